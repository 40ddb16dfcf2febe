/* A slot of the arena for each thread that calls. */

static Thread *take_slot(void) {
    i64 tid = syscall(186); /* gettid */
    i64 n = add(&arena.threads_used, 1);
    if (n < MAX_THREADS) {
        arena.threads[n].tid = tid;
        return &arena.threads[n];
    }
    add(&arena.threads_used, -1);
    for (n = 0; n < MAX_THREADS; n++) { /* slots of threads that have ended */
        Thread *t = &arena.threads[n];
        i64 was = t->tid;
        if (was && syscall(234, arena.pid, was, 0) == -1 && claim((volatile u64 *)&t->tid, was, tid)) { /* tgkill */
            t->depth = t->pending = t->broken_by = t->polls = 0;
            return t;
        }
    }
    return 0;
}

static Thread *new_thread(void) {
    Thread *t = take_slot();
    if (t) pthread_setspecific((unsigned)arena.key, t);
    else add(&arena.threads_lost, 1);
    return t;
}

static Thread *self(void) {
    Thread *t = pthread_getspecific((unsigned)arena.key);
    return t ? t : new_thread();
}
