"""Many ranks on one screen: side by side where there is room, else those that are slowest."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ..report import Amount, Report, Step
from .console import figure, micros

_ROWS = 16  # of one block; fewer on a low terminal
_LEAST_ROWS = 4
_REST_OF_SCREEN = 26  # lines that classes, lines and notes take
_BLOCK = 58  # columns of one block
_SLOW, _VERY_SLOW = 1.1, 1.25  # times the median


class _Rank(NamedTuple):
    number: int
    steps: int
    syncs: Amount  # a step
    launches: Amount
    build_us: Amount
    step_us: Amount


class RankTable:
    """Syncs, launches and times a step of each rank, beside the middle one: a straggler stands out."""

    def __init__(self, report: Report) -> None:
        of: dict[int, list[Step]] = {rank: [] for rank in report.source.ranks}
        for step in report.steps:
            of.setdefault(step.rank, []).append(step)
        self.ranks = [_rank(number, steps) for number, steps in sorted(of.items())]
        times = [rank.step_us for rank in self.ranks if rank.step_us is not None]
        self.middle = median(times) if len(times) > 1 else None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = len(self.ranks)  # a pipe has no height
        if console.is_terminal:
            rows = max(_LEAST_ROWS, min(_ROWS, console.height - _REST_OF_SCREEN))
        blocks = max(1, options.max_width // (_BLOCK + 2))
        shown = self.ranks
        if len(shown) > rows * blocks:
            slowest = sorted(self.ranks, key=lambda rank: -(rank.step_us or 0.0))[: rows * blocks]
            shown = sorted(slowest)
        tall = -(-len(shown) // blocks)
        yield Text(f"ranks ({len(self.ranks)})", style="bold")
        yield Columns([self._block(shown[at : at + tall]) for at in range(0, len(shown), tall)], padding=(0, 2))
        if len(shown) < len(self.ranks):
            yield self._rest([rank for rank in self.ranks if rank not in shown])

    def _rest(self, ranks: Sequence[_Rank]) -> Text:
        times = [rank.step_us for rank in ranks if rank.step_us is not None]
        between = f", step mean {micros(min(times))} to {micros(max(times))}" if times else ""
        return Text(f"and {len(ranks)} ranks that are faster{between}", style="dim")

    def _block(self, ranks: Sequence[_Rank]) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        for name in ("rank", "steps", "syncs\n/step", "launch\n/step", "build\nmean", "step\nmean", "to the\nmedian"):
            table.add_column(name, justify="right", no_wrap=True)
        for rank in ranks:
            table.add_row(
                str(rank.number),
                str(rank.steps),
                figure(rank.syncs, 1),
                figure(rank.launches, 1),
                micros(rank.build_us),
                micros(rank.step_us),
                self._beside(rank),
            )
        return table

    def _beside(self, rank: _Rank) -> Text:
        if rank.step_us is None or not self.middle:
            return Text("–")
        ratio = rank.step_us / self.middle
        style = "bold red" if ratio > _VERY_SLOW else "yellow" if ratio > _SLOW else ""
        return Text(f"{round(100 * (ratio - 1)):+d} %", style=style)


def _rank(number: int, steps: Sequence[Step]) -> _Rank:
    return _Rank(
        number,
        len(steps),
        _mean([step.syncs.total for step in steps]),
        _mean([_launches(step) for step in steps]),
        _mean([step.phases["build"].duration_us for step in steps if "build" in step.phases]),
        _mean([step.duration_us for step in steps]),
    )


def _launches(step: Step) -> Amount:
    kernels, graphs = step.launches.kernels, step.launches.graphs
    return None if kernels is None or graphs is None else kernels + graphs


def _mean(values: Sequence[Amount]) -> Amount:
    """None where one is unknown, or there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
