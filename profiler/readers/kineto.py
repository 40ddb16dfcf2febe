"""PyTorch profiler traces (Kineto's Chrome-trace JSON), CUDA and ROCm, plain or gzip, 2021 to today."""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import msgspec

from ...errors import BadInput
from ..calls import Direction, Role
from .json_array import ArrayPieces, repaired
from .process_trace import CopyRecord, DeviceRecords, ProcessTrace, Range, Spans, possible_size, record_direction
from .steps import RangeFilter
from .text import DEFAULT_LIMITS, Limits, NoTrace, Text

Number = int | str | float | None


class Args(msgspec.Struct, gc=False):
    correlation: Number = None
    kind: Number = None  # HIP copy calls: hipMemcpyKind; device records: a word
    nbytes: Number = msgspec.field(name="bytes", default=None)
    size: Number = None
    stack: str | None = msgspec.field(name="Call stack", default=None)
    name: Number = None  # metadata events


class Event(msgspec.Struct, gc=False):
    """The few fields that are needed; the rest of an event is skipped, not decoded. Times stay text: exact decimals."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()
    args: Args | None = None


class OddEvent(msgspec.Struct, gc=False):
    """An event whose `args` or ids are not what they should be."""

    ph: str
    name: str
    cat: str | None = None
    tid: msgspec.Raw = msgspec.Raw()
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()


_FRAME, _OP, _API, _KERNEL, _COPY, _MEMSET, _RANGE = range(1, 8)
_KINDS = {
    "python_function": _FRAME,
    "cpu_op": _OP,
    "operator": _OP,
    "cuda_runtime": _API,
    "cuda_driver": _API,
    "hip_runtime": _API,
    "runtime": _API,
    "kernel": _KERNEL,
    "gpu_memcpy": _COPY,
    "memcpy": _COPY,
    "gpu_memset": _MEMSET,
    "memset": _MEMSET,
    "user_annotation": _RANGE,
}
_HIP_KIND = {
    "0": Direction.H2H,
    "1": Direction.H2D,
    "2": Direction.D2H,
    "3": Direction.D2D,
    "hipmemcpyhosttohost": Direction.H2H,
    "hipmemcpyhosttodevice": Direction.H2D,
    "hipmemcpydevicetohost": Direction.D2H,
    "hipmemcpydevicetodevice": Direction.D2D,
}
_TRACE_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_EXACT = re.compile(rb"-?\d+(?:\.\d{1,3})?")
_TENTHS = (1000, 100, 10, 1)


def nanoseconds(raw: msgspec.Raw) -> int | None:
    """A JSON number of microseconds as whole nanoseconds, without a detour over floats; None if it is no number."""
    text = bytes(raw)
    if _EXACT.fullmatch(text):
        whole, _, fraction = text.partition(b".")
        return int(whole + fraction) * _TENTHS[len(fraction)]
    try:
        value = Decimal(text.decode())
        # Fractions of a nanosecond come from tools that added floats; times beyond years are no times.
        return round(value * 1000) if value.is_finite() and abs(value) < 10**18 else None
    except (InvalidOperation, UnicodeDecodeError):
        return None


def window(start: msgspec.Raw, duration: msgspec.Raw) -> tuple[int, int] | None:
    """Start and end in nanoseconds of a range in exact microseconds, so that whole nanoseconds lie in it as they do.

    Both are rounded up: a moment is before an end of 5.2 ns just if it is before 6 ns.
    """
    try:
        begin, length = Decimal(bytes(start).decode()), Decimal(bytes(duration).decode())
    except (InvalidOperation, UnicodeDecodeError):
        return None
    if not (begin.is_finite() and length.is_finite() and abs(begin) < 10**18 and abs(length) < 10**18):
        return None
    return math.ceil(begin * 1000), math.ceil((begin + length) * 1000)


def whole_number(value: Number) -> int | None:
    if type(value) is int:
        return value
    if isinstance(value, str):
        try:
            return int(value, 0)
        except ValueError:
            return None
    return int(value) if isinstance(value, float) and value.is_integer() else None


def read_kineto(path: Path, wanted: RangeFilter, limits: Limits = DEFAULT_LIMITS) -> list[ProcessTrace]:
    """The process of a Kineto trace. Raises `BadInput` if the file is none or is not JSON."""
    reader = _KinetoReader(path, wanted, limits)
    return [reader.read()]


class _KinetoReader:
    def __init__(self, path: Path, wanted: RangeFilter, limits: Limits) -> None:
        self.path = path
        self.text = Text(path, limits)
        self.trace = ProcessTrace(path, "kineto", limits)
        self.wanted = wanted
        self.kinds: dict[str | None, int | None] = {None: None}
        self.ids: dict[tuple[int | str | None, int | str | None], int] = {}
        self.is_step: dict[str, bool] = {}

    def read(self) -> ProcessTrace:
        head, rest = self._find_events()
        decoder = msgspec.json.Decoder(list[Event])
        pieces = ArrayPieces(self.text, rest, decoder, self._odd_event)
        for batch in pieces.batches():
            self._take(batch)
            self.trace.check_size()
        self._header(head, pieces)
        self._ended(pieces)
        return self.trace

    def _ended(self, pieces: ArrayPieces[Event]) -> None:
        trace = self.trace
        if pieces.mended:
            trace.note("input", "numbers that JSON does not have (NaN, Infinity) or broken strings were passed over")
        if self.text.damaged:
            if not self.kinds_seen():
                raise BadInput(f"{self.path}: the gzip data cannot be unpacked: {self.text.damaged}")
            trace.partial = True
            trace.note("partial", f"the gzip data is damaged ({self.text.damaged}): figures are of what came before")
        elif self.text.truncated or not pieces.complete:
            trace.partial = True
            trace.note("partial", "the file ends early: figures are of what is there")

    def kinds_seen(self) -> bool:
        return bool(self.trace.kinds or self.trace.ranges)

    def _find_events(self) -> tuple[bytes, bytes]:
        """The text before the array of events (up to its bracket) and the beginning of the array."""
        head = b""
        fallback: int | None = None
        searched = 0
        for block in self.text:
            head += block
            if searched == 0 and (start := head.lstrip()) and start[:1] != b"{":
                if start[:1] == b"[":  # the other form of a Chrome trace: the array alone
                    return b"", start[1:]
                raise BadInput(f"{self.path}: expected a trace (JSON that begins with '{{' or '['), got {start[:12]!r}")
            for found in _TRACE_EVENTS.finditer(head, searched):
                if _header_fields(head[: found.end()]) is not None:
                    return head[: found.end()], head[found.end() :]
                fallback = fallback or found.end()
            searched = max(0, len(head) - 64)
            if len(head) > self.text.limits.item:
                break
        if fallback is not None:
            self.trace.note("input", "what stands before traceEvents is not JSON and was passed over")
            return b"", head[fallback:]
        if not head.strip():
            damage = f": {self.text.damaged}" if self.text.damaged else ""
            raise BadInput(f"{self.path}: expected a trace, got an empty file{damage}")
        raise NoTrace(f"{self.path}: expected a trace: JSON with a list 'traceEvents', found none")

    def _odd_event(self, raw: bytes) -> Event | None:
        """An event of the right kind with a wrong field is counted without that field; anything else is left out."""
        try:
            odd = msgspec.json.decode(raw, type=OddEvent)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.trace.odd["an event that is none, left out"] += 1
            return None
        self.trace.odd["an event with fields of the wrong type, read without them"] += 1
        thread = bytes(odd.tid).decode("utf-8", "replace").strip('"')
        return Event(ph=odd.ph, cat=odd.cat, name=odd.name, tid=thread, ts=odd.ts, dur=odd.dur)

    def thread(self, event: Event) -> int:
        """One number a thread: its id where it is one."""
        key = (event.pid, event.tid)
        found = self.ids.get(key)
        if found is None:
            number = whole_number(event.tid)
            found = self.ids[key] = number if number is not None else -1_000_000_000 - len(self.ids)
        return found

    def _take(self, batch: list[Event]) -> None:
        kinds = self.kinds
        for event in batch:
            try:
                kind = kinds[event.cat]
            except KeyError:
                kind = kinds[event.cat] = _KINDS.get((event.cat or "").lower())
            if kind is None or event.ph != "X":
                if event.ph == "M":
                    self._metadata(event)
                continue
            try:
                if kind == _FRAME:
                    self._span(self.trace.frames, event)
                elif kind == _API:
                    self._call(event)
                elif kind == _OP:
                    self._op(event)
                elif kind == _RANGE:
                    self._range(event)
                else:
                    self._record(event, kind)
            except ValueError:  # a time that is none
                self.trace.odd["an event without a time, left out"] += 1

    def _metadata(self, event: Event) -> None:
        name = event.args.name if event.args else None
        if event.name == "thread_name" and isinstance(name, str):
            self.trace.threads[self.thread(event)] = name

    def _span(self, where: dict[int, Spans], event: Event) -> Spans:
        try:
            start, duration = float(event.ts), float(event.dur)  # Raw is a buffer
        except ValueError:
            start, duration = float(self._unquoted(event.ts)), float(self._unquoted(event.dur))
        thread = self.thread(event)
        spans = where.get(thread)
        if spans is None:
            spans = where[thread] = Spans()
        spans.add(start, duration, self.trace.name_id(event.name))
        return spans

    def _op(self, event: Event) -> None:
        self.trace.kinds.add("host")
        step = self.is_step.get(event.name)
        if step is None:
            step = self.is_step[event.name] = self.wanted.matches(event.name, annotated=False)
        if step:
            self._range(event)
            return
        spans = self._span(self.trace.ops, event)
        # Stacks of 2021 and 2022, before Kineto had Python frames: the operator carries its stack as text.
        stack = event.args.stack if event.args else None
        if stack:
            spans.stacks[len(spans) - 1] = self.trace.name_id(stack)

    def _times(self, event: Event) -> tuple[int, int | None]:
        start, duration = nanoseconds(event.ts), nanoseconds(event.dur)
        if start is None:
            start = nanoseconds(self._unquoted(event.ts))
        if start is None:
            raise ValueError
        return start, nanoseconds(self._unquoted(event.dur)) if duration is None else duration

    def _unquoted(self, raw: msgspec.Raw) -> msgspec.Raw:
        """What is inside the quotes where a writer made a text of a number."""
        text = bytes(raw)
        if len(text) < 3 or text[:1] != b'"':
            return raw
        self.trace.odd["a time in quotes, read as a number"] += 1
        return msgspec.Raw(text[1:-1])

    def _range(self, event: Event) -> None:
        start, duration = self._times(event)
        if duration is None or duration < 0:
            self.trace.odd["a range without a duration or with a negative one, left out"] += 1
            return
        begin, end = window(event.ts, event.dur) or (start, start + duration)
        self.trace.ranges.append(Range(event.name, begin, end, self.thread(event)))

    def _call(self, event: Event) -> None:
        start, duration = self._times(event)
        trace = self.trace
        trace.kinds.add("api")
        args = event.args
        call = trace.add_call(
            event.name, start, duration, self.thread(event), whole_number(args.correlation) if args else None
        )
        if call is not None and args is not None and call.role is Role.COPY:
            # ROCm's device record calls a copy from or to pinned memory DtoD; the call's own argument is right.
            kind = int(args.kind) if isinstance(args.kind, float) and args.kind.is_integer() else args.kind
            told = _HIP_KIND.get(str(kind).lower())
            if told is not None:
                call.direction = told
            call.nbytes = possible_size(whole_number(args.nbytes if args.nbytes is not None else args.size))

    def _record(self, event: Event, kind: int) -> None:
        start, duration = self._times(event)
        trace = self.trace
        args = event.args
        correlation = whole_number(args.correlation) if args else None
        copy = None
        if kind == _KERNEL:
            row = DeviceRecords.KERNEL
            trace.kinds.add("kernel")
        elif kind == _MEMSET:
            row = DeviceRecords.MEMSET
            trace.kinds.add("memset")
        else:
            row = DeviceRecords.COPY
            trace.kinds.add("memcpy")
            pageable = "Pageable" in event.name or (False if "Pinned" in event.name else None)
            nbytes = whole_number(args.nbytes) if args else None
            copy = CopyRecord(record_direction(event.name), nbytes, pageable)
        trace.add_record(row, correlation, start, duration, event.name, copy)

    def _header(self, head: bytes, pieces: ArrayPieces[Event]) -> None:
        fields = _header_fields(head) or {} if head else {}
        if head and pieces.tail.strip():
            behind = b"{" + pieces.tail.strip().removeprefix(b",") if pieces.tail.strip() != b"}" else b"{}"
            more = _decoded(behind)
            if more is None:
                self.trace.note("input", "what stands behind traceEvents is not JSON and was passed over")
            else:
                fields |= more
        trace = self.trace
        rank = fields.get("distributedInfo")
        if isinstance(rank, dict) and type(rank.get("rank")) is int and rank["rank"] >= 0:
            trace.rank = rank["rank"]
        devices = fields.get("deviceProperties")
        names = [d.get("name") for d in devices if isinstance(d, dict)] if isinstance(devices, list) else []
        trace.device = next((name for name in names if isinstance(name, str) and name), None)
        version = fields.get("vllm_version")
        trace.engine = f"vllm {version}" if isinstance(version, str) else None
        trace.cuda = _cuda_version(fields.get("cuda_runtime_version"))
        trace.hip = _hip_version(fields.get("hip_runtime_version"))


def _decoded(text: bytes) -> dict[str, Any] | None:
    for attempt in (text, repaired(text)):
        try:
            found = msgspec.json.decode(attempt)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        return found if isinstance(found, dict) else None
    return None


def _header_fields(head: bytes) -> dict[str, Any] | None:
    """The fields before the events; None if `head` does not end at a top-level list."""
    return _decoded(head + b"]}")


def _cuda_version(number: object) -> str | None:
    return f"{number // 1000}.{number % 1000 // 10}" if type(number) is int and number > 0 else None


def _hip_version(number: object) -> str | None:
    if type(number) is not int or number <= 0:
        return None
    return f"{number // 10_000_000}.{number // 100_000 % 100}.{number % 100_000}"
