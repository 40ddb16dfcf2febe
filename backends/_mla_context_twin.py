"""The cut of MLA contexts in Python, for an installation without a compiler; see `mla_cutting.ContextCutter`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Piece = tuple[int, int, int]  # row, start, tokens


def cut_contexts(
    lens: Int32Array,
    query_start_loc: Int32Array,
    budget: int,
    largest: int,
    aligned: int,
    ranks: int,
    interleave: int,
    limit: int,
    /,
) -> tuple[bytearray, int, int, int, int, int] | int:
    contexts, query = lens.tolist(), query_start_loc.tolist()
    if len(query) != len(contexts) + 1 or aligned < 1 or largest < aligned or budget * ranks < aligned:
        raise ValueError("cut_contexts: arrays or sizes do not fit together")
    total: int = sum(contexts)
    if total > limit:
        return total

    def padded(tokens: int) -> int:
        return tokens if ranks == 1 else -(-tokens // (ranks * interleave)) * interleave

    chunks = _cut_rows(contexts, budget, largest, aligned, ranks, padded)
    table: list[int] = []
    starts: list[int] = []
    cu_seq_lens: list[int] = []
    starts_of_query: list[int] = []
    local_cu: list[int] = []
    lengths: list[int] = []
    shards: list[int] = []
    order: list[int] = []
    for pieces in chunks:
        rows, begins, sizes = zip(*pieces, strict=True)
        held = [padded(start + size) - padded(start) for _, start, size in pieces]
        queries = [query[row + 1] - query[row] for row in rows]
        first, last = rows[0], rows[-1] + 1
        table += [first, last, query[first], query[last], query[first + 1], begins[0] > 0, sum(sizes), max(queries)]
        table += [max(sizes), sum(held)]
        starts += [padded(start) for start in begins]
        cu_seq_lens += accumulate(sizes, initial=0)
        starts_of_query += [query[row] - query[first] for row in (*rows, last)]
        local_cu += accumulate(held, initial=0)
        lengths += sizes
        shards += held
        order += range(len(pieces))
    empty = [bound for row, size in enumerate(contexts) if size == 0 for bound in (query[row], query[row + 1])]
    owner = np.asarray(order, np.int32)
    sections = [
        *(np.asarray(values, np.int32) for values in (table, starts, cu_seq_lens, starts_of_query)),
        np.repeat(owner, lengths),
        np.asarray(local_cu if ranks > 1 else [], np.int32),
        np.repeat(owner, shards) if ranks > 1 else np.empty(0, np.int32),
        np.asarray(empty, np.int32),
    ]
    local = sections[6].size
    return (
        bytearray(np.concatenate(sections).tobytes()),
        len(chunks),
        len(order),
        sections[4].size,
        local,
        len(empty) // 2,
    )


def _cut_rows(
    contexts: list[int], budget: int, largest: int, aligned: int, ranks: int, padded: Callable[[int], int]
) -> list[list[Piece]]:
    """Rows fill a chunk until one does not fit; that one is split at an aligned token. An empty row ends a chunk."""
    chunks: list[list[Piece]] = []
    row = start = 0
    while row < len(contexts):
        if contexts[row] == 0:
            row += 1
            continue
        chunk: list[Piece] = []
        used = 0
        while row < len(contexts) and contexts[row]:
            remaining = contexts[row] - start
            cost = padded(contexts[row]) - padded(start)
            if used + cost > budget:
                room = (budget - used) * ranks
                length = min(largest, (remaining - 1) // aligned * aligned, room // aligned * aligned)
                if length > 0:
                    chunk.append((row, start, length))
                    start += length
                break
            chunk.append((row, start, remaining))
            used += cost
            row, start = row + 1, 0
        chunks.append(chunk)
    return chunks
