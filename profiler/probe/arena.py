"""The memory that the hooks write and a reader reads by address: counters, the ring of sync records, names of code.

Mirrors `struct Arena` of layout.c (a test compiles it and compares). Standard library only, and no import from this
package: the attaching client sends this file into targets that have nothing of ours installed.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
from typing import Any

MAGIC = 0x31425250434E5953
MAX_ENTRIES = 256
MAX_THREADS = 512
MAX_FRAMES = 48
RING = 4096
CODES = 4096
POOL = 1 << 19

COUNTERS = (
    "d2h h2d stream device event memset copy maybe copies_d2h copies_h2d copies_d2d copies_unknown "
    "bytes_d2h bytes_h2d kernels graphs captured blocked_ns"
).split()
PAIRED, COPY_NOTED, BROKEN, BIG_PAGEABLE, LOOP, BLOCKING, JOINED = 1, 2, 4, 8, 16, 32, 64
PREFIX = 256

_WORDS = [
    *("magic", "size", *COUNTERS, "polls", "captures", "ring_head", "ring_tail", "ring_dropped"),
    *("threads_used", "threads_lost", "codes_used", "pool_used", "codes_lost", "pid", "hip_major", "key"),
    *("is_capturing", "is_capturing_per_thread", "pointer_attribute", "peek_error", "clear_error"),
    *("step_state", "step_ident", "step_native"),
]
PYTHON = (
    "ready this_thread_state addr2line initialized frame indirect f_code f_previous f_instruction shim_code "
    "code_bytecode code_file code_name text_length text_state text_ascii_bit text_kind_shift "
    "text_ascii_data text_wide_data "
    "others thread_ident frame_bytes code_bytes code_lines code_first_line bytes_length bytes_data type_at "
    "code_type text_type bytes_type"
).split()

ENTRY = struct.Struct("7B7b")
CACHE_LINE = 64
THREAD = "tid depth pending broken_by polls".split()
THREAD_CALLS = 8 * len(THREAD)
THREAD_SIZE = -(-(THREAD_CALLS + 8 * (MAX_ENTRIES + 7)) // CACHE_LINE) * CACHE_LINE
CODE = struct.Struct("<QQIIIIBBB5x")
RECORD = struct.Struct("<Qqqqqqqqhhh6B")
FRAME = struct.Struct("<Ii")
RECORD_FRAMES = RECORD.size
RECORD_SIZE = (RECORD.size + FRAME.size * MAX_FRAMES + 7) // 8 * 8

OFFSETS: dict[str, int] = {name: 8 * i for i, name in enumerate(_WORDS)}
OFFSETS |= {f"thread_{name}": 8 * i for i, name in enumerate(THREAD)} | {"thread_calls": THREAD_CALLS}
OFFSETS["counters"] = OFFSETS[COUNTERS[0]]
OFFSETS["prefixes"] = 8 * len(_WORDS)
OFFSETS["python"] = OFFSETS["prefixes"] + 3 * PREFIX
OFFSETS["entries"] = OFFSETS["python"] + 8 * len(PYTHON)
OFFSETS["entry_size"] = ENTRY.size
OFFSETS["original"] = OFFSETS["entries"] + ENTRY.size * MAX_ENTRIES
OFFSETS["threads"] = -(-(OFFSETS["original"] + 8 * MAX_ENTRIES) // CACHE_LINE) * CACHE_LINE
OFFSETS["codes"] = OFFSETS["threads"] + THREAD_SIZE * MAX_THREADS
OFFSETS["ring"] = OFFSETS["codes"] + CODE.size * CODES
OFFSETS["pool"] = OFFSETS["ring"] + RECORD_SIZE * RING
SIZE = OFFSETS["pool"] + POOL

Peek = Callable[[int, int], bytes]  # (offset in the arena, bytes) -> content
Poke = Callable[[int, bytes], None]


class Arena:
    """An arena in this process: a private anonymous mapping, so that a forked child counts into a copy of its own."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        view = memoryview(self._map)
        start = OFFSETS["counters"]
        self._counters = view[start : start + 8 * len(COUNTERS)].cast("q")
        self._ring = view[OFFSETS["ring_head"] : OFFSETS["ring_head"] + 16].cast("q")
        self._view = view
        struct.pack_into("<QQ", self._map, 0, MAGIC, SIZE)

    def counters(self) -> list[int]:
        """Every counter, in the order of `COUNTERS`."""
        return self._counters.tolist()

    def pending(self) -> int:
        """Records that wait to be drained."""
        return self._ring[0] - self._ring[1]

    def peek(self, offset: int, size: int) -> bytes:
        return bytes(self._view[offset : offset + size])

    def poke(self, offset: int, data: bytes) -> None:
        self._view[offset : offset + len(data)] = data

    def close(self) -> None:
        """Give the memory back. Only when nothing can write to it any more."""
        self._counters.release()
        self._ring.release()
        self._view.release()
        self._map.close()


def word(peek: Peek, name: str) -> int:
    """One 64-bit word of the arena's head."""
    value: int = struct.unpack("<q", peek(OFFSETS[name], 8))[0]
    return value


def set_word(poke: Poke, name: str, value: int) -> None:
    poke(OFFSETS[name], struct.pack("<q", value))


def set_python(poke: Poke, words: dict[str, int], own: tuple[str, ...], stdlib: str) -> None:
    """Let the hooks walk stacks: `words` from frames.calibrate(), path prefixes as sites.py has them."""
    for index, prefix in enumerate((*own[:2], *[""] * (2 - len(own)), stdlib)):
        poke(OFFSETS["prefixes"] + PREFIX * index, prefix.encode("latin-1", "replace")[: PREFIX - 1] + b"\0")
    ready = PYTHON.index("ready")
    for index, name in enumerate(PYTHON):
        if index != ready:
            poke(OFFSETS["python"] + 8 * index, (int(words[name]) & (2**64 - 1)).to_bytes(8, "little"))
    poke(OFFSETS["python"] + 8 * ready, (1).to_bytes(8, "little"))


def set_step_thread(poke: Poke, state: int, ident: int, native: int) -> None:
    """Whose steps they are: its PyThreadState, `threading.get_ident()` and `get_native_id()`; zeros for nobody's."""
    set_word(poke, "step_state", 0)  # a hook that reads half of it finds numbers that do not belong together
    set_word(poke, "step_ident", ident)
    set_word(poke, "step_native", native)
    set_word(poke, "step_state", state)


def calls(peek: Peek, entries: int) -> list[int]:
    """How often each entry point was called, all threads together."""
    used = min(word(peek, "threads_used"), MAX_THREADS)
    total = [0] * entries
    for i in range(used):
        row = peek(OFFSETS["threads"] + THREAD_SIZE * i + THREAD_CALLS, 8 * entries)
        for k, n in enumerate(struct.unpack(f"<{entries}q", row)):
            total[k] += n
    return total


def take_records(peek: Peek, poke: Poke) -> list[bytes]:
    """The complete records since the last call, in order; room is made for as many new ones."""
    head, tail = word(peek, "ring_head"), word(peek, "ring_tail")
    taken: list[bytes] = []
    while tail < head:
        index = tail % RING
        run = min(head - tail, RING - index)
        block = peek(OFFSETS["ring"] + RECORD_SIZE * index, RECORD_SIZE * run)
        for k in range(run):
            record = block[RECORD_SIZE * k : RECORD_SIZE * (k + 1)]
            if RECORD.unpack_from(record)[0] != tail + 1:  # still being written
                set_word(poke, "ring_tail", tail)
                return taken
            taken.append(record)
            tail += 1
    set_word(poke, "ring_tail", tail)
    return taken


def code_names(peek: Peek) -> Callable[[int], tuple[str, str] | None]:
    """A function from the code number in a record's frame to (file, qualified name)."""
    known: dict[int, tuple[str, str] | None] = {}
    encodings: dict[int, str] = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}

    def text(at: int, size: int, kind: int) -> str:
        return peek(OFFSETS["pool"] + at, size).decode(encodings[kind], "surrogatepass" if kind > 1 else "strict")

    def find(number: int) -> tuple[str, str] | None:
        if number in known:
            return known[number]
        result: tuple[str, str] | None = None
        if 0 < number <= CODES:
            row: tuple[Any, ...] = CODE.unpack(peek(OFFSETS["codes"] + CODE.size * (number - 1), CODE.size))
            state, _, file, file_bytes, name, name_bytes, file_kind, name_kind, _ = row
            if state == 2:
                result = text(file, file_bytes, file_kind), text(name, name_bytes, name_kind)
        known[number] = result
        return result

    return find
