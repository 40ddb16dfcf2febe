/* The counting hooks: what runs inside the target on every hooked driver call.
 *
 * Compiled in the target by frida's CModule (TinyCC), and by cc in the tests. No lock, no allocation, no Python C API
 * call that needs the GIL: a thread that holds the GIL may be waiting for a driver lock that this very call holds.
 * The rule of what is one sync is counting.py's; a randomised test drives both with the same calls.
 *
 * Each hooked function i is replaced by w<i>, which calls original[i], the relocated first instructions followed by the
 * rest of the function. A wrapper passes on six registers and eight stack words, which is enough for every entry point
 * of the table; reading past the caller's last stack argument reads the caller's own frame and is harmless.
 */
#include <stdint.h>

typedef int64_t i64;
typedef uint64_t u64;

#define MAX_ENTRIES 256
#define MAX_THREADS 512
#define MAX_FRAMES 48
#define RING 4096  /* records; a power of two */
#define CODES 4096 /* code objects whose names are kept; a power of two */
#define POOL (1 << 19)
#define PREFIX 256
#define MAGIC 0x31425250434e5953ULL

enum { LAUNCH, GRAPH_LAUNCH, COPY, MEMSET, SYNC, POLL, ALLOC, FREE, OTHER };
enum { WAIT_NONE, WAIT_STREAM, WAIT_EVENT, WAIT_DEVICE };
enum { UNKNOWN, H2D, D2H, D2D, H2H };
enum { BY_NAME, BY_KIND, BY_POINTERS, CUDA_2D, CUDA_3D, HIP_3D, BATCH, CANNOT_TELL };
/* The order of base.Counters. */
enum {
    C_D2H, C_H2D, C_STREAM, C_DEVICE, C_EVENT, C_MEMSET, C_COPY, C_MAYBE, C_COPIES_D2H, C_COPIES_H2D, C_COPIES_D2D,
    C_COPIES_UNKNOWN, C_BYTES_D2H, C_BYTES_H2D, C_KERNELS, C_GRAPHS, C_CAPTURED, C_BLOCKED_NS, COUNTERS
};
enum { PAIRED = 1, COPY_NOTED = 2, BROKEN = 4, BIG_PAGEABLE = 8, LOOP = 16, BLOCKING = 32 };
#define POLLS_MAKE_A_LOOP 8
#define BIG (4 << 20) /* from here on a pageable host-to-device copy blocks until the device has read it */

typedef struct Entry {
    uint8_t role, wait, reads, direction, blocking, hip, per_thread;
    int8_t capture, kind, nbytes, nbytes2, dst, src, stream;
} Entry;

typedef struct Frame { uint32_t code; int32_t line; } Frame;

typedef struct Record {
    u64 ticket; /* position + 1 once the record is complete */
    i64 tid, ts_ns, dur_ns;
    i64 nbytes;
    i64 copy_ts_ns, copy_dur_ns, copy_nbytes; /* of the copy that this wait completes */
    int16_t entry, copy_entry, broken_by;
    uint8_t direction, copy_direction, flags, pageable, frames, spare;
    Frame stack[MAX_FRAMES];
} Record;

typedef struct Thread {
    volatile i64 tid; /* 0 = free slot */
    i64 depth;        /* hooked calls this thread is inside of */
    i64 pending;      /* 1 + entry of the copy that the next call may turn into a sync */
    i64 pending_blocking, pending_maybe, pending_direction, pending_ts, pending_dur, pending_nbytes;
    Frame pending_blamed; /* the line that asked for the copy; code 0 = not known */
    i64 broken_by; /* 1 + entry of the last launch, copy or memset since the last sync record */
    i64 polls;
    i64 calls[MAX_ENTRIES];
} Thread;

/* Names of a code object. A slot's content is compared with the object itself before it is used again. */
typedef struct Code {
    volatile u64 state; /* 0 free, 1 being written, 2 complete */
    u64 code;
    uint32_t file, file_bytes, name, name_bytes; /* into the pool */
    uint8_t file_kind, name_kind, foreign, spare[5]; /* bytes a character, 1 = Latin-1; foreign: see is_foreign */
} Code;

/* How this interpreter lays out what a stack walk reads; found and verified by frames.py, not assumed. */
typedef struct Python {
    u64 ready;
    u64 this_thread_state, addr2line; /* PyGILState_GetThisThreadState, PyCode_Addr2Line: neither needs the GIL */
    u64 initialized;                  /* address of Py_IsInitialized */
    i64 frame, indirect;              /* thread state -> frame, or -> cframe -> frame where indirect >= 0 */
    i64 f_code, f_previous, f_instruction;
    u64 shim_code;                    /* what frames that are no Python code (the border to C) have as their code */
    i64 code_bytecode, code_file, code_name;
    i64 text_length, text_state, text_ascii_bit, text_kind_shift, text_ascii_data, text_wide_data;
} Python;

typedef struct Arena {
    u64 magic;
    u64 size;
    volatile i64 counters[COUNTERS];
    volatile i64 polls;
    volatile i64 captures;                                    /* captures under way */
    volatile i64 ring_head, ring_tail, ring_dropped;          /* tail is the reader's */
    volatile i64 threads_used, threads_lost;
    volatile i64 codes_used, pool_used, codes_lost;
    i64 pid;
    i64 hip_major;
    u64 key; /* pthread key of the calling thread's slot */
    u64 is_capturing, is_capturing_per_thread, pointer_attribute, peek_error, clear_error;
    char own[2][PREFIX], stdlib[PREFIX]; /* path prefixes, for is_foreign; "" = none */
    Python python;
    Entry entries[MAX_ENTRIES];
    u64 original[MAX_ENTRIES];
    Thread threads[MAX_THREADS];
    Code codes[CODES];
    Record ring[RING];
    char pool[POOL];
} Arena;

extern Arena arena;
extern void *pthread_getspecific(unsigned key);
extern int pthread_setspecific(unsigned key, const void *value);
extern int clock_gettime(int clock, void *ts);
extern long syscall(long number, ...);

typedef long (*Function)(long, long, long, long, long, long, long, long, long, long, long, long, long, long);

static i64 add(volatile i64 *at, i64 value) { /* returns the value before */
    __asm__ __volatile__("lock; xaddq %0,(%1)" : "+r"(value) : "r"(at) : "memory");
    return value;
}

static int claim(volatile u64 *at, u64 from, u64 to) {
    u64 was = from;
    __asm__ __volatile__("lock; cmpxchgq %2,(%1)" : "+a"(was) : "r"(at), "r"(to) : "memory");
    return was == from;
}

static i64 now(void) {
    i64 ts[2];
    clock_gettime(1, ts);
    return ts[0] * 1000000000LL + ts[1];
}

/* ------------------------------------------------------------------ threads */

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

/* ------------------------------------------------------------ Python stacks */

static int text_of(const char *object, const char **data, i64 *bytes) {
    Python *py = &arena.python;
    u64 state = *(const uint32_t *)(object + py->text_state);
    i64 length = *(const i64 *)(object + py->text_length);
    int kind = (int)((state >> py->text_kind_shift) & 7);
    if (length < 0 || length > 4096 || (kind != 1 && kind != 2 && kind != 4)) return 0;
    *data = object + ((state >> py->text_ascii_bit) & 1 ? py->text_ascii_data : py->text_wide_data);
    *bytes = length * kind;
    return kind;
}

static int same(const char *a, const char *b, i64 n) {
    while (n >= 8) {
        if (*(const i64 *)a != *(const i64 *)b) return 0;
        a += 8, b += 8, n -= 8;
    }
    while (n-- > 0)
        if (*a++ != *b++) return 0;
    return 1;
}

static int keep(const char *data, i64 bytes, uint32_t *at) {
    i64 i, start = add(&arena.pool_used, bytes);
    if (start + bytes > POOL) {
        add(&arena.pool_used, -bytes);
        return 0;
    }
    for (i = 0; i < bytes; i++) arena.pool[start + i] = data[i];
    *at = (uint32_t)start;
    return 1;
}

static int starts(const char *text, i64 bytes, const char *prefix) {
    i64 k;
    for (k = 0; prefix[k]; k++)
        if (k >= bytes || text[k] != prefix[k]) return 0;
    return k > 0;
}

static int contains(const char *text, i64 bytes, const char *part) {
    for (; bytes > 0; text++, bytes--)
        if (starts(text, bytes, part)) return 1;
    return 0;
}

/* sites.is_foreign: whether a frame of this file is the user's, not torch's, ours or the standard library's. */
static int is_foreign(const char *file, i64 bytes, int kind) {
    if (kind != 1) return 1;
    if (starts(file, bytes, "<")) return (bytes == 7 && starts(file, bytes, "<stdin>")) || starts(file, bytes, "<ipython");
    if (starts(file, bytes, arena.own[0]) || starts(file, bytes, arena.own[1])) return 0;
    if (starts(file, bytes, "torch/") || contains(file, bytes, "/torch/")) return 0;
    return !(starts(file, bytes, arena.stdlib) && !contains(file, bytes, "/site-packages/"));
}

/* 1 + index into codes[]; 0 where there is no room left. */
static uint32_t code_index(const char *code) {
    Python *py = &arena.python;
    const char *file, *name;
    i64 file_bytes, name_bytes;
    int file_kind = text_of(*(const char **)(code + py->code_file), &file, &file_bytes);
    int name_kind = text_of(*(const char **)(code + py->code_name), &name, &name_bytes);
    u64 hash = ((u64)code >> 4) * 0x9e3779b97f4a7c15ULL;
    int tries;
    if (!file_kind || !name_kind) return 0;
    for (tries = 0; tries < 16; tries++) {
        uint32_t i = (uint32_t)((hash >> 40) + tries) & (CODES - 1);
        Code *c = &arena.codes[i];
        if (c->state == 2) {
            if (c->code == (u64)code && c->file_bytes == file_bytes && c->name_bytes == name_bytes &&
                same(arena.pool + c->file, file, file_bytes) && same(arena.pool + c->name, name, name_bytes))
                return i + 1;
        } else if (claim(&c->state, 0, 1)) {
            c->code = (u64)code;
            c->file_bytes = (uint32_t)file_bytes, c->name_bytes = (uint32_t)name_bytes;
            c->file_kind = (uint8_t)file_kind, c->name_kind = (uint8_t)name_kind;
            c->foreign = (uint8_t)is_foreign(file, file_bytes, file_kind);
            if (!keep(file, file_bytes, &c->file) || !keep(name, name_bytes, &c->name)) {
                c->code = 0; /* stays claimed: never matches */
                return 0;
            }
            c->state = 2;
            add(&arena.codes_used, 1);
            return i + 1;
        }
    }
    add(&arena.codes_lost, 1);
    return 0;
}

/* The calling thread's Python frames, innermost first. Only this thread pushes and pops them, and a frame keeps its
 * code object alive, so they can be read without the GIL while the thread is inside this call. */
int probe_stack(Frame *out) {
    Python *py = &arena.python;
    char *state, *frame;
    int n = 0, walked = 0;
    if (!py->ready || !((int (*)(void))py->initialized)()) return 0;
    state = ((char *(*)(void))py->this_thread_state)();
    if (!state) return 0;
    frame = *(char **)(state + py->frame);
    if (frame && py->indirect >= 0) frame = *(char **)(frame + py->indirect);
    for (; frame && n < MAX_FRAMES && walked < 4 * MAX_FRAMES; walked++) {
        char *code = (char *)(*(u64 *)(frame + py->f_code) & ~7ULL);
        if (code && (u64)code != py->shim_code) {
            char *instruction = *(char **)(frame + py->f_instruction);
            int offset = (int)(instruction - (code + py->code_bytecode));
            out[n].code = code_index(code);
            out[n].line = ((int (*)(void *, int))py->addr2line)(code, offset);
            n++;
        }
        frame = *(char **)(frame + py->f_previous);
    }
    return n;
}

/* sites.blamed: the innermost frame of the user's; the innermost of all where there is none. */
static Frame blamed(const Frame *stack, int frames) {
    Frame none = {0, 0};
    int k;
    for (k = 0; k < frames; k++)
        if (stack[k].code && arena.codes[stack[k].code - 1].foreign) return stack[k];
    return frames ? stack[0] : none;
}

/* ------------------------------------------------------------------ records */

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

/* ------------------------------------------------------------- what is what */

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

/* -------------------------------------------------------------- the counting */

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
    count_copy(&c);
    if (blocking) {
        add(&arena.counters[sync_counter(c.direction)], 1);
        add(&arena.counters[C_BLOCKED_NS], dur);
    }
    if (maybe) add(&arena.counters[C_MAYBE], 1);
    if (blocking || maybe) note(t, i, flags, c.direction, c.nbytes, ts, dur, stack, frames);
    t->pending = i + 1;
    t->pending_blocking = blocking, t->pending_maybe = maybe, t->pending_direction = c.direction;
    t->pending_ts = ts, t->pending_dur = dur, t->pending_nbytes = c.nbytes;
    t->pending_blamed = blamed(stack, frames);
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
    int frames = probe_stack(stack), paired;
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
    note(t, i, paired ? PAIRED : 0, UNKNOWN, 0, ts, dur, stack, frames);
    t->pending = 0;
    return result;
}

static long timed(Thread *t, int i, const long *a, int counter, int blocked) {
    Frame stack[MAX_FRAMES];
    int frames = probe_stack(stack);
    i64 ts = now(), dur;
    long result = pass(i, a);
    dur = now() - ts;
    add(&arena.counters[counter], 1);
    if (blocked) add(&arena.counters[C_BLOCKED_NS], dur);
    note(t, i, 0, UNKNOWN, 0, ts, dur, stack, frames);
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
