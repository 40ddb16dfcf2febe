"""`python -m syncfree.profiler.devices`: the devices of this machine as JSON."""

import sys

import msgspec

from . import look

sys.stdout.buffer.write(msgspec.json.encode(look()))
