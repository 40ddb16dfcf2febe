"""The names a batch and its plan are described with: kinds of rows, classes of batches, sources of fields."""

from enum import StrEnum
from typing import Literal, TypeAlias

Source: TypeAlias = Literal["host", "device", "persistent"]
Shape: TypeAlias = tuple[int | None, ...]  # None: an extent that only the engine knows


class RowKind(StrEnum):
    """State of one request in a step; what a report groups by."""

    PADDING = "padding"
    DECODE = "decode"
    CAUSAL_PREFILL = "causal_prefill"
    EXTEND = "extend"
    CHUNKED_PREFILL = "chunked_prefill"


class BatchClass(StrEnum):
    """State of a whole step, over its non-padding rows."""

    EMPTY = "empty"
    DECODE = "decode"
    CAUSAL_PREFILL = "causal_prefill"
    EXTEND = "extend"
    CHUNKED_PREFILL = "chunked_prefill"
    UNKNOWN = "unknown"
