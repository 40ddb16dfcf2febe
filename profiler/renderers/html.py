"""A report as one self-contained HTML page: charts by plotly.js, which is part of the file; nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

import msgspec

from ...planner.errors import SyncfreeError
from ..report import ClassFigures, GraphLaunches, Report, Site
from .figures import Figure, figures_of, site_label
from .markdown import duration, number, spread

# Inline script and style, nothing from anywhere: the browser itself then refuses every request.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_VERDICTS = {"sync-free": "✓ sync-free", "syncs": "✗ syncs", "unknown": "? unknown"}
_MAX_SITES = 60
_MAX_GRAPHS = 20
Cell = tuple[str, str]  # markup, class


def render_html(report: Report, title: str = "syncfree report") -> str:
    """The page, about 5 MB, nearly all of it plotly.js. Raises `SyncfreeError` if plotly is not installed."""
    figures = figures_of(report)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="facts">{escape(_facts(report))}</p>',
        _section("Verdict by batch class", _classes(report)),
        *(_chart(figure) for figure in figures),
        _section("Where the host waits", _sites(report)),
        _section("Graph launches", _graphs(report.run_ahead.graph_launches)) if report.run_ahead.graph_launches else "",
        _section("Totals", _totals(report)),
        _section("Notes", _notes(report)) if report.notes or report.source.blind_spots else "",
    ]
    data = [{"id": f.id, "data": f.data, "layout": f.layout} for f in figures]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_part('page.css')}</style>",
            "</head>\n<body>\n<main>",
            *body,
            "</main>",
            f'<script type="application/json" id="figures">{_embedded(data)}</script>',
            f"<script>{_plotly()}</script>",
            f"<script>\n{_part('page.js')}</script>",
            "</body>\n</html>\n",
        ]
    )


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    """plotly.js as the plotly package ships it; plotly itself, slow to import, is not needed."""
    try:
        return files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise SyncfreeError("HTML needs plotly: pip install 'syncfree[html]'") from error


def _embedded(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")


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


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


def _chart(figure: Figure) -> str:
    chart = f'<div class="chart" id="chart-{figure.id}" role="img" aria-label="{escape(figure.title)}"></div>'
    return _section(figure.title, f'<p class="caption">{escape(figure.caption)}</p>\n{chart}')


def _table(head: Sequence[Cell], rows: Iterable[Sequence[Cell]]) -> str:
    """A table whose rows become cards on a narrow screen: each cell carries its column's name."""
    columns = "".join(f'<th class="{kind}">{escape(name)}</th>' for name, kind in head)
    lines = []
    for row in rows:
        cells = zip(row, head, strict=True)
        lines.append(
            "".join(f'<td class="{kind}" data-label="{escape(name)}">{text}</td>' for (text, kind), (name, _) in cells)
        )
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>\n<thead><tr>{columns}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _number(text: str) -> Cell:
    return escape(text), "number"


def _classes(report: Report) -> str:
    if not report.classes:
        return "<p>No steps were found: the figures below are of everything seen.</p>"
    head = [("class", ""), *((name, "number") for name in _CLASS_COLUMNS), ("verdict", "")]
    return _table(head, [_class(name, figures) for name, figures in report.classes.items()])


_CLASS_COLUMNS = ("steps", "syncs a step", "launches a step", "copies a step", "duration p50", "duration p99")


def _class(name: str, figures: ClassFigures) -> list[Cell]:
    verdict = f'<span class="verdict {figures.verdict}">{_VERDICTS[figures.verdict]}</span>'
    return [
        (escape(name), ""),
        _number(f"{figures.steps:,}"),
        _number(spread(figures.syncs_per_step)),
        _number(spread(figures.launches_per_step)),
        _number(spread(figures.copies_per_step)),
        _number(duration(figures.duration_us.p50)),
        _number(duration(figures.duration_us.p99)),
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
    return _table(head, [_site(site) for site in report.sites[:_MAX_SITES]]) + more


_SITE_COLUMNS = ("count", "a step", "blocked", "device idle")


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
        _number(f"{site.count:,}"),
        _number(number(site.per_step)),
        _number(duration(site.blocked_us)),
        _number(duration(site.device_idle_us)),
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
            [(escape(group.api), ""), _number(f"{group.launches:,}"), _number(number(group.kernels)), (details, "wide")]
        )
    return _table(head, rows)


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
    return _table([("figure", ""), ("value", "number")], [[(escape(name), ""), _number(value)] for name, value in rows])


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
