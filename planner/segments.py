"""Segments: which kernel serves which rows, cut exactly as vLLM's own split functions cut (0.32)."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from . import rows as passes
from .batch_rows import BatchRows
from .classify import ClassifiedRows
from .errors import BadInput

Split: TypeAlias = Literal["none", "two", "three"]
QueryLens: TypeAlias = Literal["single", "uniform", "varlen"]


class Segment(NamedTuple):
    """A positional range of rows and of tokens, both as (start, stop), served by one kernel."""

    name: str  # decode | extend | prefill, or all where a backend does not split
    rows: tuple[int, int]
    tokens: tuple[int, int]

    def max_query_len(self, batch: BatchRows) -> int:
        """Longest query of the segment, in tokens."""
        start, stop = self.rows
        if stop - start == batch.query_lens.size:
            return batch.max_query_len
        return int(np.maximum.reduce(batch.query_lens[start:stop]))

    def max_seq_len(self, batch: BatchRows) -> int:
        """Longest sequence of the segment, in tokens (an upper bound where lengths are bounds)."""
        start, stop = self.rows
        if stop - start == batch.seq_lens.size:
            return batch.longest_seq
        return int(np.maximum.reduce(batch.seq_lens[start:stop]))


def cut(
    batch: ClassifiedRows,
    split: Split,
    query_lens: QueryLens,
    threshold: int,
    short_extends_as_decodes: bool,
    padding_cuts: bool = False,
) -> list[Segment]:
    """See `Batch.segments`. The last segment's tokens end at `num_tokens`: graph padding rides there."""
    rows = batch.query_lens.size
    if split == "three":
        return _three(batch, threshold) if rows else []
    if split == "two":
        if query_lens not in ("single", "uniform", "varlen"):
            raise BadInput(f"query_lens: expected single, uniform or varlen, got {query_lens!r}")
        flags = None
        if not short_extends_as_decodes and (flags := batch.is_prefilling) is None:
            raise BadInput("short_extends_as_decodes: false needs prefill_lens or is_prefilling; got neither")
        threshold = 1 if query_lens == "single" else threshold
        if not short_extends_as_decodes and (row := batch.row_without_flag(threshold)) is not None:
            raise BadInput(
                f"prefill_lens[{row}]: short_extends_as_decodes: false needs it known, to tell a short extend from a "
                "decode; got neither it nor is_prefilling"
            )
        uniform = query_lens != "varlen"
        first, token = passes.active.cut_two(
            batch.query_lens, flags, threshold, uniform, short_extends_as_decodes, padding_cuts
        )
        return _two(rows, batch.num_tokens, first, token) if rows else []
    if split == "none":
        return [Segment("all", (0, rows), (0, batch.num_tokens))] if rows else []
    raise BadInput(f"split: expected none, two or three, got {split!r}")


def _three(batch: ClassifiedRows, threshold: int) -> list[Segment]:
    rows, end = batch.query_lens.size, batch.num_tokens
    known = batch.classification
    if known is not None and not known.has_long_rows and threshold >= batch.decode_threshold:
        return [Segment("decode", (0, rows), (0, end))]
    # seq_len == query_len, upstream's test for a row without context, is the same as no computed tokens
    extend, prefill, extend_token, prefill_token = passes.active.cut_three(
        batch.query_lens, batch.computed_lens, threshold
    )
    if extend == rows:
        return [Segment("decode", (0, rows), (0, end))]
    out = [Segment("decode", (0, extend), (0, extend_token))] if extend else []
    if prefill == rows:
        prefill_token = end
    if extend < prefill:
        out.append(Segment("extend", (extend, prefill), (extend_token, prefill_token)))
    if prefill < rows:
        out.append(Segment("prefill", (prefill, rows), (prefill_token, end)))
    return out


def _two(rows: int, end: int, first: int, token: int) -> list[Segment]:
    if first == rows:
        return [Segment("decode", (0, rows), (0, end))]
    if first == 0:
        return [Segment("prefill", (0, rows), (0, end))]
    return [Segment("decode", (0, first), (0, token)), Segment("prefill", (first, rows), (token, end))]
