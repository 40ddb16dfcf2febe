"""Segments: which kernel serves which rows, cut exactly as vLLM's own split functions cut (0.32)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from .errors import BadInput
from .lengths import BoolArray

if TYPE_CHECKING:
    from .batch import Batch

Split: TypeAlias = Literal["none", "two", "three"]
QueryLens: TypeAlias = Literal["single", "uniform", "varlen"]


class Segment(NamedTuple):
    """A positional range of rows and of tokens, both as (start, stop), served by one kernel."""

    name: str  # decode | extend | prefill, or all where a backend does not split
    rows: tuple[int, int]
    tokens: tuple[int, int]

    def max_query_len(self, batch: Batch) -> int:
        """Longest query of the segment, in tokens."""
        start, stop = self.rows
        return int(batch.query_lens[start:stop].max())

    def max_seq_len(self, batch: Batch) -> int:
        """Longest sequence of the segment, in tokens (an upper bound where lengths are bounds)."""
        start, stop = self.rows
        return int(batch.seq_lens[start:stop].max())


def cut(
    batch: Batch,
    split: Split,
    query_lens: QueryLens,
    threshold: int,
    short_extends_as_decodes: bool,
    padding_cuts: bool = False,
) -> list[Segment]:
    """See `Batch.segments`. The last segment's tokens end at `num_tokens`: graph padding rides there."""
    rows = len(batch)
    if split == "three":
        if rows == 0:
            return []
        return _cut_three(batch, threshold)
    if split == "two":
        if query_lens not in ("single", "uniform", "varlen"):
            raise BadInput(f"query_lens: expected single, uniform or varlen, got {query_lens!r}")
        if rows == 0:
            return []
        uniform = query_lens != "varlen"
        threshold = 1 if query_lens == "single" else threshold
        return _two(batch, _first_prefill(batch, threshold, uniform, short_extends_as_decodes, padding_cuts))
    if split == "none":
        return [Segment("all", (0, rows), (0, batch.num_tokens))] if rows else []
    raise BadInput(f"split: expected none, two or three, got {split!r}")


def _cut_three(batch: Batch, threshold: int) -> list[Segment]:
    rows, end = batch.query_lens.size, batch.num_tokens
    if batch.max_query_len <= threshold:
        return [Segment("decode", (0, rows), (0, end))]
    big = batch.longer_than(threshold)
    decodes = int(big.argmax())
    # a row longer than the threshold that has no context, i.e. seq_len == query_len
    fresh = big > batch.computed_lens.astype(np.bool_)
    prefill = int(fresh.argmax())
    if not fresh[prefill]:
        prefill = rows
    starts = batch.query_start_loc
    out: list[Segment] = []
    token = int(starts[decodes])
    if decodes:
        out.append(Segment("decode", (0, decodes), (0, token)))
    if decodes < prefill:
        stop = int(starts[prefill]) if prefill < rows else end
        out.append(Segment("extend", (decodes, prefill), (token, stop)))
        token = stop
    if prefill < rows:
        out.append(Segment("prefill", (prefill, rows), (token, end)))
    return out


def _two(batch: Batch, cut_at: int) -> list[Segment]:
    rows, end = batch.query_lens.size, batch.num_tokens
    if cut_at == rows:
        return [Segment("decode", (0, rows), (0, end))]
    if cut_at == 0:
        return [Segment("prefill", (0, rows), (0, end))]
    token = int(batch.query_start_loc[cut_at])
    return [Segment("decode", (0, cut_at), (0, token)), Segment("prefill", (cut_at, rows), (token, end))]


def _first_prefill(batch: Batch, threshold: int, uniform: bool, short_extends: bool, padding_cuts: bool) -> int:
    """Index of the first row of the prefill segment, `len(batch)` if all rows are decodes."""
    rows = len(batch)
    if short_extends and batch.max_query_len <= threshold and (not uniform or threshold <= 1):
        return rows
    first = int(batch.query_lens[0])
    if first > threshold:
        return 0
    is_prefill: BoolArray
    if uniform:
        is_prefill = batch.query_lens != first
        if short_extends or not padding_cuts:
            is_prefill &= batch.query_lens.astype(np.bool_)
    else:
        is_prefill = batch.longer_than(threshold)
    if not short_extends:
        flags = batch.is_prefilling
        if flags is None:
            raise BadInput("short_extends_as_decodes: false needs prefill_lens or is_prefilling; got neither")
        is_prefill = is_prefill | flags
    index = int(is_prefill.argmax())
    return index if is_prefill[index] else rows
