"""The live view: one report an interval, drawn in place at a terminal, one after another in a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..report import Report
from .console import ClassTable, console, figure, micros, render_notes, site_table

_SITES = 6


def show_live(
    reports: Iterable[Report], seconds: float | None = None, observe: Callable[[Report], None] | None = None
) -> None:
    """Draw `reports` until they end, `seconds` have passed, or Ctrl-C. `observe` sees each of them first."""
    screen = console()
    began, shown = time.monotonic(), 0
    try:
        with ExitStack() as stack:
            live: Live | None = None
            for report in reports:
                if observe is not None:
                    observe(report)
                shown += len(report.steps)
                view = render_live(report, shown, time.monotonic() - began)
                if not screen.is_terminal:
                    screen.print(view)
                elif live is None:
                    live = stack.enter_context(Live(view, console=screen, auto_refresh=False))
                else:
                    live.update(view, refresh=True)
                if seconds is not None and time.monotonic() - began >= seconds:
                    return
    except KeyboardInterrupt:
        return


def render_live(report: Report, steps: int, seconds: float) -> RenderableType:
    """One view: classes, ranks where there are several, the lines that wait most, notes."""
    source = report.source
    head = f"{source.engine or 'engine'} · {source.device or 'device unknown'} · {steps} steps in {seconds:.0f} s"
    parts: list[RenderableType] = [Text(head, style="bold"), ClassTable(report)]
    if not report.steps:
        parts.append(Text("no step ended in this interval", style="yellow"))
    if len(source.ranks) > 1:
        parts.append(_ranks(report))
    sites = site_table(report, _SITES)
    if sites is not None:
        parts.append(sites)
    return Group(*parts, *render_notes(report))


def _ranks(report: Report) -> Table:
    """Steps, syncs and step time by rank: a straggler stands out."""
    table = Table(title="ranks", title_justify="left", title_style="bold", header_style="bold")
    for name in ("rank", "steps", "syncs", "launches", "step mean"):
        table.add_column(name, justify="right")
    for rank in _source_ranks(report):
        steps = [step for step in report.steps if step.rank == rank]
        syncs = [step.syncs.total for step in steps]
        launches = [(step.launches.kernels, step.launches.graphs) for step in steps]
        known = all(value is not None for value in syncs)
        counted = all(None not in pair for pair in launches)
        times = [step.duration_us for step in steps if step.duration_us is not None]
        table.add_row(
            str(rank),
            str(len(steps)),
            figure(sum(value or 0 for value in syncs) if known else None),
            figure(sum((k or 0) + (g or 0) for k, g in launches) if counted else None),
            micros(sum(times) / len(times) if times else None),
        )
    return table


def _source_ranks(report: Report) -> list[int]:
    return sorted({*report.source.ranks, *(step.rank for step in report.steps)})
