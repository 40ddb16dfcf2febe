"""Context of MLA prefills, cut so that each round of gathering fits the workspace, as vLLM 0.26 and 0.32 cut it.

0.26 gives every row with context the same share of the workspace in every round; 0.32 packs rows one behind another
and splits only the row that crosses the end. Under decode context parallelism (DCP) a rank gathers its own shard.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..planner.backend import Step
from ..planner.errors import BadInput, UnorderedBatch
from ..planner.lengths import INT32_MAX, Int32Array
from . import mla_cutting

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
    """The prefill segment's context."""
    rows = step.rows("prefill")
    starts = step.once(prefill_query_start_loc)
    environment, limits = step.environment, step.limits
    shards = Shards(environment.dcp_world_size, environment.dcp_interleave)
    return ContextRows(step.batch.computed_lens[rows], starts, limits.workspace_tokens, limits.block_size, shards)


def prefill_query_start_loc(step: Step) -> Int32Array:
    """(rows + 1,) int32 of the prefill segment, starting at 0."""
    start, stop = step["prefill"].rows
    starts = step.batch.query_start_loc
    rebased: Int32Array = starts[start : stop + 1] - starts[start]
    return rebased


def _refuse_staging(step: Step, total: int) -> NoReturn:
    rows = step.rows("prefill")
    row = rows.start + int(step.batch.computed_lens[rows].argmax())
    raise BadInput(f"seq_lens[{row}]: expected at most {MAX_CONTEXT_TOKENS} tokens of context in a step, got {total}")


# ---------------------------------------------------------------- vLLM 0.32


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

    @property
    def num_chunks(self) -> int:
        return len(self.rows)


def packed_chunks(step: Step) -> PackedChunks:
    """Rows with context fill a chunk until one does not fit; that one is split at an aligned token.

    A row without context ends a chunk. Source: vLLM 0.32, `build_mla_chunked_context_metadata`.
    """
    context = step.once(context_rows)
    ranks, interleave = context.shards
    aligned = context.block_size if ranks == 1 else math.lcm(context.block_size, ranks * interleave)
    largest = context.workspace // aligned * aligned
    if largest == 0:
        raise BadInput(
            f"workspace_tokens: expected at least {aligned}, one aligned step of a context, got {context.workspace}"
        )
    found = mla_cutting.active.cut_contexts(
        context.lens,
        context.query_start_loc,
        context.workspace // ranks,
        largest,
        aligned,
        ranks,
        interleave,
        MAX_CONTEXT_TOKENS,
    )
    if isinstance(found, int):
        _refuse_staging(step, found)
    block, chunks, pieces, tokens, local_tokens, empty = found
    flat = np.frombuffer(block, np.int32)
    bounds = pieces + chunks
    a = chunks * mla_cutting.CHUNK_COLUMNS
    b = a + pieces
    c = b + bounds
    d = c + bounds
    e = d + tokens
    f = e + (bounds if ranks > 1 else 0)
    g = f + local_tokens
    table = flat[:a].reshape(chunks, mla_cutting.CHUNK_COLUMNS)
    columns = table.T.tolist()
    shards = _shard_lists(context, table, flat[a:b], flat[e:f]) if ranks > 1 else ([], [], [])
    return PackedChunks(
        rows=table[:, 0:2].tolist(),
        tokens=table[:, 2:4].tolist(),
        continuation_token_end=columns[4],
        is_continuation=[bool(flag) for flag in columns[5]],
        num_context_tokens=columns[6],
        max_query_len=columns[7],
        max_seq_len=columns[8],
        num_local_tokens=columns[9],
        starts=flat[a:b],
        cu_seq_lens=flat[b:c],
        query_start_loc=flat[c:d],
        token_to_seq=flat[d:e],
        local_cu_seq_lens=flat[e:f],
        local_token_to_seq=flat[f:g],
        empty_tokens=flat[g:].reshape(empty, 2).tolist(),
        local_seq_lens=shards[0],
        local_starts=shards[1],
        local_lens_allranks=shards[2],
    )


def _shard_lists(
    context: ContextRows, table: Int32Array, starts: Int32Array, local_cu_seq_lens: Int32Array
) -> tuple[list[list[int]], list[list[int]], list[list[list[int]]]]:
    """(padded lengths, padded starts, true lengths on every rank) of each chunk's pieces."""
    held = context.shards.local(context.lens)
    lengths, begins, everywhere = [], [], []
    at = 0
    for chunk, (first, last) in enumerate(table[:, 0:2].tolist()):
        count = last - first
        lengths.append(np.diff(local_cu_seq_lens[at + chunk : at + chunk + count + 1]).tolist())
        begins.append(starts[at : at + count].tolist())
        everywhere.append(held[first:last].tolist())
        at += count
    return lengths, begins, everywhere


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
    total = int(lens.sum(dtype=np.int64))
    if total > MAX_CONTEXT_TOKENS:
        _refuse_staging(step, total)
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
