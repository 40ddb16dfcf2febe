/* The arena that hooks and readers share, its records, and the atomic operations on it. arena.py mirrors it. */
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
#define CODE_BYTES 384 /* at most, of a code object in front of its instructions */
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
enum { PAIRED = 1, COPY_NOTED = 2, BROKEN = 4, BIG_PAGEABLE = 8, LOOP = 16, BLOCKING = 32, JOINED = 64 };
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

/* Its first 64 bytes, one cache line, are all that the usual launch touches (see `quick` in agent.js). */
typedef struct Thread {
    volatile i64 tid; /* 0 = free slot */
    i64 depth;        /* hooked calls this thread is inside of; launches by the quick way are not among them */
    i64 pending;      /* 1 + entry of the copy that the next call may turn into a sync */
    i64 broken_by;    /* 1 + entry of the last launch, copy or memset since the last sync record */
    i64 polls;
    i64 calls[MAX_ENTRIES];
    i64 pending_blocking, pending_maybe, pending_direction, pending_ts, pending_dur, pending_nbytes;
    Frame pending_blamed; /* the line that asked for the copy; code 0 = not known */
    u64 spare[4];         /* to whole cache lines */
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
    u64 others;                       /* whether another thread's frames may be read; what follows is for that alone */
    i64 thread_ident, frame_bytes, code_bytes; /* the numbers of a thread state's thread; what is read of each object */
    i64 code_lines, code_first_line, bytes_length, bytes_data, type_at;
    u64 code_type, text_type, bytes_type;
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
    volatile u64 step_state, step_ident, step_native; /* of the step's thread: PyThreadState, pthread_self, gettid; or 0 */
    char own[2][PREFIX], stdlib[PREFIX]; /* path prefixes, for is_foreign; "" = none */
    Python python;
    Entry entries[MAX_ENTRIES];
    u64 original[MAX_ENTRIES];
    Thread threads[MAX_THREADS]; /* begin with a cache line */
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
