"""aiter's planners once more, in plain Python, one idea a line: what the fast ones are compared with.

Nothing is shared with the package: no closed form, no folding of clusters, one workgroup and one head at a time.
"""

from math import ceil, gcd


def prefill(qo, kv, ctx, heads, num_cu, qhead, qlen, kvlen, block_size, causal):
    """(work_indptr, work_info, reduce_indptr, reduce_final_map, reduce_partial_map) of every head and cluster."""
    tiles = []
    for b in range(len(ctx)):
        rows = qo[b + 1] - qo[b]
        spans = [(s, min(s + qlen, rows)) for s in range(0, rows, qlen)]
        while spans:
            tiles.append((b, *spans.pop(0)))
            if spans:
                tiles.append((b, *spans.pop()))
    visible = [min(ctx[b] - (qo[b + 1] - qo[b]) + end, ctx[b]) if causal else ctx[b] for b, _, end in tiles]
    units = [ceil(v / kvlen) for v in visible]
    pages_per_unit = kvlen // block_size
    clusters = gcd(heads, num_cu)
    workgroups, heads_each = num_cu // clusters, heads // clusters
    average, spare = divmod(sum(units), workgroups)

    work_indptr, work_info, partial_rows = [0], [], {}
    for cluster in range(clusters):
        tile, page, counter = 0, 0, 0
        for g in range(workgroups):
            before = tile, page, counter
            for head in range(cluster * heads_each, (cluster + 1) * heads_each):
                tile, page, counter = before
                room = (average + (g < spare)) * pages_per_unit
                while room > 0 and tile < len(tiles):
                    b, start, end = tiles[tile]
                    first_page = kv[b] + page
                    if visible[tile] - page * block_size <= room * block_size:
                        taken = units[tile] * pages_per_unit - page
                        partial = -1
                        if page > 0:
                            partial, counter = qlen * counter, counter + 1
                        last_page = min(first_page + taken, kv[b + 1])
                        behind, room, tile, page = 0, room - taken, tile + 1, 0
                    else:
                        partial, counter = qlen * counter, counter + 1
                        last_page = min(first_page + room, kv[b + 1])
                        behind = ctx[b] - (last_page - kv[b]) * block_size
                        page, room = page + room, 0
                    rows = (qo[b] + start, qo[b] + end)
                    if partial >= 0:
                        partial_rows.setdefault(rows, set()).add(partial)
                    ranges = head * qhead | (head + 1) * qhead << 16
                    work_info.append([b, partial, *rows, first_page, last_page, behind, ranges])
            work_indptr.append(len(work_info))

    reduce_indptr, partial_map = [0], []
    for rows in sorted(partial_rows):
        partial_map += sorted(partial_rows[rows])
        reduce_indptr.append(len(partial_map))
    return work_indptr, work_info, reduce_indptr, [list(rows) for rows in sorted(partial_rows)], partial_map


def folds(gfx, q_dtype, kv_dtype, heads, longest, experimental):
    """How many folded requests stand for one; None where no kernel takes the head count."""
    fp8, bf16 = (q_dtype, kv_dtype) == ("fp8", "fp8"), (q_dtype, kv_dtype) == ("bf16", "bf16")
    native = [
        heads == 16,
        gfx == "gfx950" and bf16,
        gfx == "gfx950" and fp8 and heads in (32, 64, 128),
        gfx == "gfx942" and fp8 and heads == 128,
        fp8 and heads == 64 and longest == 1,
        experimental and fp8 and heads in (16, 32, 64, 128) and heads * longest == 128,
    ]
    if any(native):
        return 1
    if heads % 16 == 0:
        return heads // 16
    if heads == 8 and ((gfx == "gfx950" and fp8 and longest == 4) or (gfx == "gfx942" and bf16 and longest == 2)):
        return 1
    return None


def tiling(gfx, q_dtype, kv_dtype, heads, longest, experimental):
    """(packed rows of a tile, whether queries are split into tiles, heads after folding)."""
    fold = folds(gfx, q_dtype, kv_dtype, heads, longest, experimental)
    launched = heads if fold == 1 else 16
    rows, tile = launched * longest, 128
    if gfx == "gfx950" and q_dtype == kv_dtype == "bf16" and launched <= 64 and rows >= 64:
        if rows < 128 or launched == 48:
            tile = 64
    elif gfx == "gfx950" and q_dtype == kv_dtype == "fp8" and launched == 32 and longest == 3:
        tile = 64
    return tile, not 0 < longest * heads <= tile, launched


class Decode:
    """The lists of a decode schedule; `final` holds None for a tile that is not split."""

    def __init__(self):
        self.work_indptr, self.works = [0], []
        self.reduce_indptr, self.final, self.partial_map = [0], [], []

    def close_tile(self, span, rows_of_pieces):
        """End a tile whose split pieces have these partial rows (none: it is not split)."""
        self.final.append(list(span) if rows_of_pieces else None)
        self.partial_map += rows_of_pieces
        self.reduce_indptr.append(len(self.partial_map))


def decode(
    qo, kv, heads, num_cu, gfx, q_dtype, kv_dtype, longest, uniform, block, causal, max_split, experimental, parallel
):
    """The schedule of aiter's serial planner, or of its parallel one."""
    fold = folds(gfx, q_dtype, kv_dtype, heads, longest, experimental)
    tile_rows, split_queries, launched = tiling(gfx, q_dtype, kv_dtype, heads, longest, experimental)
    tiles = []  # (folded request, q_start, q_end, rows, kv_begin, kv_end, tail)
    for f in range((len(kv) - 1) * fold):
        begin, end = (uniform * f, uniform * (f + 1)) if uniform > 0 else (qo[f], qo[f + 1])
        count = 1
        if split_queries:
            count = end - begin if 2 * launched > tile_rows else ceil((end - begin) * launched / tile_rows)
        rows = ceil((end - begin) / count)
        for t in range(count):
            start = begin + t * rows
            tail = 0
            if causal:
                tail = max(0, count - 1 - (start // fold) % uniform) if fold > 1 else count - 1 - t
            tiles.append((f, start, min(start + rows, end), rows, kv[f // fold], kv[f // fold + 1], tail))
    workgroups = num_cu
    if experimental and gfx == "gfx950" and q_dtype == kv_dtype == "fp8" and heads * longest == 64:
        workgroups = 2 * num_cu
    splits = workgroups if max_split < 0 else min(workgroups, max_split * (len(kv) - 1) * fold)
    total = sum(ceil((t[5] - t[4]) / block) + 16 for t in tiles)
    payload = ceil(total / splits) + 16
    plan = Decode()
    (_parallel if parallel else _serial)(plan, tiles, payload, workgroups, block, longest)
    return plan


def _serial(plan, tiles, payload, workgroups, block, longest):
    queue, given, open_rows, counter, tail_done = list(tiles), 0, [], 0, False
    for _ in range(workgroups):
        left = payload
        while queue:
            f, start, end, rows, kv_begin, kv_end, tail = queue[0]
            rest = ceil((kv_end - kv_begin) / block) - given
            at, seen = kv_begin + given * block, kv_end - tail
            if left >= rest + 16 or tail_done:
                to = min(at + rest * block, seen)
                if 0 < kv_end - to < longest or tail_done:
                    to = min(seen, kv_end)
                partial = -1
                if open_rows:
                    partial, counter = counter, counter + rows
                    open_rows.append(partial)
                plan.works.append([f, partial, start, end, at, to, kv_end - to, 0])
                plan.close_tile((start, end), open_rows)
                left -= rest + 16
                queue.pop(0)
                given, open_rows, tail_done = 0, [], False
                continue
            if left <= 16:
                break
            to = min(at + (left - 16) * block, seen)
            if kv_end - to < longest:
                tail_done = True
                continue
            plan.works.append([f, counter, start, end, at, to, kv_end - to, 0])
            open_rows.append(counter)
            counter, given = counter + rows, given + left - 16
            break
        plan.work_indptr.append(len(plan.works))
    assert not queue


def _parallel(plan, tiles, payload, workgroups, block, longest):
    assert longest == 1
    per_workgroup = [[] for _ in range(workgroups)]
    g, left, counter = 0, payload, 0
    for f, start, end, rows, kv_begin, kv_end, _ in tiles:
        blocks = ceil((kv_end - kv_begin) / block)
        shares = []  # (workgroup, blocks)
        if blocks + 16 <= left:
            shares = [(g, blocks)]
        else:
            rest = blocks
            if left > 16:
                shares, rest = [(g, left - 16)], blocks - (left - 16)
            left = 0 if rest == 0 else left
            while rest > 0:
                g += 1
                shares.append((g, min(rest, payload - 16)))
                rest -= shares[-1][1]
                left = payload
        if shares:
            left -= shares[-1][1] + 16
        is_split, open_rows, at = len(shares) > 1, [], kv_begin
        for workgroup, taken in shares:
            to = min(at + taken * block, kv_end)
            per_workgroup[workgroup].append([f, counter if is_split else -1, start, end, at, to, kv_end - to, 0])
            if is_split:
                open_rows.append(counter)
                counter += rows
            at = to
        plan.close_tile((start, end), open_rows)
    for works in per_workgroup:
        plan.works += works
        plan.work_indptr.append(len(plan.works))
