"""How far the host ran ahead of the device, and what its waits cost the device: joins of calls and device records."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence

import msgspec

from ..calls import Call, Direction, Role
from ..classes import distribution
from ..counting import Sync
from ..report import Distribution, GraphLaunches, LeadPoint, Report, RunAhead, Step
from ..windows import StepWindow
from .process_trace import DeviceRecords, ProcessTrace

_JOINED = frozenset({Role.LAUNCH, Role.GRAPH_LAUNCH, Role.COPY, Role.MEMSET})
_LAUNCHES = frozenset({Role.LAUNCH, Role.GRAPH_LAUNCH})
_SERIES = 400  # points of the launch lead over time that a report carries for each rank
_TOP_NAMES = 8


class Joined(msgspec.Struct):
    """Device records by the call that caused them (by correlation id)."""

    first_start: dict[int, int]  # correlation -> start of its first device record
    graph_kernels: dict[int, Counter[int]]  # correlation of a graph launch -> kernels by name id
    orphans: int = 0  # kernels without a call
    repeated: int = 0  # calls that share an id with an earlier one


def join(trace: ProcessTrace) -> Joined:
    """Join records to calls; also tells copies their direction, size and memory kind where the call did not."""
    calls: dict[int, Call] = {}
    repeated = 0
    for call in trace.calls:
        if call.correlation and call.role in _JOINED and calls.setdefault(call.correlation, call) is not call:
            repeated += 1
    result = Joined({}, {}, repeated=repeated)
    records = trace.records
    first, graphs = result.first_start, result.graph_kernels
    for row, correlation in enumerate(records.correlation):
        call_of = calls.get(correlation)
        kernel = records.kind[row] == DeviceRecords.KERNEL
        if call_of is None:
            result.orphans += kernel
            continue
        start = records.start[row]
        if start < first.get(correlation, start + 1):
            first[correlation] = start
        if kernel and call_of.role is Role.GRAPH_LAUNCH:
            graphs.setdefault(correlation, Counter())[records.name[row]] += 1
    _describe_copies(trace)
    return result


def _describe_copies(trace: ProcessTrace) -> None:
    relabelled: Counter[str] = Counter()
    for call in trace.calls:
        if call.role is not Role.COPY or call.correlation is None:
            continue
        record = trace.copies.get(call.correlation)
        if record is None:
            continue
        if call.direction is None:
            call.direction = record.direction
        elif record.direction is not None and record.direction is not call.direction:
            relabelled[f"{record.direction} by the device record, {call.direction} by the call"] += 1
        call.nbytes = record.nbytes if call.nbytes is None else call.nbytes
        call.pageable = record.pageable
        # cudaMemcpyAsync to pageable memory returns only when the bytes are there (CUDA: API synchronization behavior).
        if record.pageable and call.direction is Direction.D2H:
            call.blocking = True
    for what, count in sorted(relabelled.items()):
        trace.note("input", f"{count:,} copies are {what}: the call is believed", count)


def mark_ran(trace: ProcessTrace, joined: Joined) -> None:
    """Correct `captured` by what ran: a launch with a device record did; one without, in a capture range, did not."""
    if "kernel" not in trace.kinds:
        return
    ranges = [(r.start_ns, r.end_ns) for r in trace.ranges if r.name.startswith("capture_")]
    for call in trace.calls:
        if call.role not in _JOINED:
            continue
        if call.correlation is not None and call.correlation in joined.first_start:
            call.captured = False
        elif call.role is Role.LAUNCH and any(start <= call.ts_ns < end for start, end in ranges):
            call.captured = True


class Gaps:
    """When no stream of the device had work, between the first and the last device record."""

    def __init__(self, records: DeviceRecords) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        until: int | None = None
        for row in sorted(range(len(records)), key=records.start.__getitem__):
            start = records.start[row]
            if until is not None and start > until:
                self.starts.append(until)
                self.ends.append(start)
            end = start + records.duration[row]
            until = end if until is None or end > until else until

    def around(self, moment: int) -> int | None:
        """Index of the gap that `moment` lies in."""
        at = bisect_right(self.starts, moment) - 1
        return at if at >= 0 and moment < self.ends[at] else None


def attribute_idle(trace: ProcessTrace, syncs: Sequence[Sync]) -> None:
    """Set `device_idle_ns` on each sync's call: how long the device had nothing to do because the host had waited.

    That is the gap in the device's work in which the wait ended: from when the device had drained (or the wait began,
    if it was idle already) to its next work, which the host could only launch afterwards. Waits within one gap share it
    in order of time. A wait that ended while the device was still busy cost it nothing.
    """
    if "kernel" not in trace.kinds:
        return
    gaps = Gaps(trace.records)
    members: dict[int, list[Sync]] = {}
    for sync in syncs:
        if sync.kind == "maybe" or sync.blocked_ns is None:
            continue
        gap = gaps.around(sync.call.ts_ns + sync.blocked_ns)
        sync.call.device_idle_ns = 0
        if gap is not None:
            members.setdefault(gap, []).append(sync)
    for gap, waits in members.items():
        end = gaps.ends[gap]
        for sync in sorted(waits, key=lambda s: s.call.ts_ns, reverse=True):
            begin = max(gaps.starts[gap], sync.call.ts_ns)
            if begin < end:
                sync.call.device_idle_ns = end - begin
                end = begin


def attribute_leads(trace: ProcessTrace, joined: Joined, syncs: Sequence[Sync]) -> None:
    """Set `launch_lead_ns` on each sync's call: how long after it began the device came to the host's last launch.

    0 where the device had come to it before: the queue was empty, or about to be.
    """
    if "kernel" not in trace.kinds:
        return
    launched = sorted(
        (call.ts_ns, joined.first_start[call.correlation])
        for call in trace.calls
        if call.role in _LAUNCHES and call.correlation in joined.first_start
    )
    times = [at for at, _ in launched]
    for sync in syncs:
        if sync.kind != "maybe":
            last = bisect_right(times, sync.call.ts_ns) - 1
            sync.call.launch_lead_ns = max(0, launched[last][1] - sync.call.ts_ns) if last >= 0 else 0


def launch_leads(trace: ProcessTrace, joined: Joined) -> list[tuple[int, int]]:
    """(time, lead) of each launch that ran, ns: from the return of the launch call to the start of its first record.

    The lead is noted on the call too.
    """
    leads = []
    for call in trace.calls:
        if call.role not in _LAUNCHES or call.correlation is None:
            continue
        start = joined.first_start.get(call.correlation)
        if start is not None:
            call.launch_lead_ns = max(0, start - call.ts_ns - (call.dur_ns or 0))
            leads.append((call.ts_ns, call.launch_lead_ns))
    leads.sort()
    return leads


def fill_steps(windows: Sequence[StepWindow], steps: Sequence[Step], leads: list[tuple[int, int]]) -> None:
    """Launch lead of each step (`windows` and `steps` in parallel): at its end, median and least, microseconds."""
    times = [t for t, _ in leads]
    for window, step in zip(windows, steps, strict=True):
        inside = leads[bisect_right(times, window.start_ns - 1) : bisect_right(times, window.end_ns - 1)]
        if inside:
            figures = distribution(lead / 1e3 for _, lead in inside)
            step.launch_lead_us = inside[-1][1] / 1e3
            step.launch_lead_p50_us = figures.p50
            step.launch_lead_min_us = min(lead for _, lead in inside) / 1e3


def fill_idle(windows: Sequence[StepWindow], steps: Sequence[Step], waits: Sequence[Call]) -> None:
    """Device time that the waits of each step lost, microseconds."""
    told = sorted((call.ts_ns, call.device_idle_ns or 0) for call in waits)
    times = [at for at, _ in told]
    for window, step in zip(windows, steps, strict=True):
        inside = told[bisect_left(times, window.start_ns) : bisect_left(times, window.end_ns)]
        step.device_idle_us = sum(idle for _, idle in inside) / 1e3


def fill_report(report: Report, windows: Sequence[StepWindow], calls: Sequence[Call]) -> None:
    """The same figures for a live recording, from what `launch_leads` and `attribute_idle` left on its calls.

    Nothing is filled in where no call tells. `windows`: of `report.steps`, in parallel.
    """
    leads = sorted((c.ts_ns, c.launch_lead_ns) for c in calls if c.role in _LAUNCHES and c.launch_lead_ns is not None)
    if not leads:
        return
    waits = [call for call in calls if call.device_idle_ns is not None]
    fill_steps(windows, report.steps, leads)
    fill_idle(windows, report.steps, waits)
    report.run_ahead = _summary(leads, report.source.ranks[0] if report.source.ranks else 0)
    report.run_ahead.device_idle_us = sum(call.device_idle_ns or 0 for call in waits) / 1e3


def summary(trace: ProcessTrace, joined: Joined, leads: list[tuple[int, int]], rank: int) -> RunAhead:
    """The launch lead over time (medians of equal shares of the launches) and what each graph launch ran."""
    result = _summary(leads, rank)
    if "kernel" in trace.kinds:
        result.graph_launches = _graph_launches(trace, joined)
    return result


def _summary(leads: list[tuple[int, int]], rank: int) -> RunAhead:
    size = max(1, -(-len(leads) // _SERIES))
    series = []
    for at in range(0, len(leads), size):
        part = sorted(leads[at : at + size], key=lambda pair: pair[1])
        series.append(LeadPoint(rank, leads[at][0] / 1e3, part[len(part) // 2][1] / 1e3, part[0][1] / 1e3))
    return RunAhead(
        launch_lead_us=distribution(lead / 1e3 for _, lead in leads) if leads else Distribution(),
        launch_lead_min_us=min((lead for _, lead in leads), default=0) / 1e3 if leads else None,
        series=series,
    )


def _graph_launches(trace: ProcessTrace, joined: Joined) -> list[GraphLaunches]:
    """Graph launches grouped by what they ran."""
    groups: dict[tuple[str, tuple[tuple[int, int], ...]], GraphLaunches] = {}
    for call in trace.calls:
        if call.role is not Role.GRAPH_LAUNCH or call.captured:
            continue
        kernels = joined.graph_kernels.get(call.correlation or 0, Counter())
        key = (call.api, tuple(sorted(kernels.items())))
        group = groups.get(key)
        if group is None:
            names = {trace.names[name]: count for name, count in kernels.most_common(_TOP_NAMES)}
            # Without a record of any kernel the graph ran all the same: how many kernels is not known.
            count = sum(kernels.values()) or None
            group = groups[key] = GraphLaunches(api=call.api, kernels=count, names=names)
        group.launches += 1
    return sorted(groups.values(), key=lambda g: (-g.launches * (g.kernels or 0), g.api))
