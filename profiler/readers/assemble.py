"""From what a file says about a process to a report: joins, steps, stacks, then the one aggregation there is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from ...errors import BadInput
from ..aggregate import Evidence, build_report
from ..calls import Call, Direction, Role
from ..classes import class_figures, distribution
from ..counting import count_syncs, mark_captured
from ..merge import merge_reports, merged_sites
from ..report import Report, Source, Step, Totals
from ..timeline import spans
from ..windows import StepWindow
from . import run_ahead
from .process_trace import CopyRecord, DeviceRecords, ProcessTrace
from .stacks import attach_stacks
from .steps import RangeFilter, find_steps, overlap_lanes

_API_TELLS = frozenset({"syncs", "maybe", "copies", "launches", "captured", "blocked"})
_BLIND = {
    "kineto": "calls made before recording began, and PyTorch stack lines: a frame's line is where its function begins",
    "rocprofv3": "Python source lines, whether a copy's host memory is pageable, and a copy's direction without a "
    "memory copy trace",
    "nsys": "Python source lines, and calls outside the recorded range",
}


def assemble(traces: Sequence[ProcessTrace], wanted: RangeFilter, timeline: int) -> Report:
    """The report of all processes; `timeline`: at most so many spans of each go into `Report.timeline`."""
    ranks = _ranks(traces)
    built = [_process_report(trace, wanted, rank, timeline) for trace, rank in zip(traces, ranks, strict=True)]
    if wanted.named and not any(report.steps for report, _ in built):
        names = sorted({r.name for trace in traces for r in trace.ranges})
        there = f": there are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else ", nor any other"
        raise BadInput(f"{traces[0].files[0]}: expected ranges named {' or '.join(wanted.named)}, found none{there}")
    reports = [report for report, _ in built]
    merged = merge_reports(reports)
    told = [report.totals for trace, report in zip(traces, reports, strict=True) if trace.kinds - {"host"}]
    if len(reports) > 1 and told:
        # A front-end process that never touches a device does not make the others' totals unknown.
        merged.totals = merge_reports([Report(totals=totals) for totals in told]).totals
    if len(reports) > 1:
        merged.run_ahead.launch_lead_us = distribution(lead / 1e3 for _, leads in built for _, lead in leads)
    return merged


def _ranks(traces: Sequence[ProcessTrace]) -> list[int]:
    """The ranks that files tell; the others are numbered in order with what is free."""
    taken = {trace.rank for trace in traces if trace.rank is not None}
    result = []
    free = 0
    for trace in traces:
        rank = trace.rank
        if rank is None:
            while free in taken:
                free += 1
            rank = free
            taken.add(rank)
        result.append(rank)
    return result


def _process_report(
    trace: ProcessTrace, wanted: RangeFilter, rank: int, timeline: int
) -> tuple[Report, list[tuple[int, int]]]:
    joined = run_ahead.join(trace)
    trace.calls.sort(key=lambda call: call.ts_ns)
    mark_captured(trace.calls)
    run_ahead.mark_ran(trace, joined)
    windows = find_steps(trace.ranges, wanted, rank)
    syncs = count_syncs(call for call in trace.calls if not call.captured)
    attach_stacks(trace, [sync.call for sync in syncs])
    run_ahead.attribute_idle(trace, syncs)
    run_ahead.attribute_leads(trace, joined, syncs)
    _join_notes(trace, joined, windows, wanted)
    trace.finish_notes()
    report = _build(trace, windows, rank)
    leads = run_ahead.launch_leads(trace, joined)
    run_ahead.fill_steps(windows, report.steps, leads)
    _fill_host_ops(trace, windows, report.steps)
    report.run_ahead = run_ahead.summary(trace, joined, leads, rank)
    if {"kernel", "api"} <= trace.kinds:
        run_ahead.fill_idle(windows, report.steps, [sync.call for sync in syncs])
        report.run_ahead.device_idle_us = sum(s.call.device_idle_ns or 0 for s in syncs) / 1e3
    report.timeline, cut = spans(windows, syncs, timeline)
    if cut:
        trace.note(
            "input", f"the timeline holds the first {timeline:,} phases and waits, {cut:,} more are left out", cut
        )
    report.notes = trace.notes
    return report, leads


def _build(trace: ProcessTrace, windows: list[StepWindow], rank: int) -> Report:
    """`build_report`, once for each lane of windows that do not overlap; totals are the same in all of them."""
    source = Source(
        kind="trace",
        engine=_engine(trace),
        device=trace.device,
        hip=trace.hip,
        cuda=trace.cuda,
        ranks=[rank],
        partial=trace.partial,
        files=list(trace.files),
    )
    lanes = overlap_lanes(windows) or [[]]
    reports = []
    for lane in lanes:
        reports.append(build_report(lane, _evidence(trace), msgspec.structs.replace(source), threads=trace.threads))
    report = reports[0]
    if len(reports) > 1:
        steps: list[Step] = [step for item in reports for step in item.steps]
        sites = merged_sites([item.sites for item in reports])  # not `merge_reports`: lanes share their numbering
        report.steps = sorted(steps, key=lambda step: step.index)
        report.classes, report.sites = class_figures(report.steps), sites
        trace.note("input", f"steps overlap in time ({len(lanes)} at once): each counts every call in its window")
    report.totals.api = dict(sorted(trace.api.items()))
    return report


def _engine(trace: ProcessTrace) -> str | None:
    if trace.engine is not None:
        return trace.engine
    names = [r.name for r in trace.ranges]
    if any(name.startswith("step[") for name in names):
        return "sglang"
    return "vllm" if any(name.startswith("execute_") for name in names) else None


def _evidence(trace: ProcessTrace) -> list[Evidence]:
    """What the file can tell: a figure of a record kind that it does not hold is unknown, not zero."""
    sees: set[str] = set()
    calls: list[Call] = []
    if "api" in trace.kinds:
        sees |= _API_TELLS
        calls = trace.calls
        if all(call.nbytes is not None for call in calls if _crosses(call)):
            sees.add("bytes")
    elif "memcpy" in trace.kinds:
        sees |= {"copies", "bytes"}
        calls = [_as_call(record) for record in [*trace.copies.values(), *trace.loose_copies]]
        if any(call.nbytes is None for call in calls if _crosses(call)):
            sees.discard("bytes")
    kernels = None
    if "kernel" in trace.kinds and not trace.kernels_unknown:
        sees.add("kernels")
        kernels = trace.records.kind.count(DeviceRecords.KERNEL)
    return [
        Evidence(name=trace.format, sees=frozenset(sees), calls=calls, blind=_BLIND[trace.format], kernels_run=kernels)
    ]


def _crosses(call: Call) -> bool:
    return call.role is Role.COPY and not call.captured and call.direction in (Direction.H2D, Direction.D2H)


def _as_call(record: CopyRecord) -> Call:
    return Call(api="", role=Role.COPY, ts_ns=0, direction=record.direction, nbytes=record.nbytes)


def _join_notes(
    trace: ProcessTrace, joined: run_ahead.Joined, windows: Sequence[StepWindow], wanted: RangeFilter
) -> None:
    if joined.orphans and "api" in trace.kinds:
        trace.note(
            "input",
            f"{joined.orphans:,} kernels have no launch call in the file: launched before recording began, or dropped",
            joined.orphans,
        )
    if joined.repeated:
        trace.note(
            "input", f"{joined.repeated:,} calls repeat a correlation id: the first has the records", joined.repeated
        )
    if not windows and wanted.auto:
        trace.note("input", "no step annotation found: figures are of the whole file; name a range to have steps")
    if "api" not in trace.kinds:
        trace.note("blind", "the file holds no runtime calls: launches, syncs and copies by call are unknown")
    elif "kernel" not in trace.kinds:
        trace.note("blind", "the file holds no kernel records: how many kernels ran is unknown")


def _fill_host_ops(trace: ProcessTrace, windows: Sequence[StepWindow], steps: Sequence[Step]) -> None:
    if "host" not in trace.kinds:
        return
    starts = [sorted(spans.start) for spans in trace.ops.values()]
    for window, step in zip(windows, steps, strict=True):
        begin, end = window.start_ns / 1e3, window.end_ns / 1e3
        step.host_ops = sum(bisect_left(column, end) - bisect_left(column, begin) for column in starts)


def nothing_measured(report: Report) -> str | None:
    """Why a report holds nothing at all, in one line; None if it holds something."""
    if report.steps or report.totals.kernels_run is not None or report.totals != Totals():
        return None
    files = ", ".join(report.source.files[:3])
    return f"{files}: no step, runtime call or device record found"
