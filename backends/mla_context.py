"""Context of MLA prefills, cut so that each round of gathering fits the workspace, as vLLM 0.26 and 0.32 cut it.

0.26 gives every row with context the same share of the workspace in every round; 0.32 packs rows one behind another
and splits only the row that crosses the end. Under decode context parallelism (DCP) a rank gathers its own shard.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..planner.backend import Step
from ..planner.errors import BadInput, UnorderedBatch
from ..planner.lengths import Int32Array
from ..planner.schedules.arguments import INT32_MAX

# An int32 per context token is staged: 2**28 of them are one GiB, far past any cache.
MAX_CONTEXT_TOKENS = 2**28


class Shards(NamedTuple):
    """How context is dealt out over the ranks of decode context parallelism: `interleave` tokens at a time."""

    ranks: int
    interleave: int

    @property
    def round_tokens(self) -> int:
        return self.ranks * self.interleave

    def padded(self, tokens: Any) -> Any:
        """Rows that `tokens` of context take on each rank, rounded up to the interleave."""
        return -(-tokens // self.round_tokens) * self.interleave

    def local(self, tokens: Int32Array) -> Int32Array:
        """(rows, ranks) tokens of each row's context that each rank holds."""
        base = tokens // self.round_tokens * self.interleave
        rest = (tokens - base * self.ranks)[:, None] - np.arange(self.ranks, dtype=np.int32) * self.interleave
        held: Int32Array = base[:, None] + np.clip(rest, 0, self.interleave)
        return held


class ContextRows(NamedTuple):
    """What both layouts are cut from: the prefill segment's rows."""

    lens: Int32Array
    query_start_loc: Int32Array  # (rows + 1,) rebased to the segment
    workspace: int
    block_size: int
    shards: Shards


def context_rows(step: Step) -> ContextRows:
    """The prefill segment's context. Raises `BadInput` for more tokens than can be staged."""
    rows = step.rows("prefill")
    lens = np.maximum(step.batch.computed_lens[rows], 0)
    total = int(lens.sum(dtype=np.int64))
    if total > MAX_CONTEXT_TOKENS:
        raise BadInput(f"seq_lens: expected at most {MAX_CONTEXT_TOKENS} tokens of context in a step, got {total}")
    starts = step.batch.query_start_loc[rows.start : rows.stop + 1]
    environment, limits = step.environment, step.limits
    shards = Shards(environment.dcp_world_size, environment.dcp_interleave)
    return ContextRows(lens, starts - starts[0], limits.workspace_tokens, limits.block_size, shards)


def _repeat(counts: Int32Array, values: Int32Array | None = None) -> Int32Array:
    return np.repeat(np.arange(counts.size, dtype=np.int32) if values is None else values, counts)


# ---------------------------------------------------------------- vLLM 0.32


class _Cut(NamedTuple):
    """One piece per row and chunk, in order; int32 arrays of the same length."""

    chunk: Int32Array
    row: Int32Array
    start: Int32Array
    length: Int32Array


class PackedChunks(NamedTuple):
    """vLLM 0.32's layout. Flat int32 arrays hold the chunks one behind another; lists hold one entry a chunk.

    Chunk `i` has `rows[i][1] - rows[i][0]` entries of `starts`, one more of `cu_seq_lens` and `query_start_loc` (both
    start at 0 again in each chunk), and `num_context_tokens[i]` entries of `token_to_seq`. The `local` members are the
    rank's shard, empty without DCP.
    """

    rows: list[list[int]]
    tokens: list[list[int]]
    continuation_token_end: list[int]
    is_continuation: list[bool]
    num_context_tokens: list[int]
    max_query_len: list[int]
    max_seq_len: list[int]
    query_start_loc: Int32Array
    cu_seq_lens: Int32Array
    starts: Int32Array
    token_to_seq: Int32Array
    empty_tokens: list[list[int]]
    local_seq_lens: list[list[int]]
    local_starts: list[list[int]]
    local_lens_allranks: list[list[list[int]]]
    num_local_tokens: list[int]
    local_cu_seq_lens: Int32Array
    local_token_to_seq: Int32Array


def _pack(context: ContextRows) -> _Cut:
    """Greedy: rows with context fill a chunk until one does not fit; that one is split at an aligned token.

    A row without context ends a chunk. Every split is at a multiple of the block size (and of the DCP round), so the
    rows that a piece takes on a rank are a difference of two padded lengths.
    """
    lens, shards = context.lens, context.shards
    aligned = math.lcm(context.block_size, shards.round_tokens) if shards.ranks > 1 else context.block_size
    largest = context.workspace // aligned * aligned
    if largest == 0:
        raise BadInput(
            f"workspace_tokens: expected at least {aligned}, one aligned step of a context, got {context.workspace}"
        )
    budget = context.workspace // shards.ranks
    padded = shards.padded(lens.astype(np.int64)) if shards.ranks > 1 else lens.astype(np.int64)
    ends = np.cumsum(padded)
    pieces: list[tuple[int, int, int, int]] = []  # chunk, first row, end row, tokens already gathered of the first
    tails: list[tuple[int, int, int, int]] = []  # chunk, row, start, length of a row that goes on in the next chunk
    chunk, row, start, count = 0, 0, 0, lens.size
    empty_after = np.append(np.flatnonzero(lens == 0), count)
    while row < count:
        if lens[row] == 0:
            row += 1
            continue
        run_end = int(empty_after[np.searchsorted(empty_after, row)])
        before = int(ends[row] - padded[row]) + (int(shards.padded(start)) if shards.ranks > 1 else start)
        fits = min(int(np.searchsorted(ends, before + budget, side="right")), run_end)
        if fits > row:
            pieces.append((chunk, row, fits, start))
        used = int(ends[fits - 1]) - before if fits > row else 0
        begun = 0 if fits > row else start
        row, start = fits, 0
        if fits < run_end:
            remaining = int(lens[fits]) - begun
            room = (budget - used) * shards.ranks
            length = min(largest, (remaining - 1) // aligned * aligned, room // aligned * aligned)
            if length > 0:
                tails.append((chunk, fits, begun, length))
                begun += length
            start = begun
        chunk += 1
    return _expand(lens, pieces, tails)


def _expand(lens: Int32Array, pieces: list[tuple[int, int, int, int]], tails: list[tuple[int, int, int, int]]) -> _Cut:
    """Runs of whole rows and split rows as one list of pieces in chunk order."""
    runs = np.asarray(pieces, np.int32).reshape(-1, 4)
    each = runs[:, 2] - runs[:, 1]
    first = np.cumsum(each) - each
    whole_row = (
        _repeat(each, runs[:, 1]) + np.arange(each.sum(), dtype=np.int32) - _repeat(each, first.astype(np.int32))
    )
    whole_start = np.zeros(whole_row.size, np.int32)
    whole_start[first] = runs[:, 3]
    split = np.asarray(tails, np.int32).reshape(-1, 4)
    chunk = np.concatenate([_repeat(each, runs[:, 0]), split[:, 0]])
    order = np.argsort(chunk, kind="stable")
    row = np.concatenate([whole_row, split[:, 1]])[order]
    start = np.concatenate([whole_start, split[:, 2]])[order]
    length = np.concatenate([lens[whole_row] - whole_start, split[:, 3]])[order]
    return _Cut(chunk[order], row, start, length)


def _indptrs(values: Int32Array, begins: Int32Array, counts: Int32Array) -> Int32Array:
    """An indptr per chunk, each from 0, one behind another."""
    out = np.zeros(values.size + counts.size, np.int32)
    sums = np.cumsum(values, dtype=np.int64)
    base = sums[begins] - values[begins]
    out[np.arange(values.size) + _repeat(counts) + 1] = sums - _repeat(counts, base)
    return out


def packed_chunks(step: Step) -> PackedChunks:
    """Source: vLLM 0.32, `build_mla_chunked_context_metadata`."""
    context = step.once(context_rows)
    cut = _pack(context)
    starts = context.query_start_loc
    counts = np.bincount(cut.chunk).astype(np.int32)
    begins = (np.cumsum(counts) - counts).astype(np.int32)
    first, last = cut.row[begins], cut.row[begins + counts - 1] + 1
    query = np.diff(starts)[cut.row]
    within = np.arange(cut.row.size, dtype=np.int32) - _repeat(counts, begins)
    no_array, shards = np.empty(0, np.int32), context.shards
    lists: list[list[list[int]]] = [[], []]
    local_cu, local_map, local_tokens, allranks = no_array, no_array, np.add.reduceat(cut.length, begins), []
    if shards.ranks > 1:
        local_start = shards.padded(cut.start)
        local_len = shards.padded(cut.start + cut.length) - local_start
        lists = [[part.tolist() for part in np.split(values, begins[1:])] for values in (local_len, local_start)]
        local_cu, local_map = _indptrs(local_len, begins, counts), _repeat(local_len, within)
        local_tokens = np.add.reduceat(local_len, begins)
        held = shards.local(context.lens)
        allranks = [held[a:b].tolist() for a, b in zip(first.tolist(), last.tolist(), strict=True)]
    empty = np.flatnonzero(context.lens == 0)
    return PackedChunks(
        rows=np.stack([first, last], axis=1).tolist(),
        tokens=np.stack([starts[first], starts[last]], axis=1).tolist(),
        continuation_token_end=starts[first + 1].tolist(),
        is_continuation=(cut.start[begins] > 0).tolist(),
        num_context_tokens=np.add.reduceat(cut.length, begins).tolist(),
        max_query_len=np.maximum.reduceat(query, begins).tolist(),
        max_seq_len=np.maximum.reduceat(cut.length, begins).tolist(),
        query_start_loc=_indptrs(query, begins, counts),
        cu_seq_lens=_indptrs(cut.length, begins, counts),
        starts=cut.start if shards.ranks == 1 else shards.padded(cut.start),
        token_to_seq=_repeat(cut.length, within),
        empty_tokens=np.stack([starts[empty], starts[empty + 1]], axis=1).tolist(),
        local_seq_lens=lists[0],
        local_starts=lists[1],
        local_lens_allranks=allranks,
        num_local_tokens=local_tokens.tolist(),
        local_cu_seq_lens=local_cu,
        local_token_to_seq=local_map,
    )


# ---------------------------------------------------------------- vLLM 0.26


class EvenChunks(NamedTuple):
    """vLLM 0.26's layout: C chunks of all P rows, int32; `local` members are the rank's shard, empty without DCP."""

    cu_seq_lens: Int32Array  # (C, P + 1)
    starts: Int32Array  # (C, P), the rank's own under DCP
    token_to_seq: Int32Array  # (C, T), 0 behind a chunk's last token
    seq_tot: list[int]
    max_seq_lens: list[int]
    chunk_total_token: list[int]
    has_empty_context: list[bool]
    prefill_tokens_with_context: int
    cu_seq_lens_lst: list[list[int]]
    local_chunk_seq_lens: list[list[int]]
    local_lens_allranks: list[list[int]]
    local_cu_seq_lens: Int32Array
    local_token_to_seq: Int32Array
    chunk_size: int


class _Even(NamedTuple):
    starts: Int32Array
    lens: Int32Array
    cu_seq_lens: Int32Array


def _even(lens: Int32Array, share: int, count: int) -> _Even:
    """Chunk `i` holds tokens `i * share` to `(i + 1) * share` of every row."""
    starts = np.broadcast_to((np.arange(count, dtype=np.int32) * np.int32(share))[:, None], (count, lens.size))
    part = np.clip(lens - starts, 0, share)
    cu_seq_lens = np.zeros((count, lens.size + 1), np.int32)
    np.cumsum(part, axis=1, out=cu_seq_lens[:, 1:])
    return _Even(np.ascontiguousarray(starts), part, cu_seq_lens)


def _token_rows(part: Int32Array) -> Int32Array:
    """(C, T) row of each token of a chunk, 0 behind its last."""
    totals = part.sum(axis=1)
    out = np.zeros((part.shape[0], int(totals.max())), np.int32)
    out[np.arange(out.shape[1]) < totals[:, None]] = np.repeat(
        np.broadcast_to(np.arange(part.shape[1], dtype=np.int32), part.shape).ravel(), part.ravel()
    )
    return out


def even_chunks(step: Step) -> EvenChunks:
    """Source: vLLM 0.26, `build_mla_chunked_context_metadata`."""
    context = step.once(context_rows)
    lens, shards = context.lens, context.shards
    with_context = int(np.count_nonzero(lens))
    live = np.diff(context.query_start_loc) > 0
    late = np.flatnonzero(live[with_context:] & (lens[with_context:] > 0))
    if late.size:
        at = with_context + int(late[0])
        raise UnorderedBatch(
            f"rows[{step.rows('prefill').start + at}]: expected no context behind a row without, as vLLM 0.26 merges "
            f"that of the first rows only, got {lens[at]} computed tokens; order the rows first (plan with reorder)"
        )
    share = context.workspace // with_context // context.block_size * context.block_size
    if share == 0:
        least = with_context * context.block_size
        raise BadInput(
            f"workspace_tokens: expected at least {least}, a block for each of {with_context} rows with context, "
            f"got {context.workspace}"
        )
    count = -(-int(lens.max()) // share)
    if count * share > INT32_MAX:
        raise BadInput(f"seq_lens: expected contexts whose {count} chunks of {share} tokens fit int32")
    whole = _even(lens, share, count)
    local, chunk_size, allranks = whole, 0, []
    if shards.ranks > 1:
        if share % shards.ranks:
            raise BadInput(
                f"block_size: expected shares of the workspace that {shards.ranks} ranks divide, got {share}"
            )
        chunk_size = int(shards.padded(share))
        local, allranks = _even(shards.padded(lens), chunk_size, count), shards.local(lens).tolist()
    totals = whole.cu_seq_lens[:, -1].tolist()
    no_array = np.empty(0, np.int32)
    sharded = shards.ranks > 1
    return EvenChunks(
        cu_seq_lens=whole.cu_seq_lens,
        starts=local.starts,
        token_to_seq=_token_rows(whole.lens),
        seq_tot=local.cu_seq_lens[:, -1].tolist(),
        max_seq_lens=whole.lens.max(axis=1).tolist(),
        chunk_total_token=totals,
        has_empty_context=(whole.lens == 0).any(axis=1).tolist(),
        prefill_tokens_with_context=int(context.query_start_loc[with_context]),
        cu_seq_lens_lst=whole.cu_seq_lens.tolist() if sharded else [],
        local_chunk_seq_lens=local.lens.tolist() if sharded else [],
        local_lens_allranks=allranks,
        local_cu_seq_lens=local.cu_seq_lens if sharded else no_array,
        local_token_to_seq=_token_rows(local.lens) if sharded else no_array,
        chunk_size=chunk_size,
    )
