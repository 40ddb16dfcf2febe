"""Reports of several ranks or processes as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from .classes import class_figures
from .report import Distribution, PlannerFigures, Report, RunAhead, Site, Source, Step, Totals

S = TypeVar("S", bound=msgspec.Struct)


def merge_reports(reports: Sequence[Report]) -> Report:
    """One report of all: steps side by side, sites of one line together, totals added; unknown plus known is unknown.

    Steps keep their rank; where two reports have the same rank the later one's steps are counted on.
    """
    if len(reports) == 1:
        return reports[0]
    behind: dict[int, int] = {}
    steps: list[Step] = []
    for report in reports:
        shift = {rank: behind.get(rank, 0) for rank in {step.rank for step in report.steps}}
        _shift(report, shift)
        for step in report.steps:
            behind[step.rank] = max(behind.get(step.rank, 0), step.index + 1)
        steps += report.steps
    steps.sort(key=lambda step: (step.rank, step.index))
    return Report(
        source=_sources([report.source for report in reports]),
        steps=steps,
        classes=class_figures(steps),
        sites=merged_sites([report.sites for report in reports]),
        totals=_totals([report.totals for report in reports]),
        planner=_planners([report.planner for report in reports]),
        telemetry=_telemetry(reports),
        run_ahead=_run_ahead([report.run_ahead for report in reports]),
        timeline=sorted((span for r in reports for span in r.timeline), key=lambda span: span.start_us),
        verification=[item for report in reports for item in report.verification],
        notes=[note for report in reports for note in report.notes],
    )


def _shift(report: Report, shift: dict[int, int]) -> None:
    if not any(shift.values()):
        return
    for step in report.steps:
        step.index += shift[step.rank]
    for site in report.sites:
        for seen in site.steps:
            seen.index += shift.get(seen.rank, 0)
    for span in report.timeline:
        if span.step is not None:
            span.step += shift.get(span.rank, 0)


def _one(values: Iterable[str | None]) -> str | None:
    """What they share, or all of them."""
    return ", ".join(dict.fromkeys(value for value in values if value)) or None


def _unique(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return list(dict.fromkeys(item for items in lists for item in items))


def _sources(sources: Sequence[Source]) -> Source:
    return Source(
        kind=sources[0].kind,
        engine=_one(s.engine for s in sources),
        device=_one(s.device for s in sources),
        torch=_one(s.torch for s in sources),
        hip=_one(s.hip for s in sources),
        cuda=_one(s.cuda for s in sources),
        ranks=sorted(set(_unique(s.ranks for s in sources))),
        collectors=_unique(s.collectors for s in sources),
        partial=any(s.partial for s in sources),
        blind_spots={name: text for s in sources for name, text in s.blind_spots.items()},
        files=_unique(s.files for s in sources),
    )


def _added(items: Sequence[S]) -> S:
    """The field-wise sum of flat structs of figures; a field that is None in any is None."""
    kind = type(items[0])
    sums: dict[str, Any] = {}
    for name in kind.__struct_fields__:
        values = [getattr(item, name) for item in items]
        sums[name] = None if any(value is None for value in values) else sum(values)
    return kind(**sums)


def _totals(totals: Sequence[Totals]) -> Totals:
    api: dict[str, int] = {}
    for item in totals:
        for name, count in item.api.items():
            api[name] = api.get(name, 0) + count
    kernels = [item.kernels_run for item in totals]
    return Totals(
        launches=_added([item.launches for item in totals]),
        syncs=_added([item.syncs for item in totals]),
        copies=_added([item.copies for item in totals]),
        kernels_run=None if None in kernels else sum(count or 0 for count in kernels),
        api=dict(sorted(api.items())),
    )


def _sum(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left + right


def _mean(left: float | None, left_count: int, right: float | None, right_count: int) -> float | None:
    """Of two means; where one is unknown, none is."""
    if left is None or right is None:
        return None
    return (left * left_count + right * right_count) / (left_count + right_count)


def merged_sites(lists: Iterable[Sequence[Site]]) -> list[Site]:
    """Sites of one line, kind and phase together, most often first; the steps they name are taken as they are."""
    found: dict[tuple[object, ...], Site] = {}
    for sites in lists:
        for site in sites:
            key = (site.file, site.line, site.function, site.kind, site.phase, site.allowed_upstream)
            mine = found.get(key)
            if mine is None:
                found[key] = msgspec.structs.replace(
                    site, classes=dict(site.classes), threads=list(site.threads), steps=list(site.steps)
                )
                continue
            mine.launch_lead_us = _mean(mine.launch_lead_us, mine.count, site.launch_lead_us, site.count)
            mine.count += site.count
            mine.blocked_us = _sum(mine.blocked_us, site.blocked_us)
            mine.device_idle_us = _sum(mine.device_idle_us, site.device_idle_us)
            for name, count in site.classes.items():
                mine.classes[name] = mine.classes.get(name, 0) + count
            mine.threads = _unique([mine.threads, site.threads])
            mine.steps = sorted([*mine.steps, *site.steps], key=lambda seen: (seen.rank, seen.index))
            mine.per_step = sum(seen.count for seen in mine.steps) / len(mine.steps) if mine.steps else None
            mine.repeated = mine.repeated or site.repeated
            mine.same_value = mine.same_value or site.same_value
            mine.warmup = mine.warmup and site.warmup
    return sorted(found.values(), key=lambda s: (s.warmup, s.kind == "maybe", -s.count, s.file, s.line))


def _planners(planners: Sequence[PlannerFigures]) -> PlannerFigures:
    modes = _one(p.mode for p in planners if p.mode != "off")
    if modes is None:
        return PlannerFigures()

    def total(figure: Callable[[PlannerFigures], int | None]) -> int | None:
        known = [figure(p) for p in planners if p.mode != "off"]
        return None if None in known else sum(value or 0 for value in known)

    return PlannerFigures(
        mode=modes,
        mismatches=total(lambda p: p.mismatches),
        unread=total(lambda p: p.unread),
        first_mismatch=next((p.first_mismatch for p in planners if p.first_mismatch), None),
    )


def _telemetry(reports: Sequence[Report]) -> dict[str, Any]:
    told = [(report.source.ranks, report.telemetry) for report in reports if report.telemetry]
    if len(told) == 1:
        return told[0][1]
    return {f"rank {', '.join(map(str, ranks))}": telemetry for ranks, telemetry in told}


def _run_ahead(items: Sequence[RunAhead]) -> RunAhead:
    """Distributions of several cannot be joined from their summaries: they are left unknown unless one alone has it."""
    told = [item for item in items if item.launch_lead_us != Distribution()]
    least = [item.launch_lead_min_us for item in told if item.launch_lead_min_us is not None]
    idle = [item.device_idle_us for item in items if item.device_idle_us is not None]
    return RunAhead(
        launch_lead_us=told[0].launch_lead_us if len(told) == 1 else Distribution(),
        launch_lead_min_us=min(least, default=None),
        device_idle_us=sum(idle) if idle else None,
        series=[point for item in items for point in item.series],
        graph_launches=[group for item in items for group in item.graph_launches],
    )
