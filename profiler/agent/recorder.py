"""Between the thread that steps and the agent's thread: one recording at a time, swapped at step boundaries.

The stepping thread pays one attribute test while nothing records. A recording is begun and ended by the agent's
thread where the collectors allow it; those with `thread_bound` (torch.profiler belongs to the thread that started it)
are begun and ended by the stepping thread at its next boundary.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import Any, Protocol

from ...errors import BadInput, Unreachable
from ..collectors import choose
from ..collectors.base import CannotCount, Collector
from ..recording import Recording
from ..report import Note, PlannerFigures
from ..session import Profiler
from ..windows import StepWindow
from .protocol import MAX_CALLS, MAX_STEPS

logger = logging.getLogger("syncfree")


class PlannerCounters(Protocol):
    """What a planner inside the host program counts; see `Recorder.planner`."""

    def mark(self) -> Any:
        """The counters now."""
        ...

    def figures(self, since: Any = None) -> PlannerFigures:
        """What was counted since a mark."""
        ...

    def notes(self) -> list[Note]:
        """What a report should say beside the figures."""
        ...


class Session:
    """One recording, from start until its parts were fetched or its lease ended."""

    def __init__(
        self,
        profiler: Profiler,
        notes: list[Note],
        steps: int | None,
        bound: bool,
        planner: PlannerCounters | None = None,
    ) -> None:
        self.token = secrets.token_hex(8)
        self.began = time.monotonic()
        self.ended: float | None = None
        self.classes: dict[str, int] = {}
        self.error: str | None = None
        self.cannot_count = False  # the error is that a collector cannot work here
        self.recording: Recording | None = None  # what may be fetched: the whole once it ended, or the part taken last
        self._profiler = profiler
        self._notes = notes
        self._planner = planner
        self._planned_before = None if planner is None else planner.mark()
        self._wanted = steps
        self._bound = bound
        self._lock = threading.Lock()
        self._window: StepWindow | None = None
        self._closing = False
        self._halted = False
        self._collected = False

    # ----------------------------------------------------- the stepping thread

    def begin_step(self, batch_class: str, about: dict[str, Any]) -> StepWindow | None:
        with self._lock:
            if self._wanted is not None and self.steps >= self._wanted:
                self._closing = True  # not at the end of the last one: its output may still be fetched
            if self._closing:
                if self._bound:
                    self._halt()
                return None
            if self._bound and not self._profiler.recording:
                self._profiler.start()
            self._window = self._profiler.begin_step(batch_class, **about)
            return self._window

    def end_step(self) -> None:
        with self._lock:
            window, self._window = self._window, None
            if window is None:
                return
            self._profiler.end_step()
            self.classes[window.batch_class] = self.classes.get(window.batch_class, 0) + 1
            if self.steps >= MAX_STEPS and self._wanted != MAX_STEPS:
                text = f"the recording ended at {MAX_STEPS} steps, the most that an agent keeps"
                self._notes.append(Note(kind="partial", text=text))
                self._closing = True
            if self._closing and self._bound:
                self._halt()

    def reopen_step(self) -> StepWindow | None:
        with self._lock:
            if self._closing or self._window is not None:
                return None
            self._window = self._profiler.reopen_step()
            if self._window is not None:
                self.classes[self._window.batch_class] -= 1
            return self._window

    def begin_phase(self, name: str) -> None:
        with self._lock:
            if self._window is not None:
                self._profiler.begin_phase(name)

    def end_phase(self) -> None:
        with self._lock:
            if self._window is not None:
                self._profiler.end_phase()

    def begin_allowed(self) -> None:
        self._profiler.begin_allowed()

    def end_allowed(self) -> None:
        self._profiler.end_allowed()

    def fail(self, error: BaseException) -> None:
        """A collector raised: the recording is over, the host program goes on."""
        with self._lock:
            if self.error is None:
                self.cannot_count = isinstance(error, Unreachable)
                told = str(error) if self.cannot_count else f"{type(error).__name__}: {error}"
                self.error = told.splitlines()[0]
            self._window, self._closing = None, True

    # ------------------------------------------------------- the agent's thread

    @property
    def steps(self) -> int:
        """Steps kept now; fewer than `classes` counts once parts were taken."""
        return self._profiler.steps_recorded

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began

    @property
    def state(self) -> str:
        if self.error is not None:
            return "failed"
        if self._collected:
            return "stopped"
        return "stopping" if self._closing else "recording"

    @property
    def rolling(self) -> bool:
        """Whether parts can be taken while it goes on."""
        return not self._bound and self._profiler.rolling

    @property
    def finished(self) -> bool:
        """Nothing of it is left to be done in the host program."""
        return self._halted

    def close(self, force: bool = False) -> None:
        """No step begins any more. `force`: the open step is given up too."""
        with self._lock:
            self._closing = True
            if force and self._window is not None:
                self._profiler.discard_step()
                self._window = None
                self._notes.append(Note(kind="partial", text="the last step was still running and was left out"))

    def advance(self, force: bool = False) -> None:
        """End a closed recording as soon as no step is open. `force`: do not wait for the stepping thread."""
        with self._lock:
            ready = self._closing and self._window is None
            bound = self._bound and self._profiler.recording and not force
        if ready and not bound and not self._halted:
            self._halt()
        if self._halted and not self._collected and self.error is None:
            self._collect()

    def take(self) -> None:
        """Make the steps so far the part to be fetched; recording goes on. Raises `BadInput` where it cannot."""
        with self._lock:
            if self._closing or not self._profiler.recording:
                raise BadInput("take: the recording is not running")
            if not self._profiler.rolling:
                raise BadInput("take: a collector of this recording hands its calls over at the end only")
            self.recording = self._profiler.take()
            self._add_planner(self.recording)

    def _halt(self) -> None:
        if self._halted:
            return
        self._halted = True
        self.ended = time.monotonic()
        try:
            if self._profiler.recording:
                self._profiler.halt()
        except Exception as error:  # noqa: BLE001 - a collector's failure ends the recording, never the host program
            self.error = self.error or f"{type(error).__name__}: {error}".splitlines()[0]

    def _collect(self) -> None:
        try:
            recording = self._profiler.collect()
        except Exception as error:  # noqa: BLE001 - as in _halt
            self.error = f"{type(error).__name__}: {error}".splitlines()[0]
            return
        for item in recording.evidence:
            if len(item.calls) > MAX_CALLS:
                text = f"{item.name}: {len(item.calls) - MAX_CALLS} calls after the first {MAX_CALLS} were left out"
                del item.calls[MAX_CALLS:]
                self._notes.append(Note(kind="partial", text=text))
        recording.notes = [*self._notes, *recording.notes]
        self._add_planner(recording)
        if self._planner is not None:
            recording.notes += self._planner.notes()
        recording.source.partial = recording.source.partial or any(n.kind == "partial" for n in self._notes)
        self.recording, self._collected = recording, True

    def _add_planner(self, recording: Recording) -> None:
        """What the planner counted since the part before."""
        if self._planner is not None:
            recording.planner = self._planner.figures(self._planned_before)
            self._planned_before = self._planner.mark()


class Recorder:
    """What an engine's hooks call, on the thread that steps; it never raises into them.

    `session` is None while nothing records: hooks test it before they gather what describes a step.
    """

    def __init__(self, *, rank: int = 0, engine: str | None = None) -> None:
        self.rank = rank
        self.engine = engine
        self.session: Session | None = None
        self.disabled: str | None = None  # why an engine's hooks were switched off
        self.planner: PlannerCounters | None = None  # of a planner that serves this process

    def begin_step(self, batch_class: str = "unknown", **about: Any) -> StepWindow | None:
        """Open a step, as `Profiler.begin_step`; None while nothing records."""
        session = self.session
        if session is None:
            return None
        try:
            return session.begin_step(batch_class, about)
        except Exception as error:  # noqa: BLE001 - the host program must not notice
            self._fail(session, error)
            return None

    def end_step(self) -> None:
        session = self.session
        if session is not None:
            try:
                session.end_step()
            except Exception as error:  # noqa: BLE001 - the host program must not notice
                self._fail(session, error)

    def reopen_step(self) -> StepWindow | None:
        """Go on with the step that ended last, to fetch its output; close it with `end_step` again."""
        session = self.session
        if session is None:
            return None
        try:
            return session.reopen_step()
        except Exception as error:  # noqa: BLE001 - the host program must not notice
            self._fail(session, error)
            return None

    def begin_phase(self, name: str) -> None:
        session = self.session
        if session is not None:
            try:
                session.begin_phase(name)
            except Exception as error:  # noqa: BLE001 - the host program must not notice
                self._fail(session, error)

    def end_phase(self) -> None:
        session = self.session
        if session is not None:
            try:
                session.end_phase()
            except Exception as error:  # noqa: BLE001 - the host program must not notice
                self._fail(session, error)

    def begin_allowed(self) -> None:
        """Waits of this thread are meant until `end_allowed`, as `Profiler.begin_allowed`; any thread may say so."""
        session = self.session
        if session is not None:
            session.begin_allowed()

    def end_allowed(self) -> None:
        session = self.session
        if session is not None:
            session.end_allowed()

    def _fail(self, session: Session, error: Exception) -> None:
        session.fail(error)
        self.session = None
        logger.warning("syncfree: a recording was given up: %s: %s", type(error).__name__, error)

    # ------------------------------------------------------- the agent's thread

    def start(self, collectors: str = "auto", steps: int | None = None) -> Session:
        """Begin a recording. Raises `BadInput`, or `CannotCount` where a collector cannot work here."""
        chosen, notes = choose(collectors)
        bound = any(getattr(collector, "thread_bound", False) for collector in chosen)
        profiler = self._profiler(chosen)
        try:
            for collector in chosen:
                if hasattr(collector, "check"):
                    collector.check()
            if not bound:
                profiler.start()
        except Unreachable as error:
            raise CannotCount(str(error)) from error
        session = Session(profiler, notes, steps, bound, self.planner)
        self.session = session
        return session

    def _profiler(self, chosen: list[Collector]) -> Profiler:
        return Profiler(chosen, rank=self.rank, engine=self.engine, kind="live", max_steps=MAX_STEPS)

    def detach(self, session: Session) -> None:
        """The session is over: hooks are free again."""
        if self.session is session:
            self.session = None
