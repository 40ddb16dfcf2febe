"""Collector `kineto`: torch.profiler as ground truth. Sees every runtime call with times; slows a step about 1.7x."""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections import defaultdict
from typing import Any

from ...planner.errors import Unreachable
from ..apis import lookup
from ..calls import Call, Direction, Frame, Role
from ..counting import mark_captured
from .base import Counters

_MARK = "syncfree.mark#"
_API = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime", "privateuse1_driver"})
_COPY_NAMES = {"HtoD": Direction.H2D, "DtoH": Direction.D2H, "DtoD": Direction.D2D, "PtoP": Direction.D2D}
_HIP_KIND = {"1": Direction.H2D, "2": Direction.D2H, "3": Direction.D2D}


class KinetoCollector:
    """Records with torch.profiler between start and stop; device calls and, on request, Python stacks (`with_stack`).

    Raises `Unreachable` where torch has no device or another torch.profiler session is already running.
    """

    name = "kineto"
    thread_bound = True  # torch.profiler sees the host calls of the thread that started it; only that one may stop it
    sees = frozenset({"syncs", "maybe", "copies", "bytes", "launches", "captured", "blocked", "kernels"})
    blind = "its own cost: about 1.7x on an eager step; calls made before recording began; polling loops"

    def __init__(self, with_stack: bool = True) -> None:
        self.with_stack = with_stack
        self.kernels_run: int | None = None
        self._profile: Any = None
        self._marks: list[int] = []  # perf_counter_ns of each mark, in order

    def start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if not torch.cuda.is_available():
            raise Unreachable("collector kineto: this torch sees no CUDA or ROCm device, so it has no device calls")
        config = torch._C._profiler._ExperimentalConfig(verbose=True) if self.with_stack else None
        self._profile = profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
            with_stack=self.with_stack,
            experimental_config=config,
        )
        try:
            self._profile.start()
        except RuntimeError as error:
            raise Unreachable(f"collector kineto: torch.profiler did not start: {error}") from error
        self._marks = []

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
        results = profile.profiler.kineto_results
        events = results.events()
        clock = _Clock(events)
        device = _device_records(events)
        self.kernels_run = sum(1 for e in events if _activity(e) == "kernel")
        stacks = _Stacks(results, events) if self.with_stack else None
        calls = []
        for event in events:
            if _activity(event) not in _API:
                continue
            call = _call(event, clock, device)
            if stacks is not None and call.role in (Role.SYNC, Role.COPY, Role.MEMSET, Role.FREE, Role.ALLOC):
                call.stack = stacks.at(call.thread, event.start_ns())
            calls.append(call)
        calls.sort(key=lambda c: c.ts_ns)
        mark_captured(calls)
        return calls


def _activity(event: Any) -> str:
    kind = event.activity_type() if hasattr(event, "activity_type") else ""
    return str(kind)


def _device_records(events: Any) -> dict[int, Any]:
    """Copies and memsets on the device, by correlation id."""
    found: dict[int, Any] = {}
    for event in events:
        if _activity(event) in ("gpu_memcpy", "gpu_memset"):
            found[event.correlation_id()] = event
    return found


def _metadata(event: Any) -> dict[str, Any]:
    text = event.metadata_json() if hasattr(event, "metadata_json") else ""
    try:
        parsed = json.loads("{" + text.strip().strip("{}") + "}") if text else {}
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _call(event: Any, clock: _Clock, device: dict[int, Any]) -> Call:
    name = str(event.name())
    api = lookup(name)
    call = Call(
        api=name,
        role=api.role,
        wait=api.wait,
        direction=api.direction,
        blocking=api.blocking,
        ts_ns=clock.ours(event.start_ns()),
        dur_ns=event.duration_ns(),
        thread=event.device_resource_id(),
        correlation=event.correlation_id(),
    )
    if api.role is Role.COPY:
        record = device.get(event.correlation_id())
        kind = str(_metadata(event).get("kind", ""))
        if kind in _HIP_KIND:  # ROCm labels pinned copies DtoD on the device; the call's own argument is the truth
            call.direction = _HIP_KIND[kind]
        if record is not None:
            label = str(record.name())
            if call.direction is None:
                call.direction = next((d for key, d in _COPY_NAMES.items() if key in label), None)
            call.pageable = "Pageable" in label
            nbytes = _metadata(record).get("bytes")
            call.nbytes = int(nbytes) if nbytes is not None else None
            # CUDA waits inside the call for a pageable read, whatever the caller asked for.
            call.blocking = call.blocking or (call.pageable and call.direction is Direction.D2H)
    return call


class _Clock:
    """Kineto's nanoseconds to perf_counter_ns, exact at every mark and never across one."""

    def __init__(self, events: Any) -> None:
        pairs: list[tuple[int, int]] = []
        for event in events:
            name = event.name()
            # On a GPU each mark also has a twin on the device's timeline; only the host's tells our clock.
            if name.startswith(_MARK) and _activity(event) in ("user_annotation", "cpu_op", ""):
                pairs.append((event.start_ns(), int(name[len(_MARK) :])))
        pairs.sort()
        self.theirs: list[int] = [theirs for theirs, _ in pairs]
        self.mine: list[int] = [mine for _, mine in pairs]

    def ours(self, ts: int) -> int:
        if not self.mine:
            return ts
        at = max(0, bisect_right(self.theirs, ts) - 1)
        moved = self.mine[at] + ts - self.theirs[at]
        if at + 1 < len(self.mine) and ts >= self.theirs[at]:
            return min(moved, self.mine[at + 1] - 1)
        return moved


class _Stacks:
    """Python stacks by thread and time, from torch.profiler's event tree."""

    def __init__(self, results: Any, events: Any) -> None:
        threads = {e.start_thread_id(): e.device_resource_id() for e in events if _activity(e) == "python_function"}
        spans: dict[int, list[tuple[int, int, tuple[Frame, ...]]]] = defaultdict(list)
        here = threading.get_native_id()
        todo: list[tuple[Any, tuple[Frame, ...]]] = [(node, ()) for node in results.experimental_event_tree()]
        while todo:
            node, stack = todo.pop()
            caller = getattr(node.extra_fields, "caller", None)
            if caller is not None:
                # A caller's frame carries the line it stood on when it made this call.
                frame = Frame(caller.file_name, caller.line_number, caller.function_name)
                stack = (frame, *stack)
                spans[threads.get(node.start_tid, here)].append((node.start_time_ns, node.end_time_ns, stack))
            todo.extend((child, stack) for child in node.children)
        self.spans = {thread: sorted(items, key=lambda s: (s[0], -s[1])) for thread, items in spans.items()}
        self.starts = {thread: [item[0] for item in items] for thread, items in self.spans.items()}

    def at(self, thread: int, ts: int) -> tuple[Frame, ...]:
        """The innermost Python call that was open on `thread` at `ts`."""
        items = self.spans.get(thread, [])
        at = bisect_right(self.starts.get(thread, []), ts) - 1
        while at >= 0:
            if items[at][1] >= ts:
                return items[at][2]
            at -= 1
        return ()
