/* Records for the reader, and what a call's arguments tell: captured or not, which memory, which way, how much. */

static Record *new_record(i64 *position) {
    i64 head;
    do {
        head = arena.ring_head;
        if (head - arena.ring_tail >= RING) {
            add(&arena.ring_dropped, 1);
            return 0;
        }
    } while (!claim((volatile u64 *)&arena.ring_head, head, head + 1));
    *position = head;
    return &arena.ring[head & (RING - 1)];
}

static void note(Thread *t, int i, int flags, int direction, i64 nbytes, i64 ts, i64 dur, Frame *stack, int frames) {
    i64 position;
    int k;
    Record *r = new_record(&position);
    if (!r) return;
    r->tid = t->tid, r->ts_ns = ts, r->dur_ns = dur, r->nbytes = nbytes;
    r->entry = (int16_t)i, r->direction = (uint8_t)direction;
    r->copy_entry = -1;
    if (flags & PAIRED) {
        r->copy_entry = (int16_t)(t->pending - 1), r->copy_direction = (uint8_t)t->pending_direction;
        r->copy_ts_ns = t->pending_ts, r->copy_dur_ns = t->pending_dur, r->copy_nbytes = t->pending_nbytes;
        if (t->pending_blocking || t->pending_maybe) flags |= COPY_NOTED;
    }
    r->broken_by = (int16_t)(t->broken_by - 1);
    if (t->broken_by) flags |= BROKEN;
    t->broken_by = 0;
    r->flags = (uint8_t)flags, r->frames = (uint8_t)frames;
    for (k = 0; k < frames; k++) r->stack[k] = stack[k];
    __asm__ __volatile__("" ::: "memory"); /* stores are seen in order on x86-64 */
    r->ticket = (u64)position + 1;
}

static int is_capturing(const Entry *e, const long *a) {
    int status = 0;
    u64 ask = e->per_thread ? arena.is_capturing_per_thread : arena.is_capturing;
    long stream = 0;
    if (arena.captures <= 0 || !ask || e->stream < 0) return 0;
    stream = e->stream == 100 ? (a[0] ? *(long *)(a[0] + 32) : 0) : a[e->stream];
    return ((int (*)(long, int *))ask)(stream, &status) == 0 && status != 0;
}

/* 1 host memory known to the driver, 2 device memory, 3 pageable host memory, 0 not known. */
static int memory_of(const Entry *e, long pointer) {
    unsigned type = 0;
    int error;
    if (!arena.pointer_attribute || !pointer) return 0;
    if (e->hip) { /* a failing HIP call becomes the thread's last error: leave that as it was */
        if (!arena.peek_error || !arena.clear_error || ((int (*)(void))arena.peek_error)()) return 0;
        error = ((int (*)(void *, int, long))arena.pointer_attribute)(&type, 2, pointer);
        if (error) ((int (*)(void))arena.clear_error)();
        if (error == 1) return 3; /* hipErrorInvalidValue: not an address the runtime knows */
        if (error) return 0;
        if (arena.hip_major < 6) return type == 0 ? 1 : 2;
        return type == 0 ? 3 : type == 1 ? 1 : 2;
    }
    error = ((int (*)(void *, int, long))arena.pointer_attribute)(&type, 2, pointer);
    if (error == 1) return 3; /* CUDA_ERROR_INVALID_VALUE */
    return error ? 0 : type == 1 ? 1 : 2;
}

static int between(int to, int from) {
    if (!to || !from) return UNKNOWN;
    if (to == 2) return from == 2 ? D2D : H2D;
    return from == 2 ? D2H : H2H;
}

static int side(const Entry *e, int type, long device) { /* one end of a CUDA_MEMCPY2D or 3D */
    if (type == 1) return 1;
    if (type == 4) return memory_of(e, device);
    return type == 2 || type == 3 ? 2 : 0;
}

typedef struct Copy { int direction; i64 nbytes; long host; } Copy;

static void read_struct(const Entry *e, const char *p, Copy *c) {
    int from, to;
    if (!p) return;
    if (e->reads == HIP_3D) {
        int kind = *(const int *)(p + 152);
        c->nbytes = *(const i64 *)(p + 128) * *(const i64 *)(p + 136) * *(const i64 *)(p + 144);
        c->direction = kind == 0 ? H2H : kind == 1 ? H2D : kind == 2 ? D2H : kind == 3 ? D2D : UNKNOWN;
    } else if (e->reads == CUDA_2D) {
        from = side(e, *(const int *)(p + 16), *(const long *)(p + 32));
        to = side(e, *(const int *)(p + 72), *(const long *)(p + 88));
        c->nbytes = *(const i64 *)(p + 112) * *(const i64 *)(p + 120);
        c->direction = between(to, from);
        if (c->direction == D2H) c->host = *(const long *)(p + (*(const int *)(p + 72) == 1 ? 80 : 88));
    } else {
        from = side(e, *(const int *)(p + 32), *(const long *)(p + 48));
        to = side(e, *(const int *)(p + 120), *(const long *)(p + 136));
        c->nbytes = *(const i64 *)(p + 176) * *(const i64 *)(p + 184) * *(const i64 *)(p + 192);
        c->direction = between(to, from);
        if (c->direction == D2H) c->host = *(const long *)(p + (*(const int *)(p + 120) == 1 ? 128 : 136));
    }
}

static void read_batch(const Entry *e, const long *a, Copy *c) {
    const long *to = (const long *)a[0], *from = (const long *)a[1];
    i64 k;
    if (!to || !from || !a[2] || a[3] <= 0) return;
    for (k = 0; k < a[3]; k++) c->nbytes += ((const i64 *)a[2])[k];
    c->direction = between(memory_of(e, to[0]), memory_of(e, from[0]));
    if (c->direction == D2H) c->host = to[0];
}

static void read_copy(const Entry *e, const long *a, Copy *c) {
    c->direction = e->direction, c->nbytes = 0, c->host = 0;
    if (e->nbytes >= 0) c->nbytes = a[e->nbytes] * (e->nbytes2 >= 0 ? a[e->nbytes2] : 1);
    if (e->reads == BY_KIND) {
        int kind = (int)a[e->kind];
        c->direction = kind == 0 ? H2H : kind == 1 ? H2D : kind == 2 ? D2H : kind == 3 ? D2D : UNKNOWN;
        if (kind == 4 && e->dst >= 0 && e->src >= 0)
            c->direction = between(memory_of(e, a[e->dst]), memory_of(e, a[e->src]));
    } else if (e->reads == BY_POINTERS) {
        c->direction = between(memory_of(e, a[e->dst]), memory_of(e, a[e->src]));
    } else if (e->reads == BATCH) {
        read_batch(e, a, c);
    } else if (e->reads == CUDA_2D || e->reads == CUDA_3D || e->reads == HIP_3D) {
        read_struct(e, (const char *)a[0], c);
    }
    if (c->direction == D2H && e->dst >= 0) c->host = a[e->dst];
    if (c->direction == H2D && e->src >= 0) c->host = a[e->src];
}
