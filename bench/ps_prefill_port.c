/* What planning FP8 prefill on the host costs without syncfree: a straight C port of the planner described in
 * planner/schedules/prefill.py's terms, as aiter runs it: every cluster lists its tiles again, every head of every
 * workgroup emits its own works, the reduce lists come from a scan of all works through an ordered map, and five
 * zero-filled buffers of the allocated size are copied out. Compiled and timed by bench/schedules.py.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int32_t b, q_start, q_end, visible, units;
} tile_t;

typedef struct {
    int32_t q_start, q_end, count, room, *rows;
} group_t;

typedef struct {
    const int32_t *qo, *kv, *ctx;
    int32_t batch, heads, num_cu, qhead, qlen, kvlen, block_size, causal;
} call_t;

typedef struct {
    int32_t *work_indptr, *work_info, *reduce_indptr, *final_map, *partial_map;
    int64_t reduce_size;
} lists_t;

static int32_t gcd(int32_t a, int32_t b) { return b ? gcd(b, a % b) : a; }
static int32_t cdiv(int32_t a, int32_t b) { return (a + b - 1) / b; }
static int32_t min(int32_t a, int32_t b) { return a < b ? a : b; }

static int32_t list_tiles(const call_t *c, tile_t *tiles, int64_t *total) {
    int32_t n = 0;
    *total = 0;
    for (int32_t b = 0; b < c->batch; b++) {
        const int32_t rows = c->qo[b + 1] - c->qo[b], count = cdiv(rows, c->qlen);
        for (int32_t i = 0; i < count; i++) {
            const int32_t t = i % 2 ? count - 1 - i / 2 : i / 2;
            const int32_t start = t * c->qlen, end = min(start + c->qlen, rows);
            const int32_t visible = c->causal ? min(c->ctx[b] - rows + end, c->ctx[b]) : c->ctx[b];
            tiles[n] = (tile_t){b, c->qo[b] + start, c->qo[b] + end, visible, cdiv(visible, c->kvlen)};
            *total += tiles[n++].units;
        }
    }
    return n;
}

/* An ordered map from (q_start, q_end) to an ordered set of partial rows: binary search and insertion. */
static void add_partial(group_t *groups, int32_t *count, int32_t q_start, int32_t q_end, int32_t row) {
    int32_t low = 0, high = *count;
    while (low < high) {
        const int32_t mid = (low + high) / 2;
        if (groups[mid].q_start < q_start)
            low = mid + 1;
        else
            high = mid;
    }
    group_t *g = &groups[low];
    if (low == *count || g->q_start != q_start) {
        memmove(g + 1, g, (size_t)(*count - low) * sizeof(group_t));
        *g = (group_t){q_start, q_end, 0, 4, malloc(4 * sizeof(int32_t))};
        ++*count;
    }
    int32_t at = g->count;
    while (at > 0 && g->rows[at - 1] >= row)
        if (g->rows[--at] == row)
            return;
    if (g->count == g->room)
        g->rows = realloc(g->rows, (size_t)(g->room *= 2) * sizeof(int32_t));
    memmove(g->rows + at + 1, g->rows + at, (size_t)(g->count - at) * sizeof(int32_t));
    g->rows[at] = row;
    g->count++;
}

static void reduce_lists(const lists_t *out, int64_t works, int32_t tiles) {
    group_t *groups = malloc((size_t)(tiles + 1) * sizeof(group_t));
    int32_t count = 0, at = 0;
    for (int64_t w = 0; w < works; w++) {
        const int32_t *row = out->work_info + 8 * w;
        if (row[1] >= 0)
            add_partial(groups, &count, row[2], row[3], row[1]);
    }
    out->reduce_indptr[0] = 0;
    for (int32_t j = 0; j < count; j++) {
        memcpy(out->partial_map + at, groups[j].rows, (size_t)groups[j].count * sizeof(int32_t));
        at += groups[j].count;
        out->reduce_indptr[j + 1] = at;
        out->final_map[2 * j] = groups[j].q_start;
        out->final_map[2 * j + 1] = groups[j].q_end;
        free(groups[j].rows);
    }
    for (int64_t j = count + 1; j < out->reduce_size; j++)
        out->reduce_indptr[j] = at;
    free(groups);
}

/* The bare packing, into lists that are large enough; returns the number of works. */
int64_t ps_pack(const call_t *c, const lists_t *out) {
    const int32_t clusters = gcd(c->heads, c->num_cu), workgroups = c->num_cu / clusters, heads = c->heads / clusters;
    const int32_t unit_pages = c->kvlen / c->block_size;
    int64_t works = 0, total = 0;
    int32_t most = 0, count = 0;
    for (int32_t b = 0; b < c->batch; b++)
        most += cdiv(c->qo[b + 1] - c->qo[b], c->qlen);
    tile_t *tiles = malloc((size_t)(most + 1) * sizeof(tile_t));
    out->work_indptr[0] = 0;
    for (int32_t cluster = 0; cluster < clusters; cluster++) {
        count = list_tiles(c, tiles, &total);
        const int32_t average = (int32_t)(total / workgroups), spare = (int32_t)(total % workgroups);
        int32_t tile = 0, page = 0, counter = 0;
        for (int32_t g = 0; g < workgroups; g++) {
            int32_t t = tile, p = page, k = counter;
            for (int32_t h = cluster * heads; h < (cluster + 1) * heads; h++) {
                int32_t room = (average + (g < spare)) * unit_pages;
                t = tile, p = page, k = counter;
                while (room > 0 && t < count) {
                    const tile_t *x = &tiles[t];
                    int32_t *row = out->work_info + 8 * works++;
                    const int finishes = x->visible - p * c->block_size <= room * c->block_size;
                    const int32_t taken = finishes ? x->units * unit_pages - p : room;
                    row[0] = x->b;
                    row[1] = finishes && p == 0 ? -1 : c->qlen * k++;
                    row[2] = x->q_start;
                    row[3] = x->q_end;
                    row[4] = c->kv[x->b] + p;
                    row[5] = min(row[4] + taken, c->kv[x->b + 1]);
                    row[6] = finishes ? 0 : c->ctx[x->b] - (row[5] - c->kv[x->b]) * c->block_size;
                    row[7] = h * c->qhead | (h + 1) * c->qhead << 16;
                    room -= taken;
                    p = finishes ? 0 : p + taken;
                    t += finishes;
                }
            }
            tile = t, page = p, counter = k;
            out->work_indptr[cluster * workgroups + g + 1] = (int32_t)works;
        }
    }
    free(tiles);
    reduce_lists(out, works, count);
    return works;
}

/* The whole call: zero-filled buffers of the allocated sizes (in int32), the packing, and the copies out. */
int64_t ps_plan(const call_t *c, const int64_t *sizes, const lists_t *target) {
    int32_t *host[5], *const to[5] = {target->work_indptr, target->work_info, target->reduce_indptr,
                                      target->final_map, target->partial_map};
    for (int i = 0; i < 5; i++) {
        host[i] = malloc((size_t)sizes[i] * sizeof(int32_t));
        memset(host[i], 0, (size_t)sizes[i] * sizeof(int32_t));
    }
    const lists_t lists = {host[0], host[1], host[2], host[3], host[4], sizes[2]};
    const int64_t works = ps_pack(c, &lists);
    for (int i = 0; i < 5; i++) {
        memcpy(to[i], host[i], (size_t)sizes[i] * sizeof(int32_t));
        free(host[i]);
    }
    return works;
}
