"""A report as one self-contained HTML page: charts by plotly.js, which is part of the file; nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..report import ClassFigures, Comparison, GraphLaunches, Report, Site
from .figures import figures_of, site_label
from .markdown import duration, number, spread
from .page import Cell, chart, number_cell, page, section, table

_VERDICTS = {"sync-free": "✓ sync-free", "syncs": "✗ syncs", "unknown": "? unknown"}
_MAX_SITES = 60
_MAX_GRAPHS = 20


def render_html(report: Report, title: str = "syncfree report") -> str:
    """The page, about 5 MB, nearly all of it plotly.js. Raises `SyncfreeError` if plotly is not installed."""
    figures = figures_of(report)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="facts">{escape(_facts(report))}</p>',
        section("Verdict by batch class", _classes(report)),
        *(chart(figure) for figure in figures),
        section("Where the host waits", _sites(report)),
        section("Graph launches", _graphs(report.run_ahead.graph_launches)) if report.run_ahead.graph_launches else "",
        *(section(f"{c.left} beside {c.right}, rank {c.rank}", _comparison(c)) for c in report.verification),
        section("Totals", _totals(report)),
        section("Notes", _notes(report)) if report.notes or report.source.blind_spots else "",
    ]
    return page(title, body, figures)


def _facts(report: Report) -> str:
    source = report.source
    facts = [
        source.kind,
        source.engine,
        source.device,
        source.hip and f"HIP {source.hip}",
        source.cuda and f"CUDA {source.cuda}",
        source.torch and f"torch {source.torch}",
        f"{len(report.steps):,} step{'' if len(report.steps) == 1 else 's'}",
        f"{len(source.ranks)} ranks" if len(source.ranks) > 1 else None,
        "collectors " + ", ".join(source.collectors) if source.collectors else None,
        ", ".join(source.files[:4]) + (" and more" if len(source.files) > 4 else "") if source.files else None,
        "partial: figures are of what was recorded" if source.partial else None,
    ]
    return " · ".join(fact for fact in facts if fact)


def _classes(report: Report) -> str:
    if not report.classes:
        return "<p>No steps were found: the figures below are of everything seen.</p>"
    head = [("class", ""), *((name, "number") for name in _CLASS_COLUMNS), ("verdict", "")]
    return table(head, [_class(name, figures) for name, figures in report.classes.items()])


_CLASS_COLUMNS = ("steps", "syncs a step", "launches a step", "copies a step", "duration p50", "duration p99")


def _class(name: str, figures: ClassFigures) -> list[Cell]:
    verdict = f'<span class="verdict {figures.verdict}">{_VERDICTS[figures.verdict]}</span>'
    return [
        (escape(name), ""),
        number_cell(f"{figures.steps:,}"),
        number_cell(spread(figures.syncs_per_step)),
        number_cell(spread(figures.launches_per_step)),
        number_cell(spread(figures.copies_per_step)),
        number_cell(duration(figures.duration_us.p50)),
        number_cell(duration(figures.duration_us.p99)),
        (verdict, ""),
    ]


def _sites(report: Report) -> str:
    if not report.sites:
        known = report.totals.syncs.total is not None
        return f"<p>{'No wait was seen in any step.' if known else 'Waits were not recorded: unknown.'}</p>"
    head = [
        ("site", "wide"),
        ("kind", ""),
        ("phase", ""),
        *((name, "number") for name in _SITE_COLUMNS),
        ("classes", ""),
    ]
    rest = len(report.sites) - _MAX_SITES
    more = f'<p class="caption">{rest:,} more are in the JSON report.</p>' if rest > 0 else ""
    return table(head, [_site(site) for site in report.sites[:_MAX_SITES]]) + more


_SITE_COLUMNS = ("count", "a step", "blocked", "device idle", "launch lead")


def _site(site: Site) -> list[Cell]:
    marks = [
        mark
        for mark, there in (
            ("several a step", site.repeated),
            ("allowed upstream", site.allowed_upstream),
            ("warm-up only", site.warmup),
        )
        if there
    ]
    place = f"<code>{escape(site_label(site))}</code> " + " ".join(f'<span class="mark">{m}</span>' for m in marks)
    inner = [f"<p><code>{escape(site.source)}</code></p>"] if site.source else []
    inner += [f"<p>{escape(site.hint)}</p>"] if site.hint else []
    if site.stack:
        frames = "".join(f"<li><code>{escape(frame)}</code></li>" for frame in site.stack)
        inner.append(f"<ol>{frames}</ol>")
    if inner:
        place = f"<details><summary>{place}</summary>{''.join(inner)}</details>"
    return [
        (place, "wide"),
        (escape(site.kind), ""),
        (escape(site.phase), ""),
        number_cell(f"{site.count:,}"),
        number_cell(number(site.per_step)),
        number_cell(duration(site.blocked_us)),
        number_cell(duration(site.device_idle_us)),
        number_cell(duration(site.launch_lead_us)),
        (escape(", ".join(f"{name} {count:,}" for name, count in sorted(site.classes.items()))), ""),
    ]


def _graphs(groups: Sequence[GraphLaunches]) -> str:
    head = [("call", ""), ("launches", "number"), ("kernels each", "number"), ("most frequent kernels", "wide")]
    rows = []
    for group in groups[:_MAX_GRAPHS]:
        names = "".join(
            f"<li>{count:,} × <code>{escape(name[:160])}</code></li>" for name, count in group.names.items()
        )
        details = f"<details><summary>{len(group.names)} kernels</summary><ol>{names}</ol></details>" if names else "–"
        rows.append(
            [
                (escape(group.api), ""),
                number_cell(f"{group.launches:,}"),
                number_cell(number(group.kernels)),
                (details, "wide"),
            ]
        )
    return table(head, rows)


def _comparison(item: Comparison) -> str:
    head = [("figure", ""), *((name, "number") for name in ("steps", item.left, item.right, "steps that differ"))]
    rows = [
        [(escape(f.name), ""), *(number_cell(f"{n:,}") for n in (f.steps, f.left, f.right, f.differ))]
        for f in item.figures
    ]
    return table(head, rows) + (f'<p class="caption">{escape(item.doubt)}</p>' if item.doubt else "")


def _totals(report: Report) -> str:
    totals = report.totals
    lead = report.run_ahead.launch_lead_us
    rows = [
        ("launch calls that ran", number(totals.launches.kernels)),
        ("graph launches", number(totals.launches.graphs)),
        ("launch calls recorded into graphs", number(totals.launches.captured)),
        ("kernels that ran", number(totals.kernels_run)),
        ("syncs", number(totals.syncs.total)),
        ("device to host", number(totals.syncs.d2h)),
        ("host to device", number(totals.syncs.h2d)),
        (
            "stream, device, event waits",
            " / ".join(number(v) for v in (totals.syncs.stream, totals.syncs.device, totals.syncs.event)),
        ),
        ("calls that may have waited", number(totals.syncs.maybe)),
        ("launch lead p50 / p99", f"{duration(lead.p50)} / {duration(lead.p99)}"),
        ("device idle because the host waited", duration(report.run_ahead.device_idle_us)),
    ]
    return table(
        [("figure", ""), ("value", "number")], [[(escape(name), ""), number_cell(value)] for name, value in rows]
    )


def _notes(report: Report) -> str:
    items = [
        f"<li><b>{escape(note.kind)}</b>: {escape(note.text)}{escape(_where(note.file, note.line))}</li>"
        for note in report.notes
    ]
    blind = report.source.blind_spots.items()
    items += [f"<li><b>not seen by {escape(name)}</b>: {escape(text)}</li>" for name, text in blind]
    return f"<ul>\n{''.join(items)}\n</ul>"


def _where(file: str | None, line: int | None) -> str:
    return f" ({file}:{line})" if file and line else (f" ({file})" if file else "")
