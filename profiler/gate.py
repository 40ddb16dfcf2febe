"""Judges a report by a budget: which limits were exceeded, by which lines, and which could not be judged at all."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from .budget import ANY_CLASS, SYNC_KINDS, WHOLE_STEP, Allow, Budget, ClassBudget
from .classes import distribution, judged_phases
from .report import Amount, PhaseFigures, Report, Site, Step
from .windows import VERDICT_PHASES

TOP_SITES = 5
_WAITS = frozenset({*SYNC_KINDS, "copy"})
_UNITS = {"blocked_us": " µs", "duration_us": " µs", "build_us": " µs", "d2h_bytes": " B", "h2d_bytes": " B"}


def shown_path(file: str) -> str:
    """`file` relative to the working directory where it lies below it: short, and clickable in a terminal."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


class SiteShare(msgspec.Struct, kw_only=True):
    """A line's part in an exceeded limit: `count` over the judged steps, `most` within one step."""

    site: Site
    count: int
    most: int

    def line(self) -> str:
        site = self.site
        where = f"{shown_path(site.file)}:{site.line}" if site.file else f"(no stack) {site.api}"
        within = f", {self.most} in one step" if self.most > 1 else ""
        return f"{site.kind} {where} in {site.function} ({self.count}x{within})"


class Judgement(msgspec.Struct, kw_only=True):
    """One limit of one class. `got` is None where it is not known; `reason` then says why."""

    where: str  # the budget's table or option
    batch_class: str
    figure: str
    stat: str
    phases: tuple[str, ...] | None
    limit: float
    got: Amount = None
    steps: int = 0
    steps_over: int = 0
    worst: tuple[int, int] | None = None  # (rank, index) of the step with the highest figure
    sites: list[SiteShare] = msgspec.field(default_factory=list)
    reason: str = ""

    def line(self) -> str:
        """One line: what, how much, over which steps, against which limit."""
        if self.got is None:
            return f"{self.batch_class}: {self.figure}: not measured: {self.reason}"
        unit = _UNITS.get(self.figure, "")
        phases = "build + forward" if self.phases is None else " + ".join(self.phases)
        about = "whole step" if self.phases == WHOLE_STEP else phases
        steps = f"{self.stat} over {self.steps} step{'s' if self.steps != 1 else ''}"
        sign = ">" if self.got > self.limit else "<="
        return f"{self.batch_class}: {self.figure} = {self.got:g}{unit} {sign} {self.limit:g}{unit} ({steps}, {about})"


class Violation(Judgement, kw_only=True):
    """A limit that was exceeded."""

    def text(self) -> str:
        """The line, and below it the source lines to blame, each with its usual mend."""
        lines = [self.line()]
        for share in self.sites:
            lines.append(f"  {share.line()}")
            if share.site.source:
                lines.append(f"      {share.site.source}")
            if share.site.hint:
                lines.append(f"      mend: {share.site.hint}")
        return "\n".join(lines)


class Gate(msgspec.Struct, kw_only=True):
    """What a report is worth against a budget. `exit_code`: 1 exceeded or expired, 4 something not measured, else 0."""

    violations: list[Violation] = msgspec.field(default_factory=list)
    unmeasured: list[Judgement] = msgspec.field(default_factory=list)
    kept: list[Judgement] = msgspec.field(default_factory=list)
    expired: list[Allow] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def exit_code(self) -> int:
        if self.violations or self.expired:
            return 1
        return 4 if self.unmeasured else 0

    def summary(self) -> str:
        """One line for stderr: the first thing that is wrong, and how many more there are; empty where nothing is."""
        wrong = [f"budget exceeded: {violation.line()}" for violation in self.violations]
        wrong += [f"allowance expired: {expiry_line(entry)}" for entry in self.expired]
        wrong += [f"not judged: {judgement.line()}" for judgement in self.unmeasured]
        if not wrong:
            return ""
        return wrong[0] if len(wrong) == 1 else f"{wrong[0]} (and {len(wrong) - 1} more)"

    def text(self) -> str:
        """Everything that is wrong, for a log or a test's failure; empty where nothing is."""
        parts = [violation.text() for violation in self.violations]
        parts += [expiry_line(entry) for entry in self.expired]
        parts += [judgement.line() for judgement in self.unmeasured]
        return "\n".join(parts)


def expiry_line(entry: Allow) -> str:
    return f"{entry.where}: {entry.site} was allowed until {entry.until} ({entry.reason}): mend it, or renew the date"


def check(report: Report, budget: Budget, *, today: date | None = None) -> Gate:
    """Judge every limit of `budget`. `today` decides which allow-list entries have expired."""
    gate = Gate(expired=[entry for entry in budget.allow if entry.expired(today or date.today())])
    allowed = [entry for entry in budget.allow if entry not in gate.expired]
    for item in budget.classes:
        for name in _classes(report, item):
            _judge_class(report, item, name, allowed, gate)
    if report.source.partial:
        gate.notes.append("the report is partial: some steps or ranks were not recorded")
    for entry in allowed:
        if not any(entry.matches(site) for site in report.sites):
            gate.notes.append(f"{entry.where}: {entry.site} matches no site of this report")
    return gate


def _classes(report: Report, item: ClassBudget) -> list[str]:
    """The classes a budget is about; for `*` those that have a step to judge, or `*` itself where none has."""
    if item.batch_class != ANY_CLASS:
        return [item.batch_class]
    names = {step.batch_class for step in report.steps if not _exempt(step, item)} - item.other_than
    return sorted(names) or ([] if item.optional else [ANY_CLASS])


def _exempt(step: Step, item: ClassBudget) -> bool:
    return step.warmup and (step.warmup_cause or "warmup") in item.exempt


def _judge_class(report: Report, item: ClassBudget, name: str, allowed: Sequence[Allow], gate: Gate) -> None:
    mine = [step for step in report.steps if step.batch_class == name]
    judged = [step for step in mine if not _exempt(step, item)]
    if not mine and item.optional:
        return
    excused = _Excused(report, item, allowed)
    missing = _why_not(report, item, name, mine, judged)
    for figure, limit in item.limits.items():
        about: dict[str, Any] = {
            "where": item.where,
            "batch_class": name,
            "figure": figure,
            "stat": item.stat,
            "phases": _shown_phases(judged, item, figure),
            "limit": limit,
            "steps": len(judged),
        }
        values = [figure_of(step, figure, item, excused) for step in judged]
        known = [value for value in values if value is not None]
        over = [value for value in known if value > limit]
        if missing or (len(known) < len(values) and not (over and item.stat == "max")):
            reason = missing or _unknown(report, figure, len(values) - len(known), len(values))
            gate.unmeasured.append(Judgement(**about, reason=reason))
            continue
        got = getattr(distribution(known), item.stat)
        if got <= limit:
            gate.kept.append(Judgement(**about, got=got))
            continue
        worst = judged[values.index(max(known))]
        gate.violations.append(
            Violation(
                **about,
                got=got,
                steps_over=len(over),
                worst=(worst.rank, worst.index),
                sites=_shares(report, item, figure, judged, excused)[:TOP_SITES],
            )
        )


def _shown_phases(judged: Sequence[Step], item: ClassBudget, figure: str) -> tuple[str, ...] | None:
    if item.phases is not None:
        return item.phases
    if figure == "build_us":
        return ("build",)
    if figure in ("duration_us", "host_ops") or all(judged_phases(step) is None for step in judged):
        return WHOLE_STEP
    return None


def _why_not(report: Report, item: ClassBudget, name: str, mine: Sequence[Step], judged: Sequence[Step]) -> str:
    if not mine:
        seen = ", ".join(sorted({step.batch_class for step in report.steps}))
        return f"no such step was recorded (recorded: {seen or 'no step at all'})"
    if not judged:
        causes = sorted({step.warmup_cause or "warmup" for step in mine})
        return f"all {len(mine)} steps are exempt ({', '.join(causes)})"
    for phase in item.phases or ():
        if phase != "*" and not any(phase in step.phases for step in judged):
            return f"no {name} step has a phase {phase!r}"
    return ""


def _unknown(report: Report, figure: str, unknown: int, steps: int) -> str:
    collectors = ", ".join(report.source.collectors) or "none"
    text = f"unknown in {unknown} of {steps} steps (collectors: {collectors})"
    why = [note.text for note in report.notes if note.kind in ("device", "collector", "disabled")]
    blind = [text for text in report.source.blind_spots.values() if figure in text]
    return "; ".join([text, *(why or blind)[:1]])


# ------------------------------------------------------------------ figures of a step


def _of_part(part: Step | PhaseFigures, figure: str) -> Amount:
    if figure == "syncs":
        return part.syncs.total
    if figure in SYNC_KINDS or figure == "maybe":
        return getattr(part.syncs, figure)  # type: ignore[no-any-return]
    if figure == "copies":
        c = part.copies
        return None if c.d2h is None or c.h2d is None else c.d2h + c.h2d
    if figure.startswith("copies_"):
        return getattr(part.copies, figure.removeprefix("copies_"))  # type: ignore[no-any-return]
    if figure in ("d2h_bytes", "h2d_bytes"):
        return getattr(part.copies, figure)  # type: ignore[no-any-return]
    if figure == "launches":
        n = part.launches
        return None if n.kernels is None or n.graphs is None else n.kernels + n.graphs
    if figure in ("kernels", "graphs", "captured"):
        return getattr(part.launches, figure)  # type: ignore[no-any-return]
    return getattr(part, figure)  # type: ignore[no-any-return]


def _parts(step: Step, item: ClassBudget) -> list[PhaseFigures] | None:
    """The phases that are judged; None = the whole step."""
    if item.phases is None:
        return judged_phases(step)
    if item.phases == WHOLE_STEP:
        return None
    return [step.phases[name] for name in item.phases if name in step.phases]


def _in_scope(step: Step, phase: str, item: ClassBudget) -> bool:
    if _parts(step, item) is None:
        return True
    return phase in (VERDICT_PHASES if item.phases is None else item.phases)


def figure_of(step: Step, figure: str, item: ClassBudget, excused: _Excused | None = None) -> Amount:
    """A step's figure as a budget judges it: its phases, without what is exempt; None where unknown."""
    if figure == "host_ops":
        return step.host_ops
    if figure == "build_us":
        return step.phases["build"].duration_us if "build" in step.phases else None
    parts = _parts(step, item)
    if figure == "duration_us" and item.phases is None:
        parts = None
    result: float = 0
    for part in [step] if parts is None else parts:
        value = _of_part(part, figure)
        if value is None:
            return None
        result += value
    if figure == "duration_us":
        return result
    if "other_threads" in item.exempt:
        for phase, foreign in step.other_threads.items():
            if _in_scope(step, phase, item):
                result -= _of_part(foreign, figure) or 0  # null: the collector cannot tell threads apart
    return max(0, result - (excused.of(step, figure) if excused else 0))


def _kinds(figure: str) -> frozenset[str]:
    if figure in ("syncs", "blocked_us"):
        return _WAITS
    return frozenset({figure})


class _Excused:
    """Waits of allowed sites, by step: taken off the sync counts (never off times or launches)."""

    def __init__(self, report: Report, item: ClassBudget, allowed: Sequence[Allow]) -> None:
        self.item = item
        upstream = "allowed_upstream" in item.exempt
        self.sites = [
            site
            for site in report.sites
            if (upstream and site.allowed_upstream) or any(entry.matches(site) for entry in allowed)
        ]
        self.counts: dict[tuple[int, int], list[tuple[Site, int]]] = {}
        for site in self.sites:
            for at in site.steps:
                self.counts.setdefault((at.rank, at.index), []).append((site, self.count(at.count, at.other_threads)))

    def count(self, count: int, other_threads: int) -> int:
        return count - other_threads if "other_threads" in self.item.exempt else count

    def of(self, step: Step, figure: str) -> int:
        if figure == "blocked_us":
            return 0
        kinds = _kinds(figure)
        mine = self.counts.get((step.rank, step.index), ())
        return sum(n for site, n in mine if site.kind in kinds and _in_scope(step, site.phase, self.item))


def _shares(
    report: Report, item: ClassBudget, figure: str, judged: Sequence[Step], excused: _Excused
) -> list[SiteShare]:
    """The lines behind a figure, most often first."""
    steps = {(step.rank, step.index): step for step in judged}
    kinds = _kinds(figure)
    found = []
    for site in report.sites:
        if site.kind not in kinds or any(site is other for other in excused.sites):
            continue
        counts = [
            excused.count(at.count, at.other_threads)
            for at in site.steps
            if (at.rank, at.index) in steps and _in_scope(steps[at.rank, at.index], site.phase, item)
        ]
        if sum(counts):
            found.append(SiteShare(site=site, count=sum(counts), most=max(counts)))
    return sorted(found, key=lambda share: (-share.count, share.site.file, share.site.line))
