"""The per-row passes of `_rows.c` in NumPy: same names, arguments and results."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Any

import numpy as np

from .lengths import INT32_MAX, BoolArray, Int32Array, UInt8Array

HAS_CONTEXT, LONG, DONE, WHOLE, IS_PADDING = 1, 2, 4, 8, 16
PADDING, DECODE, CAUSAL, EXTEND, CHUNKED = range(5)


def _kind(bits: int) -> int:
    if bits & IS_PADDING:
        return PADDING
    if not bits & HAS_CONTEXT:
        return CAUSAL
    if bits & DONE:
        return EXTEND if bits & LONG else DECODE
    return EXTEND if bits & WHOLE else CHUNKED


def _region(bits: int) -> int:
    if bits & IS_PADDING:
        return 4
    if not bits & HAS_CONTEXT:
        return 3
    if bits & LONG:
        return 2
    return 0 if bits & DONE else 1


_KIND_OF = np.array([_kind(bits) for bits in range(32)], dtype=np.uint8)
_REGION_OF = np.array([_region(bits) for bits in range(32)], dtype=np.uint8)


def read_rows(
    rows: list[str], scheduled: dict[str, int], ids: list[str] | None, computed: Any, out: Int32Array, /
) -> int:
    """`out[3, rows]`: query, sequence, computed lengths. Returns the sum of queries, -1 or -2 - i (see `_rows.c`)."""
    count = len(rows)
    if ids is None:
        computed = _pick(computed, rows)
    elif rows != ids or len(computed) != count:
        return -1
    query, context = out[0], out[2]
    try:
        query[:] = np.fromiter(_pick(scheduled, rows), np.int32, count)
        context[:] = np.fromiter(computed, np.int32, count)
        np.add(query, context, out=out[1])
        total = int(query.sum(dtype=np.int64))
        if count and np.bitwise_or.reduce(out, axis=None) >= 0:
            return total
    except (OverflowError, TypeError, ValueError):
        pass  # a count that is no int32: found below
    for i, (row, tokens) in enumerate(zip(rows, computed, strict=True)):
        if not _plausible(scheduled[row]) or not _plausible(tokens) or scheduled[row] + tokens > INT32_MAX:
            return -2 - i
    return 0


def _plausible(value: object) -> bool:
    return isinstance(value, int | np.integer) and bool(0 <= value <= INT32_MAX)


def _pick(mapping: dict[str, int], rows: list[str]) -> Iterable[int]:
    if len(rows) > 1:
        picked: Iterable[int] = itemgetter(*rows)(mapping)
        return picked
    return [mapping[row] for row in rows]


def gather(rows: list[str], slots: dict[str, int], table: Int32Array, out: Int32Array, /) -> int:
    """`out[3, rows] = table[3, capacity]` at each request's slot, else 0. Bits: unknown 1, flag differs 2, twice 4."""
    try:
        picked = _pick(slots, rows)
    except KeyError:
        picked = [slots.get(row, 0) for row in rows]
    index = np.fromiter(picked, np.intp, len(rows))
    out[:] = table[:, index]
    bits = int((out[0] < 0).any()) | (2 if (out[0] != out[2]).any() else 0)
    return bits | (4 if index.size and np.bincount(index).max() > 1 else 0)


def describe(
    query: Int32Array,
    computed: Int32Array,
    prefill: Int32Array | None,
    cached: Int32Array | None,
    flag_lens: Int32Array | None,
    flags: BoolArray | None,
    threshold: int,
    codes: UInt8Array,
    regions: UInt8Array,
    /,
) -> int:
    """Writes kind and region of every row; returns the bits of `rows.py`."""
    bits: UInt8Array = (query > threshold).view(np.uint8) * np.uint8(LONG)
    bits += computed.astype(np.bool_)
    bits[query == 0] |= IS_PADDING
    done = None if flags is None else ~flags
    reaches = None
    if prefill is not None:
        reached = computed >= prefill
        done = reached if done is None else np.where(prefill < 0, done, reached)
        reaches = (prefill >= 0) & (query + computed >= prefill)
    known = bits + np.uint8(DONE) if done is None else bits + done.view(np.uint8) * np.uint8(DONE)
    if reaches is not None and cached is not None:
        known = known | ((reaches & (computed == cached)).view(np.uint8) * np.uint8(WHOLE))
    _KIND_OF.take(known, out=codes)
    if flags is not None:
        bits += (~flags).view(np.uint8) * np.uint8(DONE)
    elif flag_lens is not None:
        bits += (computed >= flag_lens).view(np.uint8) * np.uint8(DONE)
    else:
        bits = known
    _REGION_OF.take(bits, out=regions)
    summary = 0
    for kind in range(5):
        summary |= (codes == kind).any() << kind
    if (regions[1:] < regions[:-1]).any():
        summary |= 128
    if (query > threshold).any():
        summary |= 256
    return int(summary) | _guesses(codes, prefill, cached, done, reaches)


def _guesses(
    codes: UInt8Array,
    prefill: Int32Array | None,
    cached: Int32Array | None,
    done: BoolArray | None,
    reaches: BoolArray | None,
) -> int:
    if prefill is None or done is None or reaches is None:
        return 32 if (codes >= EXTEND).any() else 0
    guessed = prefill < 0
    open_end = ~done & reaches
    guessed |= open_end if cached is None else open_end & (cached < 0)
    bits = 32 if (guessed & (codes >= EXTEND)).any() else 0
    return bits | (64 if (~guessed & (codes == CHUNKED)).any() else 0)


def cut_three(query: Int32Array, computed: Int32Array, threshold: int, /) -> tuple[int, int, int, int]:
    """(first long row, first long row without context, tokens before each); all rows and tokens if there is none."""
    starts = np.zeros(query.size + 1, dtype=np.int64)
    np.cumsum(query, out=starts[1:])
    long = query > threshold
    first_long, first_fresh = _first(long), _first(long & (computed == 0))
    return first_long, first_fresh, int(starts[first_long]), int(starts[first_fresh])


def cut_two(
    query: Int32Array,
    flags: BoolArray | None,
    threshold: int,
    uniform: bool,
    short_extends: bool,
    padding_cuts: bool,
    /,
) -> tuple[int, int]:
    """(first prefill row, tokens before it); `flags` are read only if short extends do not count as decodes."""
    if query.size == 0 or query[0] > threshold:
        return 0, 0
    if short_extends and (not uniform or threshold <= 1) and query.max() <= threshold:
        return query.size, int(query.sum(dtype=np.int64))
    if uniform:
        prefill = query != query[0]
        if short_extends or not padding_cuts:
            prefill &= query != 0
    else:
        prefill = query > threshold
    if not short_extends:
        if flags is None:
            raise ValueError("cut_two: arrays of different sizes")
        prefill = prefill | flags
    row = _first(prefill)
    return row, int(query[:row].sum(dtype=np.int64))


def unpack(starts: Int32Array, seq_lens: Int32Array, out: Int32Array, /) -> int:
    """`out[3, rows]`: query, sequence, computed lengths. Returns the sum of queries, or -2 - i for a bad row i."""
    if starts.size != seq_lens.size + 1 or out.size != 3 * seq_lens.size:
        raise ValueError("unpack: arrays of different sizes")
    query = starts[1:].astype(np.int64) - starts[:-1]
    wrong = (query < 0) | (query > INT32_MAX) | (seq_lens < query)
    if wrong.any():
        return -2 - int(wrong.argmax())
    out[0], out[1], out[2] = query, seq_lens, seq_lens - query
    return int(starts[-1]) - int(starts[0])


def even_chunks(context: Int32Array, share: int, starts: Int32Array, ends: Int32Array, longest: Int32Array, /) -> None:
    """`share` tokens of every row in each chunk: first token, running sums from 0, longest row (see `_rows.c`)."""
    starts[:] = (np.arange(longest.size, dtype=np.int64) * share)[:, None]
    lengths = np.clip(context.astype(np.int64) - starts, 0, share)
    ends[:, :1] = 0
    np.cumsum(lengths, axis=1, out=ends[:, 1:])
    longest[:] = lengths.max(axis=1, initial=0)


def spread(ends: Int32Array, rows: int, width: int, out: Int32Array, /) -> None:
    """`out[chunks, width]`: the row each token of a chunk belongs to, `rows` behind the last token."""
    table = ends.reshape(-1, rows + 1)
    runs = np.diff(table, axis=1, prepend=0, append=width)[:, 1:]
    if out.size != table.shape[0] * width or (runs < 0).any() or (table[:, 0] != 0).any():
        raise ValueError("spread: running sums do not fit the output")
    owners = np.broadcast_to(np.arange(rows + 1, dtype=np.int32), runs.shape)
    out.reshape(-1)[:] = np.repeat(owners.ravel(), runs.ravel())


def _first(mask: BoolArray) -> int:
    row = int(mask.argmax()) if mask.size else 0
    return row if mask.size and mask[row] else mask.size
