"""Collector `kineto`: torch.profiler as ground truth. Sees every runtime call with times; slows a step about 1.7x.

What it recorded is read back by the trace reader, so that a live profile and a trace file of the same run cannot
disagree, and so that no figure depends on a torch version's private event objects.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from bisect import bisect_right
from pathlib import Path
from typing import Any

from ...errors import Unreachable
from ..calls import Call, Frame
from ..counting import count_syncs, mark_captured
from ..readers import run_ahead
from ..readers.kineto import read_kineto
from ..readers.process_trace import ProcessTrace, Range
from ..readers.stacks import attach_stacks
from ..readers.steps import RangeFilter
from ..report import Note
from .base import Counters

_MARK = "syncfree.mark#"
_SEES = frozenset({"syncs", "maybe", "copies", "bytes", "launches", "captured", "blocked", "kernels"})


class KinetoCollector:
    """Records with torch.profiler between start and stop: runtime calls, device records, and what enclosed them.

    `with_stack`: also Python stacks, which name source lines but slow the process many times over and take minutes to
    write for some tens of engine steps; without them a site is named by its operator. Raises `Unreachable` where torch
    has no device or another torch.profiler session is running.
    """

    name = "kineto"
    thread_bound = True  # torch.profiler sees the host calls of the thread that started it; only that one may stop it
    blind = "its own cost: about 1.7x on an eager step; calls made before recording began; polling loops"

    def __init__(self, with_stack: bool = False) -> None:
        self.with_stack = with_stack
        self.sees: frozenset[str] = _SEES
        self.kernels_run: int | None = None
        self._profile: Any = None
        self._notes: list[Note] = []

    def check(self) -> None:
        """Raises `Unreachable` where it is known before the start that it cannot work here."""
        self._activities()
        _import_ahead()

    def start(self) -> None:
        import torch
        from torch.profiler import profile

        config = torch._C._profiler._ExperimentalConfig(verbose=True) if self.with_stack else None
        self._profile = profile(
            activities=self._activities(),
            with_stack=self.with_stack,
            experimental_config=config,
        )
        try:
            self._profile.start()
        except RuntimeError as error:
            self._profile = None
            raise Unreachable(f"collector kineto: torch.profiler did not start: {error}") from error

    def _activities(self) -> list[Any]:
        import torch
        from torch.profiler import ProfilerActivity

        if not torch.cuda.is_available():
            raise Unreachable("collector kineto: this torch sees no CUDA or ROCm device, so it has no device calls")
        return [ProfilerActivity.CPU, ProfilerActivity.CUDA]

    def mark(self, now_ns: int) -> Counters | None:
        import torch

        if self._profile is not None:
            # The name ties kineto's clock to ours at every boundary, so that no call lands in the wrong window.
            with torch.profiler.record_function(f"{_MARK}{now_ns}"):
                pass
        return None

    def stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()

    def drain(self) -> list[Call]:
        """The runtime calls of the recording, in our clock. Empty on a second call."""
        profile, self._profile = self._profile, None
        if profile is None:
            return []
        with tempfile.TemporaryDirectory(prefix="syncfree-kineto-") as folder:
            path = Path(folder) / "recording.json"
            profile.export_chrome_trace(str(path))
            [trace, *_] = read_kineto(path, RangeFilter(f"{_MARK}*"))
        calls = self._read(trace)
        if self.with_stack:
            lines = _Lines(profile.profiler.kineto_results)
            for call in calls:
                if call.stack:
                    call.stack = lines.exact(call.thread, call.ts_ns, call.stack)
        clock = Clock(trace.ranges)
        for call in calls:
            call.ts_ns = clock.ours(call.ts_ns)
        return calls

    def _read(self, trace: ProcessTrace) -> list[Call]:
        joined = run_ahead.join(trace)
        trace.calls.sort(key=lambda call: call.ts_ns)
        mark_captured(trace.calls)
        run_ahead.mark_ran(trace, joined)
        syncs = count_syncs(call for call in trace.calls if not call.captured)
        attach_stacks(trace, [sync.call for sync in syncs])
        run_ahead.attribute_idle(trace, syncs)
        run_ahead.attribute_leads(trace, joined, syncs)
        run_ahead.launch_leads(trace, joined)
        if "api" not in trace.kinds:
            # A profiler that delivers nothing (another CUPTI client holds the device) must not read as "no syncs".
            self.sees = frozenset()
            text = "torch.profiler delivered no runtime calls: another profiler may hold the device; figures are null"
            self._notes.append(Note(kind="collector", text=text))
        elif "kernel" in trace.kinds and not trace.kernels_unknown:
            self.kernels_run = trace.records.kind.count(trace.records.KERNEL)
        return trace.calls

    def notes(self) -> list[Note]:
        return self._notes


def _import_ahead() -> None:
    """Import what torch.profiler imports when it starts: hundreds of modules, seconds for the thread that steps."""
    with contextlib.suppress(ImportError):  # where a torch has none of them, it does without
        importlib.import_module("torch._inductor.config")


class Clock:
    """Kineto's nanoseconds to perf_counter_ns, exact at every mark and never across one."""

    def __init__(self, ranges: list[Range]) -> None:
        # A mark may have a twin on the device's timeline; the host's is the one that comes first.
        first: dict[int, int] = {}
        for item in ranges:
            if item.name.startswith(_MARK):
                mine = int(item.name[len(_MARK) :])
                first[mine] = min(item.start_ns, first.get(mine, item.start_ns))
        pairs = sorted((theirs, mine) for mine, theirs in first.items())
        self.theirs = [theirs for theirs, _ in pairs]
        self.mine = [mine for _, mine in pairs]

    def ours(self, ts: int) -> int:
        if not self.mine:
            return ts
        at = max(0, bisect_right(self.theirs, ts) - 1)
        moved = self.mine[at] + ts - self.theirs[at]
        if ts < self.theirs[at]:
            return min(moved, self.mine[at] - 1)
        return min(moved, self.mine[at + 1] - 1) if at + 1 < len(self.mine) else moved


class _Lines:
    """Exact lines: the trace file has where each function begins, torch.profiler's event tree where each call stood."""

    def __init__(self, results: Any) -> None:
        found: list[tuple[int, int, Frame]] = []
        todo = list(results.experimental_event_tree())
        while todo:
            node = todo.pop()
            caller = getattr(node.extra_fields, "caller", None)
            if caller is not None:
                frame = Frame(caller.file_name, caller.line_number, caller.function_name)
                found.append((node.start_time_ns, node.end_time_ns, frame))
            todo.extend(node.children)
        found.sort(key=lambda item: (item[0], -item[1]))
        self.found = found
        self.starts = [item[0] for item in found]

    def exact(self, thread: int, ts: int, stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
        """`stack` with the lines at which its functions stood at `ts`; a frame without a match keeps its own."""
        lines: dict[tuple[str, str], Frame] = {}
        for start, end, frame in reversed(self.found[: bisect_right(self.starts, ts)]):
            if end >= ts:
                lines.setdefault((Path(frame.file).name, frame.function), frame)
            if ts - start > 10_000_000_000:
                break
        return tuple(lines.get((Path(frame.file).name, frame.function), frame) for frame in stack)
