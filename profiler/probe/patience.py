"""Lets frida wait longer than its five seconds for a target that is slow to answer.

frida gives up on an injection after five seconds, and then unmaps the code that it has just started a thread on: that
thread returns into nothing, and the target dies of SIGSEGV. Five seconds pass easily where many programs share few
processors, and whenever some thread of the target is in dlopen for so long. There is no setting for it. So, in the
helper process alone, the clock that frida's timers go by is slowed down once an attachment takes unusually long: the
clock_gettime that its library calls is replaced, in that library's table of imports, by the few instructions below.

x86-64 Linux. Standard library only.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USUAL_SECONDS = 2.0  # an attachment that takes less never meets the slow clock
SLOW = 20  # then a second of frida's lasts so many
STALLED_SECONDS = 55.0  # from here on hardly any time passes for it: to give up is the one thing it must not do
STALLED = 1_000_000
_MARGIN_NS = 100_000_000

# clock_gettime(clock, ts): the real one. While there is a pace {after, base, divisor} and `after` is past, it answers
# base + (now - after) / divisor for CLOCK_MONOTONIC.
_CODE = bytes.fromhex(
    "53 55 4883ec08"  # push rbx; push rbp; sub rsp, 8
    "89fd 4889f3"  # mov ebp, edi; mov rbx, rsi
    "ff154f000000"  # call [real]
    "85c0 753e"  # test eax, eax; jne out
    "83fd01 7539"  # cmp ebp, 1; jne out
    "4c8b0547000000"  # mov r8, [pace]
    "4d85c0 742d"  # test r8, r8; je out
    "48690300ca9a3b 48034308"  # imul rax, [rbx], 1000000000; add rax, [rbx + 8]
    "492b00 7e1b"  # sub rax, [r8]; jle done
    "4899 49f77810"  # cqo; idiv qword [r8 + 16]
    "49034008"  # add rax, [r8 + 8]
    "4899 b900ca9a3b 48f7f9"  # cqo; mov ecx, 1000000000; idiv rcx
    "488903 48895308"  # mov [rbx], rax; mov [rbx + 8], rdx
    "31c0"  # done: xor eax, eax
    "4883c408 5d 5b c3"  # out: add rsp, 8; pop rbp; pop rbx; ret
)
_REAL, _PACE, _SLOW, _STALLED, _LENGTH = 96, 104, 112, 136, 160  # behind the code: two pointers, two paces

_PT_DYNAMIC = 2
_STRTAB, _SYMTAB, _JMPREL, _PLTRELSZ = 5, 6, 23, 2
_JUMP_SLOT = 7

_installed: list[SlowClock] = []  # their code must outlive every call


class SlowClock:
    """The clock of one loaded library. Raises `LookupError` where the library does not call clock_gettime."""

    def __init__(self, library: str) -> None:
        self._slot = import_slot(library, b"clock_gettime")
        self._page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        real = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value or 0
        self._page[:_REAL] = _CODE.ljust(_REAL, b"\x90")
        self._block = (ctypes.c_char * _LENGTH).from_buffer(self._page)  # keeps the page where it is
        self.address = ctypes.addressof(self._block)
        self._write(_REAL, real, 0)

    def _write(self, at: int, *values: int) -> None:
        (ctypes.c_int64 * len(values)).from_address(self.address + at)[:] = list(values)

    def install(self) -> None:
        """For good: the library may be between reading the table and the call whenever we looked."""
        _installed.append(self)
        ctypes.c_uint64.from_address(self._slot).value = self.address

    @contextmanager
    def patient(self, usual: float = USUAL_SECONDS, stalled: float = STALLED_SECONDS) -> Iterator[None]:
        """Until the end of the `with`: slow from `usual` seconds on, next to no time from `stalled` seconds on."""
        over = threading.Event()
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(usual * 1e9)
        self._write(_SLOW, after, after, SLOW)
        self._write(_PACE, self.address + _SLOW)

        def stall() -> None:
            if not over.wait(stalled):
                now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
                ahead = now + _MARGIN_NS  # so that nobody sees it go back
                self._write(_STALLED, now, after + (ahead - after) // SLOW, STALLED)
                self._write(_PACE, self.address + _STALLED)

        watch = threading.Thread(target=stall, daemon=True)
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()
            self._write(_PACE, 0)


def import_slot(library: str, name: bytes) -> int:
    """Address of the pointer through which `library` calls an imported function."""
    base = _base(library)
    tables = _dynamic(base)
    if not {_STRTAB, _SYMTAB, _JMPREL, _PLTRELSZ} <= set(tables):
        raise LookupError(f"{library}: imports are not looked up as expected")
    for at in range(tables[_JMPREL], tables[_JMPREL] + tables[_PLTRELSZ], 24):
        offset, info = struct.unpack("<QQ", ctypes.string_at(at, 16))
        if info & 0xFFFFFFFF != _JUMP_SLOT:
            continue
        (text,) = struct.unpack("<I", ctypes.string_at(tables[_SYMTAB] + 24 * (info >> 32), 4))
        if ctypes.string_at(tables[_STRTAB] + text) == name:
            slot = int(base + offset)
            if not _writable(slot):
                raise LookupError(f"{library}: its table of imports is read-only")
            return slot
    raise LookupError(f"{library}: does not import {name.decode()}")


def _mappings() -> Iterator[tuple[int, int, str, int, str]]:
    """(start, end, permissions, offset in the file, path)"""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(None, 5)
        start, end = (int(x, 16) for x in fields[0].split("-"))
        yield start, end, fields[1], int(fields[2], 16), fields[5] if len(fields) > 5 else ""


def _base(library: str) -> int:
    for start, _, _, offset, path in _mappings():
        if path == library and offset == 0:
            return start
    raise LookupError(f"{library}: not loaded")


def _writable(address: int) -> bool:
    return any(start <= address < end and "w" in permissions for start, end, permissions, _, _ in _mappings())


def _dynamic(base: int) -> dict[int, int]:
    """The dynamic section of the library at `base`."""
    (headers,) = struct.unpack("<Q", ctypes.string_at(base + 32, 8))
    size, count = struct.unpack("<HH", ctypes.string_at(base + 54, 4))
    for k in range(count):
        kind, _, _, address = struct.unpack("<IIQQ", ctypes.string_at(base + headers + k * size, 24))
        if kind == _PT_DYNAMIC:
            return _entries(base + address)
    return {}


def _entries(at: int) -> dict[int, int]:
    found: dict[int, int] = {}
    while True:
        tag, value = struct.unpack("<qQ", ctypes.string_at(at, 16))
        if tag == 0:
            return found
        found[tag] = value
        at += 16
