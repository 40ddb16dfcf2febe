/* The packing loops of packing.py in C; _twin.py is the same in NumPy, and one set of tests runs both.
 *
 * Arrays come as C-contiguous int32 through the buffer protocol, so that no NumPy headers are needed to build. Every
 * input is checked in the pass that reads it: a malformed one gives None, and Python then looks for the element.
 * Outputs are written only behind a check of their size.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define COLUMNS 8

typedef struct {
    Py_buffer view;
    int32_t *data;
    int64_t size;
} Vector;

static int vector_open(PyObject *object, int writable, Vector *vector) {
    if (PyObject_GetBuffer(object, &vector->view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return -1;
    vector->data = vector->view.buf;
    vector->size = vector->view.len / (Py_ssize_t)sizeof(int32_t);
    return 0;
}

static int vectors_open(PyObject *const *objects, int inputs, int outputs, Vector *vectors) {
    for (int i = 0; i < inputs + outputs; i++) {
        if (vector_open(objects[i], i >= inputs, &vectors[i]) < 0) {
            while (i-- > 0)
                PyBuffer_Release(&vectors[i].view);
            return -1;
        }
    }
    return 0;
}

static void vectors_close(Vector *vectors, int count) {
    for (int i = 0; i < count; i++)
        PyBuffer_Release(&vectors[i].view);
}

static int integers(PyObject *const *objects, int count, int64_t *values) {
    for (int i = 0; i < count; i++) {
        values[i] = PyLong_AsLongLong(objects[i]);
        if (values[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

static int expect_arguments(const char *name, Py_ssize_t got, Py_ssize_t expected) {
    if (got == expected)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s: expected %zd arguments, got %zd", name, expected, got);
    return -1;
}

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline void put_work(int32_t *row, int64_t request, int64_t partial, int64_t q_start, int64_t q_end,
                            int64_t kv_start, int64_t kv_end, int64_t behind) {
    row[0] = (int32_t)request;
    row[1] = (int32_t)partial;
    row[2] = (int32_t)q_start;
    row[3] = (int32_t)q_end;
    row[4] = (int32_t)kv_start;
    row[5] = (int32_t)kv_end;
    row[6] = (int32_t)behind;
    row[7] = 0;
}

/* ---- prefill ---------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t tile_rows, unit_tokens, block_size, causal;
} PrefillRule;

typedef struct {
    int64_t request, q_start, q_end, units;
} Tile;

/* Tiles of one request come first, last, second, second-last, ...: heavy and light causal tiles alternate. */
static inline int64_t tile_at(int64_t position, int64_t tiles) {
    return (position & 1) ? tiles - 1 - position / 2 : position / 2;
}

static inline int64_t tile_units(const PrefillRule *rule, int64_t rows, int64_t tokens, int64_t end_row) {
    int64_t visible = rule->causal ? least(tokens - rows + end_row, tokens) : tokens;
    return ceil_div(visible, rule->unit_tokens);
}

static PyObject *prefill_count(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Vector in[3];
    int64_t scalars[4];
    (void)self;
    if (expect_arguments("prefill_count", nargs, 7) < 0 || integers(args + 3, 4, scalars) < 0)
        return NULL;
    if (vectors_open(args, 3, 0, in) < 0)
        return NULL;
    const PrefillRule rule = {scalars[0], scalars[1], scalars[2], scalars[3]};
    const int32_t *qo = in[0].data, *kv = in[1].data, *context = in[2].data;
    const int64_t requests = in[2].size;
    int64_t tiles = 0, units = 0;
    int good = in[0].size == requests + 1 && in[1].size == requests + 1 && qo[0] >= 0 && kv[0] >= 0;
    for (int64_t b = 0; good && b < requests; b++) {
        const int64_t rows = (int64_t)qo[b + 1] - qo[b], pages = (int64_t)kv[b + 1] - kv[b], tokens = context[b];
        good = rows >= 0 && pages >= 0 && tokens >= 0 && tokens <= pages * rule.block_size &&
               (!rule.causal || tokens >= rows);
        const int64_t here = good ? ceil_div(rows, rule.tile_rows) : 0;
        tiles += here;
        for (int64_t t = 0; t < here; t++)
            units += tile_units(&rule, rows, tokens, least((t + 1) * rule.tile_rows, rows));
    }
    vectors_close(in, 3);
    if (!good)
        Py_RETURN_NONE;
    return Py_BuildValue("LL", (long long)tiles, (long long)units);
}

typedef struct {
    int32_t start, end;
    int64_t first, count;
} Group;

static int by_start(const void *a, const void *b) {
    const int32_t x = ((const Group *)a)->start, y = ((const Group *)b)->start;
    return (x > y) - (x < y);
}

typedef struct {
    int64_t workgroups, tiles, groups_most;
    int32_t *work_indptr, *work_info, *reduce_indptr, *final_map, *partial_map;
} PrefillOut;

/* One cursor walks the tiles; every workgroup takes its equal share of KV units, and a tile that spans a border between
 * two shares is split there. */
static void pack_cluster(const PrefillRule *rule, const Vector *in, const Tile *tiles, int64_t total, PrefillOut *out,
                         Group *groups, int64_t *counts) {
    const int32_t *kv = in[1].data, *context = in[2].data;
    const int64_t unit_pages = rule->unit_tokens / rule->block_size;
    const int64_t share = total / out->workgroups, spare = total % out->workgroups;
    int64_t tile = 0, given = 0, works = 0, partials = 0, split = 0;
    out->work_indptr[0] = 0;
    for (int64_t g = 0; g < out->workgroups; g++) {
        int64_t room = share + (g < spare);
        while (room > 0 && tile < out->tiles) {
            const Tile *t = &tiles[tile];
            const int64_t left = t->units - given;
            const int finishes = left <= room;
            const int64_t taken = finishes ? left : room;
            const int64_t kv_start = kv[t->request] + given * unit_pages;
            const int64_t kv_end = least(kv_start + taken * unit_pages, kv[t->request + 1]);
            const int64_t behind =
                finishes ? 0 : context[t->request] - (kv_end - kv[t->request]) * rule->block_size;
            int64_t partial = -1;
            if (!finishes || given > 0) {
                if (given == 0)
                    groups[split++] = (Group){(int32_t)t->q_start, (int32_t)t->q_end, partials, 0};
                groups[split - 1].count++;
                partial = rule->tile_rows * partials++;
            }
            put_work(out->work_info + COLUMNS * works++, t->request, partial, t->q_start, t->q_end, kv_start, kv_end,
                     behind);
            given = finishes ? 0 : given + taken;
            tile += finishes;
            room -= taken;
        }
        out->work_indptr[g + 1] = (int32_t)works;
    }
    qsort(groups, (size_t)split, sizeof(Group), by_start);
    int64_t at = 0;
    out->reduce_indptr[0] = 0;
    for (int64_t j = 0; j < split; j++) {
        for (int64_t k = 0; k < groups[j].count; k++)
            out->partial_map[at++] = (int32_t)(rule->tile_rows * (groups[j].first + k));
        out->reduce_indptr[j + 1] = (int32_t)at;
        out->final_map[2 * j] = groups[j].start;
        out->final_map[2 * j + 1] = groups[j].end;
    }
    counts[0] = works;
    counts[1] = split;
    counts[2] = partials;
}

static int64_t list_tiles(const PrefillRule *rule, const Vector *in, Tile *tiles) {
    const int32_t *qo = in[0].data, *context = in[2].data;
    int64_t total = 0;
    for (int64_t b = 0; b < in[2].size; b++) {
        const int64_t rows = (int64_t)qo[b + 1] - qo[b], here = ceil_div(rows, rule->tile_rows);
        for (int64_t p = 0; p < here; p++) {
            const int64_t start = tile_at(p, here) * rule->tile_rows, end = least(start + rule->tile_rows, rows);
            *tiles = (Tile){b, qo[b] + start, qo[b] + end, tile_units(rule, rows, context[b], end)};
            total += tiles->units;
            tiles++;
        }
    }
    return total;
}

/* The caller passes the same arrays that prefill_count accepted. */
static PyObject *prefill_pack(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Vector v[4];
    int64_t scalars[6], counts[3];
    (void)self;
    if (expect_arguments("prefill_pack", nargs, 10) < 0 || integers(args + 3, 6, scalars) < 0)
        return NULL;
    PyObject *const arrays[4] = {args[0], args[1], args[2], args[9]};
    if (vectors_open(arrays, 3, 1, v) < 0)
        return NULL;
    const PrefillRule rule = {scalars[1], scalars[2], scalars[3], scalars[4]};
    PrefillOut out = {.workgroups = scalars[0], .tiles = scalars[5]};
    out.groups_most = least(out.tiles, out.workgroups);
    out.work_indptr = v[3].data;
    out.work_info = out.work_indptr + out.workgroups + 1;
    out.reduce_indptr = out.work_info + COLUMNS * (out.tiles + out.workgroups);
    out.final_map = out.reduce_indptr + out.groups_most + 1;
    out.partial_map = out.final_map + 2 * out.groups_most;
    PyObject *result = NULL;
    if (v[3].size < (out.partial_map - out.work_indptr) + 2 * out.workgroups) {
        PyErr_SetString(PyExc_ValueError, "prefill_pack: block is too small");
    } else {
        Tile *tiles = PyMem_Malloc((size_t)(out.tiles + 1) * sizeof(Tile));
        Group *groups = PyMem_Malloc((size_t)(out.groups_most + 1) * sizeof(Group));
        if (tiles == NULL || groups == NULL) {
            PyErr_NoMemory();
        } else {
            const int64_t total = list_tiles(&rule, v, tiles);
            pack_cluster(&rule, v, tiles, total, &out, groups, counts);
            result = Py_BuildValue("LLL", (long long)counts[0], (long long)counts[1], (long long)counts[2]);
        }
        PyMem_Free(tiles);
        PyMem_Free(groups);
    }
    vectors_close(v, 4);
    return result;
}

static PyObject *prefill_expand(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Vector v[4];
    int64_t scalars[3];
    (void)self;
    if (expect_arguments("prefill_expand", nargs, 7) < 0 || integers(args + 2, 3, scalars) < 0)
        return NULL;
    PyObject *const arrays[4] = {args[0], args[1], args[5], args[6]};
    if (vectors_open(arrays, 2, 2, v) < 0)
        return NULL;
    const int64_t clusters = scalars[0], heads = scalars[1], qhead = scalars[2];
    const int64_t workgroups = v[0].size - 1, pieces = v[1].size / COLUMNS;
    if (workgroups < 0 || v[0].data[workgroups] != pieces || v[2].size != clusters * workgroups + 1 ||
        v[3].size != clusters * heads * pieces * COLUMNS) {
        vectors_close(v, 4);
        PyErr_SetString(PyExc_ValueError, "prefill_expand: outputs have other sizes than the schedule");
        return NULL;
    }
    int32_t *indptr = v[2].data, *row = v[3].data;
    int64_t works = 0;
    *indptr++ = 0;
    for (int64_t c = 0; c < clusters; c++) {
        for (int64_t g = 0; g < workgroups; g++) {
            const int64_t begin = v[0].data[g], end = v[0].data[g + 1];
            for (int64_t h = c * heads; h < (c + 1) * heads; h++) {
                const uint32_t range = (uint32_t)(h * qhead) | (uint32_t)((h + 1) * qhead) << 16;
                for (const int32_t *piece = v[1].data + COLUMNS * begin; piece < v[1].data + COLUMNS * end;
                     piece += COLUMNS, row += COLUMNS) {
                    memcpy(row, piece, COLUMNS * sizeof(int32_t));
                    row[COLUMNS - 1] = (int32_t)range;
                }
            }
            works += heads * (end - begin);
            *indptr++ = (int32_t)works;
        }
    }
    vectors_close(v, 4);
    Py_RETURN_NONE;
}

/* ---- MLA decode ------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t fold, uniform, tiles_each, longest, block, overhead, splits, workgroups, causal, parallel;
} DecodeRule;

typedef struct {
    int32_t *work_indptr, *reduce_indptr, *final_map, *partial_map, *work_info;
    int64_t works, partials, rows, tile;
    int overran;
} DecodeOut;

typedef struct {
    int64_t q_start, q_end, tile_rows, kv_begin, kv_end, blocks, tail;
} DecodeTile;

static int64_t decode_cost(const DecodeRule *rule, const Vector *in) {
    const int32_t *qo = in[0].data, *kv = in[1].data;
    const int64_t requests = in[1].size - 1;
    int64_t sum = 0;
    if (requests < 1 || in[0].size != requests + 1 || qo[0] < 0 || kv[0] != 0)
        return -1;
    for (int64_t b = 0; b < requests; b++) {
        const int64_t rows = (int64_t)qo[b + 1] - qo[b], tokens = (int64_t)kv[b + 1] - kv[b];
        if (rows < 0 || tokens < 0 || (rule->uniform < 0 && rows > rule->longest))
            return -1;
        sum += ceil_div(tokens, rule->block) + rule->overhead;
    }
    sum *= rule->fold * rule->tiles_each;
    return sum > INT32_MAX ? -1 : sum;
}

static inline void tile_of(const DecodeRule *rule, const Vector *in, int64_t folded, int64_t index, DecodeTile *tile) {
    const int32_t *qo = in[0].data, *kv = in[1].data + folded / rule->fold;
    const int64_t begin = rule->uniform < 0 ? qo[folded] : rule->uniform * folded;
    const int64_t end = rule->uniform < 0 ? qo[folded + 1] : rule->uniform * (folded + 1);
    tile->tile_rows = ceil_div(end - begin, rule->tiles_each);
    tile->q_start = begin + index * tile->tile_rows;
    tile->q_end = least(tile->q_start + tile->tile_rows, end);
    tile->kv_begin = kv[0];
    tile->kv_end = kv[1];
    tile->blocks = ceil_div(tile->kv_end - tile->kv_begin, rule->block);
    tile->tail = 0;
    if (rule->causal) {
        const int64_t behind = rule->fold > 1 ? (tile->q_start / rule->fold) % rule->uniform : index;
        tile->tail = rule->tiles_each - 1 - behind;
        if (tile->tail < 0)
            tile->tail = 0;
    }
}

static inline void put_piece(DecodeOut *out, int64_t request, const DecodeTile *tile, int is_split, int64_t kv_start,
                             int64_t kv_end) {
    int64_t partial = -1;
    if (is_split) {
        partial = out->rows;
        out->partial_map[out->partials++] = (int32_t)partial;
        out->rows += tile->tile_rows;
    }
    put_work(out->work_info + COLUMNS * out->works++, request, partial, tile->q_start, tile->q_end, kv_start, kv_end,
             tile->kv_end - kv_end);
}

static inline void close_tile(DecodeOut *out, const DecodeTile *tile, int is_split) {
    out->final_map[2 * out->tile] = is_split ? (int32_t)tile->q_start : -1;
    out->final_map[2 * out->tile + 1] = is_split ? (int32_t)tile->q_end : -1;
    out->reduce_indptr[++out->tile] = (int32_t)out->partials;
}

static void decode_serial(const DecodeRule *rule, const Vector *in, int64_t payload, DecodeOut *out) {
    const int64_t requests = (in[1].size - 1) * rule->fold;
    int64_t request = 0, index = 0, given = 0, pieces = 0;
    int tail_done = 0;
    DecodeTile tile;
    tile_of(rule, in, 0, 0, &tile);
    for (int64_t g = 0; g < rule->workgroups; g++) {
        int64_t left = payload;
        while (request < requests) {
            const int64_t rest = tile.blocks - given;
            const int64_t kv_start = tile.kv_begin + given * rule->block, seen = tile.kv_end - tile.tail;
            if (left >= rest + rule->overhead || tail_done) {
                int64_t kv_end = least(kv_start + rest * rule->block, seen);
                /* A remainder shorter than a query is not worth a piece: this one is stretched over it. */
                if (tail_done || (tile.kv_end - kv_end > 0 && tile.kv_end - kv_end < rule->longest))
                    kv_end = least(seen, tile.kv_end);
                put_piece(out, request, &tile, pieces > 0, kv_start, kv_end);
                close_tile(out, &tile, pieces > 0);
                left -= rest + rule->overhead;
                given = pieces = 0;
                tail_done = 0;
                if (++index == rule->tiles_each) {
                    index = 0;
                    request++;
                }
                if (request < requests)
                    tile_of(rule, in, request, index, &tile);
            } else if (left > rule->overhead) {
                const int64_t taken = left - rule->overhead;
                const int64_t kv_end = least(kv_start + taken * rule->block, seen);
                if (tile.kv_end - kv_end < rule->longest) {
                    tail_done = 1;
                    continue;
                }
                put_piece(out, request, &tile, 1, kv_start, kv_end);
                given += taken;
                pieces++;
                break;
            } else {
                break;
            }
        }
        out->work_indptr[g + 1] = (int32_t)out->works;
    }
}

/* No batch is known to need more workgroups than there are; the block has no room for one more. */
static inline int next_workgroup(const DecodeRule *rule, DecodeOut *out, int64_t *g) {
    if (*g == rule->workgroups) {
        out->overran = 1;
        return -1;
    }
    out->work_indptr[++*g] = (int32_t)out->works;
    return 0;
}

/* The parallel planner's closed form: it gives a request that does not fit to fresh workgroups, and so gives one
 * without KV to none. */
static void decode_parallel(const DecodeRule *rule, const Vector *in, int64_t payload, DecodeOut *out) {
    const int64_t fresh = payload - rule->overhead;
    int64_t left = payload, g = 0;
    DecodeTile tile;
    for (int64_t request = 0; request < in[1].size - 1; request++) {
        tile_of(rule, in, request, 0, &tile);
        if (tile.blocks + rule->overhead <= left) {
            put_piece(out, request, &tile, 0, tile.kv_begin, tile.kv_end);
            left -= tile.blocks + rule->overhead;
            close_tile(out, &tile, 0);
            continue;
        }
        const int64_t first = left > rule->overhead ? left - rule->overhead : 0;
        const int64_t workgroups = ceil_div(tile.blocks - first, fresh), pieces = workgroups + (first > 0);
        int64_t given = 0, share = first > 0 ? first : fresh;
        if (first == 0 && pieces > 0 && next_workgroup(rule, out, &g) < 0)
            return;
        for (int64_t p = 0; p < pieces; p++) {
            const int64_t taken = least(share, tile.blocks - given);
            const int64_t kv_start = tile.kv_begin + given * rule->block;
            put_piece(out, request, &tile, pieces > 1, kv_start, least(kv_start + taken * rule->block, tile.kv_end));
            if (p + 1 < pieces && next_workgroup(rule, out, &g) < 0)
                return;
            left = payload - (taken + rule->overhead);
            given += taken;
            share = fresh;
        }
        if (pieces == 0)
            left = 0;
        close_tile(out, &tile, pieces > 1);
    }
    while (g < rule->workgroups)
        next_workgroup(rule, out, &g);
}

static PyObject *decode_pack(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Vector v[3];
    int64_t s[10];
    (void)self;
    if (expect_arguments("decode_pack", nargs, 13) < 0 || integers(args + 2, 10, s) < 0)
        return NULL;
    PyObject *const arrays[3] = {args[0], args[1], args[12]};
    if (vectors_open(arrays, 2, 1, v) < 0)
        return NULL;
    const DecodeRule rule = {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9]};
    const int64_t cost = decode_cost(&rule, v);
    const int64_t tiles = (v[1].size - 1) * rule.fold * rule.tiles_each;
    PyObject *result = NULL;
    if (cost < 0) {
        result = Py_NewRef(Py_None);
    } else if (v[2].size < rule.workgroups + 2 + 3 * tiles + (COLUMNS + 1) * (tiles + rule.workgroups)) {
        PyErr_SetString(PyExc_ValueError, "decode_pack: block is too small");
    } else {
        DecodeOut out = {.work_indptr = v[2].data};
        out.reduce_indptr = out.work_indptr + rule.workgroups + 1;
        out.final_map = out.reduce_indptr + tiles + 1;
        out.partial_map = out.final_map + 2 * tiles;
        out.work_info = out.partial_map + tiles + rule.workgroups;
        out.work_indptr[0] = out.reduce_indptr[0] = 0;
        const int64_t payload = ceil_div(cost, rule.splits) + rule.overhead;
        if (rule.parallel)
            decode_parallel(&rule, v, payload, &out);
        else
            decode_serial(&rule, v, payload, &out);
        if (out.overran || out.tile != tiles)
            PyErr_SetString(PyExc_RuntimeError, "decode_pack: tiles were left without a workgroup");
        else
            result = Py_BuildValue("LL", (long long)out.works, (long long)out.partials);
    }
    vectors_close(v, 3);
    return result;
}

static PyMethodDef methods[] = {
    {"prefill_count", (PyCFunction)(void (*)(void))prefill_count, METH_FASTCALL, "Count tiles and KV units."},
    {"prefill_pack", (PyCFunction)(void (*)(void))prefill_pack, METH_FASTCALL, "Pack one cluster's prefill schedule."},
    {"prefill_expand", (PyCFunction)(void (*)(void))prefill_expand, METH_FASTCALL, "Repeat it over clusters and heads."},
    {"decode_pack", (PyCFunction)(void (*)(void))decode_pack, METH_FASTCALL, "Pack an MLA decode schedule."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "The packing loops in C.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
