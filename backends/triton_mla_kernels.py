# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# Triton compiles these functions; their arguments are device values that Python's types cannot describe.
"""Triton kernels of MLA decode: persistent by work items, fixed split, reduce, and the scheduler on the device.

One source for NVIDIA and AMD. A packed row is one (query row, head) pair: `row * HEADS + head`. Keys are the cached
latents with their rotary part, values the latents alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a work item.
REQUEST: tl.constexpr = tl.constexpr(0)
PARTIAL: tl.constexpr = tl.constexpr(1)
Q_START: tl.constexpr = tl.constexpr(2)
Q_STOP: tl.constexpr = tl.constexpr(3)
KV_START: tl.constexpr = tl.constexpr(4)
KV_STOP: tl.constexpr = tl.constexpr(5)
KV_BEHIND: tl.constexpr = tl.constexpr(6)
HEAD_RANGE: tl.constexpr = tl.constexpr(7)
COLUMNS: tl.constexpr = tl.constexpr(8)

# Columns of the scheduler's notes on a tile.
NOTE_GROUP: tl.constexpr = tl.constexpr(0)
NOTE_LEFT: tl.constexpr = tl.constexpr(1)
NOTE_WORKS: tl.constexpr = tl.constexpr(2)
NOTE_POOL_ROWS: tl.constexpr = tl.constexpr(3)
NOTE_PARTIALS: tl.constexpr = tl.constexpr(4)
NOTES: tl.constexpr = tl.constexpr(8)

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    q,
    pages,
    page_list,
    packed,
    in_tile,
    seen_end,
    kv_start,
    kv_stop,
    scale,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax of packed query rows over one KV range: (weighted sum, row maximum in log2, row sum)."""
    SIZE: tl.constexpr = LATENT + ROPE
    latent = tl.arange(0, LATENT)
    rope = LATENT + tl.arange(0, ROPE)
    base = packed.to(tl.int64) * SIZE
    q_latent = tl.load(q + base[:, None] + latent[None, :], mask=in_tile[:, None], other=0.0)
    q_rope = tl.load(q + base[:, None] + rope[None, :], mask=in_tile[:, None], other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, LATENT], tl.float32)
    for start in tl.range(kv_start, kv_stop, BLOCK_N, num_stages=STAGES):
        kv = start + tl.arange(0, BLOCK_N)
        inside = kv < kv_stop
        page = tl.load(page_list + kv, mask=inside, other=0).to(tl.int64) * SIZE
        k_latent = tl.load(pages + page[:, None] + latent[None, :], mask=inside[:, None], other=0.0)
        k_rope = tl.load(pages + page[:, None] + rope[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(k_latent))
        scores = tl.dot(q_rope, tl.trans(k_rope), scores) * (scale * LOG2_E)
        visible = inside[None, :] & (kv[None, :] < seen_end[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base_top = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet: -inf - -inf is nan
        shrink = tl.exp2(top - base_top)
        weights = tl.exp2(scores - base_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(k_latent.dtype), k_latent)
        top = new_top
    return acc, top, total


@triton.jit
def _finish(acc, top, total):
    """(softmax average, natural log-sum-exp); a row that saw nothing gives 0 and -inf."""
    safe = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), (top + tl.log2(safe)) / LOG2_E)
    return acc / safe[:, None], lse


@triton.jit(do_not_specialize=["heads", "fold", "is_causal"])
def persistent_decode(
    q,
    pages,
    page_list,
    qo_indptr,
    work_metadata_ptrs,
    out,
    lse,
    pool_out,
    pool_lse,
    scale,
    heads,
    fold,
    is_causal,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (g, i): the i-th block of packed rows of every work item of workgroup g, one after the other."""
    group = tl.program_id(0)
    lane = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    work_indptr = tl.load(work_metadata_ptrs).to(tl.pointer_type(tl.int32))
    work_info = tl.load(work_metadata_ptrs + 1).to(tl.pointer_type(tl.int32))
    latent = tl.arange(0, LATENT)
    for work in range(tl.load(work_indptr + group), tl.load(work_indptr + group + 1)):
        item = work_info + work * COLUMNS
        request = tl.load(item + REQUEST)
        partial = tl.load(item + PARTIAL)
        first = tl.load(item + Q_START)
        stop = tl.load(item + Q_STOP)
        kv_start = tl.load(item + KV_START)
        kv_stop = tl.load(item + KV_STOP)
        if tl.program_id(1) * BLOCK_M < (stop - first) * heads:
            row = first + lane // heads
            in_tile = row < stop
            seen_end = tl.zeros([BLOCK_M], tl.int32) + kv_stop + tl.load(item + KV_BEHIND)
            rows_behind = tl.load(qo_indptr + request // fold + 1) - 1 - row // fold
            seen_end -= rows_behind * is_causal
            acc, top, total = _attend(
                q,
                pages,
                page_list,
                first * heads + lane,
                in_tile,
                seen_end,
                kv_start,
                kv_stop,
                scale,
                LATENT,
                ROPE,
                BLOCK_M,
                BLOCK_N,
                STAGES,
            )
            average, row_lse = _finish(acc, top, total)
            if partial < 0:
                place = (first * heads + lane).to(tl.int64)
                tl.store(lse + place, row_lse, mask=in_tile)
                tl.store(
                    out + place[:, None] * LATENT + latent[None, :],
                    average.to(out.dtype.element_ty),
                    mask=in_tile[:, None],
                )
            else:
                place = (partial * heads + lane).to(tl.int64)
                tl.store(pool_lse + place, row_lse, mask=in_tile)
                tl.store(pool_out + place[:, None] * LATENT + latent[None, :], average, mask=in_tile[:, None])


@triton.jit(do_not_specialize=["num_rows", "heads", "is_causal"])
def fixed_split_decode(
    q,
    pages,
    page_list,
    qo_indptr,
    kv_indptr,
    pool_out,
    pool_lse,
    num_rows,
    scale,
    heads,
    is_causal,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (s, b, i): the s-th of equal parts of request b's KV, for its i-th block of packed rows.

    Split s of query row r lies in row `s * num_rows + r` of the pool. Splits come first in the grid: the parts of one
    long request go to one compute unit each, where with requests first several of them would share units.
    """
    request = tl.program_id(1)
    split = tl.program_id(0)
    first = tl.load(qo_indptr + request)
    stop = tl.load(qo_indptr + request + 1)
    begin = tl.load(kv_indptr + request)
    end = tl.load(kv_indptr + request + 1)
    share = tl.cdiv(tl.cdiv(end - begin, tl.num_programs(0)), BLOCK_N) * BLOCK_N
    kv_start = tl.minimum(begin + split * share, end)
    kv_stop = tl.minimum(kv_start + share, end)
    lane = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(2) * BLOCK_M < (stop - first) * heads:
        row = first + lane // heads
        in_tile = row < stop
        seen_end = tl.zeros([BLOCK_M], tl.int32) + end
        seen_end -= (stop - 1 - row) * is_causal
        acc, top, total = _attend(
            q,
            pages,
            page_list,
            first * heads + lane,
            in_tile,
            seen_end,
            kv_start,
            kv_stop,
            scale,
            LATENT,
            ROPE,
            BLOCK_M,
            BLOCK_N,
            STAGES,
        )
        average, row_lse = _finish(acc, top, total)
        place = ((split * num_rows + first) * heads + lane).to(tl.int64)
        tl.store(pool_lse + place, row_lse, mask=in_tile)
        tl.store(pool_out + place[:, None] * LATENT + tl.arange(0, LATENT)[None, :], average, mask=in_tile[:, None])


@triton.jit
def _merge(pool_out, pool_lse, offsets, known, LATENT: tl.constexpr):
    """Add up the partial results at `offsets` (packed pool rows, where `known`): (weighted sum, sum of weights, top).

    Weights are relative to `top`, the largest log-sum-exp; it is -inf, and the sums 0, where nothing was seen.
    """
    parts = tl.load(pool_lse + offsets, mask=known, other=float("-inf"))
    top = tl.max(parts, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2((parts - base) * LOG2_E)
    values = tl.load(
        pool_out + offsets[:, None] * LATENT + tl.arange(0, LATENT)[None, :], mask=known[:, None], other=0.0
    )
    return tl.sum(values * weights[:, None], 0), tl.sum(weights, 0), top


@triton.jit(do_not_specialize=["heads"])
def reduce_partials(
    reduce_indptr,
    reduce_final_map,
    reduce_partial_map,
    pool_out,
    pool_lse,
    out,
    lse,
    heads,
    LATENT: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Program (j, i, h): head h of the i-th row of reduce group j. An empty group (an unsplit tile) does nothing."""
    group = tl.program_id(0)
    start = tl.load(reduce_indptr + group)
    stop = tl.load(reduce_indptr + group + 1)
    if start < stop:
        first = tl.load(reduce_final_map + 2 * group)
        row = first + tl.program_id(1)
        if row < tl.load(reduce_final_map + 2 * group + 1):
            acc = tl.zeros([LATENT], tl.float32)
            total = 0.0
            top = float("-inf")
            for index in range(start, stop, BLOCK_P):
                part = index + tl.arange(0, BLOCK_P)
                known = part < stop
                pool_row = tl.load(reduce_partial_map + part, mask=known, other=0) + tl.program_id(1)
                offsets = pool_row.to(tl.int64) * heads + tl.program_id(2)
                sums, part_total, part_top = _merge(pool_out, pool_lse, offsets, known, LATENT)
                new_top = tl.maximum(top, part_top)
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
                shrink = tl.exp2((top - base) * LOG2_E)
                grow = tl.exp2((part_top - base) * LOG2_E)
                acc = acc * shrink + sums * grow
                total = total * shrink + part_total * grow
                top = new_top
            safe = tl.where(total == 0.0, 1.0, total)
            place = row.to(tl.int64) * heads + tl.program_id(2)
            tl.store(lse + place, tl.where(total == 0.0, float("-inf"), top + tl.log2(safe) / LOG2_E))
            tl.store(out + place * LATENT + tl.arange(0, LATENT), (acc / safe).to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows", "heads"])
def reduce_splits(pool_out, pool_lse, out, lse, num_rows, heads, SPLITS: tl.constexpr, LATENT: tl.constexpr):
    """Program (r, h): head h of query row r, merged over the fixed splits."""
    place = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    offsets = tl.arange(0, SPLITS).to(tl.int64) * num_rows * heads + place
    sums, total, top = _merge(pool_out, pool_lse, offsets, tl.arange(0, SPLITS) >= 0, LATENT)
    safe = tl.where(total == 0.0, 1.0, total)
    tl.store(lse + place, tl.where(total == 0.0, float("-inf"), top + tl.log2(safe) / LOG2_E))
    tl.store(out + place * LATENT + tl.arange(0, LATENT), (sums / safe).to(out.dtype.element_ty))


# ------------------------------------------------------- scheduling on the device

SCALARS = [
    "requests",
    "reduce_entries",
    "fold",
    "uniform",
    "tiles_each",
    "longest",
    "granularity",
    "overhead",
    "num_splits",
    "workgroups",
    "is_causal",
    "drops_empty",
]


@triton.jit
def _place(left, blocks, last_cut, payload, overhead, drops_empty):
    """Where a tile of `blocks` KV blocks goes when its workgroup has `left` capacity.

    `last_cut`: the last block boundary behind which enough KV remains for a piece of its own. Returns (pieces, whether
    the first piece fills up the current workgroup, blocks in that one, groups moved on, capacity left in the last one).
    """
    fresh = payload - overhead
    fits = left >= blocks + overhead
    opens = (left > overhead) & (fits == 0)
    stretched = opens & (left - overhead > last_cut)
    here = fits | stretched
    fills = opens & (stretched == 0)
    given = tl.where(fills, left - overhead, 0)
    whole = tl.where(last_cut > given, (last_cut - given) // fresh, 0)
    dropped = (here == 0) & (blocks == 0) & (drops_empty != 0)
    stays = here | dropped
    pieces = tl.where(here, 1, tl.where(dropped, 0, fills.to(tl.int32) + whole + 1))
    rest = payload - overhead - (blocks - given - whole * fresh)
    left = tl.where(here, left - blocks - overhead, tl.where(dropped, 0, rest))
    return pieces, fills, given, tl.where(stays, 0, whole + 1), left


@triton.jit
def _last_cut(length, longest, granularity):
    return tl.where(length >= longest, (length - longest) // granularity, -1)


@triton.jit(do_not_specialize=SCALARS)
def scan_tiles(
    qo_indptr,
    kv_indptr,
    work_indptr,
    reduce_indptr,
    notes,
    requests,
    reduce_entries,
    fold,
    uniform,
    tiles_each,
    longest,
    granularity,
    overhead,
    num_splits,
    workgroups,
    drops_empty,
    BLOCK: tl.constexpr,
):
    """One program: walk the tiles in order, note where each starts, and close what lies behind the last.

    Each tile takes constant time however many pieces it gives; `emit_works` writes those in parallel. `notes[-1]` is
    the payload of a workgroup.
    """
    cost = tl.zeros([BLOCK], tl.int32)
    for start in range(0, requests, BLOCK):
        index = start + tl.arange(0, BLOCK)
        known = index < requests
        length = tl.load(kv_indptr + index + 1, mask=known, other=0) - tl.load(kv_indptr + index, mask=known, other=0)
        cost += tl.where(known, tl.cdiv(length, granularity) + overhead, 0)
    payload = tl.cdiv(tl.sum(cost, 0) * (fold * tiles_each), num_splits) + overhead
    tiles = requests * fold * tiles_each
    tl.store(notes + tiles * NOTES, payload)
    tl.store(work_indptr, 0)
    tl.store(reduce_indptr, 0)
    group = payload * 0
    left = payload
    works = payload * 0
    pool_rows = payload * 0
    partials = payload * 0
    for tile in range(tiles):
        request = tile // (fold * tiles_each)
        length = tl.load(kv_indptr + request + 1) - tl.load(kv_indptr + request)
        if uniform > 0:
            rows = (uniform + tiles_each - 1) // tiles_each
        else:
            rows = tl.load(qo_indptr + request + 1) - tl.load(qo_indptr + request)
        note = notes + tile * NOTES
        tl.store(note + NOTE_GROUP, group)
        tl.store(note + NOTE_LEFT, left)
        tl.store(note + NOTE_WORKS, works)
        tl.store(note + NOTE_POOL_ROWS, pool_rows)
        tl.store(note + NOTE_PARTIALS, partials)
        blocks = tl.cdiv(length, granularity)
        pieces, _fills, _given, moved, left = _place(
            left, blocks, _last_cut(length, longest, granularity), payload, overhead, drops_empty
        )
        split = tl.where(pieces > 1, pieces, 0)
        group += moved
        works += pieces
        pool_rows += split * rows
        partials += split
        tl.store(reduce_indptr + tile + 1, partials)
    for start in range(0, workgroups, BLOCK):
        index = start + tl.arange(0, BLOCK)
        tl.store(
            work_indptr + index + 1, tl.zeros([BLOCK], tl.int32) + works, mask=(index >= group) & (index < workgroups)
        )
    for start in range(0, reduce_entries, BLOCK):
        index = start + tl.arange(0, BLOCK)
        behind = (index > tiles) & (index < reduce_entries)
        tl.store(reduce_indptr + index, tl.zeros([BLOCK], tl.int32) + partials, mask=behind)


@triton.jit(do_not_specialize=SCALARS)
def emit_works(
    qo_indptr,
    kv_indptr,
    work_indptr,
    work_info,
    reduce_final_map,
    reduce_partial_map,
    notes,
    fold,
    uniform,
    tiles_each,
    longest,
    granularity,
    overhead,
    is_causal,
    drops_empty,
    BLOCK: tl.constexpr,
):
    """Program i: the work items of tile i, the boundaries of the workgroups they fill, and its reduce group."""
    index = tl.program_id(0)
    folded = index // tiles_each
    tile = index % tiles_each
    begin = tl.load(kv_indptr + folded // fold)
    end = tl.load(kv_indptr + folded // fold + 1)
    if uniform > 0:
        rows = (uniform + tiles_each - 1) // tiles_each
        q_start = folded * uniform + tile * rows
        q_stop = tl.minimum(q_start + rows, (folded + 1) * uniform)
    else:
        q_start = tl.load(qo_indptr + folded)
        q_stop = tl.load(qo_indptr + folded + 1)
        rows = q_stop - q_start
    # Rows of a request that lie behind this tile, counted in tiles: that much KV none of its rows may see.
    row_before = tl.where(fold > 1, (q_start // fold) % tl.maximum(uniform, 1), tile)
    tail = tl.maximum(tiles_each - 1 - row_before, 0) * is_causal
    note = notes + index * NOTES
    payload = tl.load(notes + tl.num_programs(0) * NOTES)
    group = tl.load(note + NOTE_GROUP)
    works = tl.load(note + NOTE_WORKS)
    pool_rows = tl.load(note + NOTE_POOL_ROWS)
    partials = tl.load(note + NOTE_PARTIALS)
    last_cut = _last_cut(end - begin, longest, granularity)
    blocks = tl.cdiv(end - begin, granularity)
    pieces, fills, given, moved, _left = _place(
        tl.load(note + NOTE_LEFT), blocks, last_cut, payload, overhead, drops_empty
    )
    first_fresh = fills.to(tl.int32)
    if (moved > 0) & (first_fresh == 0):
        tl.store(work_indptr + group + 1, works)
    first_group = group + tl.where((moved > 0) & (first_fresh == 0), 1, 0)
    fresh = payload - overhead
    split = tl.where(pieces > 1, pieces, 0)
    for start in range(0, pieces, BLOCK):
        piece = start + tl.arange(0, BLOCK)
        known = piece < pieces
        given_before = tl.where(piece == 0, 0, given + (piece - first_fresh) * fresh)
        given_after = given + (piece + 1 - first_fresh) * fresh
        kv_stop = tl.where(piece == pieces - 1, end - tail, begin + given_after * granularity)
        pool_row = pool_rows + piece * rows
        item = work_info + (works + piece) * COLUMNS
        zeros = tl.zeros([BLOCK], tl.int32)
        tl.store(item + REQUEST, zeros + folded, mask=known)
        tl.store(item + PARTIAL, tl.where(pieces > 1, pool_row, -1), mask=known)
        tl.store(item + Q_START, zeros + q_start, mask=known)
        tl.store(item + Q_STOP, zeros + q_stop, mask=known)
        tl.store(item + KV_START, begin + given_before * granularity, mask=known)
        tl.store(item + KV_STOP, kv_stop, mask=known)
        tl.store(item + KV_BEHIND, end - kv_stop, mask=known)
        tl.store(item + HEAD_RANGE, zeros, mask=known)
        tl.store(reduce_partial_map + partials + piece, pool_row, mask=piece < split)
        tl.store(work_indptr + first_group + piece + 1, works + piece + 1, mask=piece < pieces - 1)
    tl.store(reduce_final_map + 2 * index, tl.where(pieces > 1, q_start, -1))
    tl.store(reduce_final_map + 2 * index + 1, tl.where(pieces > 1, q_stop, -1))
