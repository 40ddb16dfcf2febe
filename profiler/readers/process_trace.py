"""What any trace file says about one process, in the terms of `calls.py`: plain data, filled by the readers.

Device records and Python frames come by the million, so they are columns of numbers and not objects.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ...errors import BadInput
from ..apis import Api, base_name, lookup
from ..calls import Call, Direction, Role
from ..report import Note
from .text import DEFAULT_LIMITS, Limits

_MASK = (1 << 63) - 1
_FAR = 1 << 62  # nanoseconds: 146 years
_IMPOSSIBLE = "an event at an impossible time, left out"
# No launch, copy or wait, but they tell what was recorded into a graph instead of run.
_CAPTURE_CALLS = frozenset(f"{v}Stream{verb}Capture" for v in ("cuda", "cu", "hip") for verb in ("Begin", "End"))


def shown_name(path: Path) -> str:
    """A file's name as text that can be written: bytes that are no UTF-8 are replaced."""
    return os.fsencode(path.name).decode("utf-8", "replace")


def possible_size(nbytes: int | None) -> int | None:
    """A number of bytes, unknown where it cannot be one."""
    return None if nbytes is None or nbytes < 0 else nbytes


class Range(msgspec.Struct, gc=False):
    """A named range of host time: a user annotation, an NVTX or roctx range. Nanoseconds of the trace's clock."""

    name: str
    start_ns: int
    end_ns: int
    thread: int = 0


class CopyRecord(msgspec.Struct, gc=False):
    """What the device record of a copy says. `pageable` is None where the record does not tell."""

    direction: Direction | None
    nbytes: int | None = None
    pageable: bool | None = None

    def __post_init__(self) -> None:
        self.nbytes = possible_size(self.nbytes)


class DeviceRecords:
    """Kernels, copies and memsets as columns: correlation id, start, duration (ns), name id. One row a record."""

    KERNEL, COPY, MEMSET, GRAPH = range(4)  # GRAPH: a whole graph as one record

    def __init__(self) -> None:
        self.correlation = array("q")
        self.start = array("q")
        self.duration = array("q")
        self.name = array("l")
        self.kind = bytearray()

    def __len__(self) -> int:
        return len(self.kind)

    def add(self, kind: int, correlation: int | None, start_ns: int, dur_ns: int, name: int) -> None:
        self.kind.append(kind)
        self.correlation.append(0 if correlation is None else correlation & _MASK)
        self.start.append(start_ns)
        self.duration.append(dur_ns)
        self.name.append(name)


class Spans:
    """Nested host spans of one thread as columns: start and end in microseconds, name id."""

    def __init__(self) -> None:
        self.start = array("d")
        self.end = array("d")
        self.name = array("l")
        self.stacks: dict[int, int] = {}  # row -> name id of a whole stack as text, where a format has such

    def __len__(self) -> int:
        return len(self.name)

    def add(self, start_us: float, dur_us: float, name: int) -> None:
        self.start.append(start_us)
        self.end.append(start_us + dur_us)
        self.name.append(name)

    def enclosing(self, moments_us: list[float]) -> Iterator[tuple[int, int]]:
        """(index of moment, index of span) for every span around a moment; `moments_us` ascending."""
        ends = self.end
        for i, start in enumerate(self.start):
            at = bisect_left(moments_us, start)
            while at < len(moments_us) and moments_us[at] < ends[i]:
                yield at, i
                at += 1


class ProcessTrace:
    """One process of a trace. `kinds` holds the record kinds that the file has: api, kernel, memcpy, memset, host."""

    def __init__(self, path: Path, format_name: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self.files = [shown_name(path)]
        self.format = format_name
        self.limits = limits
        self.rank: int | None = None
        self.pid: int | None = None
        self.device: str | None = None
        self.engine: str | None = None
        self.hip: str | None = None
        self.cuda: str | None = None
        self.kinds: set[str] = set()
        self.calls: list[Call] = []
        self.api: Counter[str] = Counter()
        self.ranges: list[Range] = []
        self.records = DeviceRecords()
        self.copies: dict[int, CopyRecord] = {}
        self.loose_copies: list[CopyRecord] = []  # copy records that no call can be joined to by id
        self.frames: dict[int, Spans] = {}
        self.ops: dict[int, Spans] = {}
        self.threads: dict[int, str] = {}
        self.names: list[str] = []
        self.notes: list[Note] = []
        self.partial = False
        self.kernels_unknown = False  # some ran without a record of their own
        self.odd: Counter[str] = Counter()  # records left out or mended, by what was wrong
        self._name_ids: dict[str, int] = {}
        self._name_bytes = 0

    def name_id(self, name: str) -> int:
        found = self._name_ids.get(name)
        if found is None:
            found = self._name_ids[name] = len(self.names)
            self.names.append(name)
            self._name_bytes += len(name) + 150
        return found

    def note(self, kind: str, text: str, count: int = 1) -> None:
        self.notes.append(Note(kind=kind, text=text, file=self.files[0], count=count))

    def add_call(
        self,
        api: str,
        ts_ns: int,
        dur_ns: int | None,
        thread: int,
        correlation: int | None,
        *,
        direction: Direction | None = None,
        nbytes: int | None = None,
    ) -> Call | None:
        """Count a runtime call by name and keep it if it launches, copies, waits or allocates."""
        if not -_FAR < ts_ns < _FAR:
            self.odd[_IMPOSSIBLE] += 1
            return None
        self.api[api] += 1
        meaning: Api = lookup(api)
        if not self._kept(meaning, api):
            return None
        call = Call(
            api=api,
            role=meaning.role,
            ts_ns=ts_ns,
            dur_ns=self.duration_of(dur_ns),
            thread=thread,
            wait=meaning.wait,
            direction=direction or meaning.direction,
            nbytes=nbytes,
            blocking=meaning.blocking,
            correlation=None if correlation is None else correlation & _MASK,
        )
        self.calls.append(call)
        return call

    def duration_of(self, dur_ns: int | None) -> int | None:
        """A host duration, unknown where it cannot be one."""
        if dur_ns is not None and not 0 <= dur_ns < _FAR:
            self.odd["an impossible duration, taken as unknown"] += 1
            return None
        return dur_ns

    def add_record(
        self, kind: int, correlation: int | None, start_ns: int, dur_ns: int | None, name: str, copy: CopyRecord | None
    ) -> None:
        """Keep a device record; `copy` goes with kind COPY."""
        if not -_FAR < start_ns < _FAR:
            self.odd[_IMPOSSIBLE] += 1
            return
        if dur_ns is None or not 0 <= dur_ns < _FAR:
            self.odd["a device record without a duration, taken as 0"] += 1
            dur_ns = 0
        self.records.add(kind, correlation, start_ns, dur_ns, self.name_id(name))
        if copy is not None:
            if correlation:
                self.copies.setdefault(correlation & _MASK, copy)
            else:
                self.loose_copies.append(copy)

    def check_size(self) -> None:
        """`BadInput` where more is kept of the process than the limits allow."""
        spans = sum(len(s) for s in self.frames.values()) + sum(len(s) for s in self.ops.values())
        rows = len(self.records) + spans
        objects = len(self.copies) + len(self.loose_copies) + len(self.ranges) + len(self.api) + len(self.threads)
        kept = 36 * rows + 320 * len(self.calls) + 200 * objects + self._name_bytes
        if kept > self.limits.kept:
            raise BadInput(
                f"{self.files[0]}: expected a trace of which at most {self.limits.kept >> 20} MiB are kept, got more "
                f"({len(self.records):,} device records, {len(self.calls):,} calls, {spans:,} frames and operators)"
            )

    def finish_notes(self) -> None:
        """Turn what was left out or mended into notes."""
        for what, count in sorted(self.odd.items()):
            self.note("input", f"{count:,} x {what}", count)
        polls = {name: n for name, n in self.api.items() if lookup(name).role is Role.POLL}
        if polls:
            text = ", ".join(f"{n:,} x {name}" for name, n in sorted(polls.items()))
            self.note(
                "blind", f"polls are no syncs, yet a polling loop waits all the same: {text}", sum(polls.values())
            )

    @staticmethod
    def _kept(meaning: Api, api: str) -> bool:
        if meaning.role is Role.OTHER:
            return "Capture" in api and base_name(api) in _CAPTURE_CALLS
        return meaning.role is not Role.POLL and meaning.role is not Role.DEVICE_WAIT


def share_kinds(traces: Sequence[ProcessTrace]) -> None:
    """What one process of a recording has was recorded in all: another that has none of it did none of it."""
    recorded = set[str]().union(*(trace.kinds for trace in traces))
    for trace in traces:
        if trace.kinds:  # one that never touched a device stays out of it
            trace.kinds |= recorded


_DIRECTIONS = {
    "htod": Direction.H2D,
    "dtoh": Direction.D2H,
    "dtod": Direction.D2D,
    "htoh": Direction.H2H,
    "ptop": Direction.D2D,
    "htoa": Direction.H2D,
    "atoh": Direction.D2H,
    "atoa": Direction.D2D,
    "atod": Direction.D2D,
    "dtoa": Direction.D2D,
}


def record_direction(text: str) -> Direction | None:
    """The direction in a record's name: `Memcpy HtoD (Pinned -> Device)`, `MEMORY_COPY_DEVICE_TO_HOST`.

    `CopyHostToDevice` is what PyTorch wrote with the first versions of roctracer.
    """
    text = text.lower().removeprefix("copy").replace("host", "h").replace("device", "d").replace("_to_", "to")
    for word in text.replace("_", " ").replace("(", " ").split():
        if word in _DIRECTIONS:
            return _DIRECTIONS[word]
    return None
