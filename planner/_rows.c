/* The per-row passes of rows.py in C; _rows_twin.py is the same in NumPy, and one set of tests runs both.  Arrays come
 * as C-contiguous int32 or bytes through the buffer protocol, so that no NumPy headers are needed to build. A row of a
 * step costs one pass here; the same in NumPy costs about 25 calls, which is what a small batch is made of. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "_vectors.h"

enum { HAS_CONTEXT = 1, LONG = 2, DONE = 4, WHOLE = 8, IS_PADDING = 16 };
enum { PADDING, DECODE, CAUSAL, EXTEND, CHUNKED };
enum { GUESSED = 32, CERTAIN_CHUNK = 64, DISORDERED = 128, ANY_LONG = 256 };
enum { HAS_UNKNOWN = 1, FLAG_DIFFERS = 2, REPEATED = 4 };
#define MISALIGNED (-1)
#define UNKNOWN_SLOT 0

/* A count from a Python integer; -1 where it is no int32 >= 0. */
static int64_t count_of(PyObject *object) {
    int overflow = 0;
    long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (value == -1 && PyErr_Occurred())
        PyErr_Clear();
    return overflow != 0 || value < 0 || value > INT32_MAX ? -1 : value;
}

static int same_id(PyObject *a, PyObject *b) { return a == b ? 1 : PyObject_RichCompareBool(a, b, Py_EQ); }

static int store_row(PyObject *scheduled, PyObject *computed, Py_ssize_t rows, Py_ssize_t row, int32_t *out,
                     int64_t *total) {
    int64_t query = count_of(scheduled), context = count_of(computed);
    if (query < 0 || context < 0 || query + context > INT32_MAX)
        return -1;
    out[row] = (int32_t)query;
    out[rows + row] = (int32_t)(query + context);
    out[2 * rows + row] = (int32_t)context;
    *total += query;
    return 0;
}

static int key_error(PyObject *key) {
    if (!PyErr_Occurred())
        PyErr_SetObject(PyExc_KeyError, key);
    return -1;
}

/* read_rows(rows, scheduled, ids, computed, out): `ids` and `computed` are lists in row order, or `ids` is None and
 * `computed` a dict by request. out[3, rows]: query, sequence and computed lengths. The sum of the query lengths; -1
 * if the lists are in another order; -2 - i if the counts of row i are not plausible. */
static PyObject *read_rows(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (expect_arguments("read_rows", nargs, 5) < 0)
        return NULL;
    PyObject *rows = args[0], *scheduled = args[1], *ids = args[2], *computed = args[3];
    int by_request = ids == Py_None;
    if (!PyList_Check(rows) || !PyDict_Check(scheduled) ||
        (by_request ? !PyDict_Check(computed) : !(PyList_Check(ids) && PyList_Check(computed)))) {
        PyErr_SetString(PyExc_TypeError, "read_rows: expected lists and dicts");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(rows);
    if (!by_request && (PyList_GET_SIZE(ids) != count || PyList_GET_SIZE(computed) != count))
        return PyLong_FromLong(MISALIGNED);
    Vector out;
    if (vector_open(args[4], sizeof(int32_t), 1, &out) < 0)
        return NULL;
    int64_t total = 0, bad = 0;
    int failed = out.count < 3 * count ? size_error("read_rows") : 0;
    for (Py_ssize_t i = 0; i < count && !failed && !bad; i++) {
        PyObject *id = PyList_GET_ITEM(rows, i);
        PyObject *query = PyDict_GetItemWithError(scheduled, id);
        PyObject *context = NULL;
        if (by_request) {
            context = PyDict_GetItemWithError(computed, id);
        } else {
            int same = same_id(id, PyList_GET_ITEM(ids, i));
            if (same <= 0) {
                failed = same;
                bad = MISALIGNED;
                break;
            }
            context = PyList_GET_ITEM(computed, i);
        }
        if (query == NULL || context == NULL)
            failed = key_error(id);
        else if (store_row(query, context, count, i, out.data, &total) < 0)
            bad = -2 - (int64_t)i;
    }
    vectors_close(&out, 1);
    return failed ? NULL : PyLong_FromLongLong(bad ? bad : total);
}

/* gather(rows, slots, table, out): out[3, rows] = table[3, capacity] at each request's slot (slot 0 if it has none).
 * Bits: a row has an unknown prefill length; the flag length of a row differs from its prefill length; two rows have
 * one slot. */
static PyObject *gather(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (expect_arguments("gather", nargs, 4) < 0)
        return NULL;
    PyObject *rows = args[0], *slots = args[1];
    if (!PyList_Check(rows) || !PyDict_Check(slots)) {
        PyErr_SetString(PyExc_TypeError, "gather: expected a list and a dict");
        return NULL;
    }
    Vector vectors[2];
    if (vector_open(args[2], sizeof(int32_t), 0, &vectors[0]) < 0)
        return NULL;
    if (vector_open(args[3], sizeof(int32_t), 1, &vectors[1]) < 0) {
        vectors_close(vectors, 1);
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(rows), capacity = vectors[0].count / 3;
    const int32_t *table = vectors[0].data;
    int32_t *out = vectors[1].data;
    int failed = vectors[1].count < 3 * count ? size_error("gather") : 0, bits = 0;
    uint8_t *seen = failed ? NULL : PyMem_Calloc(capacity > 0 ? capacity : 1, 1);
    if (!failed && seen == NULL) {
        PyErr_NoMemory();
        failed = -1;
    }
    for (Py_ssize_t i = 0; i < count && !failed; i++) {
        PyObject *found = PyDict_GetItemWithError(slots, PyList_GET_ITEM(rows, i));
        if (found == NULL && PyErr_Occurred()) {
            failed = -1;
            break;
        }
        int64_t slot = found == NULL ? UNKNOWN_SLOT : count_of(found);
        if (slot < 0 || slot >= capacity) {
            failed = size_error("gather");
            break;
        }
        bits |= seen[slot] ? REPEATED : 0;
        seen[slot] = 1;
        for (int part = 0; part < 3; part++)
            out[part * count + i] = table[part * capacity + slot];
        bits |= out[i] < 0 ? HAS_UNKNOWN : 0;
        bits |= out[i] != out[2 * count + i] ? FLAG_DIFFERS : 0;
    }
    PyMem_Free(seen);
    vectors_close(vectors, 2);
    return failed ? NULL : PyLong_FromLong(bits);
}

typedef struct {
    const int32_t *query, *computed, *prefill, *cached, *flag_lens;
    const uint8_t *flags;
    int64_t threshold;
    uint8_t *codes, *regions;
} Rows;

/* Indexed by the bits of a row; _rows_twin.py tells the rules behind the two tables. */
#define REPEATED_PADDING PADDING, PADDING, PADDING, PADDING, PADDING, PADDING, PADDING, PADDING
static const uint8_t KIND_OF[32] = {
    CAUSAL, CHUNKED, CAUSAL, CHUNKED, CAUSAL, DECODE, CAUSAL, EXTEND, /* not whole */
    CAUSAL, EXTEND,  CAUSAL, EXTEND,  CAUSAL, DECODE, CAUSAL, EXTEND, /* whole */
    REPEATED_PADDING, REPEATED_PADDING,
};
static const uint8_t REGION_OF[32] = {
    3, 1, 3, 2, 3, 0, 3, 2, 3, 1, 3, 2, 3, 0, 3, 2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4,
};

/* Any mix of what is known. */
static int describe_each(const Rows *r, Py_ssize_t count) {
    int summary = 0, last = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        int32_t query = r->query[i], computed = r->computed[i];
        int bits = (computed != 0) * HAS_CONTEXT | (query > r->threshold) * LONG | (query == 0) * IS_PADDING;
        int64_t prefill = r->prefill ? r->prefill[i] : -1, cached = r->cached ? r->cached[i] : -1;
        int flag = r->flags ? r->flags[i] : 0;
        int done = prefill >= 0 ? computed >= prefill : !flag;
        int reaches = prefill >= 0 && (int64_t)query + computed >= prefill;
        int guessed = prefill < 0 || (!done && reaches && cached < 0);
        bits |= (reaches && computed == cached) * WHOLE;
        if (!r->flags)
            flag = r->flag_lens ? computed < r->flag_lens[i] : !done;
        int kind = KIND_OF[bits | done * DONE], region = REGION_OF[bits | (!flag) * DONE];
        r->codes[i] = (uint8_t)kind;
        r->regions[i] = (uint8_t)region;
        summary |= 1 << kind | (region < last) * DISORDERED | (bits & LONG ? ANY_LONG : 0);
        summary |= (kind >= EXTEND) * (guessed ? GUESSED : (kind == CHUNKED) * CERTAIN_CHUNK);
        last = region;
    }
    return summary;
}

/* The two usual cases in arithmetic instead of look-ups, so that the compiler makes vector code of them: lengths at
 * admission are all there (from a scheduler), or none is (plain lengths, flags from a metadata). Masks are 0 or -1. */
static inline __attribute__((always_inline)) int describe_usual(const Rows *r, Py_ssize_t count, int admitted,
                                                                int flagged) {
    const int32_t *restrict query = r->query, *restrict computed = r->computed, *restrict prefill = r->prefill;
    const int32_t *restrict cached = r->cached, *restrict flag_lens = r->flag_lens ? r->flag_lens : r->prefill;
    const uint8_t *restrict flags = r->flags;
    uint8_t *restrict codes = r->codes, *restrict regions = r->regions;
    int32_t threshold = (int32_t)r->threshold, guesses = 0, certain = 0, disorder = 0, any_long = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        int32_t is_long = query[i] > threshold ? 2 : 0, fresh = computed[i] == 0 ? -1 : 0, real = query[i] ? -1 : 0;
        int32_t pending = 0, prefilling = 0, unfinished = CHUNKED, guess = -1;
        if (admitted) {
            pending = computed[i] < prefill[i] ? -1 : 0;
            prefilling = computed[i] < flag_lens[i] ? -1 : 0;
            int32_t reaches = query[i] + computed[i] >= prefill[i] ? -1 : 0, hit = computed[i] == cached[i] ? -1 : 0;
            unfinished = CHUNKED + (reaches & hit); /* CHUNKED - 1 is EXTEND */
            guess = (prefill[i] < 0 ? -1 : 0) | (pending & reaches & (cached[i] < 0 ? -1 : 0));
        } else if (flagged) {
            pending = prefilling = flags[i] ? -1 : 0;
        }
        int32_t kind = ((DECODE + is_long) & ~pending) | (unfinished & pending);
        kind = ((kind & ~fresh) | (CAUSAL & fresh)) & real;
        int32_t region = is_long ? is_long : 1 & prefilling;
        region = (((region & ~fresh) | (3 & fresh)) & real) | (4 & ~real);
        any_long |= is_long;
        guesses |= guess & (kind >= EXTEND ? -1 : 0);
        certain |= ~guess & (kind == CHUNKED ? -1 : 0);
        codes[i] = (uint8_t)kind;
        regions[i] = (uint8_t)region;
    }
    int summary = (guesses ? GUESSED : 0) | (certain ? CERTAIN_CHUNK : 0) | (any_long ? ANY_LONG : 0);
    for (int kind = PADDING; kind <= CHUNKED; kind++)
        summary |= count && memchr(codes, kind, (size_t)count) ? 1 << kind : 0;
    for (Py_ssize_t i = 1; i < count; i++)
        disorder |= regions[i] < regions[i - 1];
    return summary | (disorder ? DISORDERED : 0);
}

static int describe_rows(const Rows *r, Py_ssize_t count) {
    if (r->threshold <= INT32_MAX && r->prefill && r->cached && !r->flags)
        return describe_usual(r, count, 1, 0);
    if (r->threshold <= INT32_MAX && !r->prefill && !r->flag_lens)
        return r->flags ? describe_usual(r, count, 0, 1) : describe_usual(r, count, 0, 0);
    return describe_each(r, count);
}

/* describe(query, computed, prefill|None, cached|None, flag_lens|None, flags|None, threshold, codes, regions): writes
 * the kind and the region of every row. Bits: 1 << kind of each kind present; guesses; disorder; a long row. */
static PyObject *describe(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    static const struct {
        Py_ssize_t width;
        int writable;
    } forms[8] = {{4, 0}, {4, 0}, {4, 0}, {4, 0}, {4, 0}, {1, 0}, {1, 1}, {1, 1}};
    if (expect_arguments("describe", nargs, 9) < 0)
        return NULL;
    PyObject *arrays[8] = {args[0], args[1], args[2], args[3], args[4], args[5], args[7], args[8]};
    long long threshold = PyLong_AsLongLong(args[6]);
    if (threshold == -1 && PyErr_Occurred())
        return NULL;
    Vector v[8];
    for (int i = 0; i < 8; i++) {
        if (vector_open(arrays[i], forms[i].width, forms[i].writable, &v[i]) < 0) {
            vectors_close(v, i);
            return NULL;
        }
    }
    int failed = 0;
    for (int i = 1; i < 8; i++)
        if (arrays[i] != Py_None && v[i].count != v[0].count)
            failed = size_error("describe");
    int summary = 0;
    if (!failed) {
        Rows rows = {v[0].data, v[1].data, v[2].data, v[3].data, v[4].data, v[5].data, threshold, v[6].data, v[7].data};
        summary = describe_rows(&rows, v[0].count);
    }
    vectors_close(v, 8);
    return failed ? NULL : PyLong_FromLong(summary);
}

/* cut_three(query, computed, threshold): (first long row, first long row without context, tokens before each); the
 * number of rows and all tokens where there is none. */
static PyObject *cut_three(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (expect_arguments("cut_three", nargs, 3) < 0)
        return NULL;
    long long threshold = PyLong_AsLongLong(args[2]);
    if (threshold == -1 && PyErr_Occurred())
        return NULL;
    Vector v[2];
    if (vector_open(args[0], sizeof(int32_t), 0, &v[0]) < 0)
        return NULL;
    if (vector_open(args[1], sizeof(int32_t), 0, &v[1]) < 0) {
        vectors_close(v, 1);
        return NULL;
    }
    const int32_t *query = v[0].data, *computed = v[1].data;
    Py_ssize_t count = v[0].count, first_long = count, first_fresh = count;
    int failed = v[1].count != count ? size_error("cut_three") : 0;
    int64_t tokens = 0, before_long = 0;
    for (Py_ssize_t i = 0; i < count && !failed; i++) {
        if (query[i] > threshold) {
            if (first_long == count) {
                first_long = i;
                before_long = tokens;
            }
            if (computed[i] == 0) {
                first_fresh = i;
                break;
            }
        }
        tokens += query[i];
    }
    vectors_close(v, 2);
    if (failed)
        return NULL;
    return Py_BuildValue("(nnLL)", first_long, first_fresh, (long long)(first_long == count ? tokens : before_long),
                         (long long)tokens);
}

/* cut_two(query, flags|None, threshold, uniform, short_extends, padding_cuts): (first prefill row, tokens before it);
 * `flags` are read only if short extends do not count as decodes. */
static PyObject *cut_two(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (expect_arguments("cut_two", nargs, 6) < 0)
        return NULL;
    long long threshold = PyLong_AsLongLong(args[2]);
    int uniform = PyObject_IsTrue(args[3]), shorts = PyObject_IsTrue(args[4]), cuts = PyObject_IsTrue(args[5]);
    if ((threshold == -1 && PyErr_Occurred()) || uniform < 0 || shorts < 0 || cuts < 0)
        return NULL;
    Vector v[2];
    if (vector_open(args[0], sizeof(int32_t), 0, &v[0]) < 0)
        return NULL;
    if (vector_open(args[1], 1, 0, &v[1]) < 0) {
        vectors_close(v, 1);
        return NULL;
    }
    const int32_t *query = v[0].data;
    const uint8_t *flags = v[1].data;
    Py_ssize_t count = v[0].count, row = 0;
    int failed = 0;
    if (!shorts && v[1].count != count)
        failed = size_error("cut_two");
    int64_t tokens = 0;
    int all_short = !failed && shorts && (!uniform || threshold <= 1);
    for (Py_ssize_t i = 0; i < count && all_short; i++)
        all_short = query[i] <= threshold;
    if (!failed && count && query[0] <= threshold) {
        for (; row < count; row++) {
            int differs = query[row] != query[0] && (query[row] || (cuts && !shorts));
            int prefill = uniform ? differs : query[row] > threshold;
            if (!all_short && (prefill || (!shorts && flags[row])))
                break;
            tokens += query[row];
        }
    }
    vectors_close(v, 2);
    return failed ? NULL : Py_BuildValue("(nL)", row, (long long)tokens);
}

/* unpack(starts, seq_lens, out): out[3, rows] query, sequence and computed lengths from query starts and sequence
 * lengths. The last start, or -2 - i where row i's sequence is shorter than its query or a length is negative. */
static PyObject *unpack(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (expect_arguments("unpack", nargs, 3) < 0)
        return NULL;
    Vector v[3];
    for (int i = 0; i < 3; i++) {
        if (vector_open(args[i], sizeof(int32_t), i == 2, &v[i]) < 0) {
            vectors_close(v, i);
            return NULL;
        }
    }
    const int32_t *starts = v[0].data, *seq = v[1].data;
    int32_t *out = v[2].data;
    Py_ssize_t count = v[1].count;
    int failed = v[0].count != count + 1 || v[2].count != 3 * count ? size_error("unpack") : 0;
    int64_t result = failed ? 0 : starts[count] - (int64_t)starts[0];
    for (Py_ssize_t i = 0; i < count && !failed; i++) {
        int64_t query = (int64_t)starts[i + 1] - starts[i];
        if (query < 0 || query > INT32_MAX || seq[i] < query) {
            result = -2 - (int64_t)i;
            break;
        }
        out[i] = (int32_t)query;
        out[count + i] = seq[i];
        out[2 * count + i] = seq[i] - (int32_t)query;
    }
    vectors_close(v, 3);
    return failed ? NULL : PyLong_FromLongLong(result);
}

/* even_chunks(context, share, starts, ends, longest): `share` tokens of every row in each chunk. starts[chunks, rows]:
 * first token of the chunk; ends[chunks, rows + 1]: running sums of the chunk's lengths, from 0; longest[chunks]. */
static PyObject *even_chunks(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (expect_arguments("even_chunks", nargs, 5) < 0)
        return NULL;
    long long share = PyLong_AsLongLong(args[1]);
    if (share == -1 && PyErr_Occurred())
        return NULL;
    PyObject *arrays[4] = {args[0], args[2], args[3], args[4]};
    Vector v[4];
    for (int i = 0; i < 4; i++) {
        if (vector_open(arrays[i], sizeof(int32_t), i > 0, &v[i]) < 0) {
            vectors_close(v, i);
            return NULL;
        }
    }
    const int32_t *context = v[0].data;
    int32_t *starts = v[1].data, *ends = v[2].data, *longest = v[3].data;
    Py_ssize_t rows = v[0].count, chunks = v[3].count;
    int failed = v[1].count != chunks * rows || v[2].count != chunks * (rows + 1) ? size_error("even_chunks") : 0;
    for (Py_ssize_t chunk = 0; chunk < chunks && !failed; chunk++) {
        int64_t start = chunk * share, end = 0, most = 0;
        *ends++ = 0;
        for (Py_ssize_t row = 0; row < rows; row++) {
            int64_t length = context[row] - start;
            length = length < 0 ? 0 : length > share ? share : length;
            most = length > most ? length : most;
            end += length;
            *starts++ = (int32_t)start;
            *ends++ = (int32_t)end;
        }
        longest[chunk] = (int32_t)most;
    }
    vectors_close(v, 4);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* spread(ends, rows, width, out): `ends` is [chunks, rows + 1], running sums from 0, `out` [chunks, width]: the row
 * that each token of a chunk belongs to, `rows` behind the chunk's last token. */
static PyObject *spread(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (expect_arguments("spread", nargs, 4) < 0)
        return NULL;
    Py_ssize_t rows = PyLong_AsSsize_t(args[1]), width = PyLong_AsSsize_t(args[2]);
    if ((rows == -1 || width == -1) && PyErr_Occurred())
        return NULL;
    Vector v[2];
    if (vector_open(args[0], sizeof(int32_t), 0, &v[0]) < 0)
        return NULL;
    if (vector_open(args[3], sizeof(int32_t), 1, &v[1]) < 0) {
        vectors_close(v, 1);
        return NULL;
    }
    const int32_t *ends = v[0].data;
    int32_t *out = v[1].data;
    int failed = rows < 0 || width < 0 || v[0].count % (rows + 1) || v[1].count != v[0].count / (rows + 1) * width;
    Py_ssize_t chunks = failed ? 0 : v[0].count / (rows + 1);
    for (Py_ssize_t chunk = 0; chunk < chunks && !failed; chunk++, ends += rows + 1, out += width) {
        Py_ssize_t token = 0;
        for (Py_ssize_t row = 0; row < rows && !failed; row++) {
            Py_ssize_t stop = ends[row + 1];
            failed = stop < token || stop > width;
            for (; !failed && token < stop; token++)
                out[token] = (int32_t)row;
        }
        for (; token < width; token++)
            out[token] = (int32_t)rows;
    }
    vectors_close(v, 2);
    if (failed) {
        PyErr_SetString(PyExc_ValueError, "spread: running sums do not fit the output");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"read_rows", (PyCFunction)(void (*)(void))read_rows, METH_FASTCALL, "Lengths of one step, in row order."},
    {"gather", (PyCFunction)(void (*)(void))gather, METH_FASTCALL, "Lengths at admission, in row order."},
    {"describe", (PyCFunction)(void (*)(void))describe, METH_FASTCALL, "Kind and region of every row."},
    {"cut_three", (PyCFunction)(void (*)(void))cut_three, METH_FASTCALL, "Boundaries of decode, extend, prefill."},
    {"cut_two", (PyCFunction)(void (*)(void))cut_two, METH_FASTCALL, "Boundary of decode and prefill."},
    {"unpack", (PyCFunction)(void (*)(void))unpack, METH_FASTCALL, "Lengths of a metadata's rows."},
    {"even_chunks", (PyCFunction)(void (*)(void))even_chunks, METH_FASTCALL, "Contexts in chunks of equal shares."},
    {"spread", (PyCFunction)(void (*)(void))spread, METH_FASTCALL, "The row of every token."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_rows", "The per-row passes in C.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__rows(void) { return PyModule_Create(&module); }
