"""The packing loops in NumPy, for an installation without a compiler; `packing.Packing` says what each returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

_COLUMNS = 8
_INT32_MAX = 2**31 - 1


def _is_indptr(indptr: Int32Array, requests: int) -> bool:
    return len(indptr) == requests + 1 and int(indptr[0]) >= 0 and bool(np.all(indptr[1:] >= indptr[:-1]))


def _tiles(
    qo_indptr: Int32Array, context_lens: Int32Array, tile_rows: int, unit_tokens: int, is_causal: bool
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """(request, q_start, q_end, KV units) of every tile; a request's come first, last, second, second-last, ..."""
    rows = np.diff(qo_indptr).astype(np.int64)
    per_request = -(-rows // tile_rows)
    request = np.repeat(np.arange(len(rows)), per_request)
    position = np.arange(len(request)) - np.repeat(np.cumsum(per_request) - per_request, per_request)
    index = np.where(position % 2 == 0, position // 2, per_request[request] - 1 - position // 2)
    start = index * tile_rows
    end = np.minimum(start + tile_rows, rows[request])
    tokens = context_lens.astype(np.int64)[request]
    visible = np.minimum(tokens - rows[request] + end, tokens) if is_causal else tokens
    base = qo_indptr.astype(np.int64)[request]
    return request, base + start, base + end, -(-visible // unit_tokens)


def prefill_count(
    qo_indptr: Int32Array,
    kv_indptr: Int32Array,
    context_lens: Int32Array,
    qlen_granularity: int,
    kvlen_granularity: int,
    block_size: int,
    is_causal: bool,
    /,
) -> tuple[int, int] | None:
    requests = len(context_lens)
    if not (_is_indptr(qo_indptr, requests) and _is_indptr(kv_indptr, requests)):
        return None
    tokens = context_lens.astype(np.int64)
    good = (tokens >= 0) & (tokens <= np.diff(kv_indptr).astype(np.int64) * block_size)
    if is_causal:
        good &= tokens >= np.diff(qo_indptr)
    if not good.all():
        return None
    units = _tiles(qo_indptr, context_lens, qlen_granularity, kvlen_granularity, is_causal)[3]
    return len(units), int(units.sum())


def prefill_pack(
    qo_indptr: Int32Array,
    kv_indptr: Int32Array,
    context_lens: Int32Array,
    workgroups: int,
    qlen_granularity: int,
    kvlen_granularity: int,
    block_size: int,
    is_causal: bool,
    tiles: int,
    block: Int32Array,
    /,
) -> tuple[int, int, int]:
    """Pieces are the overlaps of two partitions of one line of KV units: the tiles, and the equal shares."""
    request, q_start, q_end, units = _tiles(qo_indptr, context_lens, qlen_granularity, kvlen_granularity, is_causal)
    tile_end = np.cumsum(units)
    tile_start = tile_end - units
    total = int(tile_end[-1]) if tiles else 0
    share, spare = divmod(total, workgroups)
    group_end = np.cumsum(share + (np.arange(workgroups) < spare))

    # A workgroup's border inside a tile adds a piece. A tile without units is taken by the workgroup at its position.
    first = np.searchsorted(group_end, tile_start, side="right")
    last = np.where(units > 0, np.searchsorted(group_end, tile_end, side="left"), first)
    pieces = np.where(first < workgroups, last - first + 1, 0)
    tile = np.repeat(np.arange(tiles), pieces)
    works = len(tile)
    group = first[tile] + np.arange(works) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = np.maximum(tile_start[tile], (group_end[group] - share - (group < spare)))
    end = np.minimum(tile_end[tile], group_end[group])

    unit_pages = kvlen_granularity // block_size
    base = kv_indptr.astype(np.int64)[request[tile]]
    kv_start = base + (start - tile_start[tile]) * unit_pages
    kv_end = np.minimum(kv_start + (end - start) * unit_pages, kv_indptr[request[tile] + 1])
    is_split = pieces[tile] > 1
    partial = np.where(is_split, qlen_granularity * (np.cumsum(is_split) - 1), -1)
    finishes = end == tile_end[tile]
    behind = np.where(finishes, 0, context_lens[request[tile]] - (kv_end - base) * block_size)

    work_indptr, rest = np.split(block, [workgroups + 1])
    work_info, rest = np.split(rest, [_COLUMNS * (tiles + workgroups)])
    groups_most = min(tiles, workgroups)
    reduce_indptr, final_map, partial_map = np.split(rest, [groups_most + 1, 3 * groups_most + 1])
    columns = work_info[: _COLUMNS * works].reshape(works, _COLUMNS)
    for column, values in enumerate((request[tile], partial, q_start[tile], q_end[tile], kv_start, kv_end, behind, 0)):
        columns[:, column] = values
    work_indptr[0] = 0
    work_indptr[1:] = np.cumsum(np.bincount(group, minlength=workgroups))

    split_tiles = np.flatnonzero(pieces > 1)
    split_tiles = split_tiles[np.argsort(q_start[split_tiles], kind="stable")]
    groups = len(split_tiles)
    reduce_indptr[0] = 0
    reduce_indptr[1 : groups + 1] = np.cumsum(pieces[split_tiles])
    final_map[: 2 * groups : 2] = q_start[split_tiles]
    final_map[1 : 2 * groups : 2] = q_end[split_tiles]
    partials = partial[is_split]
    by_output = np.lexsort((partials, q_start[tile][is_split]))
    partial_map[: len(partials)] = partials[by_output]
    return works, groups, len(partials)


def prefill_expand(
    cluster_indptr: Int32Array,
    cluster_info: Int32Array,
    num_clusters: int,
    heads_per_cluster: int,
    qhead_granularity: int,
    work_indptr: Int32Array,
    work_info: Int32Array,
    /,
) -> None:
    workgroups, pieces = len(cluster_indptr) - 1, len(cluster_info)
    works = num_clusters * heads_per_cluster * pieces
    if len(work_indptr) != num_clusters * workgroups + 1 or work_info.shape != (works, _COLUMNS):
        raise ValueError("prefill_expand: outputs have other sizes than the schedule")
    each = np.diff(cluster_indptr)
    work_indptr[0] = 0
    np.cumsum(np.tile(heads_per_cluster * each, num_clusters), out=work_indptr[1:])
    grid = work_info.reshape(num_clusters, heads_per_cluster * pieces, _COLUMNS)
    heads = np.arange(num_clusters * heads_per_cluster, dtype=np.uint32).reshape(num_clusters, heads_per_cluster)
    ranges = (heads * np.uint32(qhead_granularity) | (heads + 1) * np.uint32(qhead_granularity) << 16).view(np.int32)
    if heads_per_cluster == 1:
        grid[:] = cluster_info
        grid[:, :, 7] = ranges
        return
    begin = 0
    for first, count in zip(cluster_indptr[:-1].tolist(), each.tolist(), strict=True):
        part = grid[:, begin : begin + heads_per_cluster * count]
        part = part.reshape(num_clusters, heads_per_cluster, count, _COLUMNS)
        part[:] = cluster_info[first : first + count]
        part[..., 7] = ranges[:, :, None]
        begin += heads_per_cluster * count


@dataclass(slots=True)
class _Decode:
    """The decode schedule while it grows."""

    works: list[tuple[int, int, int, int, int, int, int, int]] = field(default_factory=list)
    work_indptr: list[int] = field(default_factory=lambda: [0])
    reduce_indptr: list[int] = field(default_factory=lambda: [0])
    final_map: list[tuple[int, int]] = field(default_factory=list)
    partial_map: list[int] = field(default_factory=list)
    rows: int = 0

    def put(self, request: int, tile: _Tile, is_split: bool, kv_start: int, kv_end: int) -> None:
        partial = -1
        if is_split:
            partial = self.rows
            self.partial_map.append(partial)
            self.rows += tile.rows
        self.works.append((request, partial, tile.q_start, tile.q_end, kv_start, kv_end, tile.kv_end - kv_end, 0))

    def close(self, tile: _Tile, is_split: bool) -> None:
        self.final_map.append((tile.q_start, tile.q_end) if is_split else (-1, -1))
        self.reduce_indptr.append(len(self.partial_map))


class _Tile(NamedTuple):
    q_start: int
    q_end: int
    rows: int
    kv_begin: int
    kv_end: int
    blocks: int
    tail: int


class _Rule(NamedTuple):
    fold: int
    uniform: int
    tiles_each: int
    longest: int
    block: int
    overhead: int
    causal: bool

    def tile(self, qo: list[int], kv: list[int], folded: int, index: int) -> _Tile:
        begin, end = (
            qo[folded : folded + 2] if self.uniform < 0 else (self.uniform * folded, self.uniform * (folded + 1))
        )
        rows = -(-(end - begin) // self.tiles_each)
        q_start = begin + index * rows
        kv_begin, kv_end = kv[folded // self.fold : folded // self.fold + 2]
        tail = 0
        if self.causal:
            behind = (q_start // self.fold) % self.uniform if self.fold > 1 else index
            tail = max(0, self.tiles_each - 1 - behind)
        q_end = min(q_start + rows, end)
        return _Tile(q_start, q_end, rows, kv_begin, kv_end, -(-(kv_end - kv_begin) // self.block), tail)


def _decode_serial(rule: _Rule, qo: list[int], kv: list[int], payload: int, workgroups: int, out: _Decode) -> None:
    todo = [(f, t) for f in range((len(kv) - 1) * rule.fold) for t in range(rule.tiles_each)]
    at = given = pieces = 0
    tail_done = False
    for _ in range(workgroups):
        left = payload
        while at < len(todo):
            tile = rule.tile(qo, kv, *todo[at])
            rest = tile.blocks - given
            kv_start, seen = tile.kv_begin + given * rule.block, tile.kv_end - tile.tail
            if left >= rest + rule.overhead or tail_done:
                kv_end = min(kv_start + rest * rule.block, seen)
                # A remainder shorter than a query is not worth a piece: this one is stretched over it.
                if tail_done or 0 < tile.kv_end - kv_end < rule.longest:
                    kv_end = min(seen, tile.kv_end)
                out.put(todo[at][0], tile, pieces > 0, kv_start, kv_end)
                out.close(tile, pieces > 0)
                left -= rest + rule.overhead
                at, given, pieces, tail_done = at + 1, 0, 0, False
            elif left > rule.overhead:
                taken = left - rule.overhead
                kv_end = min(kv_start + taken * rule.block, seen)
                if tile.kv_end - kv_end < rule.longest:
                    tail_done = True
                    continue
                out.put(todo[at][0], tile, True, kv_start, kv_end)
                given, pieces = given + taken, pieces + 1
                break
            else:
                break
        out.work_indptr.append(len(out.works))


def _decode_parallel(rule: _Rule, qo: list[int], kv: list[int], payload: int, workgroups: int, out: _Decode) -> None:
    """The parallel planner's closed form; a request without KV that does not fit gets no piece."""
    fresh = payload - rule.overhead
    left = payload
    for request in range(len(kv) - 1):
        tile = rule.tile(qo, kv, request, 0)
        if tile.blocks + rule.overhead <= left:
            out.put(request, tile, False, tile.kv_begin, tile.kv_end)
            left -= tile.blocks + rule.overhead
            out.close(tile, False)
            continue
        first = max(0, left - rule.overhead)
        pieces = -(-(tile.blocks - first) // fresh) + (first > 0)
        if first == 0 and pieces > 0:
            out.work_indptr.append(len(out.works))
        given, share = 0, first or fresh
        for piece in range(pieces):
            taken = min(share, tile.blocks - given)
            kv_start = tile.kv_begin + given * rule.block
            out.put(request, tile, pieces > 1, kv_start, min(kv_start + taken * rule.block, tile.kv_end))
            if piece + 1 < pieces:
                out.work_indptr.append(len(out.works))
            left = payload - (taken + rule.overhead)
            given, share = given + taken, fresh
        if pieces == 0:
            left = 0
        out.close(tile, pieces > 1)
    out.work_indptr += [len(out.works)] * (workgroups + 1 - len(out.work_indptr))


def decode_pack(
    qo_indptr: Int32Array,
    kv_indptr: Int32Array,
    fold: int,
    uni_seqlen_qo: int,
    tiles_per_request: int,
    max_seqlen_qo: int,
    kv_granularity: int,
    overhead: int,
    num_splits: int,
    workgroups: int,
    is_causal: bool,
    parallel: bool,
    block: Int32Array,
    /,
) -> tuple[int, int] | None:
    requests = len(kv_indptr) - 1
    if not (requests > 0 and _is_indptr(qo_indptr, requests) and _is_indptr(kv_indptr, requests)) or kv_indptr[0]:
        return None
    if uni_seqlen_qo < 0 and int(np.diff(qo_indptr).max()) > max_seqlen_qo:
        return None
    tokens = np.diff(kv_indptr).astype(np.int64)
    cost = int((-(-tokens // kv_granularity) + overhead).sum()) * fold * tiles_per_request
    if cost > _INT32_MAX:
        return None
    rule = _Rule(fold, uni_seqlen_qo, tiles_per_request, max_seqlen_qo, kv_granularity, overhead, is_causal)
    payload = -(-cost // num_splits) + overhead
    out = _Decode()
    pack = _decode_parallel if parallel else _decode_serial
    pack(rule, qo_indptr.tolist(), kv_indptr.tolist(), payload, workgroups, out)
    tiles = requests * fold * tiles_per_request
    if len(out.final_map) != tiles or len(out.work_indptr) != workgroups + 1:
        raise RuntimeError("decode_pack: tiles were left without a workgroup")
    sections = np.split(block, np.cumsum([workgroups + 1, tiles + 1, 2 * tiles, tiles + workgroups]))
    sections[0][:] = out.work_indptr
    sections[1][:] = out.reduce_indptr
    sections[2][:] = np.asarray(out.final_map, np.int32).reshape(-1)
    sections[3][: len(out.partial_map)] = out.partial_map
    sections[4][: _COLUMNS * len(out.works)] = np.asarray(out.works, np.int32).reshape(-1)
    return len(out.works), len(out.partial_map)
