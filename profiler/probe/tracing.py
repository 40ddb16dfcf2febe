"""Writes code into a running process while all its threads stand still.

A five-byte jump over the start of a function is safe only if no thread is executing those bytes: one that stands
between two of the overwritten instructions would resume inside the jump. So the writer stops every thread through
ptrace (as py-spy does to read a stack), looks where each one is, writes through /proc/PID/mem and lets them go. If
this process dies meanwhile, the kernel lets them go.

x86-64 Linux. Runs in the helper process only. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_SEIZE, _INTERRUPT, _DETACH, _GETREGS, _GETSIGMASK = 0x4206, 0x4207, 17, 12, 0x420A
_WALL = 0x40000000
_REGISTERS, _RIP, _RSP = 27, 16, 19
_LATE_SECONDS = 0.02  # a thread in an uninterruptible wait of the kernel's is not waited for longer than this
_LEAVE_SECONDS = 5.0
_LOOK_SECONDS = 0.00002
_BUSY = 8  # threads that are stopped last and let go first
_STOP_SECONDS = 5.0  # any other stops as soon as it gets a processor
_TOP_BYTES = 256  # of a stack, where a return address may stand
_STACK_BYTES = 1 << 12  # of a stack, where a signal handler may have been called
_HANDLER_BYTES = 1 << 16  # the same for a thread that has signals blocked, as one inside a handler has
_SIGNAL_RIP = 176  # bytes from the return address of a handler to where the kernel keeps the interrupted place


class TracingRefused(Exception):
    """The kernel does not let this process trace the target; the text says why."""


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.restype = ctypes.c_long
_LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def _ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> int:
    """0, or the error number."""
    return ctypes.get_errno() if _LIBC.ptrace(request, tid, address, data) == -1 else 0


def threads_of(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208 - threads stand still meanwhile
    except FileNotFoundError:
        return []


@dataclass
class Stopped:
    """All threads of `pid`, standing still. `seconds`: how long the busiest did, once they run again."""

    pid: int
    places: dict[int, tuple[int, int]] = field(default_factory=dict)  # tid -> (instruction, stack pointer)
    signals: dict[int, int] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    interrupted: dict[int, list[int]] = field(default_factory=dict)  # where it goes on after signal handlers
    inside: set[int] = field(default_factory=set)  # threads that are in the code that was asked about, or return to it
    began: float = 0.0
    seconds: float = 0.0


def _seize_all(stopped: Stopped, seized: set[int]) -> None:
    """Seizing does not stop a thread; new ones may appear until every thread that could make them is seized."""
    while new := set(threads_of(stopped.pid)) - seized:
        for tid in new:
            error = _seize(stopped.pid, tid)
            if error and error != errno.ESRCH:  # ESRCH: has just ended
                raise TracingRefused(f"thread {tid} of process {stopped.pid}: {os.strerror(error)}")
            seized.add(tid)


def _seize(pid: int, tid: int, seconds: float = 3.0) -> int:
    """0, or the error. frida may be at this thread for a moment, in a thread of ours or from within the target."""
    deadline = time.monotonic() + seconds
    while error := _ptrace(_SEIZE, tid):
        if error != errno.EPERM or time.monotonic() > deadline:
            break
        time.sleep(0.002)
    return error


def consent(pid: int, tid: int) -> None:
    """Stop one thread for an instant, to learn whether the kernel lets us. Raises `TracingRefused`.

    Asked before frida is: where ptrace is refused but /proc/PID/mem is not (a container's seccomp profile, another
    tracer), it would overwrite pthread_mutex_lock in the hope of catching a thread, and leave it overwritten.
    """
    deadline = time.monotonic() + 1.5  # an agent that is just leaving may still be tracing from within
    while tracers := {tracer_of(pid, other) for other in threads_of(pid)} - {0, os.getpid()}:
        if time.monotonic() > deadline:
            raise TracingRefused(f"process {pid} is already being traced by process {min(tracers)} (a debugger?)")
        time.sleep(0.02)
    error = _seize(pid, tid, 1.0)
    if error:
        raise PermissionError(error, os.strerror(error))
    stopped = Stopped(pid, began=time.monotonic())
    _ptrace(_INTERRUPT, tid)
    try:
        _collect(stopped, [tid])
    finally:
        _release(stopped, [tid])
    if stopped.late:
        raise TracingRefused(f"thread {tid} of process {pid} does not stop: it hangs inside the kernel")


def tracer_of(pid: int, tid: int) -> int:
    """The thread, of whatever process, that traces this thread; 0 if none."""
    try:
        status = Path(f"/proc/{pid}/task/{tid}/status").read_text()
    except OSError:
        return 0
    return int(next((x.split()[1] for x in status.splitlines() if x.startswith("TracerPid")), "0"))


def holds_any(pid: int, tracer: int = 0) -> bool:
    """Whether process `tracer`, by default this one, traces a thread of `pid`: by any of its threads, frida's too."""
    threads = set(threads_of(tracer or os.getpid()))
    return any(tracer_of(pid, tid) in threads for tid in threads_of(pid))


def _wait(stopped: Stopped, tid: int, deadline: float) -> bool:
    """Whether `tid` has stopped (or ended) by `deadline`."""
    patience = 0.0
    while True:
        try:
            got, status = os.waitpid(tid, os.WNOHANG | _WALL)
        except ChildProcessError:
            return True
        if got == tid:
            if os.WIFSTOPPED(status):
                number = os.WSTOPSIG(status)
                stopped.signals[tid] = number if status >> 16 == 0 else 0  # a signal on its way is passed on
                _read_registers(stopped, tid)
            return True
        now = time.monotonic()
        patience = patience or now + 0.002
        if now > deadline:
            return False
        time.sleep(_LOOK_SECONDS if now < patience else 0.0005)  # never spin: it may need this very processor


def _read_registers(stopped: Stopped, tid: int) -> bool:
    """Note where a stopped thread stands; False if it does not stand still for us."""
    registers = (ctypes.c_uint64 * _REGISTERS)()
    if _ptrace(_GETREGS, tid, 0, ctypes.addressof(registers)):
        return False
    stopped.places[tid] = (registers[_RIP], registers[_RSP])
    return True


def _release(stopped: Stopped, seized: Sequence[int]) -> None:
    for n, tid in enumerate(seized):
        if tid in stopped.signals:
            _ptrace(_DETACH, tid, 0, stopped.signals[tid])
        if n < _BUSY and stopped.began:
            stopped.seconds = time.monotonic() - stopped.began
    # A tracer can leave a thread alone only while it stands: late ones stop at last on their way out of the kernel, and
    # where something was refused half way some were not asked to stop yet.
    for tid in seized:
        if tid not in stopped.signals:
            _ptrace(_INTERRUPT, tid)
            if _wait(stopped, tid, time.monotonic() + _LEAVE_SECONDS) and tid in stopped.signals:
                _ptrace(_DETACH, tid, 0, stopped.signals[tid])


@contextmanager
def _first_in_line() -> Iterator[None]:
    """Real-time priority where the kernel lets us have it: a process that stands still must not wait for our turn too.

    Whatever is waited for meanwhile is waited for asleep, so that the threads that have to stop get a processor.
    """
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO)))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


@contextmanager
def standstill(
    pid: int, memory: int | None = None, restorers: Sequence[int] = (), code: Sequence[tuple[int, int]] = ()
) -> Iterator[Stopped]:
    """Stop every thread of `pid` for the body of the `with`. Raises `TracingRefused`.

    With its `memory`, open, stacks are read as well: for the places that signals have interrupted, known by
    `restorers`, where handlers return to; and for threads inside of `code` (address, size).

    Threads in an uninterruptible wait of the kernel's (a device driver's) are in `late`: they will stop on their way
    out of it, before they execute another instruction of their program.

    The threads that have used most processor time stand the shortest: of some hundred threads most only ever wait.
    """
    stopped = Stopped(pid)

    def look() -> None:
        if memory is not None:
            _look(stopped, memory, restorers, code)

    with _first_in_line():
        yield from _stand_still(stopped, look)


def _stand_still(stopped: Stopped, look: Callable[[], None]) -> Iterator[Stopped]:
    seized: set[int] = set()
    order: list[int] = []  # the busiest last
    try:
        _seize_all(stopped, seized)
        order = sorted(seized, key=lambda tid: _ran(stopped.pid, tid))
        _stop(stopped, order[:-_BUSY])
        look()  # at those that only wait, before the busy ones have to stop too
        stopped.began = time.monotonic()
        _stop(stopped, order[-_BUSY:])
        for _ in range(8):  # threads made by one that was not yet stopped
            before = set(seized)
            _seize_all(stopped, seized)
            if seized == before:
                break
            order += seized - before
            _stop(stopped, seized - before)
        look()
        yield stopped
    finally:
        _release(stopped, [*reversed(order), *seized.difference(order)])


def _look(stopped: Stopped, memory: int, restorers: Sequence[int], code: Sequence[tuple[int, int]]) -> None:
    """Read the stacks of those that stand and have not been looked at."""

    def ours(address: int) -> bool:
        return any(start <= address < start + size for start, size in code)

    for tid in stopped.places.keys() - stopped.interrupted.keys():
        rip, rsp = stopped.places[tid]
        stack = _stack(memory, tid, rsp)
        stopped.interrupted[tid] = interrupted = list(_interrupted(stack, restorers))
        top = stack[8 : 8 + _TOP_BYTES] if code else b""
        words = (word for (word,) in struct.iter_unpack("<Q", top[: len(top) // 8 * 8]))
        if ours(rip) or any(map(ours, interrupted)) or any(map(ours, words)):
            stopped.inside.add(tid)


def _stack(memory: int, tid: int, rsp: int) -> bytes:
    """From the word below the stack pointer on: what a handler that is just returning has returned to stands there."""
    mask = ctypes.c_uint64()
    unknown = _ptrace(_GETSIGMASK, tid, ctypes.sizeof(mask), ctypes.addressof(mask))
    try:
        return os.pread(memory, _HANDLER_BYTES if unknown or mask.value else _STACK_BYTES, rsp - 8)
    except (OSError, OverflowError):  # it has no stack
        return b""


def _interrupted(stack: bytes, restorers: Sequence[int]) -> Iterator[int]:
    """Where a thread goes on after the signal handlers that it is amid of."""
    for restorer in restorers:
        word = struct.pack("<Q", restorer)
        sought = word.rstrip(b"\0")  # zeros, of which stacks are full, make a search slow
        at = stack.find(sought)
        while at >= 0:
            if at % 8 == 0 and at + _SIGNAL_RIP + 8 <= len(stack) and stack[at : at + 8] == word:
                yield struct.unpack_from("<Q", stack, at + _SIGNAL_RIP)[0]
            at = stack.find(sought, at + 1)


def _ran(pid: int, tid: int) -> int:
    """Nanoseconds that a thread has had a processor; 0 where it has ended."""
    try:
        with open(f"/proc/{pid}/task/{tid}/schedstat", "rb") as file:
            return int(file.read().split()[0])
    except (OSError, IndexError):
        return 0


def _stop(stopped: Stopped, tids: Iterable[int]) -> None:
    for tid in tids:
        _ptrace(_INTERRUPT, tid)
    _collect(stopped, tids)


def _collect(stopped: Stopped, tids: Iterable[int]) -> None:
    """Wait until each has stopped. One that only lacks a processor could stand anywhere: it must be waited for."""
    began = time.monotonic()
    for tid in tids:
        if _wait(stopped, tid, began + _LATE_SECONDS):
            continue
        while (state := _state(stopped.pid, tid)) != "D":
            if _wait(stopped, tid, time.monotonic() + _LATE_SECONDS):
                break
            if state == "t" and _read_registers(stopped, tid):  # frida, in this process, has taken the news of it
                stopped.signals[tid] = 0
                break
            _ptrace(_INTERRUPT, tid)
            if time.monotonic() > began + _STOP_SECONDS:
                text = f"did not stop within {_STOP_SECONDS:g} s (state {state})"
                raise TracingRefused(f"thread {tid} of process {stopped.pid} {text}")
        else:
            stopped.late.add(tid)


def _state(pid: int, tid: int) -> str:
    """One letter, as /proc has it; "X" if the thread has ended."""
    try:
        return Path(f"/proc/{pid}/task/{tid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "X"


@dataclass(frozen=True)
class Patch:
    """`before` is replaced by `after` at `address`; `length` bytes from there are instructions that move elsewhere."""

    name: str
    address: int
    before: bytes
    after: bytes
    length: int


def _memory(pid: int) -> int:
    try:
        return os.open(f"/proc/{pid}/mem", os.O_RDWR)
    except OSError as error:
        raise TracingRefused(f"/proc/{pid}/mem: {error.strerror}") from None


def _in_the_way(stopped: Stopped, patches: Iterable[Patch]) -> bool:
    interiors = [(p.address + 1, p.address + p.length) for p in patches]
    places = [rip for rip, _ in stopped.places.values()]
    places += [place for its in stopped.interrupted.values() for place in its]
    return any(a <= place < b for place in places for a, b in interiors)


def apply(pid: int, patches: list[Patch], restorers: Sequence[int] = (), *, attempts: int = 200) -> float:
    """Put every patch in. Returns the seconds its busiest threads stood still. Raises `TracingRefused`.

    All or nothing: if some address does not hold what it should, nothing is written. `restorers`: where the target's
    signal handlers return to, for the places that signals have interrupted.
    """
    memory = _memory(pid)
    try:
        for attempt in range(attempts):
            with standstill(pid, memory, restorers) as stopped:
                clear = not _in_the_way(stopped, patches)
                if clear:
                    for patch in patches:
                        if os.pread(memory, len(patch.before), patch.address) != patch.before:
                            raise TracingRefused(f"{patch.name} has been changed by somebody else")
                    for patch in patches:
                        os.pwrite(memory, patch.after, patch.address)
            if clear:
                return stopped.seconds
            time.sleep(min(0.05, 0.001 * 1.2**attempt))  # one that stands there may have to wait for a processor
    finally:
        os.close(memory)
    raise TracingRefused("a thread never left the first instructions of a driver function")


def revert(
    pid: int,
    patches: list[Patch],
    code: list[tuple[int, int]],
    inside: Callable[[], int],
    seconds: float,
    restorers: Sequence[int] = (),
) -> tuple[float, bool]:
    """Take the patches out, then wait until no thread is in `code` any more.

    Returns (the longest standstill, whether the code is free). Nothing new can enter: a thread is in there only if its
    instruction pointer is, now or where a signal has interrupted it, if a return address on the top of its stack is, or
    if it counts in `inside()`.
    """
    memory = _memory(pid)
    longest, deadline = 0.0, time.monotonic() + seconds
    try:
        with standstill(pid, memory, restorers, code) as stopped:
            for patch in patches:
                if os.pread(memory, len(patch.after), patch.address) == patch.after:
                    os.pwrite(memory, patch.before, patch.address)
            free = not stopped.inside
        longest = stopped.seconds
        while not free or inside():
            if time.monotonic() > deadline:
                return longest, False
            time.sleep(0.005)
            if inside():
                continue
            with standstill(pid, memory, restorers, code) as stopped:
                free = not stopped.inside
            longest = max(longest, stopped.seconds)
        return longest, True
    finally:
        os.close(memory)
