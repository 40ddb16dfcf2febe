"""A difference of two reports as one self-contained HTML page."""

from __future__ import annotations

from html import escape

from ..diff import TIMES, Change, Difference, SiteChange
from ..report import Report
from ..sites import short_path
from .figures import compared_durations
from .markdown import duration, number
from .page import Cell, chart, number_cell, page, section, table

_MARKS = {"worse": "▲ worse", "better": "▼ better", "same": "same", "unknown": "? unknown"}
_ORDER = {"worse": 0, "better": 1, "unknown": 2, "same": 3}


def render_difference_html(difference: Difference, before: Report, after: Report, title: str = "syncfree diff") -> str:
    """What got worse and better first, then step durations side by side, then every figure compared."""
    figure = compared_durations(before, after)
    sites = [site for site in difference.sites if site.direction in ("worse", "better")]
    notes = [*(f"lost: {text}" for text in difference.lost), *difference.notes]
    counts = f"{len(difference.regressions)} worse, {len(difference.improvements)} better"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="facts">{counts}, {difference.compared} figures compared</p>',
        section("Figures by batch class", _changes(difference.changes)),
        section("Sites", _sites(sites)) if sites else "",
        chart(figure) if figure is not None else "",
        section("Notes", f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>") if notes else "",
    ]
    return page(title, body, [figure] if figure is not None else [])


def _mark(direction: str) -> str:
    return f'<span class="verdict {"syncs" if direction == "worse" else direction}">{_MARKS[direction]}</span>'


def _changes(changes: list[Change]) -> str:
    head = [("class", ""), ("figure", ""), ("before", "number"), ("after", "number"), ("percent", "number")]
    head += [("change", ""), ("why", "wide")]
    rows = [_change(change) for change in sorted(changes, key=lambda c: _ORDER[c.direction])]
    return table(head, rows) if rows else "<p>The reports have no batch class in common.</p>"


def _change(change: Change) -> list[Cell]:
    show = duration if change.figure in TIMES else number
    percent = "–" if change.percent is None else f"{change.percent:+.1f} %"
    return [
        (escape(change.batch_class), ""),
        (escape(change.figure), ""),
        number_cell(show(change.before)),
        number_cell(show(change.after)),
        number_cell(percent),
        (_mark(change.direction), ""),
        (escape(change.why), "wide"),
    ]


def _sites(sites: list[SiteChange]) -> str:
    head = [
        ("site", "wide"),
        ("class", ""),
        ("kind", ""),
        ("a step before", "number"),
        ("after", "number"),
        ("change", ""),
    ]
    return table(head, [_site(site) for site in sorted(sites, key=lambda s: _ORDER[s.direction])])


def _site(site: SiteChange) -> list[Cell]:
    line = site.line_after if site.line_after is not None else site.line_before
    place = f"{short_path(site.file)}:{line} {site.function}" if site.file else site.function
    hint = f"<p>{escape(site.hint)}</p>" if site.hint and site.direction == "worse" else ""
    return [
        (f"<code>{escape(place)}</code>{hint}", "wide"),
        (escape(site.batch_class), ""),
        (escape(site.kind), ""),
        number_cell(number(site.before)),
        number_cell(number(site.after)),
        (_mark(site.direction), ""),
    ]
