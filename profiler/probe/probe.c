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
#include "layout.c"
#include "threads.c"
#include "stacks.c"
#include "waiter.c"
#include "reading.c"
#include "rule.c"
