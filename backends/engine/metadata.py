"""What the kernels of one step read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Tensor = Any


@dataclass(frozen=True)
class Segment:
    """A run of rows that one attention kernel serves; the two maxima are host integers that shape its launch."""

    name: str  # decode, extend, prefill
    rows: slice
    tokens: slice
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, kw_only=True)
class StepMetadata:
    """Device tensors (int32) of one step. A field that no kernel of the step reads is None.

    T tokens, R rows, S sampling rows: `input_ids`, `positions`, `slot_mapping` [T]; `sample_tokens` [S] the token whose
    logits are sampled; `query_start_loc` [R + 1]; `seq_lens` [R]; `block_table` [R, W].
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    sample_tokens: Tensor
    query_start_loc: Tensor | None
    seq_lens: Tensor | None
    block_table: Tensor | None
    segments: Sequence[Segment]
