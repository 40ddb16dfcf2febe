"""Two collectors on the same steps: do they tell the same figures?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from .aggregate import Evidence, build_report
from .report import Compared, Comparison, Figure, Note, Report, Source, Step
from .windows import StepWindow

SHOWN = 8  # differences that are spelled out
VERIFYING = "probe,kineto"  # the collectors of `profile --verify`


def compare(steps: Sequence[StepWindow], evidence: Sequence[Evidence]) -> tuple[list[Comparison], list[Note]]:
    """Every two collectors that both count syncs, on the steps of one rank; nothing where there is only one.

    Compared per step: syncs in total, copies by direction, launches, graphs, launches recorded by a capture; the sums
    are told over all steps and by batch class. A figure that one of them does not know is left out. The notes, of kind
    "verify", tell of each agreement and difference.
    """
    both = [item for item in evidence if "syncs" in item.sees]
    if len(both) < 2 or not steps:
        return [], []
    reports = {item.name: build_report(steps, [item], Source()) for item in both}
    doubts = {item.name: next((n.text for n in item.notes if n.kind == "partial"), "") for item in both}
    comparisons: list[Comparison] = []
    notes: list[Note] = []
    for a, b in combinations(reports, 2):
        made = Comparison(left=a, right=b, rank=steps[0].rank, doubt=doubts[a] or doubts[b])
        notes += _notes(made, _compare(made, reports[a].steps, reports[b].steps), len(steps))
        comparisons.append(made)
    return comparisons, notes


def _figures(step: Step) -> dict[str, Figure]:
    return {
        "syncs": step.syncs.total,
        "d2h copies": step.copies.d2h,
        "h2d copies": step.copies.h2d,
        "d2d copies": step.copies.d2d,
        "kernel launches": step.launches.kernels,
        "graph launches": step.launches.graphs,
        "captured launches": step.launches.captured,
    }


def _compare(made: Comparison, left: Sequence[Step], right: Sequence[Step]) -> list[str]:
    """Fills in the figures; returns every difference in words."""
    found: list[str] = []
    figures: dict[str, Compared] = {}
    classes: dict[str, dict[str, Compared]] = {}
    for mine, theirs in zip(left, right, strict=True):
        of_class = classes.setdefault(mine.batch_class, {})
        for (name, x), y in zip(_figures(mine).items(), _figures(theirs).values(), strict=True):
            if x is None or y is None:
                continue
            for sums in (figures, of_class):
                figure = sums.setdefault(name, Compared(name=name))
                figure.steps += 1
                figure.left += x
                figure.right += y
                figure.differ += x != y
            if x != y:
                found.append(f"step {mine.index} ({mine.batch_class}): {name}: {made.left} {x}, {made.right} {y}")
    made.figures = list(figures.values())
    made.classes = {name: list(sums.values()) for name, sums in classes.items()}
    return found


def _notes(made: Comparison, found: Sequence[str], steps: int) -> Iterator[Note]:
    a, b, where = made.left, made.right, f"rank {made.rank}: " if made.rank else ""
    if not found:
        names = ", ".join(figure.name for figure in made.figures) or "nothing both know"
        yield Note(kind="verify", text=f"{where}{a} and {b} agree on all {steps} steps: {names}")
        return
    for text in found[:SHOWN]:
        yield Note(kind="verify", text=where + text)
    if len(found) > SHOWN:
        text = f"{where}{a} and {b} differ in {len(found) - SHOWN} more figures"
        yield Note(kind="verify", text=text, count=len(found))


class Outcome(NamedTuple):
    """`exit_code`: 0 they agree, 1 they differ, 4 that cannot be told here; `text` says what, in a line."""

    exit_code: int
    text: str


def outcome(report: Report) -> Outcome:
    """What a recording with `VERIFYING` proves, all ranks together. A difference anywhere outweighs all else."""
    a, b = VERIFYING.split(",")
    made = [item for item in report.verification if {item.left, item.right} == {a, b}]
    differ = [item for item in made if item.differ and not item.doubt]
    if differ:
        steps = sum(max(figure.steps for figure in item.figures) for item in differ)
        figures = ", ".join(dict.fromkeys(f.name for item in differ for f in item.figures if f.differ))
        where = f" on rank {', '.join(str(item.rank) for item in differ)}" if len(report.source.ranks) > 1 else ""
        return Outcome(1, f"{a} and {b} differ{where}: {figures} ({steps} steps compared)")
    missing = _missing(report, made)
    if missing:
        return Outcome(4, f"{a} and {b} could not be compared: {missing}")
    return Outcome(0, f"{a} and {b} agree on all {len(report.steps)} steps")


def _missing(report: Report, made: Sequence[Comparison]) -> str:
    """Why the comparison does not cover everything; "" where it does."""
    for item in made:
        if item.differ:
            return f"they differ, but {item.doubt}"
        if not any(figure.name == "syncs" for figure in item.figures):
            return "there is no step whose syncs both know"
    lacking = sorted({step.rank for step in report.steps} - {item.rank for item in made})
    if made and not lacking:
        return ""
    told = next((n.text for n in report.notes if n.kind in ("collector", "device", "partial")), "")
    where = f"rank {', '.join(map(str, lacking))}: " if made else ""
    return where + (told or f"only {', '.join(report.source.collectors) or 'no collector'} counted syncs")
