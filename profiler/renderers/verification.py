"""What `profile --verify` found, as a table."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from ..report import Compared, Comparison, Report


def render_verification(report: Report) -> list[Table]:
    """One table for every two collectors and rank: each figure as both tell it, and in how many steps they differ;
    over all steps, and by batch class where there are several."""
    return [_table(item, len(report.source.ranks) > 1) for item in report.verification]


def _table(item: Comparison, ranked: bool) -> Table:
    title = f"{item.left} beside {item.right}" + (f", rank {item.rank}" if ranked else "")
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.add_column("figure", no_wrap=True)
    for name in ("steps", item.left, item.right, "steps that differ"):
        table.add_column(name, justify="right")
    for figure in item.figures:
        table.add_row(*_row(figure.name, figure))
    if len(item.classes) > 1:
        for name, figures in item.classes.items():
            table.add_section()
            for figure in figures:
                if figure.left or figure.right:
                    table.add_row(*_row(f"{name}: {figure.name}", figure))
    if item.doubt:
        table.caption = item.doubt
    return table


def _row(name: str, figure: Compared) -> tuple[str | Text, ...]:
    differ = Text(str(figure.differ), style="bold red" if figure.differ else "green")
    return name, str(figure.steps), str(figure.left), str(figure.right), differ
