"""A stand-in for AMD's aiter: the functions that vLLM's metadata builders call, on any machine.

Put the folder above this one on `sys.path` and vLLM's ROCm builders find `aiter`. Schedules are real: `syncfree`'s own,
which equal aiter's bit for bit. Arguments are checked as aiter checks them. What a call does to the device is what
aiter's does: the decode planner is one launch and no wait; the prefill planner runs on the host, from lengths on the
host, and writes into the tensors it is given: without a wait where those lie on the host, by one blocking copy each
where they lie on the device.

`configure(gfx=..., num_cu=...)` chooses the card; `CALLS` counts calls by name.
"""

from . import dtypes
from .card import CALLS, configure
from .mla_metadata import get_mla_metadata_info_v1, get_mla_metadata_v1
from .ps_metadata import get_ps_metadata_info_v1, get_ps_metadata_v1

__all__ = [
    "CALLS",
    "configure",
    "dtypes",
    "get_mla_metadata_info_v1",
    "get_mla_metadata_v1",
    "get_ps_metadata_info_v1",
    "get_ps_metadata_v1",
]
