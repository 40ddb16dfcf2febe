"""Windows of time that figures are grouped by: a step, and the phases inside it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from .calls import Call
from .collectors.base import Counters

PHASES = ("build", "forward", "sample", "output", "other")
VERDICT_PHASES = ("build", "forward")  # what a verdict is about; a step without these phases is judged whole


class PhaseWindow(msgspec.Struct, kw_only=True):
    name: str
    start_ns: int
    end_ns: int
    thread: int = 0
    marks: dict[str, tuple[Counters, Counters]] = msgspec.field(default_factory=dict)  # by collector name


class StepWindow(msgspec.Struct, kw_only=True):
    start_ns: int
    end_ns: int
    thread: int = 0
    rank: int = 0
    index: int = 0
    batch_class: str = "unknown"
    coarse: bool = False
    mixed: bool | None = None
    num_reqs: int | None = None
    num_tokens: int | None = None
    name: str | None = None
    warmup: bool = False
    warmup_cause: str = ""  # warmup, compile or capture; "" where `warmup` is false
    phases: list[PhaseWindow] = msgspec.field(default_factory=list)
    marks: dict[str, tuple[Counters, Counters]] = msgspec.field(default_factory=dict)


Region = tuple[int, int, int]  # thread, start and end in nanoseconds


def tag_allowed(calls: Iterable[Call], regions: Sequence[Region]) -> None:
    """Mark the calls that were made within one of `regions` (which do not overlap within a thread)."""
    by_thread: dict[int, list[tuple[int, int]]] = {}
    for thread, start, end in sorted(regions, key=lambda region: region[1]):
        by_thread.setdefault(thread, []).append((start, end))
    if not by_thread:
        return
    starts = {thread: [start for start, _ in spans] for thread, spans in by_thread.items()}
    for call in calls:
        spans = by_thread.get(call.thread)
        if spans is not None:
            at = bisect_right(starts[call.thread], call.ts_ns) - 1
            if at >= 0 and call.ts_ns < spans[at][1]:
                call.allowed_upstream = True


def is_foreign_thread(step: StepWindow, call: Call) -> bool:
    """Whether `call` was made by another thread than the one that steps; not where either is unknown."""
    return step.thread != 0 and call.thread not in (0, step.thread)
