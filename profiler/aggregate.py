"""From windows and calls to a report: pure functions, used by live sessions and by trace readers alike."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from .apis import MODULE_LOADS, base_name
from .calls import Call, Direction, Role
from .classes import class_figures
from .collectors.base import GROUPS, Counters
from .counting import Sync, count_syncs
from .report import (
    Copies,
    Launches,
    Note,
    PhaseFigures,
    Report,
    Source,
    Step,
    Syncs,
    Totals,
)
from .site_book import SiteBook, thread_names
from .windows import StepWindow, is_foreign_thread

_SYNC_FIELDS = ("d2h", "h2d", "stream", "device", "event", "memset", "copy")


class Evidence(msgspec.Struct, kw_only=True):
    """What one collector brought home. `marks` = its figures come from the windows' counters, not from its calls."""

    name: str
    sees: frozenset[str] = GROUPS
    calls: list[Call] = msgspec.field(default_factory=list)
    blind: str = ""
    notes: list[Note] = msgspec.field(default_factory=list)
    marks: bool = False
    totals: Counters | None = None
    kernels_run: int | None = None
    api: dict[str, int] | None = None  # calls by entry point, where `calls` are not all of them


class Tally(msgspec.Struct, kw_only=True):
    """Figures of one window."""

    counters: Counters = msgspec.field(default_factory=Counters)
    phases: dict[str, Counters] = msgspec.field(default_factory=dict)
    other_threads: dict[str, Counters] = msgspec.field(default_factory=dict)  # by phase: what other threads did
    other_syncs_only: bool = False  # counters cannot tell threads apart, sync events can
    compiled: bool = False  # a module was loaded: a kernel was compiled or loaded lazily
    syncs: list[tuple[str, Sync]] = msgspec.field(default_factory=list)  # (phase, sync)
    host_ops: int = 0


def _count_call(into: Counters, call: Call) -> None:
    if call.role is Role.LAUNCH or call.role is Role.GRAPH_LAUNCH:
        if call.captured:
            into.captured += 1
        elif call.role is Role.LAUNCH:
            into.kernels += 1
        else:
            into.graphs += 1
    elif call.role is Role.COPY and not call.captured:
        nbytes = call.nbytes or 0
        if call.direction is Direction.D2H:
            into.copies_d2h += 1
            into.bytes_d2h += nbytes
        elif call.direction is Direction.H2D:
            into.copies_h2d += 1
            into.bytes_h2d += nbytes
        elif call.direction is Direction.D2D:
            into.copies_d2d += 1
        elif call.direction is None:
            into.copies_unknown += 1


def _count_sync(into: Counters, sync: Sync) -> None:
    setattr(into, sync.kind, getattr(into, sync.kind) + 1)
    if sync.kind == "maybe":
        return
    if sync.blocked_ns is None:
        into.blocked_unknown += 1
    else:
        into.blocked_ns += sync.blocked_ns


class _Finder:
    """Finds the step and the phase of a moment; steps do not overlap, phases of a step do not either."""

    def __init__(self, steps: Sequence[StepWindow]) -> None:
        self.steps = steps
        self.order = sorted(range(len(steps)), key=lambda i: steps[i].start_ns)
        self.starts = [steps[i].start_ns for i in self.order]
        self.phases = [sorted(step.phases, key=lambda p: p.start_ns) for step in steps]
        self.phase_starts = [[p.start_ns for p in phases] for phases in self.phases]

    def find(self, call: Call) -> tuple[int | None, str]:
        at = bisect_right(self.starts, call.ts_ns) - 1
        if at < 0:
            return None, call.phase or "other"
        index = self.order[at]
        if call.ts_ns >= self.steps[index].end_ns:
            return None, call.phase or "other"
        if call.phase is not None:
            return index, call.phase
        inside = bisect_right(self.phase_starts[index], call.ts_ns) - 1
        if inside >= 0 and call.ts_ns < self.phases[index][inside].end_ns:
            return index, self.phases[index][inside].name
        return index, "other"


def tally(steps: Sequence[StepWindow], calls: Iterable[Call]) -> tuple[list[Tally], Tally]:
    """Figures of each step by phase, and of everything seen, from a stream of calls."""
    finder = _Finder(steps)
    result = [Tally() for _ in steps]
    everything = Tally()
    calls = list(calls)
    for call in calls:
        index, phase = finder.find(call)
        _count_call(everything.counters, call)
        if index is not None:
            mine = result[index]
            _count_call(mine.counters, call)
            _count_call(mine.phases.setdefault(phase, Counters()), call)
            mine.compiled = mine.compiled or (call.role is Role.ALLOC and base_name(call.api) in MODULE_LOADS)
            if is_foreign_thread(steps[index], call):
                _count_call(mine.other_threads.setdefault(phase, Counters()), call)
    for sync in count_syncs(call for call in calls if not call.captured):
        index, phase = finder.find(sync.call)
        _count_sync(everything.counters, sync)
        everything.syncs.append((phase, sync))
        if index is None:
            continue
        mine = result[index]
        _count_sync(mine.counters, sync)
        _count_sync(mine.phases.setdefault(phase, Counters()), sync)
        mine.syncs.append((phase, sync))
        if is_foreign_thread(steps[index], sync.call):
            _count_sync(mine.other_threads.setdefault(phase, Counters()), sync)
    return result, everything


def _from_marks(step: StepWindow, events: Tally, name: str) -> Tally:
    """Counter collectors: figures by difference of marks; the events only tell sites and threads."""
    both = step.marks.get(name)
    if both is None:
        return events
    result = Tally(
        counters=both[1] - both[0],
        other_threads=events.other_threads,
        other_syncs_only=True,
        compiled=events.compiled,
        syncs=events.syncs,
    )
    seen = Counters()
    for phase in step.phases:
        marks = phase.marks.get(name)
        if marks is not None:
            delta = marks[1] - marks[0]
            result.phases[phase.name] = result.phases.get(phase.name, Counters()) + delta
            seen = seen + delta
    rest = result.counters - seen
    if rest != Counters():
        result.phases["other"] = result.phases.get("other", Counters()) + rest
    return result


def sync_figures(c: Counters, sees: frozenset[str]) -> Syncs:
    maybe = c.maybe if "maybe" in sees else None
    if "syncs" not in sees:
        return Syncs(maybe=maybe)
    known = c.copy == 0  # a copy of unknown direction leaves both directions unknown
    return Syncs(
        total=sum(getattr(c, name) for name in _SYNC_FIELDS),
        d2h=c.d2h if known else None,
        h2d=c.h2d if known else None,
        stream=c.stream,
        device=c.device,
        event=c.event,
        memset=c.memset,
        maybe=maybe,
    )


def copy_figures(c: Counters, sees: frozenset[str]) -> Copies:
    if "copies" not in sees or c.copies_unknown:
        return Copies()
    nbytes = "bytes" in sees
    return Copies(
        d2h=c.copies_d2h,
        h2d=c.copies_h2d,
        d2d=c.copies_d2d,
        d2h_bytes=c.bytes_d2h if nbytes else None,
        h2d_bytes=c.bytes_h2d if nbytes else None,
    )


def launch_figures(c: Counters, sees: frozenset[str]) -> Launches:
    if "launches" not in sees:
        return Launches()
    return Launches(kernels=c.kernels, graphs=c.graphs, captured=c.captured if "captured" in sees else None)


def _blocked(c: Counters, sees: frozenset[str]) -> float | None:
    return c.blocked_ns / 1e3 if "blocked" in sees and not c.blocked_unknown else None


def _split(evidence: Sequence[Evidence]) -> dict[str, Evidence]:
    """Which evidence tells which group of figures: the first that sees it."""
    chosen: dict[str, Evidence] = {}
    for item in evidence:
        for group in item.sees:
            chosen.setdefault(group, item)
    return chosen


class _Figures:
    """Report figures of one window, each group from the evidence that sees it."""

    def __init__(self, chosen: dict[str, Evidence], pick: dict[str, Counters]) -> None:
        def of(group: str) -> tuple[Counters, frozenset[str]]:
            item = chosen.get(group)
            return (Counters(), frozenset()) if item is None else (pick.get(item.name, Counters()), item.sees)

        self.syncs = sync_figures(*of("syncs"))
        if self.syncs.maybe is None:
            counters, sees = of("maybe")
            self.syncs.maybe = counters.maybe if "maybe" in sees else None
        self.copies = copy_figures(*of("copies"))
        self.launches = launch_figures(*of("launches"))
        self.blocked_us = _blocked(*of("blocked"))


def _other_threads(chosen: dict[str, Evidence], tallies: dict[str, Tally]) -> dict[str, PhaseFigures]:
    """What threads that do not step did, by phase; null where the collector cannot tell threads apart."""
    told = {
        group: item
        for group, item in chosen.items()
        if item.name not in tallies or not tallies[item.name].other_syncs_only or group in ("syncs", "maybe")
    }
    result = {}
    for phase in dict.fromkeys(name for t in tallies.values() for name in t.other_threads):
        figures = _Figures(told, {key: t.other_threads.get(phase, Counters()) for key, t in tallies.items()})
        result[phase] = PhaseFigures(
            syncs=figures.syncs, copies=figures.copies, launches=figures.launches, blocked_us=figures.blocked_us
        )
    return result


def _step_report(step: StepWindow, chosen: dict[str, Evidence], tallies: dict[str, Tally]) -> Step:
    whole = _Figures(chosen, {name: t.counters for name, t in tallies.items()})
    result = Step(
        rank=step.rank,
        index=step.index,
        batch_class=step.batch_class,
        coarse=step.coarse,
        mixed=step.mixed,
        num_reqs=step.num_reqs,
        num_tokens=step.num_tokens,
        duration_us=(step.end_ns - step.start_ns) / 1e3,
        syncs=whole.syncs,
        copies=whole.copies,
        launches=whole.launches,
        blocked_us=whole.blocked_us,
        name=step.name,
        warmup=step.warmup,
        start_us=step.start_ns / 1e3,
        warmup_cause=step.warmup_cause,
        other_threads=_other_threads(chosen, tallies),
    )
    times: dict[str, int] = defaultdict(int)
    for phase in step.phases:
        times[phase.name] += phase.end_ns - phase.start_ns
    names = dict.fromkeys([*times, *(name for t in tallies.values() for name in t.phases)])
    for name in names:
        figures = _Figures(chosen, {key: t.phases.get(name, Counters()) for key, t in tallies.items()})
        rest = step.end_ns - step.start_ns - sum(times.values()) if name == "other" else None
        result.phases[name] = PhaseFigures(
            syncs=figures.syncs,
            copies=figures.copies,
            launches=figures.launches,
            blocked_us=figures.blocked_us,
            duration_us=times.get(name, rest if rest is not None else 0) / 1e3,
        )
    return result


def _mark_warmup(steps: Sequence[StepWindow], tallies: dict[str, list[Tally]]) -> None:
    """A step that captured a graph or loaded a module is one of preparation, whoever marked it or not."""
    for i, step in enumerate(steps):
        mine = [per_step[i] for per_step in tallies.values()]
        if any(t.counters.captured for t in mine):
            step.warmup_cause = "capture"
        elif any(t.compiled for t in mine) and step.warmup_cause != "warmup":
            step.warmup_cause = "compile"
        elif step.warmup and not step.warmup_cause:
            step.warmup_cause = "warmup"
        step.warmup = bool(step.warmup_cause)


def build_report(
    steps: Sequence[StepWindow],
    evidence: Sequence[Evidence],
    source: Source,
    notes: Iterable[Note] = (),
    *,
    threads: dict[int, str] | None = None,
) -> Report:
    """The report of `steps`, each figure from the first evidence that can tell it; null where none can.

    `threads`: thread names by native id, where the steps come from another process.
    """
    chosen = _split(evidence)
    tallies: dict[str, list[Tally]] = {}
    totals: dict[str, Tally] = {}
    for item in evidence:
        per_step, everything = tally(steps, item.calls)
        if item.marks:
            per_step = [_from_marks(step, t, item.name) for step, t in zip(steps, per_step, strict=True)]
            everything.counters = item.totals or everything.counters
        tallies[item.name], totals[item.name] = per_step, everything
    _mark_warmup(steps, tallies)
    reported = [
        _step_report(step, chosen, {name: per_step[i] for name, per_step in tallies.items()})
        for i, step in enumerate(steps)
    ]
    judge = chosen.get("syncs")
    report = Report(source=source, steps=reported, classes=class_figures(reported))
    if judge is not None:
        book = SiteBook(thread_names() if threads is None else threads)
        for i, (step, counted) in enumerate(zip(steps, tallies[judge.name], strict=True)):
            for phase, sync in counted.syncs:
                book.add(sync, phase, step, i)
        if not steps:
            for phase, sync in totals[judge.name].syncs:
                book.add(sync, phase, None, -1)
        report.sites = book.finish()
    report.totals = _totals(chosen, evidence, totals)
    report.source.collectors = [item.name for item in evidence]
    report.source.blind_spots = {item.name: item.blind for item in evidence if item.blind}
    report.notes = [*notes, *(note for item in evidence for note in item.notes)]
    return report


def _totals(chosen: dict[str, Evidence], evidence: Sequence[Evidence], totals: dict[str, Tally]) -> Totals:
    figures = _Figures(chosen, {name: t.counters for name, t in totals.items()})
    api: Counter[str] = Counter()
    for item in evidence:
        if item is chosen.get("launches") or item is chosen.get("syncs"):
            api.update((call.api for call in item.calls) if item.api is None else item.api)
    kernels = chosen.get("kernels")
    return Totals(
        launches=figures.launches,
        syncs=figures.syncs,
        copies=figures.copies,
        kernels_run=kernels.kernels_run if kernels else None,
        api=dict(sorted(api.items())),
    )
