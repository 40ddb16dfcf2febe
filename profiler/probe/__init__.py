"""The probe: counting hooks on the driver library's exported functions, in this process or in another.

entry_points   which functions, and what their arguments tell
probe.c        what runs on every call, in parts: layout.c (the arena: arena.py mirrors it, events.py reads its
               records), threads.c, stacks.c, reading.c (arguments), rule.c (what counts as what)
frames.py      where this interpreter keeps its frames, so that stacks.c can name the waiting line without the GIL
agent.js       prepares the hooks inside the target; tracing.py writes them in while its threads stand still
helper.py      the process that attaches, with patience.py; attach.py talks to it
"""

from .attach import Attachment, Installed
from .entry_points import CUDA, HIP, VENDORS, EntryPoint, Vendor

__all__ = ["CUDA", "HIP", "VENDORS", "Attachment", "EntryPoint", "Installed", "Vendor"]
