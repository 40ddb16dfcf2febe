/* The per-row passes of rows.py in C; _rows_twin.py is the same in NumPy, and one set of tests runs both.
 *
 * Arrays come as C-contiguous int32 or bytes through the buffer protocol, so that no NumPy headers are needed to build.
 * A row of a step costs one pass here; the same in NumPy costs about 25 calls, which is what a small batch is made of.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

enum { HAS_CONTEXT = 1, LONG = 2, DONE = 4, WHOLE = 8, IS_PADDING = 16 };
enum { PADDING, DECODE, CAUSAL, EXTEND, CHUNKED };
enum { GUESSED = 32, CERTAIN_CHUNK = 64, DISORDERED = 128 };
enum { HAS_UNKNOWN = 1, FLAG_DIFFERS = 2 };
#define MISALIGNED (-1)
#define UNKNOWN_SLOT 0

typedef struct {
    Py_buffer view;
    void *data;
    Py_ssize_t count;
} Vector;

/* None opens as a null pointer. */
static int vector_open(PyObject *object, Py_ssize_t width, int writable, Vector *vector) {
    vector->data = NULL;
    vector->count = 0;
    vector->view.obj = NULL;
    if (object == Py_None)
        return 0;
    if (PyObject_GetBuffer(object, &vector->view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return -1;
    vector->data = vector->view.buf;
    vector->count = vector->view.len / width;
    return 0;
}

static void vectors_close(Vector *vectors, int count) {
    for (int i = 0; i < count; i++)
        if (vectors[i].view.obj != NULL)
            PyBuffer_Release(&vectors[i].view);
}

static int expect_arguments(const char *name, Py_ssize_t got, Py_ssize_t expected) {
    if (got == expected)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s: expected %zd arguments, got %zd", name, expected, got);
    return -1;
}

static int size_error(const char *name) {
    PyErr_Format(PyExc_ValueError, "%s: arrays of different sizes", name);
    return -1;
}

/* A count from a Python integer; -1 where it is no int32 >= 0. */
static int64_t count_of(PyObject *object) {
    int overflow = 0;
    long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (value == -1 && PyErr_Occurred())
        PyErr_Clear();
    return overflow != 0 || value < 0 || value > INT32_MAX ? -1 : value;
}

static int same_id(PyObject *a, PyObject *b) { return a == b || PyObject_RichCompareBool(a, b, Py_EQ) == 1; }

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
 * `computed` a dict by request. out[3, rows]: query, sequence and computed lengths. The sum of the query lengths; -1 if
 * the lists are in another order; -2 - i if the counts of row i are not plausible. */
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
            if (!same_id(id, PyList_GET_ITEM(ids, i))) {
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
 * Bits: a row has an unknown prefill length; the flag length of a row differs from its prefill length. */
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
        for (int part = 0; part < 3; part++)
            out[part * count + i] = table[part * capacity + slot];
        bits |= out[i] < 0 ? HAS_UNKNOWN : 0;
        bits |= out[i] != out[2 * count + i] ? FLAG_DIFFERS : 0;
    }
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

/* Which arrays are there is known where this is inlined: a plain batch costs two comparisons and two look-ups a row. */
static inline __attribute__((always_inline)) int describe_each(const Rows *r, Py_ssize_t count, int prefills,
                                                               int admitted) {
    int summary = 0, last = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        int32_t query = r->query[i], computed = r->computed[i];
        int bits = (computed != 0) * HAS_CONTEXT | (query > r->threshold) * LONG | (query == 0) * IS_PADDING;
        int done = 1, flag = 0, guessed = 1;
        if (admitted) {
            int64_t prefill = prefills ? r->prefill[i] : -1, cached = r->cached ? r->cached[i] : -1;
            flag = r->flags ? r->flags[i] : 0;
            done = prefill >= 0 ? computed >= prefill : !flag;
            int reaches = prefill >= 0 && (int64_t)query + computed >= prefill;
            guessed = prefill < 0 || (!done && reaches && cached < 0);
            bits |= (reaches && computed == cached) * WHOLE;
            if (!r->flags)
                flag = r->flag_lens ? computed < r->flag_lens[i] : !done;
        }
        int kind = KIND_OF[bits | done * DONE], region = REGION_OF[bits | (!flag) * DONE];
        r->codes[i] = (uint8_t)kind;
        r->regions[i] = (uint8_t)region;
        summary |= 1 << kind | (region < last) * DISORDERED;
        summary |= (kind >= EXTEND) * (guessed ? GUESSED : (kind == CHUNKED) * CERTAIN_CHUNK);
        last = region;
    }
    return summary;
}

static int describe_rows(const Rows *r, Py_ssize_t count) {
    if (!r->prefill && !r->flags && !r->flag_lens)
        return describe_each(r, count, 0, 0);
    return r->prefill ? describe_each(r, count, 1, 1) : describe_each(r, count, 0, 1);
}

/* describe(query, computed, prefill|None, cached|None, flag_lens|None, flags|None, threshold, codes, regions): writes the
 * kind and the region of every row. Bits: 1 << kind of each kind present; guesses; disorder. */
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
            int prefill = uniform ? query[row] != query[0] && (query[row] || (cuts && !shorts)) : query[row] > threshold;
            if (!all_short && (prefill || (!shorts && flags[row])))
                break;
            tokens += query[row];
        }
    }
    vectors_close(v, 2);
    return failed ? NULL : Py_BuildValue("(nL)", row, (long long)tokens);
}

/* spread(lengths, rows, width, out): `lengths` is [chunks, rows], `out` [chunks, width]: the row that each token of a
 * chunk belongs to, `rows` behind the chunk's last token. */
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
    const int32_t *lengths = v[0].data;
    int32_t *out = v[1].data;
    int failed = rows < 1 || width < 0 || v[0].count % rows || v[1].count != v[0].count / rows * width;
    for (Py_ssize_t chunk = 0; !failed && chunk < v[0].count / rows; chunk++) {
        Py_ssize_t token = 0;
        for (Py_ssize_t row = 0; row < rows; row++) {
            Py_ssize_t stop = token + lengths[chunk * rows + row];
            if (stop < token || stop > width) {
                failed = 1;
                break;
            }
            for (; token < stop; token++)
                out[chunk * width + token] = (int32_t)row;
        }
        for (; token < width; token++)
            out[chunk * width + token] = (int32_t)rows;
    }
    vectors_close(v, 2);
    if (failed) {
        PyErr_SetString(PyExc_ValueError, "spread: lengths do not fit the output");
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
    {"spread", (PyCFunction)(void (*)(void))spread, METH_FASTCALL, "The row of every token."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_rows", "The per-row passes in C.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__rows(void) { return PyModule_Create(&module); }
