"""A report as Markdown: for a pull request, a CI summary, an issue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..report import ClassFigures, Distribution, Report, Site
from ..sites import short_path

_VERDICTS = {"sync-free": "✓ sync-free", "syncs": "✗ syncs", "unknown": "? unknown"}
_MAX_SITES = 20
UNKNOWN = "–"


def render_markdown(report: Report, title: str = "syncfree report") -> str:
    """Verdicts, sites, totals and notes as tables of GitHub's Markdown."""
    parts = [f"## {escaped(title)}", _source(report)]
    if report.classes:
        head = ("class", "steps", "syncs a step", "launches a step", "duration p50 / p99", "verdict")
        parts.append(table(head, [_class(name, figures) for name, figures in report.classes.items()]))
    else:
        parts.append("No steps were found: the figures below are of everything seen.")
    if report.sites:
        parts.append("### Where the host waits")
        columns = ("site", "kind", "phase", "count", "a step", "blocked", "device idle", "launch lead")
        parts.append(table(columns, [_site(site) for site in report.sites[:_MAX_SITES]]))
        if len(report.sites) > _MAX_SITES:
            parts.append(f"{len(report.sites) - _MAX_SITES} more sites are in the report.")
        hints = dict.fromkeys(f"{_place(site)}: {site.hint}" for site in report.sites[:_MAX_SITES] if site.hint)
        if hints:
            parts.append("\n".join(f"- {escaped(hint)}" for hint in hints))
    for item in report.verification:
        parts.append(f"### {escaped(item.left)} beside {escaped(item.right)}, rank {item.rank}")
        names = ("figure", "steps", item.left, item.right, "steps that differ")
        parts.append(table(names, [(f.name, *map(str, (f.steps, f.left, f.right, f.differ))) for f in item.figures]))
    parts += _totals(report)
    if report.notes:
        parts.append("### Notes")
        parts.append("\n".join(f"- {escaped(note.kind)}: {escaped(note.text)}" for note in report.notes))
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the cells are escaped here."""
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(escaped(cell) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    text = " ".join(text.split())
    for character in "\\`*_[]<>|#~$":
        text = text.replace(character, "\\" + character)
    return text


def number(value: float | None) -> str:
    """A count for a table cell."""
    return UNKNOWN if value is None else f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def duration(value_us: float | None) -> str:
    """Microseconds in the unit that reads best."""
    if value_us is None:
        return UNKNOWN
    if value_us < 1000:
        return f"{value_us:.0f} µs"
    return f"{value_us / 1e3:.2f} ms" if value_us < 1e6 else f"{value_us / 1e6:.2f} s"


def spread(figures: Distribution) -> str:
    """Median and maximum of counts; one number where they are the same."""
    if figures.max is None:
        return UNKNOWN
    return number(figures.max) if figures.p50 == figures.max else f"{number(figures.p50)} (max {number(figures.max)})"


def _source(report: Report) -> str:
    source = report.source
    facts = [source.kind, source.engine, source.device, source.hip and f"HIP {source.hip}"]
    facts += [
        source.cuda and f"CUDA {source.cuda}",
        f"{len(report.steps):,} step{'' if len(report.steps) == 1 else 's'}",
    ]
    line = " · ".join(escaped(fact) for fact in facts if fact)
    return line + (" · **partial**" if source.partial else "")


def _class(name: str, figures: ClassFigures) -> tuple[str, ...]:
    times = f"{duration(figures.duration_us.p50)} / {duration(figures.duration_us.p99)}"
    syncs, launches = spread(figures.syncs_per_step), spread(figures.launches_per_step)
    return name, str(figures.steps), syncs, launches, times, _VERDICTS[figures.verdict]


def _place(site: Site) -> str:
    where = short_path(site.file)
    if where and site.line:
        return f"{where}:{site.line} {site.function}"
    return site.function or site.api


def _site(site: Site) -> tuple[str, ...]:
    times = f"{number(site.per_step)} ×" if site.repeated else number(site.per_step)
    per_step = "-" if site.per_step is None else times
    idle = "-" if site.device_idle_us is None else duration(site.device_idle_us)
    lead = "-" if site.launch_lead_us is None else duration(site.launch_lead_us)
    return _place(site), site.kind, site.phase, f"{site.count:,}", per_step, duration(site.blocked_us), idle, lead


def _totals(report: Report) -> list[str]:
    totals = report.totals
    rows = [
        ("launch calls", number(totals.launches.kernels)),
        ("graph launches", number(totals.launches.graphs)),
        ("recorded into graphs", number(totals.launches.captured)),
        ("kernels that ran", number(totals.kernels_run)),
        ("syncs", number(totals.syncs.total)),
        ("of these device to host / host to device", f"{number(totals.syncs.d2h)} / {number(totals.syncs.h2d)}"),
        ("that may have waited", number(totals.syncs.maybe)),
        (
            "launch lead p50 / least",
            f"{duration(report.run_ahead.launch_lead_us.p50)} / {duration(report.run_ahead.launch_lead_min_us)}",
        ),
        ("device idle because the host waited", duration(report.run_ahead.device_idle_us)),
    ]
    return ["### Totals", table(("figure", "value"), rows)]
