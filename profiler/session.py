"""`Profiler`: records steps and phases while collectors watch, and ends in a report.

Off the recording path everything is one attribute test; on it a step costs two clock reads and a mark per boundary.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, ParamSpec, TypeVar

import msgspec

from ..errors import NothingMeasured
from .aggregate import Evidence
from .calls import Call
from .collectors import choose
from .collectors.base import Collector, Counters
from .compiling import compilations
from .recording import Recording
from .report import Note, Report, Source
from .windows import PhaseWindow, Region, StepWindow, tag_allowed

P = ParamSpec("P")
R = TypeVar("R")
Collectors = Literal["auto"] | str | Sequence["str | Collector"]
MAX_STEPS = 100_000


class Profiler:
    """Counts syncs, copies and launches per step.

    `collectors`: "auto" (the best that works here), a name, or a sequence of names and `Collector` objects.
    `warmup_steps`: so many first steps are counted but not judged. `max_steps`: recording of new steps stops there and
    the report is marked partial. One thread (the one that steps) drives `step` and `phase`; calls from other threads
    are counted, and told apart.

    Raises `Unreachable` on start if a collector that was asked for by name cannot work here.
    """

    def __init__(
        self,
        collectors: Collectors = "auto",
        *,
        rank: int = 0,
        engine: str | None = None,
        kind: str = "live",
        warmup_steps: int = 0,
        max_steps: int = MAX_STEPS,
    ) -> None:
        self._wanted = collectors
        self._rank = rank
        self._warmup_steps = warmup_steps
        self._max_steps = max_steps
        self._source = Source(kind=kind, engine=engine, ranks=[rank])
        self._collectors: list[Collector] = []
        self._totals: list[Counters | None] = []  # of each collector, at the end; those that `take` gave are taken off
        self._taken: dict[str, Counters] = {}
        self._allowed: list[Region] = []  # closed regions in which the engine's own checker allows waits
        self._regions: dict[int, tuple[int, int]] = {}  # open ones by thread: depth, start
        self._held: dict[str, list[Call]] = {}  # drained by `take`, but later than what it gave
        self._notes: list[Note] = []
        self._steps: list[StepWindow] = []
        self._step: StepWindow | None = None
        self._open_phases: list[str] = []  # nesting; only the innermost has an open window
        self._dropped = 0
        self._index = 0
        self._compilations = 0
        self._report: Report | None = None
        self.recording = False

    # ------------------------------------------------------------------ life

    def start(self) -> Profiler:
        """Begin to record. Raises `RuntimeError` if already recording."""
        if self.recording:
            raise RuntimeError("profiler: already recording; stop() it first")
        self._collectors, self._notes = choose(self._wanted)
        self._steps, self._report, self._dropped, self._index = [], None, 0, 0
        self._taken, self._held, self._allowed, self._regions = {}, {}, [], {}
        started: list[Collector] = []
        try:
            for collector in self._collectors:
                collector.start()
                started.append(collector)
        except BaseException:
            for collector in started:
                collector.stop()
            raise
        self.recording = True
        return self

    def stop(self) -> Report:
        """End the recording (an open step too) and return its report."""
        self.halt()
        self._report = self.collect().build()
        return self._report

    def halt(self) -> None:
        """End the recording and stop the collectors. On the stepping thread: some collectors belong to it."""
        if not self.recording:
            raise RuntimeError("profiler: not recording")
        self.recording = False
        self._totals = []
        with ExitStack() as stack:  # every collector lets go, whatever another one does
            for collector in self._collectors:
                stack.callback(collector.stop)
            self.end_step()
            for collector in self._collectors:
                self._totals.append(collector.mark(time.perf_counter_ns()))

    def collect(self) -> Recording:
        """What a halted recording saw, not aggregated yet. On any thread; once a recording: collectors are drained."""
        if self.recording:
            raise RuntimeError("profiler: still recording; halt() it first")
        pairs = zip(self._collectors, self._totals, strict=True)
        evidence = [self._harvest(collector, totals, collector.drain()) for collector, totals in pairs]
        self._collectors, self._totals = [], []
        if self._dropped:
            text = f"{self._dropped} steps after the first {self._max_steps} were not recorded"
            self._notes.append(Note(kind="partial", text=text, count=self._dropped))
            self._source.partial = True
        _describe(self._source)
        return Recording(source=self._source, steps=self._steps, evidence=evidence, notes=self._notes)

    @property
    def rolling(self) -> bool:
        """Whether `take` works: every collector hands over calls while it runs."""
        return all(getattr(collector, "rolling", False) for collector in self._collectors)

    def take(self) -> Recording:
        """The steps so far, and what was seen in them, while recording goes on; they are forgotten here.

        The step that ended last stays: its output may still be fetched. Not while another thread steps.
        """
        kept = self._steps[-1:]
        steps = self._steps[:-1]
        until = kept[0].start_ns if kept else None
        evidence = []
        allowed = list(self._allowed)
        for collector in self._collectors:
            totals, before = self._so_far(collector, kept), self._taken.get(collector.name, Counters())
            if totals is not None:
                self._taken[collector.name] = totals
                totals = totals - before
            calls = self._held.pop(collector.name, []) + collector.drain()
            if until is not None:
                self._held[collector.name] = [call for call in calls if call.ts_ns >= until]
                calls = [call for call in calls if call.ts_ns < until]
            tag_allowed(calls, allowed)
            part = _evidence(collector, totals, calls)
            part.kernels_run = None  # a sum since the start
            evidence.append(part)
        self._allowed = [region for region in allowed if until is not None and region[2] >= until]
        self._steps = kept
        _describe(self._source)
        return Recording(source=msgspec.structs.replace(self._source), steps=steps, evidence=evidence)

    def _so_far(self, collector: Collector, kept: list[StepWindow]) -> Counters | None:
        """Cumulative counters at the beginning of the step that stays, now if there is none."""
        if not kept:
            return collector.mark(time.perf_counter_ns())
        marks = kept[0].marks.get(collector.name)
        return None if marks is None else marks[0]

    def _harvest(self, collector: Collector, totals: Counters | None, calls: list[Call]) -> Evidence:
        if totals is not None and collector.name in self._taken:
            totals = totals - self._taken[collector.name]
        calls = self._held.pop(collector.name, []) + calls
        tag_allowed(calls, self._allowed)
        return _evidence(collector, totals, calls)

    def __enter__(self) -> Profiler:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        if self.recording:
            self.stop()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """As a decorator: each call of `function` is a step; a recording is started if there is none."""

        @functools.wraps(function)
        def stepped(*args: P.args, **kwargs: P.kwargs) -> R:
            if not self.recording:
                self.start()
            with self.step(name=function.__qualname__):
                return function(*args, **kwargs)

        return stepped

    # ------------------------------------------------------- steps and phases

    def begin_step(self, batch_class: str = "unknown", **about: Any) -> StepWindow | None:
        """Open a step (closing an open one). `about`: fields of `StepWindow` (mixed, num_reqs, num_tokens, name...).

        Returns the window, whose descriptive fields may still be set before the step ends; None when not recording.
        """
        if not self.recording:
            return None
        self.end_step()
        if len(self._steps) >= self._max_steps:
            self._dropped += 1
            return None
        warmup = bool(about.pop("warmup", False)) or self._index < self._warmup_steps
        now = time.perf_counter_ns()
        step = StepWindow(
            start_ns=now,
            end_ns=now,
            thread=threading.get_native_id(),
            rank=self._rank,
            index=self._index,
            batch_class=batch_class,
            warmup=warmup,
            warmup_cause="warmup" if warmup else "",
            **about,
        )
        self._index += 1
        self._compilations = compilations()
        self._step = step
        self._mark_start(step, now)
        return step

    def end_step(self) -> None:
        """Close the open step, and its phase; nothing if there is none."""
        step = self._step
        if step is None:
            return
        now = time.perf_counter_ns()
        self._open_phases.clear()
        self._close_phase(step, now)
        self._mark_end(step, now)
        step.end_ns = now
        if compilations() != self._compilations and not step.warmup:
            step.warmup, step.warmup_cause = True, "compile"
        self._step = None
        self._steps.append(step)

    def reopen_step(self) -> StepWindow | None:
        """Go on with the step that ended last, e.g. to fetch its output; None if there is none, or one is open."""
        if not self.recording or self._step is not None or not self._steps:
            return None
        step = self._steps[-1]
        if step.thread != threading.get_native_id():
            return None
        self._step = self._steps.pop()
        return step

    def discard_step(self) -> None:
        """Forget the open step: it was cut off, and its figures would be too small."""
        self._step = None
        self._open_phases.clear()

    def begin_phase(self, name: str) -> None:
        """Open a phase of the current step: build, forward, sample, output or a name of your own. Phases may nest."""
        step = self._step
        if step is None or threading.get_native_id() != step.thread:
            return
        now = time.perf_counter_ns()
        self._close_phase(step, now)
        self._open_phases.append(name)
        self._open_phase(step, name, now)

    def end_phase(self) -> None:
        step = self._step
        if step is None or not self._open_phases or threading.get_native_id() != step.thread:
            return
        now = time.perf_counter_ns()
        self._open_phases.pop()
        self._close_phase(step, now)
        if self._open_phases:
            self._open_phase(step, self._open_phases[-1], now)

    def begin_allowed(self) -> None:
        """The engine says that waits of this thread are meant, until `end_allowed`; regions may nest."""
        if self.recording:
            thread = threading.get_native_id()
            depth, start = self._regions.get(thread, (0, time.perf_counter_ns()))
            self._regions[thread] = (depth + 1, start)

    def end_allowed(self) -> None:
        thread = threading.get_native_id()
        depth, start = self._regions.pop(thread, (0, 0))
        if depth > 1:
            self._regions[thread] = (depth - 1, start)
        elif depth == 1:
            self._allowed.append((thread, start, time.perf_counter_ns()))

    @contextmanager
    def step(self, batch_class: str = "unknown", **about: Any) -> Iterator[StepWindow | None]:
        """One step of the serving loop: `with p.step(batch_class="decode"): ...`. Fields as in `begin_step`."""
        window = self.begin_step(batch_class, **about)
        try:
            yield window
        finally:
            if window is not None and self._step is window:
                self.end_step()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step: `with p.phase("build"): ...`."""
        self.begin_phase(name)
        try:
            yield
        finally:
            self.end_phase()

    # ---------------------------------------------------------------- marking

    def _open_phase(self, step: StepWindow, name: str, now: int) -> None:
        phase = PhaseWindow(name=name, start_ns=now, end_ns=-1, thread=step.thread)
        self._mark_start(phase, now)
        step.phases.append(phase)

    def _close_phase(self, step: StepWindow, now: int) -> None:
        if step.phases and step.phases[-1].end_ns < 0:
            phase = step.phases[-1]
            self._mark_end(phase, now)
            phase.end_ns = now

    def _mark_start(self, window: StepWindow | PhaseWindow, now: int) -> None:
        for collector in self._collectors:
            counters = collector.mark(now)
            if counters is not None:
                window.marks[collector.name] = (counters, counters)

    def _mark_end(self, window: StepWindow | PhaseWindow, now: int) -> None:
        for collector in self._collectors:
            counters: Counters | None = collector.mark(now)
            if counters is not None:
                window.marks[collector.name] = (window.marks[collector.name][0], counters)

    # ----------------------------------------------------------------- result

    @property
    def steps_recorded(self) -> int:
        """Steps that have ended so far."""
        return len(self._steps)

    @property
    def report(self) -> Report:
        """The report of the recording that ended last. Raises `NothingMeasured` while there is none."""
        if self._report is None:
            raise NothingMeasured("profiler: no report yet: start(), run steps, stop()")
        return self._report


def _evidence(collector: Collector, totals: Counters | None, calls: list[Call]) -> Evidence:
    notes = getattr(collector, "notes", None)
    return Evidence(
        name=collector.name,
        sees=collector.sees,
        calls=calls,
        blind=collector.blind,
        notes=notes() if callable(notes) else [],
        marks=totals is not None,
        totals=totals,
        kernels_run=getattr(collector, "kernels_run", None),
        api=getattr(collector, "api", None),
    )


def _describe(source: Source) -> None:
    """Fill in device and versions from what is loaded; never loads torch by itself."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    source.torch = str(torch.__version__)
    source.cuda, source.hip = torch.version.cuda, torch.version.hip
    if source.device is None:
        simulated = sys.modules.get("syncfree.profiler.simulated")
        if simulated is not None and simulated.is_active():
            source.device = "simulated"
        elif torch.cuda.is_available():
            source.device = torch.cuda.get_device_name()
        else:
            source.device = "cpu"
