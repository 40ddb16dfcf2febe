"""What the kernels of one step read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Tensor = Any


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of rows that one attention kernel serves, and the fields of that kernel; None where it reads none.

    The maxima are host integers, which shape a launch; the others int32 device tensors, R rows of the segment:
    `query_start_loc` [R + 1] from 0, `seq_lens` [R], `block_table` [R, W].
    """

    name: str  # decode, extend, prefill
    tokens: slice
    max_query_len: int | None = None
    max_seq_len: int | None = None
    query_start_loc: Tensor | None = None
    seq_lens: Tensor | None = None
    block_table: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class StepMetadata:
    """One step, int32 device tensors: `input_ids`, `positions`, `slot_mapping` [tokens]; `sample_tokens` [samples].

    `sample_tokens` are the tokens whose logits are sampled.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    sample_tokens: Tensor
    segments: Sequence[Segment]
