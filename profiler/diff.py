"""What changed between two reports: per class and per site, with direction, and told apart from noise.

Counts that are the same in every step are compared exactly. Counts that vary, and all times, are compared as
distributions: a difference needs a rank test that rules out chance (Mann-Whitney U, normal approximation with tie
correction), and for times also little overlap (probability that a random step of one side is slower than one of the
other) and a shift of the median that matters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from statistics import NormalDist
from typing import Literal

import msgspec

from .budget import ClassBudget
from .classes import distribution
from .gate import figure_of
from .report import Amount, Report, Site, Step

Direction = Literal["worse", "better", "same", "unknown"]
COUNTS = ("syncs", "copies", "launches")
TIMES = ("duration_us", "build_us", "blocked_us")
MIN_STEPS = 8  # fewer values cannot rule out chance by ranks
CHANCE = 1e-5  # two-sided p below which a rank test counts: a gate makes dozens of them a run
SEPARATION = 0.75  # P(a random step of one side is slower than one of the other) from which times differ
SHIFT = 0.05  # least relative shift of the median time
FLOOR_US = 2.0  # and the least in microseconds: below it are clock reads


class Change(msgspec.Struct, kw_only=True):
    """One figure of one class. `before` and `after` are medians for times, means for counts; None is unknown."""

    batch_class: str
    figure: str
    before: Amount
    after: Amount
    direction: Direction
    why: str = ""

    @property
    def percent(self) -> float | None:
        if self.before is None or self.after is None or self.before == 0:
            return None
        return (self.after - self.before) / self.before * 100


class SiteChange(msgspec.Struct, kw_only=True):
    """One source line in one class: syncs per judged step before and after."""

    batch_class: str
    file: str
    function: str
    kind: str
    phase: str
    line_before: int | None
    line_after: int | None
    before: float
    after: float
    direction: Direction
    source: str = ""
    hint: str = ""


class Difference(msgspec.Struct, kw_only=True):
    """`exit_code`: 1 something got worse, 4 a figure was lost or nothing could be compared, else 0."""

    changes: list[Change] = msgspec.field(default_factory=list)
    sites: list[SiteChange] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    lost: list[str] = msgspec.field(default_factory=list)  # known before, unknown after

    @property
    def regressions(self) -> list[Change | SiteChange]:
        return self._all("worse")

    @property
    def improvements(self) -> list[Change | SiteChange]:
        return self._all("better")

    def _all(self, direction: Direction) -> list[Change | SiteChange]:
        everything: list[Change | SiteChange] = [*self.changes, *self.sites]
        return [change for change in everything if change.direction == direction]

    @property
    def compared(self) -> int:
        return sum(change.direction != "unknown" for change in self.changes)

    def summary(self) -> str:
        """One line: what got worse, what got better, what can no longer be told."""
        if not self.compared:
            return "nothing could be compared: no figure is known on both sides"
        parts = [f"{len(self.regressions)} worse", f"{len(self.improvements)} better"]
        if self.lost:
            parts.append(f"{len(self.lost)} no longer measured ({self.lost[0]})")
        return ", ".join(parts)

    @property
    def exit_code(self) -> int:
        if self.regressions:
            return 1
        return 4 if self.lost or not self.compared else 0


def compare(before: Report, after: Report, *, shift: float = SHIFT) -> Difference:
    """The difference of two reports. Warm-up, compile and capture steps and other threads are left out of both.

    `shift`: the least relative change of a median time that counts.
    """
    result = Difference()
    old, new = _by_class(before), _by_class(after)
    for name in sorted({*old, *new}):
        if name not in old or name not in new:
            where, count = ("before", len(old[name])) if name in old else ("after", len(new[name]))
            result.notes.append(f"{name}: only {where} ({count} steps): not compared")
            continue
        for figure in COUNTS:
            result.changes.append(_counts(name, figure, _values(old[name], figure), _values(new[name], figure)))
        for figure in TIMES:
            result.changes.append(_times(name, figure, _values(old[name], figure), _values(new[name], figure), shift))
        result.sites += _sites(name, before, old[name], after, new[name])
    result.lost = [
        f"{change.batch_class}: {change.figure} was {change.before:g}, is unknown now"
        for change in result.changes
        if change.before is not None and change.after is None
    ]
    for side, report in (("before", before), ("after", after)):
        if report.source.partial:
            result.notes.append(f"{side}: the report is partial")
    if before.source.device != after.source.device:
        result.notes.append(f"devices differ: {before.source.device} before, {after.source.device} after")
    return result


def _by_class(report: Report) -> dict[str, list[Step]]:
    groups: dict[str, list[Step]] = {}
    for step in report.steps:
        if not step.warmup:
            groups.setdefault(step.batch_class, []).append(step)
    return groups


def _values(steps: Sequence[Step], figure: str) -> list[float] | None:
    """The figure of every step, as budgets judge it; None where it is unknown in any."""
    judge = ClassBudget(batch_class="*", limits={})
    values = []
    for step in steps:
        value = figure_of(step, figure, judge)
        if value is None:
            return None
        values.append(value)
    return values


# ------------------------------------------------------------------ figures


def _counts(name: str, figure: str, old: list[float] | None, new: list[float] | None) -> Change:
    change = Change(batch_class=name, figure=figure, before=_mean(old), after=_mean(new), direction="unknown")
    if old is None or new is None:
        return change
    change.direction = "same"
    mean_old, mean_new = change.before or 0, change.after or 0
    if mean_old == mean_new and max(old) == max(new):
        return change
    if min(old) == max(old) and mean_new > mean_old:
        over = sum(value > old[0] for value in new)
        change.direction = "worse"
        change.why = f"was {old[0]:g} in every step, now up to {max(new):g} ({over} of {len(new)} steps)"
        return change
    if min(new) == max(new) and mean_new < mean_old:
        over = sum(value > new[0] for value in old)
        change.direction = "better"
        change.why = f"is {new[0]:g} in every step, was up to {max(old):g} ({over} of {len(old)} steps)"
        return change
    slower, chance = rank_test(old, new)
    few = min(len(old), len(new)) < MIN_STEPS
    if (chance < CHANCE or few) and mean_new != mean_old:
        change.direction = "worse" if mean_new > mean_old else "better"
        change.why = f"varies, {slower:.0%} of pairs higher after" + (" (few steps)" if few else "")
    elif max(new) > max(old):
        change.why = f"maximum {max(old):g} before, {max(new):g} after; within chance"
    return change


def _times(name: str, figure: str, old: list[float] | None, new: list[float] | None, shift: float) -> Change:
    change = Change(batch_class=name, figure=figure, before=_median(old), after=_median(new), direction="unknown")
    if old is None or new is None or change.before is None or change.after is None:
        return change
    change.direction = "same"
    if min(len(old), len(new)) < MIN_STEPS:
        change.why = f"fewer than {MIN_STEPS} steps: times not compared"
        change.direction = "unknown"
        return change
    slower, chance = rank_test(old, new)
    moved = abs(change.after - change.before)
    if (
        chance < CHANCE
        and max(slower, 1 - slower) >= SEPARATION
        and moved >= FLOOR_US
        and moved >= shift * change.before
    ):
        change.direction = "worse" if change.after > change.before else "better"
    change.why = f"{slower:.0%} of pairs slower after"
    return change


def rank_test(old: Sequence[float], new: Sequence[float]) -> tuple[float, float]:
    """Probability that a random value of `new` is higher than one of `old` (ties half), and the two-sided p of chance.

    Mann and Whitney (1947); normal approximation with correction for ties and continuity.
    """
    import numpy as np

    n, m = len(old), len(new)
    _, place, sizes = np.unique(np.concatenate((old, new)), return_inverse=True, return_counts=True)
    middle = np.cumsum(sizes) - (sizes - 1) / 2  # the rank that equal values share
    u = float(middle[place[n:]].sum()) - m * (m + 1) / 2
    ties = float((sizes.astype(float) ** 3 - sizes).sum())
    total = n + m
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0:
        return 0.5, 1.0
    z = max(0.0, abs(u - n * m / 2) - 0.5) / math.sqrt(variance)
    return u / (n * m), 2 * (1 - NormalDist().cdf(z))


def _mean(values: list[float] | None) -> Amount:
    return distribution(values or []).mean


def _median(values: list[float] | None) -> Amount:
    return distribution(values or []).p50


# ------------------------------------------------------------------ sites

_SiteKey = tuple[str, str, str, str]


def _sites(
    name: str, before: Report, old_steps: Sequence[Step], after: Report, new_steps: Sequence[Step]
) -> list[SiteChange]:
    old, new = _site_counts(before, old_steps), _site_counts(after, new_steps)
    result = []
    for key in sorted({*old, *new}):
        (was, old_site), (now, new_site) = old.get(key, (Counter(), None)), new.get(key, (Counter(), None))
        shown = new_site or old_site
        assert shown is not None
        per_step = sum(was.values()) / len(old_steps), sum(now.values()) / len(new_steps)
        change = _counts(name, "syncs", _spread(was, old_steps), _spread(now, new_steps))
        result.append(
            SiteChange(
                batch_class=name,
                file=shown.file,
                function=shown.function,
                kind=shown.kind,
                phase=shown.phase,
                line_before=old_site.line if old_site else None,
                line_after=new_site.line if new_site else None,
                before=per_step[0],
                after=per_step[1],
                direction=change.direction,
                source=shown.source,
                hint=shown.hint,
            )
        )
    return result


def _site_counts(report: Report, steps: Sequence[Step]) -> dict[_SiteKey, tuple[Counter[tuple[int, int]], Site]]:
    """By what survives an edit or another checkout (end of path, function, kind, phase): counts by step."""
    wanted = {(step.rank, step.index) for step in steps}
    found: dict[_SiteKey, tuple[Counter[tuple[int, int]], Site]] = {}
    for site in report.sites:
        if site.kind == "maybe":
            continue
        key = ("/".join(PurePath(site.file).parts[-2:]), site.function, site.kind, site.phase)
        for at in site.steps:
            mine = at.count - at.other_threads
            if mine and (at.rank, at.index) in wanted:
                counts, _ = found.setdefault(key, (Counter(), site))
                counts[at.rank, at.index] += mine
    return found


def _spread(counts: Counter[tuple[int, int]], steps: Sequence[Step]) -> list[float]:
    return [float(counts.get((step.rank, step.index), 0)) for step in steps]
