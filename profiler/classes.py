"""Figures by batch class, over the steps that a verdict is about."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from .report import ClassFigures, Distribution, Figure, PhaseFigures, Step
from .windows import VERDICT_PHASES


def judged_phases(step: Step, phases: Sequence[str] = VERDICT_PHASES) -> list[PhaseFigures] | None:
    """The phases a verdict is about; None = the step is judged whole (it has none of them)."""
    if not any(name in step.phases for name in phases):
        return None
    return [step.phases[name] for name in phases if name in step.phases]


def judged_syncs(step: Step) -> Figure:
    """Syncs of build + forward made by the stepping thread; of the whole step where it has no such phase."""
    phases = judged_phases(step)
    parts = [step.syncs] if phases is None else [phase.syncs for phase in phases]
    foreign = step.other_threads.items()
    others = [f.syncs.total for name, f in foreign if phases is None or name in VERDICT_PHASES]
    if any(part.total is None for part in parts) or any(figure is None for figure in others):
        return None
    return sum(part.total or 0 for part in parts) - sum(figure or 0 for figure in others)


def distribution(figures: Iterable[float | None]) -> Distribution:
    """Mean, nearest-rank median and 99th percentile, maximum; unknown if any figure is unknown or there is none."""
    values: list[float] = []
    for figure in figures:
        if figure is None:
            return Distribution()
        values.append(figure)
    if not values:
        return Distribution()
    values.sort()
    n = len(values)

    def rank(q: float) -> float:
        return values[max(0, min(n - 1, -int(-q * n // 1) - 1))]

    return Distribution(mean=sum(values) / n, p50=rank(0.5), p99=rank(0.99), max=values[-1])


def _launch_count(step: Step) -> Figure:
    phases = judged_phases(step)
    parts = [step.launches] if phases is None else [phase.launches for phase in phases]
    if any(p.kernels is None or p.graphs is None for p in parts):
        return None
    return sum((p.kernels or 0) + (p.graphs or 0) for p in parts)


def _copy_count(step: Step) -> Figure:
    phases = judged_phases(step)
    parts = [step.copies] if phases is None else [phase.copies for phase in phases]
    if any(p.d2h is None or p.h2d is None for p in parts):
        return None
    return sum((p.d2h or 0) + (p.h2d or 0) for p in parts)


def class_figures(steps: Sequence[Step]) -> dict[str, ClassFigures]:
    """Per batch class, over the steps that are not warm-up."""
    groups: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        if not step.warmup:
            groups[step.batch_class].append(step)
    result = {}
    for name, members in sorted(groups.items()):
        syncs = distribution(judged_syncs(step) for step in members)
        result[name] = ClassFigures(
            steps=len(members),
            syncs_per_step=syncs,
            launches_per_step=distribution(_launch_count(step) for step in members),
            copies_per_step=distribution(_copy_count(step) for step in members),
            duration_us=distribution(step.duration_us for step in members),
            build_us=distribution(
                step.phases["build"].duration_us if "build" in step.phases else None for step in members
            ),
            blocked_us=distribution(step.blocked_us for step in members),
            verdict="unknown" if syncs.max is None else ("sync-free" if syncs.max == 0 else "syncs"),
        )
    return result
