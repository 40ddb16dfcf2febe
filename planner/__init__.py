"""Planner: batch -> classify -> plan, from what the scheduler knows on the host. NumPy and msgspec only."""

from .batch import Batch
from .classify import Classification, classify
from .errors import BadInput, SkippedField, SyncfreeError, UnorderedBatch
from .scheduler_output import PrefillTable
from .segments import Segment
from .vocabulary import BatchClass, RowKind

__all__ = [
    "BadInput",
    "Batch",
    "BatchClass",
    "Classification",
    "PrefillTable",
    "RowKind",
    "Segment",
    "SkippedField",
    "SyncfreeError",
    "UnorderedBatch",
    "classify",
]
