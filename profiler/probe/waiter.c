/* The frames of the thread that waits for this one: the step's own, while it stands in a join or in a future's result.
 *
 * Where a helper thread waits in a function that is not the user's (Thread(target=event.synchronize)), no frame of its
 * own names a line of the program; the line is where the step's thread waits for it. That thread is not ours: it may
 * wake at any moment, change its frames, or have ended. So nothing of its memory is touched by a load. All of it, the
 * text of names and the table of lines included, is copied by pread from /proc/self/mem, which fails where nothing is
 * mapped and which calibrate() has shown to be allowed here (another system call might not be: some sandboxes kill for
 * one). What was copied is believed only where every object's type is right, the thread state has still the numbers of
 * its thread, the innermost frame is one that waits for another thread, the kernel says that the thread sleeps, and a
 * second walk finds the very same frames, all of them.
 */

enum { NOT_RIGHT = -1, STARTS_A_THREAD = -2 };
#define LOOKS 8 /* while that thread starts another one: half a millisecond to a whole one, by the timer's slack */

typedef struct Place { u64 frame, code, instruction; } Place;
typedef struct Text { u64 at; const char *data; i64 bytes; int kind; char raw[512]; } Text;
typedef struct Table { u64 at; i64 left, have, next; uint8_t part[192]; } Table;
typedef struct Block { u64 start, end; char bytes[2048]; } Block;

extern int *__errno_location(void);

static int open_file(const char *path) {
    return (int)syscall(257, -100L, path, 0x80000L, 0L); /* openat, O_RDONLY | O_CLOEXEC */
}

static void close_file(int file) { syscall(3, (long)file); }

static i64 fetch(int memory, u64 at, void *to, i64 bytes) {
    return syscall(17, (long)memory, to, bytes, at); /* pread64 */
}

static u64 fetch_word(int memory, u64 at) {
    u64 value = 0;
    return fetch(memory, at, &value, 8) == 8 ? value : 0;
}

/* A frame's content. Callers lie in front of what they call, most often in the same page: one read serves several. */
static const char *fetch_frame(int memory, Block *b, u64 at) {
    u64 bytes = (u64)arena.python.frame_bytes, end = at + bytes, page = at & ~4095ULL;
    if (end < at) return 0; /* no address */
    if (at < b->start || end > b->end) {
        b->start = end - page > sizeof b->bytes ? end - sizeof b->bytes : page;
        b->end = fetch(memory, b->start, b->bytes, (i64)(end - b->start)) == (i64)(end - b->start) ? end : 0;
        if (!b->end) return 0;
    }
    return b->bytes + (at - b->start);
}

/* Whether the kernel has that thread asleep: not about to go on, and not working while we look. */
static int sleeps(i64 tid) {
    static const char start[] = "/proc/self/task/", end[] = "/stat";
    char path[64], text[64], digits[24];
    int n = 0, k = 0, file;
    i64 got;
    for (; start[n]; n++) path[n] = start[n];
    for (; tid > 0 && k < 20; tid /= 10) digits[k++] = (char)('0' + tid % 10);
    while (k > 0) path[n++] = digits[--k];
    for (k = 0; end[k]; k++) path[n++] = end[k];
    path[n] = 0;
    file = open_file(path);
    if (file < 0) return 0;
    got = syscall(0, (long)file, text, (long)sizeof text); /* read */
    close_file(file);
    while (got > 2 && text[got - 3] != ')') got--; /* the last one: a name may have its own */
    return got > 2 && text[got - 1] == 'S';
}

/* The step thread's innermost frames; 0 unless all that is read fits. */
static int walk_other(int memory, Place *out, int most) {
    Python *py = &arena.python;
    u64 state = arena.step_state, words[2], frame;
    Block block;
    int n = 0, walked;
    if (fetch(memory, state + py->thread_ident, words, 16) != 16) return 0;
    if (words[0] != arena.step_ident || words[1] != arena.step_native) return 0; /* freed, or of another thread now */
    frame = fetch_word(memory, state + py->frame);
    if (frame && py->indirect >= 0) frame = fetch_word(memory, frame + py->indirect);
    block.start = block.end = 0;
    for (walked = 0; frame && n < most && walked < 4 * MAX_FRAMES; walked++) {
        const char *raw = fetch_frame(memory, &block, frame);
        u64 code;
        if (!raw) return 0;
        code = *(u64 *)(raw + py->f_code) & ~7ULL;
        if (code && code != py->shim_code) {
            out[n].frame = frame, out[n].code = code, out[n].instruction = *(u64 *)(raw + py->f_instruction);
            n++;
        }
        frame = *(u64 *)(raw + py->f_previous);
    }
    return n;
}

static int read_text(int memory, u64 at, Text *t) {
    Python *py = &arena.python;
    i64 got = fetch(memory, at, t->raw, sizeof t->raw);
    t->at = at;
    if (got < py->text_wide_data || *(u64 *)(t->raw + py->type_at) != py->text_type) return 0;
    t->kind = text_of(t->raw, &t->data, &t->bytes);
    return t->kind && t->data - t->raw + t->bytes <= got;
}

static int next_byte(int memory, Table *t) { /* -1 at the end */
    if (t->next == t->have) {
        t->have = t->left < (i64)sizeof t->part ? t->left : (i64)sizeof t->part;
        t->next = 0;
        if (t->have <= 0 || fetch(memory, t->at, t->part, t->have) != t->have) {
            t->have = t->left = 0;
            return -1;
        }
        t->at += t->have, t->left -= t->have;
    }
    return t->part[t->next++];
}

/* The line of a code object's instruction, as PyCode_Addr2Line tells it, which would go by pointers that may be stale.
 * The table's format is CPython's Objects/locations.md, the same from 3.11 on; a trial compares the two. */
static int line_of(int memory, u64 bytes, i64 offset, int line) {
    Table t;
    i64 end = 0, head = arena.python.bytes_data, got, length;
    int byte;
    if (offset < 0) return line;
    got = fetch(memory, bytes, t.part, sizeof t.part);
    if (got < head || *(u64 *)(t.part + arena.python.type_at) != arena.python.bytes_type) return -1;
    length = *(i64 *)(t.part + arena.python.bytes_length);
    if (length < 0 || length > 1 << 20) return -1;
    t.next = head, t.have = length < got - head ? head + length : got;
    t.at = bytes + t.have, t.left = length - (t.have - head);
    byte = next_byte(memory, &t);
    while (byte >= 0) {
        int kind = (byte >> 3) & 15, shift = 0, part;
        u64 delta = 0;
        end += 2 * ((byte & 7) + 1);
        byte = next_byte(memory, &t);
        if (kind == 13 || kind == 14) {
            do {
                part = byte;
                if (part < 0 || shift > 30) return -1;
                delta |= (u64)(part & 63) << shift, shift += 6;
                byte = next_byte(memory, &t);
            } while (part & 64);
            line += delta & 1 ? -(int)(delta >> 1) : (int)(delta >> 1);
        } else if (kind >= 10 && kind <= 12) line += kind - 10;
        if (offset < end) return kind == 15 ? -1 : line;
        while (byte >= 0 && !(byte & 128)) byte = next_byte(memory, &t); /* columns */
    }
    return -1;
}

static int is_text(const Text *t, i64 from, const char *what) {
    i64 k;
    for (k = 0; what[k]; k++)
        if (from + k >= t->bytes || t->data[from + k] != what[k]) return 0;
    return from + k == t->bytes;
}

/* Innermost: threading's functions that wait for another thread, where join, a future's result, a pool's and a queue's
 * end. Further out: Thread.start waits for a thread to begin, not for what it does. */
static int stands(const Text *file, const Text *name, int innermost) {
    i64 n = 0;
    int here;
    while (arena.stdlib[n]) n++;
    here = file->kind == 1 && starts(file->data, file->bytes, arena.stdlib) && is_text(file, n, "threading.py");
    if (!innermost) return !(here && is_text(name, 0, "Thread.start"));
    return here && (is_text(name, 0, "Condition.wait") || is_text(name, 0, "Thread.join") ||
                    is_text(name, 0, "Thread._wait_for_tstate_lock"));
}

/* 1 where it is a frame of the program's, 0 where it is CPython's own, and the reasons why it is not to be believed.
 * `file`: the one before, with its object's address: frames of the same file follow each other. */
static int describe(int memory, const Place *p, int innermost, Text *file, Frame *out) {
    Python *py = &arena.python;
    char raw[CODE_BYTES];
    Text name;
    i64 offset = (i64)(p->instruction - (p->code + py->code_bytecode));
    if (fetch(memory, p->code, raw, py->code_bytes) != py->code_bytes) return NOT_RIGHT;
    if (*(u64 *)(raw + py->type_at) != py->code_type || offset < -2 || offset > 1 << 24) return NOT_RIGHT;
    if (cleans_up(raw)) return 0;
    if (file->at != *(u64 *)(raw + py->code_file) && !read_text(memory, *(u64 *)(raw + py->code_file), file))
        return NOT_RIGHT;
    if (!read_text(memory, *(u64 *)(raw + py->code_name), &name)) return NOT_RIGHT;
    if (!stands(file, &name, innermost)) return innermost ? NOT_RIGHT : STARTS_A_THREAD;
    out->line = line_of(memory, *(u64 *)(raw + py->code_lines), offset, *(int *)(raw + py->code_first_line));
    if (out->line < 0) return NOT_RIGHT;
    out->code = kept(p->code, file->data, file->bytes, file->kind, name.data, name.bytes, name.kind);
    return 1;
}

/* Its frames; below 0 where something is not right. */
static int read_waiter(int memory, Frame *out, int most) {
    Place places[MAX_FRAMES], again[MAX_FRAMES];
    Text file;
    int k, n, frames = 1;
    file.at = 1; /* of no object */
    if (!walk_other(memory, again, 1) || describe(memory, again, 1, &file, out) != 1) return 0; /* most often the end */
    n = walk_other(memory, places, MAX_FRAMES);
    if (!n || !same((const char *)places, (const char *)again, sizeof(Place))) return 0;
    for (k = 1; k < n && frames < most; k++) {
        int found = describe(memory, &places[k], 0, &file, &out[frames]);
        if (found < 0) return found;
        frames += found;
    }
    if (!sleeps((i64)arena.step_native)) return 0;
    if (walk_other(memory, again, MAX_FRAMES) != n) return 0;
    return same((const char *)places, (const char *)again, n * (i64)sizeof(Place)) ? frames : 0;
}

/* A thread that has just been started may be here before its starter is back from Thread.start, on its way to join it:
 * that one is given the time to get there. Our wait is over by then, and no frame of the user's is held up by it. */
static int read_patiently(int memory, Frame *out, int most) {
    i64 moment[2] = {0, 50000};
    int k, frames = read_waiter(memory, out, most);
    if (frames != STARTS_A_THREAD) return frames;
    for (k = 1; k < LOOKS && frames <= 0; k++) {
        syscall(230, 1L, 0L, moment, 0L); /* clock_nanosleep, monotonic: as time.sleep does */
        frames = read_waiter(memory, out, most);
    }
    return frames;
}

/* The frames of the step's thread where it waits for another thread, innermost first; 0 where it does not, or where
 * anything is not as expected. Leaves errno alone: the program may look at it after the call that we are in. */
int probe_waiter(Frame *out, int most) {
    int memory, frames, error;
    if (!arena.python.others || !arena.step_state) return 0;
    error = *__errno_location();
    frames = 0;
    if (syscall(39) == arena.pid) { /* getpid: the step's thread is not in a forked child */
        memory = open_file("/proc/self/mem");
        if (memory >= 0) {
            frames = read_patiently(memory, out, most);
            close_file(memory);
        }
    }
    *__errno_location() = error;
    return frames > 0 ? frames : 0;
}

static int has_foreign(const Frame *stack, int frames) {
    int k;
    for (k = 0; k < frames; k++)
        if (stack[k].code && arena.codes[stack[k].code - 1].foreign) return 1;
    return 0;
}

/* After a wait: puts the frames of who waits for this thread behind its own, where these are known to the last one and
 * none is the user's. Returns JOINED, a record's flag, where it did. */
static int with_waiter(const Thread *t, Frame *stack, int *frames) {
    int k, more, own = *frames;
    if (!arena.step_state || (u64)t->tid == arena.step_native || own <= 0 || own >= MAX_FRAMES) return 0;
    for (k = 0; k < own; k++)
        if (!stack[k].code) return 0;
    if (has_foreign(stack, own)) return 0;
    more = probe_waiter(stack + own, MAX_FRAMES - own);
    if (!has_foreign(stack + own, more)) return 0;
    *frames = own + more;
    return JOINED;
}
