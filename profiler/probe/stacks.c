/* The calling thread's Python frames, read without the GIL. */

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

/* 1 + index into codes[] of the code object at that address with that text; 0 where there is no room left. */
static uint32_t kept(u64 code, const char *file, i64 file_bytes, int file_kind, const char *name, i64 name_bytes,
                     int name_kind) {
    u64 hash = (code >> 4) * 0x9e3779b97f4a7c15ULL;
    int tries;
    for (tries = 0; tries < 16; tries++) {
        uint32_t i = (uint32_t)((hash >> 40) + tries) & (CODES - 1);
        Code *c = &arena.codes[i];
        if (c->state == 2) {
            if (c->code == code && c->file_bytes == file_bytes && c->name_bytes == name_bytes &&
                same(arena.pool + c->file, file, file_bytes) && same(arena.pool + c->name, name, name_bytes))
                return i + 1;
        } else if (claim(&c->state, 0, 1)) {
            c->code = code;
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

static uint32_t code_index(const char *code) {
    Python *py = &arena.python;
    const char *file, *name;
    i64 file_bytes, name_bytes;
    int file_kind = text_of(*(const char **)(code + py->code_file), &file, &file_bytes);
    int name_kind = text_of(*(const char **)(code + py->code_name), &name, &name_bytes);
    if (!file_kind || !name_kind) return 0;
    return kept((u64)code, file, file_bytes, file_kind, name, name_bytes, name_kind);
}

/* CPython's own code between a constructor and its caller (3.12 on) is no frame of the program's: its file and its name
 * are the same object. */
static int cleans_up(const char *code) {
    return *(u64 *)(code + arena.python.code_file) == *(u64 *)(code + arena.python.code_name);
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
        if (code && (u64)code != py->shim_code && !cleans_up(code)) {
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
