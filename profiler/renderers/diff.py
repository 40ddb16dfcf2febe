"""A difference for people: a terminal, or the Markdown of a pull request."""

from __future__ import annotations

import re

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..diff import TIMES, Change, Difference, SiteChange
from ..report import Amount
from ..sites import short_path
from .markdown import escaped

_MARKS = {"worse": "▲ worse", "better": "▼ better", "same": "same", "unknown": "?"}
_STYLES = {"worse": "bold red", "better": "bold green", "same": "dim", "unknown": "yellow"}
_BADGES = {"worse": "🔴", "better": "🟢", "same": "", "unknown": "❔"}


def _amount(value: Amount, figure: str) -> str:
    if value is None:
        return "–"
    if figure in TIMES:
        return f"{value / 1e3:.2f} ms" if value >= 1e3 else f"{value:.1f} µs"
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _percent(change: Change) -> str:
    return "" if change.percent is None or change.before == change.after else f"{change.percent:+.1f} %"


def _where(site: SiteChange) -> str:
    lines = [line for line in (site.line_before, site.line_after) if line is not None]
    shown = f"{lines[0]}" if len(set(lines)) == 1 else f"{lines[0]}→{lines[-1]}"
    return f"{short_path(site.file)}:{shown} {site.function}" if site.file else f"(no stack) {site.function}"


def render_diff(difference: Difference) -> RenderableType:
    """The whole difference as one renderable; classes in full, only sites that changed."""
    table = Table(title="before and after", title_justify="left", title_style="bold", header_style="bold")
    for name in ("batch class", "figure"):
        table.add_column(name, no_wrap=True)
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("why")
    for change in difference.changes:
        if change.before is None and change.after is None:
            continue
        table.add_row(
            change.batch_class,
            change.figure,
            _amount(change.before, change.figure),
            _amount(change.after, change.figure),
            _percent(change),
            Text(_MARKS[change.direction], style=_STYLES[change.direction]),
            Text(change.why, style="dim"),
        )
    parts: list[RenderableType] = [table] if table.row_count else []
    for site in difference.sites:
        if site.direction in ("worse", "better"):
            line = Text()
            line.append(f"{_MARKS[site.direction]:9}", style=_STYLES[site.direction])
            line.append(f"{site.batch_class}: {site.kind} {site.before:.3g} → {site.after:.3g} a step  ")
            line.append(_where(site), style="bold")
            if site.source:
                line.append(f"\n         {site.source}", style="dim")
            parts.append(line)
    parts += [Text(f"lost: {text}", style="yellow") for text in difference.lost]
    parts += [Text(f"note: {text}", style="dim") for text in difference.notes]
    parts.append(Text(difference.summary(), style="bold red" if difference.regressions else "bold"))
    return Group(*parts)


def _plain(text: str) -> str:
    """Text that Markdown shows as it is; underscores inside a name need no escape, and read better without."""
    return escaped(text).replace("\\_", "_")


def _code(text: str) -> str:
    """A code span, whatever backticks are in it."""
    text = " ".join(text.split())
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    pad = " " if len(fence) > 1 else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def render_markdown(difference: Difference) -> str:
    """For a comment on a pull request: what changed on top, the figures that did not folded away."""
    lines = ["### syncfree: host-device syncs, copies and launches", "", f"**{_plain(difference.summary())}**", ""]
    moved = [change for change in difference.changes if change.direction in ("worse", "better")]
    rest = [change for change in difference.changes if change not in moved and change.before is not None]
    if moved:
        lines += [*_class_table(moved), ""]
    sites = [site for site in difference.sites if site.direction in ("worse", "better")]
    if sites:
        lines += ["| | class | kind | per step | where | line |", "|---|---|---|---|---|---|"]
        for site in sites:
            row = (
                _BADGES[site.direction],
                _plain(site.batch_class),
                _plain(site.kind),
                f"{site.before:.3g} → {site.after:.3g}",
                _code(_where(site)).replace("|", "\\|"),
                _code(site.source).replace("|", "\\|") if site.source else "",
            )
            lines.append("| " + " | ".join(row) + " |")
        lines.append("")
        mends = [site for site in sites if site.direction == "worse" and site.hint]
        lines += [f"- {_code(_where(site))}: {_plain(site.hint)}" for site in mends]
        lines.append("")
    lines += [f"- no longer measured: {_plain(text)}" for text in difference.lost]
    lines += [f"- {_plain(text)}" for text in difference.notes]
    if rest:
        lines += ["", "<details><summary>unchanged</summary>", "", *_class_table(rest), "", "</details>"]
    return "\n".join(_squeeze(lines)) + "\n"


def _class_table(changes: list[Change]) -> list[str]:
    lines = ["| | class | figure | before | after | change | |", "|---|---|---|---:|---:|---:|---|"]
    for change in changes:
        row = (
            _BADGES[change.direction],
            change.batch_class,
            change.figure,
            _amount(change.before, change.figure),
            _amount(change.after, change.figure),
            _percent(change),
            change.why,
        )
        lines.append("| " + " | ".join(_plain(cell) for cell in row) + " |")
    return lines


def _squeeze(lines: list[str]) -> list[str]:
    """Without empty lines in a row or at the end."""
    kept = [line for i, line in enumerate(lines) if line or (i and lines[i - 1])]
    while kept and not kept[-1]:
        kept.pop()
    return kept
