/* Arrays through the buffer protocol, and the errors of a function that takes them. Include behind <Python.h>. */
#ifndef SYNCFREE_VECTORS_H
#define SYNCFREE_VECTORS_H

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

#endif
