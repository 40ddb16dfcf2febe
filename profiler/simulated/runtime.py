"""The simulated CUDA runtime: streams, events, what the host knows to be complete, and the calls it records.

Nothing here computes. Work is numbered per stream; an event remembers how far each stream had come; the host learns
that work is complete only by waiting or by a query. From that follow hazards (a copy read before anything proved it
complete) and which frees cannot wait. Loads no torch.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

from .. import sites
from ..calls import Call, Direction, Frame, Role, Wait
from .recorder import RECORDER

CAPTURE_ERROR = (
    "CUDA error: operation not permitted when stream is capturing (simulated device): {what}. "
    "A graph capture cannot contain a wait of the host"
)
BLIND_PAGEABLE_BYTES = 4 << 20  # measured: a pageable upload of this size blocks the host without any sync call


class Stream:
    """One stream: `clock[s]` is how much of stream s's work is ordered before what is enqueued here next."""

    def __init__(self, number: int, priority: int = 0) -> None:
        self.number = number
        self.priority = priority
        self.enqueued = 0
        self.clock: dict[int, int] = {}
        self.capture: Any = None  # graphs.Capture while this stream is being captured

    def snapshot(self) -> dict[int, int]:
        return {**self.clock, self.number: self.enqueued}


class PendingCopy:
    """An asynchronous copy into pinned memory that nothing has proved complete yet."""

    def __init__(self, stream: int, position: int, stack: tuple[Frame, ...]) -> None:
        self.stream = stream
        self.position = position
        self.stack = stack


class _Current(threading.local):
    stream: Stream | None = None


class Runtime:
    """One context's device. `pending`: asynchronous copies by the storage they write."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.default = Stream(next(self._numbers))
        self.streams: list[Stream] = [self.default]
        self._current = _Current()
        self.done: dict[int, int] = {}  # what the host knows to be complete, by stream
        self._seen_done: dict[int, int] = {}  # the same, of what the present recording has seen
        self._seen_by: object = None  # the recording that `_seen_done` belongs to
        self.pending: dict[Any, PendingCopy] = {}
        self.captures = 0
        self._last_read: dict[tuple[str, int], Any] = {}  # by source line

    # ---------------------------------------------------------------- streams

    def new_stream(self, priority: int = 0) -> Stream:
        stream = Stream(next(self._numbers), priority)
        self.streams.append(stream)
        return stream

    @property
    def current(self) -> Stream:
        return self._current.stream or self.default

    def set_current(self, stream: Stream | None) -> Stream:
        previous = self.current
        self._current.stream = stream
        return previous

    # ------------------------------------------------------------------- work

    def launch(self, count: int = 1, api: str = "cudaLaunchKernel") -> None:
        """`count` kernels enqueued on the current stream."""
        stream = self.current
        stream.enqueued += count
        captured = stream.capture is not None
        if RECORDER.sinks:
            for _ in range(count):
                RECORDER.emit(api, Role.LAUNCH, captured=captured)
            if not captured:
                RECORDER.ran(count)
        if captured:
            stream.capture.kernels += count

    def memset(self, count: int = 1) -> None:
        stream = self.current
        stream.enqueued += count
        for _ in range(count):
            RECORDER.emit("cudaMemsetAsync", Role.MEMSET, captured=stream.capture is not None)

    def copy(
        self,
        direction: Direction,
        nbytes: int,
        *,
        pageable: bool | None = None,
        wait: bool,
        into: Any = None,
        value: Any = None,
    ) -> None:
        """One cudaMemcpyAsync on the current stream, followed by a stream wait where `wait`.

        A device-to-host copy into pageable memory blocks with or without one. `into`: the pinned storage it writes;
        `value`: what is read, to tell a site that reads one value again and again.
        """
        stream = self.current
        if stream.capture is not None and (wait or (direction is Direction.D2H and pageable)):
            raise RuntimeError(CAPTURE_ERROR.format(what=f"a {direction.value} copy that waits"))
        stream.enqueued += 1
        blocking = direction is Direction.D2H and bool(pageable) and not wait
        call = RECORDER.emit(
            "cudaMemcpyAsync",
            Role.COPY,
            with_stack=direction is not Direction.D2D,
            direction=direction,
            nbytes=nbytes,
            pageable=pageable,
            blocking=blocking,
            maybe=False,  # measured: a small pageable upload does not wait, a large one does (noted below)
            captured=stream.capture is not None,
        )
        if call is not None and value is not None:
            call.repeat_value = self._read_again(call.stack, value)
        if wait:
            self._emit_wait("cudaStreamSynchronize", Wait.STREAM, call)
        if wait or blocking:
            self.learn(stream.snapshot())
        elif into is not None and direction is Direction.D2H:
            stack = call.stack if call is not None else RECORDER.stack()
            self.pending[into] = PendingCopy(stream.number, stream.enqueued, stack)
        if direction is Direction.H2D and pageable and not wait and nbytes >= BLIND_PAGEABLE_BYTES and call is not None:
            text = f"a pageable upload of {nbytes} bytes blocks the host without a sync call; it is not counted"
            RECORDER.note("blind", text, call.stack)

    def _read_again(self, stack: tuple[Frame, ...], value: Any) -> bool:
        frame = sites.blamed(stack)
        if frame is None:
            return False
        site = (frame.file, frame.line)
        again = bool(self._last_read.get(site) == value)
        self._last_read[site] = value
        return again

    def graph_launch(self, kernels: int) -> None:
        self.current.enqueued += 1
        RECORDER.emit("cudaGraphLaunch", Role.GRAPH_LAUNCH, captured=self.current.capture is not None)
        RECORDER.ran(kernels)

    def other(self, api: str) -> None:
        RECORDER.emit(api, Role.OTHER)

    def allocate(self, api: str) -> None:
        """Memory from the driver: measured not to wait, even while the device is busy."""
        RECORDER.emit(api, Role.ALLOC, maybe=False)

    def free(self, api: str = "cudaFree") -> None:
        """A free waits for the device; not where this recording has seen the device drained and idle since."""
        RECORDER.emit(api, Role.FREE, with_stack=True, maybe=not self.is_seen_idle())

    # ------------------------------------------------------------------ waits

    def _emit_wait(self, api: str, wait: Wait, copy: Call | None = None) -> None:
        call = RECORDER.emit(api, Role.SYNC, with_stack=copy is None, wait=wait)
        if call is not None and copy is not None:
            call.stack = copy.stack
            orphans = RECORDER.thread.orphans
            if orphans and orphans[-1] is copy:
                orphans.append(call)

    def stream_wait(self) -> None:
        """A wait for the current stream inside an operator."""
        self.synchronize_stream(self.current)

    def synchronize_device(self) -> None:
        if self.captures:
            raise RuntimeError(CAPTURE_ERROR.format(what="torch.cuda.synchronize()"))
        self._emit_wait("cudaDeviceSynchronize", Wait.DEVICE)
        for stream in self.streams:
            self.learn(stream.snapshot())

    def synchronize_stream(self, stream: Stream) -> None:
        if stream.capture is not None:
            raise RuntimeError(CAPTURE_ERROR.format(what="Stream.synchronize()"))
        self._emit_wait("cudaStreamSynchronize", Wait.STREAM)
        self.learn(stream.snapshot())

    def synchronize_event(self, snapshot: dict[int, int] | None, capture: Any) -> None:
        if capture is not None:
            raise RuntimeError(CAPTURE_ERROR.format(what="Event.synchronize()"))
        self._emit_wait("cudaEventSynchronize", Wait.EVENT)
        self.learn(snapshot or {})

    def query(self, api: str, snapshot: dict[int, int] | None) -> bool:
        """A query answers True: simulated work is complete as soon as somebody asks."""
        call = RECORDER.emit(api, Role.POLL, with_stack=True)
        if call is not None:
            RECORDER.note("blind", f"{api}: a query is no sync, and a loop of them waits unseen", call.stack)
        self.learn(snapshot or {})
        return True

    def learn(self, snapshot: dict[int, int]) -> None:
        """The host now knows that everything up to `snapshot` is complete."""
        done = self.done
        if self._seen_by is not RECORDER.sinks:
            self._seen_by, self._seen_done = RECORDER.sinks, {}
        for number, position in snapshot.items():
            if done.get(number, 0) < position:
                done[number] = position
            self._seen_done[number] = max(position, self._seen_done.get(number, 0))
        if self.pending:
            for storage in [s for s, c in self.pending.items() if done.get(c.stream, 0) >= c.position]:
                del self.pending[storage]

    def is_seen_idle(self) -> bool:
        """Whether the present recording itself has seen the device drained, and nothing enqueued since."""
        if self._seen_by is not RECORDER.sinks:
            return False
        return bool(self._seen_done) and all(self._seen_done.get(s.number, -1) >= s.enqueued for s in self.streams)

    # ---------------------------------------------------------------- hazards

    def host_reads(self, storage: Any, how: str) -> None:
        """The host reads memory; a hazard where an asynchronous copy into it may still be under way."""
        copy = self.pending.get(storage)
        if copy is None or not RECORDER.sinks:
            return
        source = sites.blamed(copy.stack)
        where = f"{source.file}:{source.line}" if source else "an unknown place"
        text = f"{how} reads pinned memory that the asynchronous copy of {where} may still be writing: wait first"
        RECORDER.note("hazard", text, RECORDER.stack())
