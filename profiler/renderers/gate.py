"""A gate for people: one row a limit, then the lines to blame, then what to know."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..gate import Gate, Judgement, expiry_line

_VERDICTS = {"kept": ("kept", "bold green"), "over": ("EXCEEDED", "bold red"), "unknown": ("NOT MEASURED", "yellow")}


def _row(table: Table, judgement: Judgement, verdict: str) -> None:
    text, style = _VERDICTS[verdict]
    table.add_row(
        judgement.batch_class,
        judgement.figure,
        judgement.stat,
        "–" if judgement.got is None else f"{judgement.got:g}",
        f"{judgement.limit:g}",
        str(judgement.steps),
        Text(text, style=style),
    )


def render_gate(gate: Gate) -> RenderableType:
    """The whole gate as one renderable."""
    table = Table(title="budget", title_justify="left", title_style="bold", header_style="bold")
    table.add_column("batch class", no_wrap=True)
    table.add_column("figure", no_wrap=True)
    table.add_column("stat")
    table.add_column("got", justify="right", no_wrap=True)
    table.add_column("limit", justify="right", no_wrap=True)
    table.add_column("steps", justify="right")
    table.add_column("verdict", no_wrap=True)
    for violation in gate.violations:
        _row(table, violation, "over")
    for judgement in gate.unmeasured:
        _row(table, judgement, "unknown")
    for judgement in gate.kept:
        _row(table, judgement, "kept")
    parts: list[RenderableType] = [table] if table.row_count else []
    for violation in gate.violations:
        parts.append(Text(violation.line(), style="red"))
        for share in violation.sites:
            parts.append(Padding(Text(share.line(), style="bold"), (0, 0, 0, 2)))
            if share.site.source:
                parts.append(Padding(Text(share.site.source, style="dim"), (0, 0, 0, 6)))
            if share.site.hint:
                parts.append(Padding(Text(f"mend: {share.site.hint}", style="italic"), (0, 0, 0, 6)))
    parts += [Text(f"expired: {expiry_line(entry)}", style="red") for entry in gate.expired]
    parts += [Text(judgement.line(), style="yellow") for judgement in gate.unmeasured]
    parts += [Text(f"note: {note}", style="dim") for note in gate.notes]
    return Group(*parts)
