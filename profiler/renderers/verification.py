"""What `profile --verify` found, as a table."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from ..report import Comparison, Report


def render_verification(report: Report) -> list[Table]:
    """One table for every two collectors and rank: each figure as both tell it, and in how many steps they differ."""
    return [_table(item, len(report.source.ranks) > 1) for item in report.verification]


def _table(item: Comparison, ranked: bool) -> Table:
    title = f"{item.left} beside {item.right}" + (f", rank {item.rank}" if ranked else "")
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.add_column("figure", no_wrap=True)
    for name in ("steps", item.left, item.right, "steps that differ"):
        table.add_column(name, justify="right")
    for figure in item.figures:
        differ = Text(str(figure.differ), style="bold red" if figure.differ else "green")
        table.add_row(figure.name, str(figure.steps), str(figure.left), str(figure.right), differ)
    if item.doubt:
        table.caption = item.doubt
    return table
