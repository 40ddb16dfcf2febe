"""The live view: one report an interval, drawn in place at a terminal, one after another in a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..report import Report
from .console import ClassTable, console, figure, render_notes, site_table
from .rank_table import RankTable

_SITES = 6
_NOTES = 6


def show_live(
    reports: Iterable[Report],
    seconds: float | None = None,
    observe: Callable[[Report], None] | None = None,
    waiting: str = "waiting for the first steps",
) -> None:
    """Draw `reports` until they end, `seconds` have passed, or Ctrl-C. `observe` sees each of them first.

    `waiting` stands on a terminal's screen until the first one comes.
    """
    screen = console()
    began, shown = time.monotonic(), 0
    try:
        with ExitStack() as stack:
            draw = _drawer(screen, stack, waiting)
            for report in reports:
                if observe is not None:
                    observe(report)
                shown += len(report.steps)
                draw(render_live(report, shown, time.monotonic() - began))
                if seconds is not None and time.monotonic() - began >= seconds:
                    return
    except KeyboardInterrupt:
        return


def _drawer(screen: Console, stack: ExitStack, waiting: str) -> Callable[[RenderableType], None]:
    if not screen.is_terminal or screen.is_dumb_terminal:  # where nothing can be drawn over

        def append(view: RenderableType) -> None:
            screen.print(view)
            screen.print()

        return append
    live = stack.enter_context(Live(Text(waiting, style="dim"), console=screen, auto_refresh=False))
    live.refresh()
    return lambda view: live.update(view, refresh=True)


def render_live(report: Report, steps: int, seconds: float) -> RenderableType:
    """One view: classes, the lines that wait most, ranks where there are several, notes."""
    source = report.source
    head = f"{source.engine or 'engine'} · {source.device or 'device unknown'} · {steps} steps in {seconds:.0f} s"
    head += " · PARTIAL" if source.partial else ""
    parts: list[RenderableType] = [Text(head, style="bold")]
    if report.steps:
        parts.append(ClassTable(report))
    else:
        parts += [Text("no step ended in this interval", style="yellow"), *_totals(report)]
    sites = site_table(report, _SITES)
    if sites is not None:
        parts.append(sites)
    if len(source.ranks) > 1:
        parts.append(RankTable(report))
    notes = render_notes(report)
    if len(notes) > _NOTES:
        notes[_NOTES - 1 :] = [Text(f"and {len(notes) - _NOTES + 1} more notes", style="dim")]
    return Group(*parts, *notes)


def _totals(report: Report) -> list[Text]:
    """What was counted outside of steps: all there is of a process that has none."""
    syncs, launches = report.totals.syncs.total, report.totals.launches
    if syncs is None and launches.kernels is None:
        return []
    text = (
        f"counted: {figure(syncs)} syncs, {figure(launches.kernels)} launches, {figure(launches.graphs)} graph launches"
    )
    return [Text(text)]
