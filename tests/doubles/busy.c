/* A program that calls the driver all the time from several threads: launches, copies, waits, allocations and frees.
 * Commands on standard input: p pause, r resume, f fork a child that calls too, s N sleep N ms in every wait, d N keep
 * every dlopen waiting for N seconds, q quit.
 * Each is answered with a line: how many calls of each kind were made so far, and the child's exit code after f.
 */
#define _GNU_SOURCE
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int cuLaunchKernel(); int cuMemcpyDtoHAsync_v2(); int cuStreamSynchronize(); int cuMemAlloc_v2(); int cuMemFree_v2();
void fake_sleep(long ns);
#ifndef THREADS
#define THREADS 2
#endif
static atomic_int paused, standing, stop;
static struct { _Alignas(64) atomic_long launches, syncs, frees; } made[THREADS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void round_of_calls(int k) {
    cuLaunchKernel(1L, 1L, 1L, 1L, 1L, 1L, 1L, 0L, 0L, 0L, 0L);
    cuLaunchKernel(1L, 1L, 1L, 1L, 1L, 1L, 1L, 0L, 0L, 0L, 0L);
    made[k].launches += 2;
    cuMemcpyDtoHAsync_v2(0x2000L, 0x1000L, 8L, 7L);
    cuStreamSynchronize(7L);
    made[k].syncs += 1;
    pthread_mutex_lock(&lock); /* a lock that is held around driver calls, as an allocator's is */
    cuMemAlloc_v2(0x1000L, 64L);
    free(malloc(200000)); /* big enough to come from mmap */
    cuMemFree_v2(0x1000L);
    pthread_mutex_unlock(&lock);
    made[k].frees += 1;
}
static void *work(void *argument) {
    int k = (int)(long)argument;
    while (!stop) {
        if (paused) {
            standing++;
            while (paused && !stop) usleep(200);
            standing--;
        }
        round_of_calls(k);
    }
    return 0;
}
static int keep_the_lock(struct dl_phdr_info *info, size_t size, void *seconds) {
    sleep((int)(long)seconds);
    return 1;
}
static void *hold_the_loader(void *seconds) {
    dl_iterate_phdr(keep_the_lock, seconds);
    return 0;
}
static void answer(int code) {
    long launches = 0, syncs = 0, frees = 0;
    for (int k = 0; k < THREADS; k++) launches += made[k].launches, syncs += made[k].syncs, frees += made[k].frees;
    printf("%ld %ld %ld %d\n", launches, syncs, frees, code);
    fflush(stdout);
}
int main(void) {
    pthread_t threads[THREADS];
    char line[64];
    for (long k = 0; k < THREADS; k++) pthread_create(&threads[k], 0, work, (void *)k);
    answer(0);
    while (fgets(line, sizeof line, stdin)) {
        int code = 0;
        if (line[0] == 'p') {
            paused = 1;
            while (standing < THREADS) usleep(200);
        } else if (line[0] == 'r') {
            paused = 0;
            while (standing > 0) usleep(200);
        } else if (line[0] == 's') {
            fake_sleep(atol(line + 1) * 1000000);
        } else if (line[0] == 'd') {
            pthread_t holder;
            pthread_create(&holder, 0, hold_the_loader, (void *)atol(line + 1));
            pthread_detach(holder);
            usleep(50000);
        } else if (line[0] == 'f') {
            pid_t child = fork();
            if (!child) {
                for (int i = 0; i < 1000; i++) cuLaunchKernel(1L, 1L, 1L, 1L, 1L, 1L, 1L, 0L, 0L, 0L, 0L), cuStreamSynchronize(7L);
                _exit(7);
            }
            waitpid(child, &code, 0);
            code = WIFEXITED(code) ? WEXITSTATUS(code) : -WTERMSIG(code);
        } else break;
        answer(code);
    }
    stop = 1;
    paused = 0;
    if (line[0] == 'x') exit(3); /* while the others still call */
    for (int k = 0; k < THREADS; k++) pthread_join(threads[k], 0);
    return 0;
}
