"""The names a batch is described with: kinds of rows, classes of batches."""

from enum import StrEnum


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
