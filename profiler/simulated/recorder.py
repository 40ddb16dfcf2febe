"""Where the simulated runtime writes its calls, and from where collectors take them. Loads no torch."""

from __future__ import annotations

import threading
import time
from typing import Any

from .. import sites
from ..calls import Call, Frame, Role
from ..report import Note


class Sink:
    """What one collector has been given since it started."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.kernels_run = 0
        self._notes: dict[tuple[str, str, str, int], Note] = {}

    def note(self, kind: str, text: str, file: str, line: int) -> None:
        key = (kind, text, file, line)
        found = self._notes.get(key)
        if found is None:
            self._notes[key] = Note(kind=kind, text=text, file=file or None, line=line or None)
        else:
            found.count += 1

    def notes(self) -> list[Note]:
        return list(self._notes.values())


class _Thread(threading.local):
    """What is known of the calling thread.

    `origin`: the stack that started it; `orphans`: calls with no user frame; `has_device`: "cuda" is the device here;
    `loads_to_cpu`: torch.load is under way, and leaves tensors on the CPU.
    """

    def __init__(self) -> None:
        self.origin: tuple[Frame, ...] = ()
        self.orphans: list[Call] = []
        self.has_device = False
        self.loads_to_cpu = False


class Recorder:
    """The process's list of sinks. Recording nothing costs one attribute test a call."""

    def __init__(self) -> None:
        self.device_open = False
        self.sinks: tuple[Sink, ...] = ()
        self.thread = _Thread()
        self._lock = threading.Lock()

    def add(self, sink: Sink) -> None:
        with self._lock:
            self.sinks = (*self.sinks, sink)

    def remove(self, sink: Sink) -> None:
        with self._lock:
            self.sinks = tuple(s for s in self.sinks if s is not sink)

    def stack(self, call: Call | None = None, skip: int = 2) -> tuple[Frame, ...]:
        """The calling thread's stack; on a thread without user frames, followed by the stack that started it."""
        stack = sites.capture(skip=skip)
        thread = self.thread
        if thread.origin and not any(sites.is_foreign(frame.file) for frame in stack):
            if call is not None:
                thread.orphans.append(call)
            return (*stack, *thread.origin)
        return stack

    def emit(self, api: str, role: Role, *, with_stack: bool = False, **fields: Any) -> Call | None:
        """Record one call, now, of this thread. Returns it, or None where nobody records."""
        sinks = self.sinks
        if not sinks:
            return None
        call = Call(api=api, role=role, ts_ns=time.perf_counter_ns(), thread=threading.get_native_id(), **fields)
        if with_stack:
            call.stack = self.stack(call, skip=3)
        for sink in sinks:
            sink.calls.append(call)
        return call

    def note(self, kind: str, text: str, stack: tuple[Frame, ...]) -> None:
        frame = sites.blamed(stack)
        for sink in self.sinks:
            sink.note(kind, text, frame.file if frame else "", frame.line if frame else 0)

    def ran(self, kernels: int) -> None:
        for sink in self.sinks:
            sink.kernels_run += kernels


RECORDER = Recorder()
