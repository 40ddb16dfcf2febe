"""A checkup for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..doctor import Checkup

_STATES = {
    "ok": ("ok", "green"),
    "limited": ("limited", "yellow"),
    "missing": ("–", "dim"),
    "broken": ("broken", "red"),
}
_SECTIONS = ("software", "driver", "rights", "devices")


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _told(found: str, mend: str) -> Text:
    text = Text(found)
    if mend:
        text.append(f"\nto mend: {mend}", style="italic")
    return text


def render_checkup(checkup: Checkup) -> RenderableType:
    """The whole checkup as one renderable."""
    head = f"syncfree {checkup.syncfree} · Python {checkup.python} · {checkup.system}"
    parts: list[RenderableType] = [Text(head, style="dim")]
    for section in _SECTIONS:
        table = _table(section)
        for finding in checkup.findings:
            if finding.section == section:
                text, style = _STATES[finding.state]
                table.add_row(finding.name, Text(text, style=style), _told(finding.found, finding.mend))
        parts += [Text(), table]
    table = _table("collectors: what can be measured here")
    for item in checkup.collectors:
        mark = Text("usable", style="green") if item.usable else Text("–", style="dim")
        told = Text(f"sees {', '.join(item.sees)}" if item.usable else item.reason)
        if item.usable and item.blind:
            told.append(f"\nblind to {item.blind}", style="dim")
        if item.mend:
            told.append(f"\nto mend: {item.mend}", style="italic")
        table.add_row(item.name, mark, told)
    parts += [Text(), table, Text()]
    if checkup.auto:
        parts.append(Text(f"collectors=auto takes {checkup.auto} here", style="bold"))
    elif any(item.name == "simulated" and item.usable for item in checkup.collectors):
        parts.append(Text("no GPU here: tests run on the simulated device, trace files can be read", style="bold"))
    else:
        parts.append(Text("nothing can be measured here; trace files can be read", style="bold"))
    return Group(*parts)
