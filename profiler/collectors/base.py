"""What a collector is: something that watches device calls between `start` and `stop` of one process.

Two kinds share one interface. An *event* collector keeps every call and hands them over in `drain`. A *counter*
collector (the probe) answers `mark` with cumulative counters and hands over only its sync calls, with stacks.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from ...errors import Unreachable
from ..calls import Call

# The figure groups of a report that a collector may be able to tell; a group nobody sees is null.
GROUPS = frozenset({"syncs", "maybe", "copies", "bytes", "launches", "captured", "blocked", "kernels", "host_ops"})


class CannotCount(Unreachable):
    """A collector cannot work in this process; the text says which and why."""


class Counters(msgspec.Struct, kw_only=True, gc=False):
    """Cumulative counts since `start`, of all threads; the difference of two marks is a window's figure."""

    d2h: int = 0  # syncs, by kind
    h2d: int = 0
    stream: int = 0
    device: int = 0
    event: int = 0
    memset: int = 0
    copy: int = 0  # a blocking copy of unknown direction: in the total, but d2h and h2d are then unknown
    maybe: int = 0
    copies_d2h: int = 0
    copies_h2d: int = 0
    copies_d2d: int = 0
    copies_unknown: int = 0
    bytes_d2h: int = 0
    bytes_h2d: int = 0
    kernels: int = 0
    graphs: int = 0
    captured: int = 0
    blocked_ns: int = 0
    blocked_unknown: int = 0  # syncs whose host time is not known; blocked_ns is then unknown

    def __add__(self, other: Counters) -> Counters:
        return Counters(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})

    def __sub__(self, other: Counters) -> Counters:
        return Counters(**{name: getattr(self, name) - getattr(other, name) for name in self.__struct_fields__})


@runtime_checkable
class Collector(Protocol):
    """One way of seeing device calls. `start` raises `Unreachable` with a reason where it cannot work here.

    A collector that must be started and stopped by the thread that steps says `thread_bound = True`; others are started
    by whichever thread asks (the agent's, in a server). One whose `drain` works between start and stop too says
    `rolling = True`: a recording without an end (a live view) can then go on while parts of it are taken.
    """

    name: str
    sees: frozenset[str]  # subset of GROUPS
    blind: str  # one sentence: what it cannot see

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def mark(self, now_ns: int) -> Counters | None:
        """A step or phase begins or ends at `now_ns` (time.perf_counter_ns). Event collectors return None."""
        ...

    def drain(self) -> list[Call]:
        """Calls since the last drain, times in the clock of time.perf_counter_ns. Called after `stop`."""
        ...
