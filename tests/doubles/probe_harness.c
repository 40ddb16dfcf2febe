/* probe.c without a target: its rule is driven call by call. Entry point i behaves as the test wrote it into the arena. */
#include <stddef.h>

#include "probe.c"

Arena arena;
static int capturing;
static i64 pinned_from = 0x2000, device_from = 0x1000;

static long nothing(void) { return 0; }
static int attribute(unsigned *type, int which, long pointer) {
    (void)which;
    if (pointer >= device_from && pointer < pinned_from) return *type = 2, 0;
    if (pointer >= pinned_from && pointer < 0x3000) return *type = 1, 0;
    return 1;
}
static int is_stream_capturing(long stream, int *status) { return (void)stream, *status = capturing, 0; }

extern int pthread_key_create(unsigned *key, void (*destroy)(void *));

/* The key is the harness's own: a guessed number is somebody else's (Python's own thread state lies under a low one). */
int harness_start(void) {
    static unsigned key;
    static int made;
    if (!made && pthread_key_create(&key, 0) != 0) return 1;
    made = 1;
    char *p = (char *)&arena;
    for (size_t i = 0; i < offsetof(Arena, entries); i++) p[i] = 0;
    for (size_t i = offsetof(Arena, threads); i < offsetof(Arena, codes); i++) p[i] = 0;
    for (int i = 0; i < MAX_ENTRIES; i++) arena.original[i] = (u64)nothing;
    arena.key = key;
    arena.pid = syscall(39); /* getpid */
    pthread_setspecific(key, 0);
    arena.pointer_attribute = (u64)attribute;
    arena.is_capturing = arena.is_capturing_per_thread = (u64)is_stream_capturing;
    capturing = 0;
    return 0;
}
void harness_capture(int on) {
    capturing = on;
    arena.captures = on;
}
void *harness_arena(void) { return &arena; }

long harness_call(int i, const long *a) { /* what a wrapper does */
    Thread *t = self();
    const Entry *e = &arena.entries[i];
    if (e->role == LAUNCH || e->role == GRAPH_LAUNCH) {
        if (t->depth++ == 0) {
            if (arena.captures <= 0) launched(t, i);
            else launched_amid_captures(t, i, a);
        }
        t->depth--;
        return pass(i, a);
    }
    long result = t->depth++ ? pass(i, a) : outermost(t, i, a);
    t->depth--;
    return result;
}

int harness_is_foreign(const char *file, i64 bytes) { return is_foreign(file, bytes, 1); }
