/* What counts as what: the rule of counting.py, as calls come in, and the wrappers that replace the functions. */

static long pass(int i, const long *a) {
    return ((Function)arena.original[i])(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11],
                                         a[12], a[13]);
}

static void launched(Thread *t, int i) {
    t->calls[i]++;
    t->polls = 0;
    t->pending = 0;
    t->broken_by = i + 1;
    add(&arena.counters[arena.entries[i].role == LAUNCH ? C_KERNELS : C_GRAPHS], 1);
}

static void launched_amid_captures(Thread *t, int i, const long *a) {
    if (!is_capturing(&arena.entries[i], a)) {
        launched(t, i);
        return;
    }
    t->calls[i]++; /* recorded, not run: neither breaks nor makes a pair */
    add(&arena.counters[C_CAPTURED], 1);
}

static int sync_counter(int direction) {
    return direction == D2H ? C_D2H : direction == H2D ? C_H2D : direction == UNKNOWN ? C_COPY : C_STREAM;
}

static void count_copy(const Copy *c) {
    int which = c->direction == D2H ? C_COPIES_D2H : c->direction == H2D ? C_COPIES_H2D
              : c->direction == D2D ? C_COPIES_D2D : C_COPIES_UNKNOWN;
    if (c->direction != H2H) add(&arena.counters[which], 1);
    if (c->direction == D2H) add(&arena.counters[C_BYTES_D2H], c->nbytes);
    if (c->direction == H2D) add(&arena.counters[C_BYTES_H2D], c->nbytes);
}

static long copy(Thread *t, int i, const long *a) {
    const Entry *e = &arena.entries[i];
    Frame stack[MAX_FRAMES];
    Copy c;
    int blocking = e->blocking, maybe = 0, frames = 0, flags = 0;
    i64 ts, dur;
    long result;
    if (is_capturing(e, a)) return pass(i, a);
    read_copy(e, a, &c);
    if (!blocking && c.host && memory_of(e, c.host) == 3) {
        blocking = c.direction == D2H; /* to pageable memory always waits; from it, is staged and may wait */
        maybe = c.direction == H2D;
        if (maybe && c.nbytes >= BIG) flags = BIG_PAGEABLE;
    }
    if (blocking) flags |= BLOCKING;
    if (blocking || maybe || c.direction == D2H) frames = probe_stack(stack);
    ts = now();
    result = pass(i, a);
    dur = now() - ts;
    t->pending_blamed = blamed(stack, frames);
    count_copy(&c);
    if (blocking) {
        flags |= with_waiter(t, stack, &frames);
        add(&arena.counters[sync_counter(c.direction)], 1);
        add(&arena.counters[C_BLOCKED_NS], dur);
    }
    if (maybe) add(&arena.counters[C_MAYBE], 1);
    if (blocking || maybe) note(t, i, flags, c.direction, c.nbytes, ts, dur, stack, frames);
    t->pending = i + 1;
    t->pending_blocking = blocking, t->pending_maybe = maybe, t->pending_direction = c.direction;
    t->pending_ts = ts, t->pending_dur = dur, t->pending_nbytes = c.nbytes;
    t->broken_by = blocking || maybe ? 0 : i + 1;
    return result;
}

/* The copy that this wait completes is one with it, unless the program asked for the copy on another line. */
static int completes(const Thread *t, const Entry *e, const Frame *stack, int frames) {
    Frame here;
    if (!t->pending || e->wait == WAIT_DEVICE) return 0;
    if (t->pending_blocking) return 1;
    here = blamed(stack, frames);
    if (!here.code || !t->pending_blamed.code) return 1;
    return here.code == t->pending_blamed.code && here.line == t->pending_blamed.line;
}

static long wait(Thread *t, int i, const long *a) {
    const Entry *e = &arena.entries[i];
    Frame stack[MAX_FRAMES];
    int frames = probe_stack(stack), paired, flags;
    i64 ts = now(), dur;
    long result = pass(i, a);
    dur = now() - ts;
    paired = completes(t, e, stack, frames);
    if (!paired) {
        add(&arena.counters[e->wait == WAIT_STREAM ? C_STREAM : e->wait == WAIT_EVENT ? C_EVENT : C_DEVICE], 1);
    } else if (!t->pending_blocking) {
        add(&arena.counters[sync_counter((int)t->pending_direction)], 1);
        add(&arena.counters[C_BLOCKED_NS], t->pending_dur);
        if (t->pending_maybe) add(&arena.counters[C_MAYBE], -1); /* it did wait */
    }
    add(&arena.counters[C_BLOCKED_NS], dur);
    if (paired) t->broken_by = 0;
    flags = (paired ? PAIRED : 0) | with_waiter(t, stack, &frames);
    note(t, i, flags, UNKNOWN, 0, ts, dur, stack, frames);
    t->pending = 0;
    return result;
}

static long timed(Thread *t, int i, const long *a, int counter, int blocked) {
    Frame stack[MAX_FRAMES];
    int frames = probe_stack(stack), flags = 0;
    i64 ts = now(), dur;
    long result = pass(i, a);
    dur = now() - ts;
    add(&arena.counters[counter], 1);
    if (blocked) {
        add(&arena.counters[C_BLOCKED_NS], dur);
        flags = with_waiter(t, stack, &frames);
    }
    note(t, i, flags, UNKNOWN, 0, ts, dur, stack, frames);
    return result;
}

static long set_memory(Thread *t, int i, const long *a) {
    const Entry *e = &arena.entries[i];
    long result;
    if (is_capturing(e, a)) return pass(i, a);
    t->pending = 0;
    result = e->blocking ? timed(t, i, a, C_MEMSET, 1) : pass(i, a);
    t->broken_by = i + 1;
    return result;
}

static long poll(Thread *t, int i, const long *a) {
    long result = pass(i, a);
    add(&arena.polls, 1);
    if (++t->polls == POLLS_MAKE_A_LOOP) {
        Frame stack[MAX_FRAMES];
        i64 broken_by = t->broken_by; /* a query breaks no pair */
        note(t, i, LOOP, UNKNOWN, 0, now(), 0, stack, probe_stack(stack));
        t->broken_by = broken_by;
    }
    return result;
}

static long outermost(Thread *t, int i, const long *a) {
    const Entry *e = &arena.entries[i];
    long result;
    t->calls[i]++;
    if (e->role == POLL) return poll(t, i, a);
    t->polls = 0;
    if (e->role == COPY) return copy(t, i, a);
    if (e->role == SYNC) return wait(t, i, a);
    if (e->role == MEMSET) return set_memory(t, i, a);
    if (e->role == ALLOC || e->role == FREE) {
        i64 broken_by = t->broken_by; /* may wait, but breaks no pair */
        result = timed(t, i, a, C_MAYBE, 0);
        t->broken_by = broken_by;
        return result;
    }
    result = pass(i, a);
    if (e->capture > 0 && result == 0) add(&arena.captures, 1);
    if (e->capture < 0 && add(&arena.captures, -1) <= 0) add(&arena.captures, 1); /* began before we came */
    return result;
}

#define ARGUMENTS long a0, long a1, long a2, long a3, long a4, long a5, long s0, long s1, long s2, long s3, long s4, \
    long s5, long s6, long s7
#define VALUES a0, a1, a2, a3, a4, a5, s0, s1, s2, s3, s4, s5, s6, s7

/* The hot path: one thread lookup, one atomic add, one call. */
#define LAUNCH_WRAPPER(i)                                                  \
    long w##i(ARGUMENTS) {                                                 \
        Thread *t = self();                                                \
        long result;                                                       \
        if (!t) return ((Function)arena.original[i])(VALUES);              \
        if (t->depth++ == 0) {                                             \
            if (arena.captures <= 0) launched(t, i);                       \
            else {                                                         \
                long a[14] = {VALUES};                                     \
                launched_amid_captures(t, i, a);                           \
            }                                                              \
        }                                                                  \
        result = ((Function)arena.original[i])(VALUES);                    \
        t->depth--;                                                        \
        return result;                                                     \
    }

#define CALL_WRAPPER(i)                                                    \
    long w##i(ARGUMENTS) {                                                 \
        long a[14] = {VALUES};                                             \
        Thread *t = self();                                                \
        long result;                                                       \
        if (!t) return pass(i, a);                                         \
        result = t->depth++ ? pass(i, a) : outermost(t, i, a);             \
        t->depth--;                                                        \
        return result;                                                     \
    }

/* Threads inside a hooked call right now: the code may only go away when there are none. */
int probe_inside(void) {
    i64 i, n = arena.threads_used < MAX_THREADS ? arena.threads_used : MAX_THREADS;
    int inside = 0;
    for (i = 0; i < n; i++)
        if (arena.threads[i].depth > 0) inside++;
    return inside;
}

int probe_layout(i64 *out) { /* what arena.py must agree with */
    Arena *p = &arena;
    char *base = (char *)p;
    out[0] = sizeof(Arena), out[1] = (char *)p->counters - base, out[2] = (char *)&p->ring_head - base;
    out[3] = (char *)&p->python - base, out[4] = (char *)p->entries - base, out[5] = (char *)p->original - base;
    out[6] = (char *)p->threads - base, out[7] = (char *)p->codes - base, out[8] = (char *)p->ring - base;
    out[9] = (char *)p->pool - base, out[10] = sizeof(Thread), out[11] = sizeof(Code), out[12] = sizeof(Record);
    return 13;
}
