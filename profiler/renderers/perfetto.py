"""A report as tracks for ui.perfetto.dev (or chrome://tracing): steps, phases and waits of every rank, and counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ..report import Report, Step
from .time_axis import TimeAxis

_STEPS, _PHASES, _WAITS = 1, 2, 3
_TRACKS = {_STEPS: "steps", _PHASES: "phases", _WAITS: "waits for the device"}
_ORDER = ("build", "forward", "sample", "output", "other")

Event = dict[str, Any]


def render_perfetto(report: Report) -> bytes:
    """Chrome trace JSON, microseconds from the first step; steps without start times are laid end to end."""
    axis = TimeAxis(report)
    events = list(_names(axis.ranks))
    placed = list(_placed(report, axis))
    for step, start in placed:
        events += _step(step, start)
    drawn = {(span.rank, span.step) for span in report.timeline if span.kind == "phase"}
    for step, start in placed:
        if (step.rank, step.index) not in drawn:
            events += _phases_in_order(step, start)
    for span in report.timeline:
        track = _PHASES if span.kind == "phase" else _WAITS
        args = {"step": span.step} | ({"kind": span.detail} if span.detail else {})
        start = axis.at(span.rank, span.start_us)
        events.append(_complete(span.name, span.rank, track, start, span.duration_us or 0.0, args))
    for point in report.run_ahead.series:
        values = {"median": point.median_us, "least": point.min_us}
        events.append(_counter("launch lead (us)", point.rank, axis.at(point.rank, point.time_us), values))
    metadata = {"format": report.format, "device": report.source.device, "files": report.source.files}
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata})


def _names(ranks: Iterable[int]) -> Iterator[Event]:
    for rank in ranks:
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for track, name in _TRACKS.items():
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": track, "args": {"sort_index": track}}


def _placed(report: Report, axis: TimeAxis) -> Iterator[tuple[Step, float]]:
    behind: dict[int, float] = {}
    for step in report.steps:
        start = behind.get(step.rank, 0.0) if step.start_us is None else axis.at(step.rank, step.start_us)
        behind[step.rank] = start + (step.duration_us or 0.0)
        yield step, start


def _step(step: Step, start: float) -> Iterator[Event]:
    args = {
        "class": step.batch_class + (" (coarse)" if step.coarse else ""),
        "name": step.name,
        "requests": step.num_reqs,
        "tokens": step.num_tokens,
        "syncs": msgspec.structs.asdict(step.syncs),
        "copies": msgspec.structs.asdict(step.copies),
        "launches": msgspec.structs.asdict(step.launches),
        "blocked_us": step.blocked_us,
        "device_idle_us": step.device_idle_us,
        "launch_lead_p50_us": step.launch_lead_p50_us,
        "warmup": step.warmup_cause or step.warmup,
    }
    title = f"{step.index} {step.batch_class}" if step.batch_class != "unknown" or not step.name else step.name
    yield _complete(title, step.rank, _STEPS, start, step.duration_us or 0.0, args)
    if step.syncs.total is not None:
        yield _counter("syncs a step", step.rank, start, {"syncs": step.syncs.total})


def _phases_in_order(step: Step, start: float) -> Iterator[Event]:
    """Phases of which only durations are known, in the order in which a step has them."""
    for name in sorted(step.phases, key=lambda n: _ORDER.index(n) if n in _ORDER else len(_ORDER)):
        duration = step.phases[name].duration_us or 0.0
        if duration <= 0 or (name == "other" and len(step.phases) == 1):
            continue
        yield _complete(name, step.rank, _PHASES, start, duration, {"step": step.index, "placed": "in order"})
        start += duration


def _complete(name: str, rank: int, track: int, start: float, duration: float, args: Event) -> Event:
    return {
        "ph": "X",
        "name": name,
        "pid": rank,
        "tid": track,
        "ts": round(start, 3),
        "dur": round(duration, 3),
        "args": args,
    }


def _counter(name: str, rank: int, start: float, values: dict[str, float]) -> Event:
    return {"ph": "C", "name": name, "pid": rank, "ts": round(start, 3), "args": values}
