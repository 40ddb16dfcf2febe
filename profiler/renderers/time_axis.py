"""One axis for moments of several ranks and recordings, whose clocks may have nothing to do with each other."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

from ..report import Report

_PAUSE_US = 600e6  # a longer silence lies between two recordings, not within one
_SHOWN_PAUSE_US = 1e4


class TimeAxis:
    """Microseconds from the beginning. Ranks whose clocks begin within an hour of each other share one zero.

    Silences of more than ten minutes are cut to 10 ms: two recordings of one rank, days apart, stay readable.
    """

    def __init__(self, report: Report) -> None:
        moments: dict[int, list[float]] = {step.rank: [] for step in report.steps}
        for step in report.steps:
            if step.start_us is not None:
                moments[step.rank] += [step.start_us, step.start_us + (step.duration_us or 0.0)]
        for span in report.timeline:
            moments.setdefault(span.rank, []).append(span.start_us)
        for point in report.run_ahead.series:
            moments.setdefault(point.rank, []).append(point.time_us)
        self.ranks = sorted(moments)
        self._starts: dict[int, list[float]] = {}
        self._cuts: dict[int, list[float]] = {}  # what is taken off from each start on
        firsts = {rank: min(times) for rank, times in moments.items() if times}
        zero = min(firsts.values(), default=0.0)
        shared = max(firsts.values(), default=0.0) - zero < 3600e6
        for rank, times in moments.items():
            first = firsts.get(rank, zero)
            self._build(rank, sorted(times) or [first], zero if shared else first)

    def _build(self, rank: int, times: list[float], zero: float) -> None:
        starts, cuts = [times[0]], [zero]
        for before, after in pairwise(times):
            if after - before > _PAUSE_US:
                starts.append(after)
                cuts.append(cuts[-1] + after - before - _SHOWN_PAUSE_US)
        self._starts[rank], self._cuts[rank] = starts, cuts

    def at(self, rank: int, time_us: float) -> float:
        """Where on the axis a moment of a rank's clock lies."""
        at = max(0, bisect_right(self._starts[rank], time_us) - 1)
        return time_us - self._cuts[rank][at]
