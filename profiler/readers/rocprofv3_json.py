"""rocprofv3's JSON output: one document with all records of one or more processes, decoded whole but typed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...errors import BadInput
from .json_array import repaired
from .process_trace import CopyRecord, DeviceRecords, ProcessTrace, Range, record_direction, share_kinds
from .text import DEFAULT_LIMITS, Limits, Text

_MARKS = frozenset({"MARKER_CORE_API", "MARKER_CORE_RANGE_API"})


class Correlation(msgspec.Struct, frozen=True, gc=False):
    internal: int = 0


class KernelInfo(msgspec.Struct, frozen=True, gc=False):
    kernel_id: int = -1


class Dispatch(msgspec.Struct, gc=False):
    start_timestamp: int
    end_timestamp: int
    correlation_id: Correlation = Correlation()
    dispatch_info: KernelInfo = KernelInfo()


class ApiRecord(msgspec.Struct, gc=False):
    kind: int
    operation: int
    start_timestamp: int
    end_timestamp: int
    correlation_id: Correlation = Correlation()
    thread_id: int = 0
    nbytes: int | None = msgspec.field(name="bytes", default=None)


class BufferRecords(msgspec.Struct):
    kernel_dispatch: list[Dispatch] = msgspec.field(default_factory=list)
    hip_api: list[ApiRecord] = msgspec.field(default_factory=list)
    marker_api: list[ApiRecord] = msgspec.field(default_factory=list)
    memory_copy: list[ApiRecord] = msgspec.field(default_factory=list)


class KindNames(msgspec.Struct):
    kind: str = ""
    operations: list[str] = msgspec.field(default_factory=list)


class MarkerText(msgspec.Struct):
    key: int
    value: str


class Strings(msgspec.Struct):
    buffer_records: list[KindNames] = msgspec.field(default_factory=list)
    marker_api: list[MarkerText] = msgspec.field(default_factory=list)


class KernelSymbol(msgspec.Struct):
    kernel_id: int
    formatted_kernel_name: str = ""
    kernel_name: str = ""


class Agent(msgspec.Struct):
    type: int = 0  # 1 CPU, 2 GPU
    name: str = ""
    product_name: str = ""


class Metadata(msgspec.Struct):
    pid: int | None = None


class Process(msgspec.Struct):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    agents: list[Agent] = msgspec.field(default_factory=list)
    strings: Strings = msgspec.field(default_factory=Strings)
    kernel_symbols: list[KernelSymbol] = msgspec.field(default_factory=list)
    buffer_records: BufferRecords = msgspec.field(default_factory=BufferRecords)


class Document(msgspec.Struct):
    processes: list[Process] | Process = msgspec.field(name="rocprofiler-sdk-tool")


def read_rocprofv3_json(path: Path, limits: Limits = DEFAULT_LIMITS) -> list[ProcessTrace]:
    """The processes of a rocprofv3 JSON file. Raises `BadInput`, with the place in the document, if it is not one."""
    text = Text(path, limits)
    data = text.whole(limits.whole)
    if text.damaged or text.truncated:
        raise BadInput(f"{path}: the gzip data ends early or is damaged; this format cannot be read in part")
    document = _decode(path, data)
    del data
    processes = document.processes if isinstance(document.processes, list) else [document.processes]
    if not processes:
        raise BadInput(f"{path}: expected records of a process, found none")
    traces = [_process(path, process, limits) for process in processes]
    share_kinds(traces)
    return traces


def _decode(path: Path, data: bytes | bytearray) -> Document:
    try:
        return msgspec.json.decode(data, type=Document)
    except msgspec.ValidationError as error:
        raise BadInput(f"{path}: expected a rocprofv3 document: {error}") from None
    except RecursionError:
        raise BadInput(f"{path}: malformed JSON: nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        mended = repaired(data)
        if mended != data:
            return _decode(path, mended)
        raise BadInput(f"{path}: {error}") from None


def _process(path: Path, process: Process, limits: Limits) -> ProcessTrace:
    trace = ProcessTrace(path, "rocprofv3", limits)
    trace.pid = process.metadata.pid
    trace.device = next((a.product_name or a.name for a in process.agents if a.type == 2), None)
    records = process.buffer_records
    kernels = {s.kernel_id: s.formatted_kernel_name or s.kernel_name for s in process.kernel_symbols}
    for dispatch in records.kernel_dispatch:
        start = dispatch.start_timestamp
        kernel = dispatch.dispatch_info.kernel_id
        name = kernels.get(kernel) or f"kernel {kernel}"
        duration = dispatch.end_timestamp - start
        trace.add_record(DeviceRecords.KERNEL, dispatch.correlation_id.internal, start, duration, name, None)
    # A list that is there but empty was not recorded.
    trace.kinds |= {
        kind
        for kind, rows in (
            ("kernel", records.kernel_dispatch),
            ("memcpy", records.memory_copy),
        )
        if rows
    }
    names = process.strings.buffer_records
    for call in records.hip_api:
        duration = call.end_timestamp - call.start_timestamp
        called = _operation(names, call)
        # Calls without their names, and the compiler's own, tell nothing of launches and waits: unknown, not 0.
        if called is None:
            trace.odd["a call without a name, counted as no launch or wait"] += 1
        elif not _kind(names, call).startswith("HIP_COMPILER_API"):
            trace.kinds.add("api")
        name = called or f"operation {call.operation}"
        trace.add_call(name, call.start_timestamp, duration, call.thread_id, call.correlation_id.internal)
    texts = {text.key: text.value for text in process.strings.marker_api}
    for mark in records.marker_api:
        _mark(trace, mark, _kind(names, mark), texts)
    for copy in records.memory_copy:
        name = _operation(names, copy) or f"operation {copy.operation}"
        record = CopyRecord(record_direction(name), copy.nbytes)
        start, end = copy.start_timestamp, copy.end_timestamp
        trace.add_record(DeviceRecords.COPY, copy.correlation_id.internal, start, end - start, name, record)
    trace.check_size()
    return trace


def _kind(names: list[KindNames], record: ApiRecord) -> str:
    return names[record.kind].kind if 0 <= record.kind < len(names) else ""


def _operation(names: list[KindNames], record: ApiRecord) -> str | None:
    operations = names[record.kind].operations if 0 <= record.kind < len(names) else []
    return operations[record.operation] if 0 <= record.operation < len(operations) else None


def _mark(trace: ProcessTrace, mark: ApiRecord, kind: str, texts: dict[int, str]) -> None:
    name = texts.get(mark.correlation_id.internal)
    if kind in _MARKS and name is not None and mark.end_timestamp > mark.start_timestamp:
        trace.ranges.append(Range(name, mark.start_timestamp, mark.end_timestamp, mark.thread_id))
