"""From windows and calls to a report: pure functions, used by live sessions and by trace readers alike."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from .apis import MODULE_LOADS, base_name
from .calls import Call, Direction, Role
from .collectors.base import GROUPS, Counters
from .counting import Sync, count_syncs
from .hints import hint_for
from .report import (
    ClassFigures,
    Copies,
    Distribution,
    Figure,
    Launches,
    Note,
    PhaseFigures,
    Report,
    Site,
    SiteStep,
    Source,
    Step,
    Syncs,
    Totals,
)
from .sites import blamed, source_line
from .windows import VERDICT_PHASES, StepWindow

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


def is_foreign_thread(step: StepWindow, call: Call) -> bool:
    """Whether `call` was made by another thread than the one that steps; not where either is unknown."""
    return step.thread != 0 and call.thread not in (0, step.thread)


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


def judged_phases(step: Step, phases: Sequence[str] = VERDICT_PHASES) -> list[PhaseFigures] | None:
    """The phases a verdict is about; None = the step is judged whole (it has none of them)."""
    if not any(name in step.phases for name in phases):
        return None
    return [step.phases[name] for name in phases if name in step.phases]


def judged_syncs(step: Step) -> Figure:
    """Syncs of build + forward made by the stepping thread; of the whole step where it has no such phase."""
    phases = judged_phases(step)
    parts = [step.syncs] if phases is None else [phase.syncs for phase in phases]
    foreign = step.other_threads.items()
    others = [f.syncs.total for name, f in foreign if phases is None or name in VERDICT_PHASES]
    if any(part.total is None for part in parts) or any(figure is None for figure in others):
        return None
    return sum(part.total or 0 for part in parts) - sum(figure or 0 for figure in others)


def distribution(figures: Iterable[float | None]) -> Distribution:
    """Mean, nearest-rank median and 99th percentile, maximum; unknown if any figure is unknown or there is none."""
    values: list[float] = []
    for figure in figures:
        if figure is None:
            return Distribution()
        values.append(figure)
    if not values:
        return Distribution()
    values.sort()
    n = len(values)

    def rank(q: float) -> float:
        return values[max(0, min(n - 1, -int(-q * n // 1) - 1))]

    return Distribution(mean=sum(values) / n, p50=rank(0.5), p99=rank(0.99), max=values[-1])


def _launch_count(step: Step) -> Figure:
    phases = judged_phases(step)
    parts = [step.launches] if phases is None else [phase.launches for phase in phases]
    if any(p.kernels is None or p.graphs is None for p in parts):
        return None
    return sum((p.kernels or 0) + (p.graphs or 0) for p in parts)


def _copy_count(step: Step) -> Figure:
    phases = judged_phases(step)
    parts = [step.copies] if phases is None else [phase.copies for phase in phases]
    if any(p.d2h is None or p.h2d is None for p in parts):
        return None
    return sum((p.d2h or 0) + (p.h2d or 0) for p in parts)


def class_figures(steps: Sequence[Step]) -> dict[str, ClassFigures]:
    """Per batch class, over the steps that are not warm-up."""
    groups: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        if not step.warmup:
            groups[step.batch_class].append(step)
    result = {}
    for name, members in sorted(groups.items()):
        syncs = distribution(judged_syncs(step) for step in members)
        result[name] = ClassFigures(
            steps=len(members),
            syncs_per_step=syncs,
            launches_per_step=distribution(_launch_count(step) for step in members),
            copies_per_step=distribution(_copy_count(step) for step in members),
            duration_us=distribution(step.duration_us for step in members),
            build_us=distribution(
                step.phases["build"].duration_us if "build" in step.phases else None for step in members
            ),
            blocked_us=distribution(step.blocked_us for step in members),
            verdict="unknown" if syncs.max is None else ("sync-free" if syncs.max == 0 else "syncs"),
        )
    return result


def thread_names() -> dict[int, str]:
    """Names of this process's threads by native id."""
    return {t.native_id: t.name for t in threading.enumerate() if t.native_id is not None}


class _SiteBook:
    """Groups syncs by the line that is to blame."""

    def __init__(self, threads: dict[int, str]) -> None:
        self.sites: dict[tuple[object, ...], Site] = {}
        self.per_step: dict[tuple[object, ...], Counter[int]] = defaultdict(Counter)
        self.foreign: dict[tuple[object, ...], Counter[int]] = defaultdict(Counter)
        self.windows: dict[int, StepWindow] = {}
        self.measured: set[tuple[object, ...]] = set()
        self.names = threads

    def add(self, sync: Sync, phase: str, step: StepWindow | None, index: int) -> None:
        call = sync.call
        frame = blamed(call.stack)
        kind = "d2h" if sync.kind == "copy" and call.direction is Direction.D2H else sync.kind
        where = (frame.file, frame.line, frame.function) if frame else ("", 0, call.api)
        key = (*where, kind, phase, call.allowed_upstream)
        site = self.sites.get(key)
        if site is None:
            source = source_line(frame) if frame else ""
            site = self.sites[key] = Site(
                file=where[0],
                line=where[1],
                function=where[2],
                kind=kind,
                phase=phase,
                blocked_us=0.0,
                allowed_upstream=call.allowed_upstream,
                stack=[f"{f.file}:{f.line} {f.function}" for f in call.stack],
                source=source,
                api=call.api,
            )
        site.count += 1
        if sync.blocked_ns is None or site.blocked_us is None:
            site.blocked_us = None
        else:
            site.blocked_us += sync.blocked_ns / 1e3
        if call.device_idle_ns is not None:
            site.device_idle_us = (site.device_idle_us or 0.0) + call.device_idle_ns / 1e3
        if step is not None:
            site.classes[step.batch_class] = site.classes.get(step.batch_class, 0) + 1
            self.per_step[key][index] += 1
            self.windows[index] = step
            if is_foreign_thread(step, call):
                self.foreign[key][index] += 1
            if not step.warmup:
                self.measured.add(key)
        thread = self.names.get(call.thread, f"thread {call.thread}")
        if thread not in site.threads:
            site.threads.append(thread)
        if call.repeat_value:
            site.repeated = site.same_value = True

    def finish(self) -> list[Site]:
        for key, site in self.sites.items():
            counts = self.per_step.get(key)
            if counts:
                site.per_step = sum(counts.values()) / len(counts)
                site.repeated = site.repeated or max(counts.values()) > 1
                site.warmup = key not in self.measured
                site.steps = [
                    SiteStep(self.windows[i].rank, self.windows[i].index, n, self.foreign[key][i])
                    for i, n in sorted(counts.items())
                ]
            site.hint = hint_for(site)
        return sorted(self.sites.values(), key=lambda s: (s.warmup, s.kind == "maybe", -s.count, s.file, s.line))


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
        book = _SiteBook(thread_names() if threads is None else threads)
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


def short_path(file: str) -> str:
    """The last two parts of a path, for people."""
    return str(Path(*Path(file).parts[-2:])) if file else ""
