"""Reports of several recordings of one process, one after the other, as one report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from .aggregate import class_figures
from .report import Copies, Launches, Report, Site, SiteStep, Syncs, Totals, add

Part = TypeVar("Part", Launches, Syncs, Copies)


def join(reports: Sequence[Report]) -> Report:
    """Steps numbered through in the order of `reports`, sites of one line added up; the first report's source."""
    if len(reports) == 1:
        return reports[0]
    joined = Report(source=msgspec.structs.replace(reports[0].source))
    sites: dict[tuple[object, ...], Site] = {}
    api: dict[str, int] = {}
    first = 0
    for report in reports:
        at = {(step.rank, step.index): first + i for i, step in enumerate(report.steps)}
        joined.steps += [msgspec.structs.replace(step, index=at[step.rank, step.index]) for step in report.steps]
        for site in report.sites:
            moved = [SiteStep(s.rank, at[s.rank, s.index], s.count, s.other_threads) for s in site.steps]
            _add_site(sites, msgspec.structs.replace(site, steps=moved))
        for name, count in report.totals.api.items():
            api[name] = api.get(name, 0) + count
        joined.notes += [note for note in report.notes if note not in joined.notes]
        joined.source.partial = joined.source.partial or report.source.partial
        first += len(report.steps)
    joined.classes = class_figures(joined.steps)
    joined.sites = sorted(sites.values(), key=lambda s: (s.warmup, s.kind == "maybe", -s.count, s.file, s.line))
    totals = [report.totals for report in reports]
    joined.totals = Totals(
        launches=_sum(Launches, [t.launches for t in totals]),
        syncs=_sum(Syncs, [t.syncs for t in totals]),
        copies=_sum(Copies, [t.copies for t in totals]),
        api=dict(sorted(api.items())),
    )
    return joined


def _sum(kind: type[Part], parts: Sequence[Part]) -> Part:
    figures = {}
    for name in kind.__struct_fields__:
        figure: int | None = 0
        for part in parts:
            figure = add(figure, getattr(part, name))
        figures[name] = figure
    return kind(**figures)


def _add_site(sites: dict[tuple[object, ...], Site], site: Site) -> None:
    key = (site.file, site.line, site.function, site.kind, site.phase, site.allowed_upstream)
    old = sites.get(key)
    if old is None:
        sites[key] = msgspec.structs.replace(site, classes=dict(site.classes), threads=list(site.threads))
        return
    old.count += site.count
    old.steps += site.steps
    old.per_step = sum(at.count for at in old.steps) / len(old.steps) if old.steps else None
    old.blocked_us = None if old.blocked_us is None or site.blocked_us is None else old.blocked_us + site.blocked_us
    old.repeated = old.repeated or site.repeated
    old.same_value = old.same_value or site.same_value
    old.warmup = old.warmup and site.warmup
    old.threads += [name for name in site.threads if name not in old.threads]
    for name, count in site.classes.items():
        old.classes[name] = old.classes.get(name, 0) + count
