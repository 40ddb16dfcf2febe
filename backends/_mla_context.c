/* The cut of vLLM 0.32's MLA contexts in C; _mla_context_twin.py is the same in Python, and one set of tests runs both.
 *
 * Arrays are C-contiguous int32 through the buffer protocol. Two passes: the pieces, then everything that is laid out
 * from them, into one block whose sections mla_context.py names.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define CHUNK_COLUMNS 10

typedef struct {
    int64_t row, start, length;
} Piece;

typedef struct {
    const int32_t *lens;
    int64_t rows, budget, largest, aligned, ranks, interleave;
} Context;

typedef struct {
    Piece *pieces;
    int64_t *chunk_ends; /* pieces before the end of each chunk */
    int64_t num_pieces, room, num_chunks, chunk_room;
} Cut;

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Rows that the first `tokens` of a context take on this rank. */
static inline int64_t padded(const Context *c, int64_t tokens) {
    return c->ranks == 1 ? tokens : ceil_div(tokens, c->ranks * c->interleave) * c->interleave;
}

static int grow(void **items, int64_t *room, int64_t used, size_t size) {
    if (used < *room)
        return 0;
    void *larger = PyMem_Realloc(*items, (size_t)(2 * *room) * size);
    if (larger == NULL)
        return -1;
    *items = larger;
    *room *= 2;
    return 0;
}

static int add_piece(Cut *cut, int64_t row, int64_t start, int64_t length) {
    if (grow((void **)&cut->pieces, &cut->room, cut->num_pieces, sizeof(Piece)) < 0)
        return -1;
    cut->pieces[cut->num_pieces++] = (Piece){row, start, length};
    return 0;
}

/* Rows fill a chunk until one does not fit; that one is split at an aligned token. A row without context ends a chunk. */
static int cut_rows(const Context *c, Cut *cut) {
    int64_t row = 0, start = 0;
    while (row < c->rows) {
        if (c->lens[row] == 0) {
            row++;
            continue;
        }
        int64_t used = 0;
        while (row < c->rows && c->lens[row] > 0) {
            const int64_t remaining = c->lens[row] - start, begun = padded(c, start);
            const int64_t cost = padded(c, c->lens[row]) - begun;
            if (used + cost > c->budget) {
                int64_t length = least(c->largest, (remaining - 1) / c->aligned * c->aligned);
                length = least(length, (c->budget - used) * c->ranks / c->aligned * c->aligned);
                if (length > 0) {
                    if (add_piece(cut, row, start, length) < 0)
                        return -1;
                    start += length;
                }
                break;
            }
            if (add_piece(cut, row, start, remaining) < 0)
                return -1;
            used += cost;
            row++;
            start = 0;
        }
        if (grow((void **)&cut->chunk_ends, &cut->chunk_room, cut->num_chunks, sizeof(int64_t)) < 0)
            return -1;
        cut->chunk_ends[cut->num_chunks++] = cut->num_pieces;
    }
    return 0;
}

typedef struct {
    int32_t *table, *starts, *cu_seq_lens, *query_start_loc, *token_to_seq, *local_cu_seq_lens, *local_token_to_seq;
    int32_t *empty;
} Out;

static int32_t *repeat(int32_t *at, int32_t value, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        *at++ = value;
    return at;
}

static void lay_out(const Context *c, const Cut *cut, const int32_t *query, Out out) {
    for (int64_t chunk = 0, p = 0; chunk < cut->num_chunks; chunk++) {
        const Piece *first = &cut->pieces[p], *end = &cut->pieces[cut->chunk_ends[chunk]];
        int64_t tokens = 0, local = 0, longest_query = 0, longest = 0;
        *out.cu_seq_lens++ = *out.query_start_loc++ = 0;
        if (c->ranks > 1)
            *out.local_cu_seq_lens++ = 0;
        for (const Piece *piece = first; piece < end; piece++) {
            const int32_t seq = (int32_t)(piece - first);
            const int64_t rows = query[piece->row + 1] - query[piece->row];
            const int64_t begun = padded(c, piece->start);
            tokens += piece->length;
            longest_query = rows > longest_query ? rows : longest_query;
            longest = piece->length > longest ? piece->length : longest;
            *out.starts++ = (int32_t)begun;
            *out.cu_seq_lens++ = (int32_t)tokens;
            *out.query_start_loc++ = query[piece->row + 1] - query[first->row];
            out.token_to_seq = repeat(out.token_to_seq, seq, piece->length);
            if (c->ranks > 1) {
                const int64_t shard = padded(c, piece->start + piece->length) - begun;
                local += shard;
                *out.local_cu_seq_lens++ = (int32_t)local;
                out.local_token_to_seq = repeat(out.local_token_to_seq, seq, shard);
            }
        }
        const int64_t last = (end - 1)->row + 1;
        const int64_t columns[CHUNK_COLUMNS] = {
            first->row,       last,   query[first->row], query[last], query[first->row + 1],
            first->start > 0, tokens, longest_query,     longest,     c->ranks > 1 ? local : tokens,
        };
        for (int i = 0; i < CHUNK_COLUMNS; i++)
            *out.table++ = (int32_t)columns[i];
        p = cut->chunk_ends[chunk];
    }
    for (int64_t row = 0; row < c->rows; row++)
        if (c->lens[row] == 0) {
            *out.empty++ = query[row];
            *out.empty++ = query[row + 1];
        }
}

static PyObject *build(const Context *c, const Cut *cut, const int32_t *query, int64_t limit) {
    int64_t tokens = 0, local = 0, empty = 0;
    for (int64_t i = 0; i < cut->num_pieces; i++) {
        const Piece *piece = &cut->pieces[i];
        tokens += piece->length;
        if (c->ranks > 1)
            local += padded(c, piece->start + piece->length) - padded(c, piece->start);
    }
    for (int64_t row = 0; row < c->rows; row++)
        empty += c->lens[row] == 0;
    if (tokens > limit)
        return Py_BuildValue("L", (long long)tokens);
    const int64_t bounds = cut->num_pieces + cut->num_chunks, local_bounds = c->ranks > 1 ? bounds : 0;
    const int64_t size = cut->num_chunks * CHUNK_COLUMNS + cut->num_pieces + 2 * bounds + tokens + local_bounds + local +
                         2 * empty;
    PyObject *block = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(size * (int64_t)sizeof(int32_t)));
    if (block == NULL)
        return NULL;
    Out out = {.table = (int32_t *)PyByteArray_AS_STRING(block)};
    out.starts = out.table + cut->num_chunks * CHUNK_COLUMNS;
    out.cu_seq_lens = out.starts + cut->num_pieces;
    out.query_start_loc = out.cu_seq_lens + bounds;
    out.token_to_seq = out.query_start_loc + bounds;
    out.local_cu_seq_lens = out.token_to_seq + tokens;
    out.local_token_to_seq = out.local_cu_seq_lens + local_bounds;
    out.empty = out.local_token_to_seq + local;
    lay_out(c, cut, query, out);
    return Py_BuildValue("NLLLLL", block, (long long)cut->num_chunks, (long long)cut->num_pieces, (long long)tokens,
                         (long long)local, (long long)empty);
}

static PyObject *cut_contexts(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer lens, query;
    int64_t s[6];
    (void)self;
    if (nargs != 8) {
        PyErr_SetString(PyExc_TypeError, "cut_contexts: expected 8 arguments");
        return NULL;
    }
    for (int i = 0; i < 6; i++) {
        s[i] = PyLong_AsLongLong(args[2 + i]);
        if (s[i] == -1 && PyErr_Occurred())
            return NULL;
    }
    if (PyObject_GetBuffer(args[0], &lens, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[1], &query, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&lens);
        return NULL;
    }
    const Context c = {lens.buf, lens.len / (Py_ssize_t)sizeof(int32_t), s[0], s[1], s[2], s[3], s[4]};
    Cut cut = {.room = c.rows + 8, .chunk_room = 8};
    cut.pieces = PyMem_Malloc((size_t)cut.room * sizeof(Piece));
    cut.chunk_ends = PyMem_Malloc((size_t)cut.chunk_room * sizeof(int64_t));
    PyObject *result = NULL;
    if (query.len / (Py_ssize_t)sizeof(int32_t) != c.rows + 1 || c.aligned < 1 || c.largest < c.aligned ||
        c.budget * c.ranks < c.aligned)
        PyErr_SetString(PyExc_ValueError, "cut_contexts: arrays or sizes do not fit together");
    else if (cut.pieces == NULL || cut.chunk_ends == NULL || cut_rows(&c, &cut) < 0)
        PyErr_NoMemory();
    else
        result = build(&c, &cut, query.buf, s[5]);
    PyMem_Free(cut.pieces);
    PyMem_Free(cut.chunk_ends);
    PyBuffer_Release(&lens);
    PyBuffer_Release(&query);
    return result;
}

static PyMethodDef methods[] = {
    {"cut_contexts", (PyCFunction)(void (*)(void))cut_contexts, METH_FASTCALL, "Cut contexts into chunks."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_mla_context", "The cut of MLA contexts in C.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__mla_context(void) { return PyModule_Create(&module); }
