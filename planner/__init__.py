"""Planner: batch -> classify -> plan, from what the scheduler knows on the host. NumPy and msgspec only.

A backend is a declaration (`backend.Backend`); the ones that come with this package are in `syncfree.backends`.
"""

from .batch import Batch
from .classify import Classification, classify
from .environment import Environment, Limits
from .errors import BadInput, InexactBatch, SkippedField, SyncfreeError, UnorderedBatch
from .plan import MetadataPlan
from .planner import Planner
from .scheduler_output import PrefillTable
from .segments import Segment
from .vocabulary import BatchClass, RowKind

__all__ = [
    "BadInput",
    "Batch",
    "BatchClass",
    "Classification",
    "Environment",
    "InexactBatch",
    "Limits",
    "MetadataPlan",
    "Planner",
    "PrefillTable",
    "RowKind",
    "Segment",
    "SkippedField",
    "SyncfreeError",
    "UnorderedBatch",
    "classify",
]
