/* A program whose threads wait, each in a way of its own. A wait that ends early, or with an error, is told.
 * Prints the threads' ids in the order of `kinds`; then, after each line on standard input, of every kind: waits made,
 * those that ended too early, those that ended with EINTR.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { FOREVER, UNTIL, NANOSLEEP, POLL, SELECT, SEMAPHORE, READ, EPOLL, KINDS };
static volatile struct { int tid; long waits, early, interrupted; } told[KINDS];
static const long ASKED_NS = 200 * 1000000L;

static long now(void) {
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    return ts.tv_sec * 1000000000L + ts.tv_nsec;
}
static struct timespec at(long ns) { return (struct timespec){ns / 1000000000L, ns % 1000000000L}; }

static int wait_once(int kind, long began) {
    static pthread_mutex_t locks[2] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER};
    static pthread_cond_t never[2] = {PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER};
    struct timespec duration = at(ASKED_NS), end = at(began + ASKED_NS);
    struct timeval tv = {0, ASKED_NS / 1000};
    struct epoll_event event;
    static sem_t sem;
    static int ends[2], epoll = -1;
    char byte;
    switch (kind) {
    case FOREVER: pthread_mutex_lock(&locks[0]); pthread_cond_wait(&never[0], &locks[0]); return 0;
    case UNTIL: {
        pthread_mutex_lock(&locks[1]);
        int error = pthread_cond_timedwait(&never[1], &locks[1], &end);
        pthread_mutex_unlock(&locks[1]);
        return error == ETIMEDOUT ? 0 : -1;
    }
    case NANOSLEEP: return nanosleep(&duration, 0);
    case POLL: return poll(0, 0, ASKED_NS / 1000000);
    case SELECT: return select(0, 0, 0, 0, &tv);
    case SEMAPHORE: return sem_timedwait(&sem, &end) == -1 && errno == ETIMEDOUT ? 0 : -1;
    case READ:
        if (pipe(ends)) exit(2);
        return (int)read(ends[0], &byte, 1);
    default:
        if (epoll < 0) epoll = epoll_create1(0);
        return epoll_wait(epoll, &event, 1, ASKED_NS / 1000000);
    }
}
static void *wait_for_ever(void *argument) {
    int kind = (int)(long)argument;
    told[kind].tid = (int)syscall(SYS_gettid);
    for (;;) {
        long began = now();
        errno = 0;
        int result = wait_once(kind, began);
        if (result < 0 && errno == EINTR) told[kind].interrupted++;
        else if (result != 0 || now() - began < ASKED_NS - 2000000) told[kind].early++;
        told[kind].waits++;
    }
    return 0;
}
int main(void) {
    pthread_t thread;
    char line[16];
    for (long kind = 0; kind < KINDS; kind++) pthread_create(&thread, 0, wait_for_ever, (void *)kind);
    for (int kind = 0; kind < KINDS; kind++) {
        while (!told[kind].tid) usleep(1000);
        printf("%d ", told[kind].tid);
    }
    do {
        printf("\n");
        fflush(stdout);
        if (!fgets(line, sizeof line, stdin)) return 0;
        for (int kind = 0; kind < KINDS; kind++)
            printf("%ld %ld %ld ", told[kind].waits, told[kind].early, told[kind].interrupted);
    } while (1);
}
