"""Phases and waits on the time axis, for pictures: what `Report.timeline` holds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from .counting import Sync
from .report import Span
from .sites import blamed
from .windows import StepWindow


def spans(steps: Sequence[StepWindow], syncs: Sequence[Sync], limit: int) -> tuple[list[Span], int]:
    """At most `limit` spans in order of time, and how many more there were. `steps` do not overlap."""
    found = [
        Span(
            kind="phase",
            name=phase.name,
            start_us=phase.start_ns / 1e3,
            duration_us=(phase.end_ns - phase.start_ns) / 1e3,
            rank=step.rank,
            step=step.index,
        )
        for step in steps
        for phase in step.phases
    ]
    order = sorted(steps, key=lambda s: s.start_ns)
    starts = [step.start_ns for step in order]
    rank = steps[0].rank if steps else 0
    for sync in syncs:
        if sync.kind == "maybe":
            continue
        at = bisect_right(starts, sync.call.ts_ns) - 1
        inside = at >= 0 and sync.call.ts_ns < order[at].end_ns
        found.append(_wait(sync, rank, order[at].index if inside else None))
    found.sort(key=lambda span: span.start_us)
    return found[:limit], max(0, len(found) - limit)


def _wait(sync: Sync, rank: int, step: int | None) -> Span:
    frame = blamed(sync.call.stack)
    line = f":{frame.line}" if frame is not None and frame.line else ""
    return Span(
        kind="sync",
        name=f"{frame.file}{line} {frame.function}" if frame is not None else sync.call.api,
        start_us=sync.call.ts_ns / 1e3,
        duration_us=None if sync.blocked_ns is None else sync.blocked_ns / 1e3,
        rank=rank,
        step=step,
        detail=sync.kind,
    )
