"""The probe on this very process: exact counts at some tens of nanoseconds a call.

A helper process attaches to us, writes hooks into the driver library and waits; the hooks count into memory of ours
that `mark` reads by address. Nothing else is in the way of a step. When recording stops, the hooks are taken out.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time

from ...errors import Unreachable
from .. import sites
from ..calls import Call
from ..probe import arena as layout
from ..probe import frames
from ..probe.attach import Attachment
from ..probe.entry_points import VENDORS
from ..probe.events import Decoder
from ..probe.permission import loaded, why_not
from ..report import Note
from .base import Counters

MAX_CALLS = 1_000_000  # sync calls kept with their stacks; counting goes on beyond
_DRAIN_AT = layout.RING // 2
_LIBRARIES = tuple(prefix for vendor in VENDORS.values() for prefix in vendor.libraries)
_TRIAL_SECONDS = 1.0
_thread_state = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))
_keep: list[layout.Arena] = []  # arenas that a thread may still write to


class ProbeCollector:
    """Counts driver calls of all threads of this process. One at a time per process."""

    name = "probe"
    rolling = True
    sees = frozenset({"syncs", "maybe", "copies", "bytes", "launches", "captured", "blocked"})
    blind = (
        "waits without a waiting call: polling loops, and pageable host-to-device copies that block; "
        "kernels inside a graph"
    )

    def __init__(self) -> None:
        self._attachment: Attachment | None = None
        self._arena: layout.Arena | None = None
        self._decoder: Decoder | None = None
        self._records: list[bytes] = []
        self._over = 0
        self._notes: list[Note] = []
        self._pid = 0
        self._last = Counters()
        self._step_thread = 0  # which one `mark` was called by, as the arena has it
        self.api: dict[str, int] | None = None  # calls by entry point, once stopped
        self.pause_ms = 0.0  # how long our busiest threads stood still while hooks were written
        self.attach_seconds = 0.0

    @staticmethod
    def available() -> str | None:
        """Why the probe cannot work in this process; None if it should."""
        return why_not() or _runtime_missing()

    # ----------------------------------------------------------------- life

    def start(self) -> None:
        """Attach and hook. Raises `Unreachable` with the reason where this cannot work."""
        if self._attachment is not None:
            raise Unreachable("probe: already attached")
        reason = self.available()
        if reason is not None:
            raise Unreachable(f"probe: {reason}")
        self.__init__()  # type: ignore[misc]
        self._pid = os.getpid()
        self._arena = layout.Arena()
        try:
            with _Carrier() as carrier:
                self._attachment = Attachment(self._pid, carrier=carrier.native_id)
            installed = self._attachment.install(
                arena=self._arena.address, preferred=_torch_vendor(), hip_major=_hip_major()
            )
        except BaseException:
            self._let_go()
            raise
        self.pause_ms, self.attach_seconds = installed.pause_ms, self._attachment.attach_seconds
        self._decoder = Decoder(installed.names, self._arena.peek)
        if installed.missing:
            self._note("blind", f"not hooked, too short: {', '.join(installed.missing)}")
        self._calibrate(installed.callbacks["stack"], installed.callbacks["waiter"])
        atexit.register(self.stop)

    def _calibrate(self, walker: int, waiter: int) -> None:
        """Let the hooks read Python frames, after trial walks have found what `sys._getframe` finds."""
        assert self._arena is not None
        self._step_thread = 0
        try:
            words = frames.calibrate()
            layout.set_python(self._arena.poke, words, sites.OWN, sites.STDLIB)
            if not _walk_matches(walker, self._arena):
                raise frames.LayoutUnknown("a trial walk did not find the frames that sys._getframe() finds")
        except (frames.LayoutUnknown, OSError) as error:  # a process that changed its user may not read itself
            self._arena.poke(layout.OFFSETS["python"], bytes(8))
            self._note("blind", f"syncs have no stacks here: {error}")
            return
        if not words["others"] or not _waiter_matches(waiter, self._arena):
            self._arena.poke(layout.OFFSETS["python"] + 8 * layout.PYTHON.index("others"), bytes(8))
            text = "waits of helper threads in which no frame is the program's have no line of the program's here"
            self._note("blind", f"{text}: the frames of a thread that waits for them cannot be read")

    def stop(self) -> None:
        """Take the hooks out and let the helper end."""
        atexit.unregister(self.stop)
        attachment, arena = self._attachment, self._arena
        if attachment is None or arena is None:
            return
        if os.getpid() != self._pid:  # a forked child has a copy of the hooks, but the helper is its parent's
            self._attachment = self._arena = None
            _keep.append(arena)
            return
        layout.set_step_thread(arena.poke, 0, 0, 0)
        died = not attachment.alive
        self._last = self._read()
        self._take_records()
        attachment.detach()
        self._take_records()
        self._last = self._read()
        if attachment.installed is not None:
            names = attachment.installed.names
            self.api = {n: c for n, c in zip(names, layout.calls(arena.peek, len(names)), strict=True) if c}
        self._describe_losses(died)
        self._calls = self._decoder.decode(self._records) if self._decoder else []
        self._records = []
        self._describe_blind()
        self._let_go()

    def _let_go(self) -> None:
        attachment, arena = self._attachment, self._arena
        self._attachment = self._arena = None
        if attachment is not None:
            attachment.close()
        if arena is None:
            return
        if attachment is not None and attachment.lingering:
            _keep.append(arena)
        else:
            arena.close()

    # -------------------------------------------------------------- reading

    def mark(self, now_ns: int) -> Counters:
        arena = self._arena
        if arena is None:
            return self._last
        if threading.get_native_id() != self._step_thread:
            self._step_thread = _steps_here(arena)
        if arena.pending() > _DRAIN_AT:
            self._take_records()
        return self._read()

    def _read(self) -> Counters:
        assert self._arena is not None
        c = self._arena.counters()
        return Counters(
            d2h=c[0],
            h2d=c[1],
            stream=c[2],
            device=c[3],
            event=c[4],
            memset=c[5],
            copy=c[6],
            maybe=c[7],
            copies_d2h=c[8],
            copies_h2d=c[9],
            copies_d2d=c[10],
            copies_unknown=c[11],
            bytes_d2h=c[12],
            bytes_h2d=c[13],
            kernels=c[14],
            graphs=c[15],
            captured=c[16],
            blocked_ns=c[17],
        )

    def _take_records(self) -> None:
        assert self._arena is not None
        taken = layout.take_records(self._arena.peek, self._arena.poke)
        room = MAX_CALLS - len(self._records)
        self._records += taken[:room]
        self._over += max(0, len(taken) - room)

    def drain(self) -> list[Call]:
        """Sync calls since the last drain; while recording, not at the same time as `mark`."""
        if self._arena is not None and self._decoder is not None:
            self._take_records()
            records, self._records = self._records, []
            return self._decoder.decode(records)
        calls, self._calls = self._calls, []
        return calls

    _calls: list[Call] = []  # noqa: RUF012 - replaced, never changed

    # ---------------------------------------------------------------- notes

    def notes(self) -> list[Note]:
        return list(self._notes)

    def _note(self, kind: str, text: str, count: int = 1) -> None:
        self._notes.append(Note(kind=kind, text=f"probe: {text}", count=count))

    def _describe_losses(self, died: bool) -> None:
        assert self._arena is not None
        peek = self._arena.peek
        dropped = layout.word(peek, "ring_dropped") + self._over
        lost = layout.word(peek, "threads_lost")
        if died:
            self._note("partial", "its helper process died; calls after that were not counted")
        if dropped:
            self._note("blind", f"{dropped} syncs were counted but their source lines were not kept", dropped)
        if lost:
            self._note("partial", f"{lost} calls of threads beyond the first {layout.MAX_THREADS} not counted", lost)
        polls = layout.word(peek, "polls")
        if polls:
            self._note("blind", f"{polls} event or stream queries; a loop of them waits without a sync", polls)

    def _describe_blind(self) -> None:
        if self._decoder is None:
            return
        said = {
            "poll": "a loop of queries waits here; it is no sync call and not counted",
            "pageable": "a host-to-device copy of 4 MiB or more from pageable memory waits here, without a sync call",
        }
        where: dict[tuple[str, str | None, int | None], int] = {}
        for (what, stack), times in self._decoder.blind.items():
            frame = sites.blamed(stack)
            key = (said[what], frame.file if frame else None, frame.line if frame else None)
            where[key] = where.get(key, 0) + times
        for (text, file, line), times in where.items():
            self._notes.append(Note(kind="blind", text=text, file=file, line=line, count=times))


class _Carrier:
    """A thread of ours that waits, so that the injection stops it and not one that works."""

    def __enter__(self) -> _Carrier:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._done.wait, name="syncfree-carrier", daemon=True)
        self._thread.start()
        self.native_id = self._thread.native_id or 0
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()


def _walk_matches(walker: int, arena: layout.Arena) -> bool:
    buffer = ctypes.create_string_buffer(layout.FRAME.size * layout.MAX_FRAMES)
    walk = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(walker)  # calls it without the GIL
    address = ctypes.addressof(buffer)
    found, wanted = walk(address), frames.expected()
    names = layout.code_names(arena.peek)
    walked = [(*(names(code) or ("", "")), line) for code, line in layout.FRAME.iter_unpack(buffer.raw[: 8 * found])]
    return walked == wanted[: layout.MAX_FRAMES]


def _steps_here(arena: layout.Arena) -> int:
    """Make the calling thread the step's own: a helper thread's wait may be blamed on the line that waits for it."""
    native = threading.get_native_id()
    layout.set_step_thread(arena.poke, _thread_state() or 0, threading.get_ident(), native)
    return native


def _waiter_matches(waiter: int, arena: layout.Arena) -> bool:
    """A trial: a thread reads the frames of this one, which waits for it, and finds them and their lines right."""
    buffer = ctypes.create_string_buffer(layout.FRAME.size * layout.MAX_FRAMES)
    walk = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(waiter)  # calls it without the GIL
    address, found = ctypes.addressof(buffer), [0]

    def look() -> None:
        deadline = time.monotonic() + _TRIAL_SECONDS
        while not found[0] and time.monotonic() < deadline:  # until this thread has got to where it waits
            found[0] = walk(address, layout.MAX_FRAMES)

    thread = threading.Thread(target=look, name="syncfree-trial", daemon=True)
    _steps_here(arena)
    try:
        try:
            thread.start()
        except RuntimeError:  # no more threads allowed here: counting goes on without
            return False
        wanted = (thread.join(), frames.expected())[1]  # type: ignore[func-returns-value]
    finally:
        layout.set_step_thread(arena.poke, 0, 0, 0)
    names = layout.code_names(arena.peek)
    read = layout.FRAME.iter_unpack(buffer.raw[: layout.FRAME.size * found[0]])
    walked = [(*(names(code) or ("", "")), line) for code, line in read]
    inside = next((k for k, frame in enumerate(walked) if frame == wanted[0]), 0)
    return inside > 0 and walked[inside:] == wanted[: layout.MAX_FRAMES - inside]


def _torch_vendor() -> str | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return "hip" if getattr(torch.version, "hip", None) else "cuda"


def _hip_major() -> int:
    torch = sys.modules.get("torch")
    version = getattr(getattr(torch, "version", None), "hip", None) or "6"
    return int(str(version).split(".")[0])


def _runtime_missing() -> str | None:
    """Load the driver that torch will use where torch has not done so yet; else nothing is there to hook."""
    if loaded(_LIBRARIES):
        return None
    if _torch_vendor() == "cuda" and getattr(sys.modules["torch"].version, "cuda", None):
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            return f"the CUDA driver library cannot be loaded: {error}"
        return None
    return f"none of {', '.join(_LIBRARIES)} is loaded in this process"
