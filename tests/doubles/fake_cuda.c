/* A libcuda.so.1 that does nothing: the driver's entry points by their real names, so that the probe can be tested where
 * there is no card. Every function notes its arguments and returns; waits sleep as long as the test asks.
 * Addresses say what memory they are: 0x1000-0x1fff device, 0x2000-0x2fff pinned host, anything else unknown (pageable).
 */
#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define MAX 256
#define ARGS long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long k, long l, long m, long n
static const char *names[MAX];
static atomic_long count[MAX];
static long sums[MAX];
static atomic_int used;
static _Atomic long sleep_ns;
static atomic_int waiting, held;
static atomic_int capturing[64];

static int slot(const char *name) {
    int k, n = used;
    for (k = 0; k < n; k++)
        if (names[k] == name) return k;
    k = atomic_fetch_add(&used, 1);
    names[k] = name;
    return k;
}
long fake_calls(const char *name) {
    long total = 0;
    for (int k = 0; k < used; k++)
        if (!strcmp(names[k], name)) total += count[k];
    return total;
}
long fake_sum(const char *name) { /* of the arguments of its last call, each times its position */
    for (int k = 0; k < used; k++)
        if (!strcmp(names[k], name)) return sums[k];
    return 0;
}
void fake_sleep(long ns) { sleep_ns = ns; }
void fake_hold(int on) { held = on; } /* waits do not end until it is taken back */

static int called(int *cache, const char *name, long sum) {
    if (*cache < 0) *cache = slot(name);
    sums[*cache] = sum;
    atomic_fetch_add(&count[*cache], 1);
    return 0;
}
#define SUM (a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j + 11 * k)
#define F(name) int name(ARGS) { static int at = -1; (void)l, (void)m, (void)n; return called(&at, #name, SUM); }
#define WAITS(name) int name(ARGS) { static int at = -1; struct timespec t = {0, sleep_ns}; (void)l, (void)m, (void)n; \
    called(&at, #name, SUM); if (t.tv_nsec) nanosleep(&t, 0); \
    if (held) { struct timespec tick = {0, 1000000}; waiting++; while (held) nanosleep(&tick, 0); waiting--; } return 0; }
#define STREAM(name) F(name) F(name##_ptsz)
#define PLAIN(name) F(name) F(name##_ptds)

STREAM(cuLaunchKernel) STREAM(cuLaunchKernelEx) STREAM(cuLaunchCooperativeKernel) STREAM(cuGraphLaunch)
PLAIN(cuMemcpyHtoD_v2) PLAIN(cuMemcpyDtoH_v2) PLAIN(cuMemcpyDtoD_v2) PLAIN(cuMemcpyDtoA_v2) PLAIN(cuMemcpyAtoD_v2)
PLAIN(cuMemcpyHtoA_v2) PLAIN(cuMemcpyAtoH_v2) PLAIN(cuMemcpyAtoA_v2) PLAIN(cuMemcpy) PLAIN(cuMemcpyPeer)
PLAIN(cuMemcpy2DUnaligned_v2) PLAIN(cuMemcpy3D_v2) PLAIN(cuMemcpy3DPeer)
STREAM(cuMemcpyHtoDAsync_v2) STREAM(cuMemcpyDtoHAsync_v2) STREAM(cuMemcpyDtoDAsync_v2) STREAM(cuMemcpyHtoAAsync_v2)
STREAM(cuMemcpyAtoHAsync_v2) STREAM(cuMemcpyAsync) STREAM(cuMemcpyPeerAsync) STREAM(cuMemcpy2DAsync_v2)
STREAM(cuMemcpy3DAsync_v2) STREAM(cuMemcpy3DPeerAsync) STREAM(cuMemcpyBatchAsync) STREAM(cuMemcpyBatchAsync_v2)
PLAIN(cuMemsetD8_v2) PLAIN(cuMemsetD16_v2) PLAIN(cuMemsetD32_v2) PLAIN(cuMemsetD2D8_v2)
STREAM(cuMemsetD8Async) STREAM(cuMemsetD16Async) STREAM(cuMemsetD32Async) STREAM(cuMemsetD2D8Async)
WAITS(cuStreamSynchronize) WAITS(cuStreamSynchronize_ptsz) WAITS(cuEventSynchronize) WAITS(cuCtxSynchronize)
WAITS(cuCtxSynchronize_v2)
STREAM(cuStreamQuery) F(cuEventQuery) F(cuEventRecord)
F(cuMemAlloc_v2) F(cuMemFree_v2) F(cuMemHostAlloc) F(cuMemFreeHost) F(cuModuleLoadData)

/* A call that makes another exported call inside: only the outer one is the program's. */
int cuMemcpy2D_v2(ARGS) {
    static int at = -1;
    (void)l, (void)m, (void)n;
    called(&at, "cuMemcpy2D_v2", SUM);
    return cuMemcpyAsync(0x2000, 0x1000, 8, d, e, f, g, h, i, j, k, l, m, n);
}
int cuMemsetD2D32_v2(ARGS) { /* by a kernel */
    static int at = -1;
    (void)l, (void)m, (void)n;
    called(&at, "cuMemsetD2D32_v2", SUM);
    return cuLaunchCooperativeKernel_ptsz(a, b, c, d, e, f, g, h, i, j, k, l, m, n);
}

/* A launch among whose first instructions is a call, and that waits in there. */
void waits_deeply(void) {
    volatile char below[512];
    struct timespec t = {0, sleep_ns};
    below[0] = 0;
    waiting++;
    if (t.tv_nsec) nanosleep(&t, 0);
    waiting--;
}
int fake_waiting(void) { return waiting; }
int multi_device(ARGS) {
    static int at = -1;
    (void)l, (void)m, (void)n;
    return called(&at, "cuLaunchCooperativeKernelMultiDevice", SUM);
}
__asm__(".globl cuLaunchCooperativeKernelMultiDevice\n.type cuLaunchCooperativeKernelMultiDevice,@function\n.balign 16\n"
        "cuLaunchCooperativeKernelMultiDevice: subq $8,%rsp\ncall 1f\naddq $8,%rsp\njmp multi_device@PLT\n"
        "1: push %rdi\npush %rsi\npush %rdx\npush %rcx\npush %r8\npush %r9\nsubq $8,%rsp\ncall waits_deeply@PLT\n"
        "addq $8,%rsp\npop %r9\npop %r8\npop %rcx\npop %rdx\npop %rsi\npop %rdi\nret\n.balign 16\n");

/* Shorter than a jump: cannot be hooked. */
__asm__(".globl cuModuleUnload\n.type cuModuleUnload,@function\n.balign 16\ncuModuleUnload: xorl %eax,%eax\nret\n.balign 16\n");

int cuPointerGetAttribute(void *data, int attribute, unsigned long pointer) {
    if (attribute != 2) return 1;
    if (pointer >= 0x1000 && pointer < 0x2000) return *(unsigned *)data = 2, 0;
    if (pointer >= 0x2000 && pointer < 0x3000) return *(unsigned *)data = 1, 0;
    return 1;
}
/* Holds as a wait does, but is none of the driver's. */
int fake_wait(void) {
    struct timespec tick = {0, 1000000};
    waiting++;
    while (held) nanosleep(&tick, 0);
    waiting--;
    return 0;
}
static int seen_errno;
int fake_seen_errno(void) { return seen_errno; }
int fake_copy_and_errno(void) { /* as a program that looks at errno after a call that leaves it alone */
    fake_wait();
    errno = 77;
    cuMemcpyDtoH_v2(0x2000, 0x1000, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    seen_errno = errno;
    return 0;
}

int cuStreamIsCapturing(long stream, int *status) { return *status = capturing[stream & 63], 0; }
int cuStreamIsCapturing_ptsz(long stream, int *status) { return *status = capturing[stream & 63], 0; }
int cuStreamBeginCapture_v2(long stream, int mode) { return (void)mode, capturing[stream & 63] = 1, 0; }
int cuStreamEndCapture(long stream, void **graph) { return (void)graph, capturing[stream & 63] = 0, 0; }
