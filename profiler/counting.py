"""What counts as a sync: the one rule, as a pure function over calls.

A copy and its wait are one: a copy pairs with a stream or event wait that is the next launch, copy, memset or sync
call of the same thread. A blocking copy or memset counts by itself. An explicit wait counts 1 even if it returned at
once. Queries, device-side waits and backpressure count 0; allocations and frees are `maybe`.

Where both stacks are known and the wait is the program's own (an event's, or on another line than the copy), the copy
was asked for without waiting: still one sync, but it is the wait's, of the wait's kind and at the wait's line.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from . import sites
from .apis import base_name
from .calls import Call, Direction, Role, Wait

_BREAKS_PAIR = frozenset({Role.LAUNCH, Role.GRAPH_LAUNCH, Role.COPY, Role.MEMSET, Role.SYNC})
_COPY_KIND = {Direction.D2H: "d2h", Direction.H2D: "h2d", Direction.D2D: "stream", Direction.H2H: "stream"}


class Sync(msgspec.Struct, gc=False):
    """One counted sync. `kind` is a field name of `report.Syncs`, or "copy" for a copy of unknown direction."""

    kind: str
    call: Call  # the call that names the site: the copy of a pair, else the waiting call
    blocked_ns: int | None  # host time in the copy and its wait


_BEGIN_CAPTURE = frozenset({"cudaStreamBeginCapture", "cuStreamBeginCapture", "hipStreamBeginCapture"})
_END_CAPTURE = frozenset({"cudaStreamEndCapture", "cuStreamEndCapture", "hipStreamEndCapture"})
_RECORDED = frozenset({Role.LAUNCH, Role.GRAPH_LAUNCH, Role.COPY, Role.MEMSET})


def mark_captured(calls: Iterable[Call]) -> None:
    """Set `captured` on launches, copies and memsets between begin and end of a stream capture of their thread.

    `calls` in time order. A stream capture belongs to one stream; frameworks capture on the thread that begins it.
    """
    capturing: dict[int, int] = {}
    for call in calls:
        if call.role is Role.OTHER:
            name = base_name(call.api)
            if name in _BEGIN_CAPTURE:
                capturing[call.thread] = capturing.get(call.thread, 0) + 1
            elif name in _END_CAPTURE:
                capturing[call.thread] = max(0, capturing.get(call.thread, 0) - 1)
        elif call.role in _RECORDED and capturing.get(call.thread):
            call.captured = True


def _blocked(*calls: Call) -> int | None:
    result = 0
    for call in calls:
        if call.dur_ns is None:
            return None
        result += call.dur_ns
    return result


def _copy_kind(call: Call) -> str:
    return "copy" if call.direction is None else _COPY_KIND[call.direction]


def _waits_elsewhere(copy: Call, wait: Call) -> bool:
    """Whether the program itself waits for an asynchronous copy: no copy waits through an event of its own."""
    if copy.blocking or not copy.stack or not wait.stack or copy.stack is wait.stack:
        return False
    return wait.wait is Wait.EVENT or sites.blamed(copy.stack) != sites.blamed(wait.stack)


def _unpaired(copy: Call | None) -> list[Sync]:
    """What a copy is by itself, when no stream or event wait follows it."""
    if copy is None:
        return []
    if copy.blocking:
        return [Sync(_copy_kind(copy), copy, _blocked(copy))]
    if copy.pageable and copy.direction is Direction.H2D and copy.maybe is not False:
        return [Sync("maybe", copy, _blocked(copy))]  # staged through pinned memory of the driver's: may wait
    return []


def count_syncs(calls: Iterable[Call]) -> list[Sync]:
    """The syncs among `calls` (any threads, any order between threads, time order within one), in time order."""
    found: list[Sync] = []
    pending: dict[int, Call] = {}  # thread -> the copy that the next call may turn into a sync
    for call in sorted(calls, key=lambda c: c.ts_ns):
        role = call.role
        if role not in _BREAKS_PAIR:
            if role in (Role.ALLOC, Role.FREE) and call.maybe is not False:
                found.append(Sync("maybe", call, _blocked(call)))
            continue
        copy = pending.pop(call.thread, None)
        if role is Role.SYNC:
            if copy is not None and call.wait in (Wait.STREAM, Wait.EVENT) and not _waits_elsewhere(copy, call):
                found.append(Sync(_copy_kind(copy), copy, _blocked(copy, call)))
                continue
            found += _unpaired(copy)
            found.append(Sync((call.wait or Wait.DEVICE).value, call, _blocked(call)))
            continue
        found += _unpaired(copy)
        if role is Role.COPY:
            # A blocking copy is kept pending too: cudaMemcpy followed by a stream wait is still one stop of the host.
            pending[call.thread] = call
        elif role is Role.MEMSET and call.blocking:
            found.append(Sync("memset", call, _blocked(call)))
    for copy in pending.values():
        found += _unpaired(copy)
    found.sort(key=lambda s: s.call.ts_ns)
    return found
