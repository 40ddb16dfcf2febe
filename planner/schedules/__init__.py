"""Work schedules of AITER's persistent attention kernels, planned on the host from host lengths.

`ps_prefill` and `mla_decode` give, element for element, what `get_ps_metadata_v1` and `get_mla_metadata_v1` of aiter
0.1.2x give; `*_shapes` give the sizes of the buffers those kernels are called with.
"""

from .decode import PackingRule, mla_decode, packing_rule, reads_query_lens
from .prefill import ps_prefill
from .sizes import mla_decode_max_splits, mla_decode_shapes, ps_prefill_shapes
from .work import ClusterSchedule, WorkSchedule

__all__ = [
    "ClusterSchedule",
    "PackingRule",
    "WorkSchedule",
    "mla_decode",
    "mla_decode_max_splits",
    "mla_decode_shapes",
    "packing_rule",
    "ps_prefill",
    "ps_prefill_shapes",
    "reads_query_lens",
]
