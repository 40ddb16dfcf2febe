"""Two collectors on the same steps: do they tell the same figures?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from .aggregate import Evidence, build_report
from .report import Figure, Note, Report, Source, Step
from .windows import StepWindow

SHOWN = 8  # differences that are spelled out


def differences(steps: Sequence[StepWindow], evidence: Sequence[Evidence]) -> list[Note]:
    """Notes of kind "verify" for every two collectors that both count syncs; none where there is only one.

    Compared per step: syncs in total, copies by direction, launches, graphs, launches recorded by a capture. A figure
    that one of them does not know is left out.
    """
    both = [item for item in evidence if "syncs" in item.sees]
    if len(both) < 2 or not steps:
        return []
    reports = {item.name: build_report(steps, [item], Source()) for item in both}
    return [note for a, b in combinations(reports, 2) for note in _compare(a, reports[a], b, reports[b])]


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


def _compare(a: str, left: Report, b: str, right: Report) -> Iterator[Note]:
    found: list[str] = []
    compared: dict[str, None] = {}
    for mine, theirs in zip(left.steps, right.steps, strict=True):
        for (name, x), y in zip(_figures(mine).items(), _figures(theirs).values(), strict=True):
            if x is None or y is None:
                continue
            compared[name] = None
            if x != y:
                found.append(f"step {mine.index} ({mine.batch_class}): {name}: {a} {x}, {b} {y}")
    if not found:
        text = f"{a} and {b} agree on all {len(left.steps)} steps: {', '.join(compared) or 'nothing both know'}"
        yield Note(kind="verify", text=text)
        return
    for text in found[:SHOWN]:
        yield Note(kind="verify", text=text)
    if len(found) > SHOWN:
        yield Note(kind="verify", text=f"{a} and {b} differ in {len(found) - SHOWN} more figures", count=len(found))
