/* A program whose one thread computes with values that live in vector registers: without pause, or, given microseconds,
 * with a nap after each round of some milliseconds.
 * Ends with SIGUSR1, and tells how often a register had changed under its hands.
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static volatile sig_atomic_t stop;
static void end(int number) { stop = 1; }

#define CHECK(n) "movq %%xmm" #n ", %%rdx\n\t cmp %%rax, %%rdx\n\t je 2f\n\t inc %0\n 2:\n\t"

int main(int count, char **arguments) {
    int nap = count > 1 ? atoi(arguments[1]) : 0;
    long rounds = 0, changed = 0;
    signal(SIGUSR1, end);
    printf("up\n");
    fflush(stdout);
    for (; !stop; rounds++) {
        uint64_t wrong = 0;
        __asm__ volatile(
            "mov $0x1111111111111111, %%rax\n\t"
            "movq %%rax, %%xmm0\n\t movq %%rax, %%xmm1\n\t movq %%rax, %%xmm2\n\t movq %%rax, %%xmm3\n\t"
            "mov $5000000, %%rcx\n 1: dec %%rcx\n\t jnz 1b\n\t" CHECK(0) CHECK(1) CHECK(2) CHECK(3)
            : "+r"(wrong)
            :
            : "rax", "rcx", "rdx", "xmm0", "xmm1", "xmm2", "xmm3", "cc");
        changed += wrong != 0;
        if (nap) usleep(nap);
    }
    printf("%ld %ld\n", rounds, changed);
    return 0;
}
