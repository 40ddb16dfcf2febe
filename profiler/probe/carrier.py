"""The thread of the target that carries the injection: which one, and that it is stopped inside a system call.

frida runs functions of its own on that thread, for tens of milliseconds, and puts back its general registers but not
its vector registers: one that computes would go on with wrong numbers. And they allocate memory: one that was just
doing so would find its allocator changed. Inside a system call that waits neither can happen.

Between our look at a thread and frida's stop lie 40 to 250 ms, in which it may wake up. So the stop itself is guarded:
the `ptrace` that frida's library calls is replaced, in that library's table of imports, by one that stops the carrier
only while it waits, looks where it has stopped, and lets it go and tries again where that was not in a system call.

x86-64 Linux. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .patience import import_slot
from .tracing import TracingRefused, threads_of

_QUIET_SECONDS = 0.03
_QUIET_PATIENCE = 1.0  # from then on, where the stop is guarded, a thread that waits now and then will do
_PATIENCE = 5.0
_LOOKS = 100  # at least, however long we wait for a processor in between
_STOP_PATIENCE = 30.0  # it has to get a processor

_INTERRUPT, _CONT, _GETREGS = 0x4207, 7, 12
_WALL, _EVENT_STOP = 0x40000000, 128
_REGISTERS, _ORIG_RAX = 27, 15
_OF_THE_ALLOCATOR = frozenset((9, 10, 11, 12, 25, 28))  # mmap, mprotect, munmap, brk, mremap, madvise

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.restype = ctypes.c_long
_LIBC.ptrace.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_PTRACE = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, use_errno=True)


@contextmanager
def on_our_processors(tid: int) -> Iterator[None]:
    """Until the end of the `with`, thread `tid` may run wherever this process may.

    What is injected inherits that, for good: it must not share the one processor that a server has bound its threads
    to. As it was where the kernel refuses.
    """
    try:
        own = os.sched_getaffinity(tid)
        os.sched_setaffinity(tid, os.sched_getaffinity(0))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):  # it may have ended
            os.sched_setaffinity(tid, own)


# ------------------------------------------------------------------- choosing


def idle_thread(pid: int, wanted: int = 0, *, guarded: bool = False, patience: float = _PATIENCE) -> int:
    """A thread of `pid` that waits in the kernel: for 30 ms at least, or, where the stop is `guarded`, now and then.

    `wanted`: this one alone. Raises `TracingRefused` where none does within `patience` seconds.
    """
    began = time.monotonic()
    asleep: dict[int, int] = {}  # thread: how often it was found waiting
    while True:
        tids = [wanted] if wanted else threads_of(pid)
        first = {tid: _activity(pid, tid) for tid in tids}
        time.sleep(_QUIET_SECONDS)
        quiet = []
        for tid, before in first.items():
            after = _activity(pid, tid)
            if before is None or after is None:
                continue
            if before == after and before[0] == "S":
                quiet.append((tid != pid, _waits_restartably(pid, tid), -before[2], tid))
            asleep[tid] = asleep.get(tid, 0) + (before[0] == "S") + (after[0] == "S")
        if quiet:
            return max(quiet)[3]
        if _state(pid, pid) in "ZX":
            raise TracingRefused(f"process {pid} has ended")
        waited = time.monotonic() - began
        if guarded and waited > min(patience, _QUIET_PATIENCE) and any(asleep.values()):
            return max(asleep, key=lambda tid: (asleep[tid], tid != pid))
        if waited > patience:
            raise _refusal(pid, wanted, "at all" if guarded else f"for {_QUIET_SECONDS * 1e3:g} ms at a stretch")


def _refusal(pid: int, wanted: int, how: str) -> TracingRefused:
    which = f"thread {wanted} of process {pid} was not" if wanted else f"no thread of process {pid} was"
    return TracingRefused(
        f"{which} found to wait {how}, and the injection would change the numbers of one that computes"
    )


def _activity(pid: int, tid: int) -> tuple[str, int, int] | None:
    """State, context switches and used CPU ticks."""
    try:
        stat = Path(f"/proc/{pid}/task/{tid}/stat").read_text()
        status = Path(f"/proc/{pid}/task/{tid}/status").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    switches = sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)
    return fields[0], switches, int(fields[11]) + int(fields[12])


def _state(pid: int, tid: int) -> str:
    found = _activity(pid, tid)
    return "X" if found is None else found[0]


def _waits_restartably(pid: int, tid: int) -> int:
    """2 for a futex wait, which the kernel resumes by itself after an interruption; 1 for others; 0 unknown."""
    try:
        number = Path(f"/proc/{pid}/task/{tid}/syscall").read_text().split()[0]
    except OSError:
        return 0
    return 2 if number == "202" else 1


# ------------------------------------------------------------------- stopping


_installed: list[Guard] = []  # their callbacks must outlive every call


class Guard:
    """The `ptrace` of one loaded library. Raises `LookupError` where the library does not call it.

    It does something of its own in a `stops` block only, and there to the first stop of the one thread.
    """

    def __init__(self, library: str) -> None:
        self.pid = self.tid = 0
        self.refused = False
        self.tries = 0
        self._patience = 0.0
        self._slot = import_slot(library, b"ptrace")
        self._callback = _PTRACE(self._ptrace)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value or 0

    def install(self) -> None:
        """For good: the library may be between reading the table and the call whenever we looked."""
        _installed.append(self)
        ctypes.c_uint64.from_address(self._slot).value = self.address

    @contextmanager
    def stops(self, pid: int, tid: int, patience: float = _PATIENCE) -> Iterator[None]:
        """The next stop of `tid` is inside a system call, or is refused: then a `TracingRefused` says so."""
        self.pid, self.refused, self.tries = pid, False, 0
        self._patience = patience
        self.tid = tid
        try:
            yield
        except Exception:
            if self.refused:
                raise _refusal(pid, tid, "when it was to be stopped") from None
            raise
        finally:
            self.tid = 0

    def _ptrace(self, request: int, tid: int, address: int | None, data: int | None) -> int:
        if request != _INTERRUPT or tid != self.tid or not tid:
            return _ptrace(request, tid, address, data)
        self.tid = 0  # frida stops it again later, in the middle of what it runs on it
        if self._stop(tid):
            return 0
        self.refused = True
        ctypes.set_errno(errno.EBUSY)
        return -1

    def _stop(self, tid: int) -> bool:
        """Stop the thread where it waits. False, and it runs, where that was not to be had in time."""
        deadline = time.monotonic() + self._patience  # from here: on a busy machine frida takes seconds to get so far
        looks = 0
        while looks < _LOOKS or time.monotonic() < deadline:
            looks += 1
            if _state(self.pid, tid) != "S":
                time.sleep(0.0002)
                continue
            self.tries += 1
            if _ptrace(_INTERRUPT, tid):
                return False
            stopped = _has_stopped(tid)
            if stopped is None:  # it has ended: frida finds out
                return True
            if stopped and _in_a_wait(tid):
                return True
            if stopped:
                os.waitpid(tid, _WALL)
                _ptrace(_CONT, tid)
        return False


def _ptrace(request: int, tid: int, address: int | None = None, data: int | None = None) -> int:
    return int(_LIBC.ptrace(request, tid, address, data))


def _has_stopped(tid: int, patience: float = _STOP_PATIENCE) -> bool | None:
    """Whether it stands, as asked; None if it has ended. It is left for frida to be waited for.

    Signals that come first are passed on.
    """
    deadline = time.monotonic() + patience
    options = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL
    while True:
        try:
            told = os.waitid(os.P_PID, tid, options)
        except ChildProcessError:
            return None
        if told is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0001)
            continue
        if told.si_code != os.CLD_TRAPPED:
            return None
        if told.si_status >> 8 == _EVENT_STOP:
            return True
        os.waitpid(tid, _WALL)
        passed = told.si_status if told.si_status >> 8 == 0 and told.si_status != signal.SIGTRAP else 0
        _ptrace(_CONT, tid, None, passed)


def _in_a_wait(tid: int) -> bool:
    registers = ctypes.create_string_buffer(8 * _REGISTERS)
    if _ptrace(_GETREGS, tid, None, ctypes.addressof(registers)):
        return False
    number = struct.unpack_from("<q", registers, 8 * _ORIG_RAX)[0]
    return number >= 0 and number not in _OF_THE_ALLOCATOR
