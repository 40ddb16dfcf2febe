"""Nsight Systems exports (`nsys export --type sqlite`): one process of the recording is one `ProcessTrace`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...errors import BadInput
from ..calls import Direction
from .process_trace import CopyRecord, DeviceRecords, ProcessTrace, Range, share_kinds
from .text import DEFAULT_LIMITS, Limits, open_regular

_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
_SET = "CUPTI_ACTIVITY_KIND_MEMSET"
_GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"  # `--cuda-graph-trace=graph`: a graph is one record, without its kernels
_NVTX = "NVTX_EVENTS"
_NVTX_RANGES = (59, 60)  # push/pop, start/end
# ENUM_CUDA_MEMCPY_OPER; the unified-memory kinds (11 to 13) are page migrations and belong to no call.
_DIRECTION = {
    1: Direction.H2D,
    2: Direction.D2H,
    3: Direction.H2D,
    4: Direction.D2H,
    5: Direction.D2D,
    6: Direction.D2D,
    7: Direction.D2D,
    8: Direction.D2D,
    9: Direction.H2H,
    10: Direction.D2D,
}
_PAGEABLE, _PINNED = 0, 1  # ENUM_CUDA_MEM_KIND
_TID_BITS = 24  # globalTid = process << 24 | thread; globalPid = process << 24


def read_nsys(path: Path, limits: Limits = DEFAULT_LIMITS) -> list[ProcessTrace]:
    """The processes of an Nsight Systems export, in order of their ids. Raises `BadInput` if it is none or is cut."""
    open_regular(path).close()
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)) as connection:
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            return _NsysReader(path, connection, limits).read()
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter from words of sqlite's about broken text
        reason = " ".join(str(error).split())[:120]
        raise BadInput(f"{path}: cannot be read as a database: {reason}") from None


class _NsysReader:
    def __init__(self, path: Path, connection: sqlite3.Connection, limits: Limits) -> None:
        self.path = path
        self.connection = connection
        self.limits = limits
        self.traces: dict[int, ProcessTrace] = {}
        # Views are left alone: an export has none, and they can be made to run for ever.
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self.tables = {name for (name,) in rows}
        self.texts: dict[int, str] = {}
        self.odd = 0

    def read(self) -> list[ProcessTrace]:
        if not self.tables & {_RUNTIME, _KERNEL, _COPY, _NVTX, "StringIds"}:
            raise BadInput(
                f"{self.path}: expected an Nsight Systems export, found none of its tables"
                + (" (rocpd: write CSV or JSON with rocprofv3 --output-format)" if self._is_rocpd() else "")
            )
        self.texts = {
            key: value
            for key, value in self._rows("StringIds", ("id", "value"))
            if isinstance(key, int) and isinstance(value, str)
        }
        self._calls()
        self._kernels()
        self._copies()
        self._sets()
        self._ranges()
        device = next((name for (name,) in self._rows("TARGET_INFO_GPU", ("name",)) if isinstance(name, str)), None)
        result = [self.traces[process] for process in sorted(self.traces)]
        for trace in result:
            trace.device = device or None
        share_kinds(result)
        if self.odd and result:
            result[0].odd["a row that cannot be read, left out"] += self.odd
        if not result:
            empty = ProcessTrace(self.path, "nsys", self.limits)
            result.append(empty)
        return result

    def _is_rocpd(self) -> bool:
        return any(name.startswith("rocpd_") for name in self.tables)

    def _rows(self, table: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Rows of a table with the wanted columns; NULL for a column that this version of the schema lacks."""
        if table not in self.tables:
            return
        have = {row[1] for row in self.connection.execute(f'PRAGMA table_info("{table}")')}
        wanted = ", ".join(f'"{name}"' if name in have else "NULL" for name in columns)
        for count, row in enumerate(self.connection.execute(f'SELECT {wanted} FROM "{table}"')):
            if count % 65536 == 65535:
                for trace in self.traces.values():
                    trace.check_size()
            yield row

    def _integers(self, table: str, columns: Sequence[str], needed: int) -> Iterator[tuple[Any, ...]]:
        """Rows whose values are integers or NULL, the first `needed` of them integers."""
        for row in self._rows(table, columns):
            if all(isinstance(value, int) for value in row[:needed]) and all(
                value is None or isinstance(value, int) for value in row[needed:]
            ):
                yield row
            else:
                self.odd += 1

    def _of(self, global_id: int | None) -> ProcessTrace:
        if global_id is None and len(self.traces) == 1:  # a schema without the column: the calls came first
            return next(iter(self.traces.values()))
        process = (global_id or 0) >> _TID_BITS
        trace = self.traces.get(process)
        if trace is None:
            trace = self.traces[process] = ProcessTrace(self.path, "nsys", self.limits)
            trace.pid = process & ((1 << _TID_BITS) - 1)
        return trace

    def _calls(self) -> None:
        for start, end, name, tid, correlation in self._integers(
            _RUNTIME, ("start", "end", "nameId", "globalTid", "correlationId"), 3
        ):
            trace = self._of(tid)
            if name in self.texts:  # calls without their names tell nothing: launches are unknown, not 0
                trace.kinds.add("api")
            api = self.texts.get(name, f"name {name}")
            trace.add_call(api, start, end - start, (tid or 0) & ((1 << _TID_BITS) - 1), correlation)

    def _kernels(self) -> None:
        columns = ("start", "end", "correlationId", "globalPid", "demangledName", "shortName")
        for start, end, correlation, pid, long, short in self._integers(_KERNEL, columns, 2):
            trace = self._of(pid)
            trace.kinds.add("kernel")
            name = self.texts.get(long) or self.texts.get(short) or "kernel"
            trace.add_record(DeviceRecords.KERNEL, correlation, start, end - start, name, None)
        graphs = 0
        for start, end, correlation, pid in self._integers(_GRAPH, ("start", "end", "correlationId", "globalPid"), 2):
            trace = self._of(pid)
            trace.kernels_unknown = True
            trace.add_record(DeviceRecords.GRAPH, correlation, start, end - start, "graph", None)
            graphs += 1
        if graphs:
            for trace in self.traces.values():
                if trace.kernels_unknown:
                    trace.note(
                        "blind", "graphs were recorded whole (--cuda-graph-trace=graph): their kernels are unknown"
                    )

    def _copies(self) -> None:
        columns = ("start", "end", "copyKind", "correlationId", "globalPid", "bytes", "srcKind", "dstKind")
        for start, end, kind, correlation, pid, nbytes, source, target in self._integers(_COPY, columns, 3):
            direction = _DIRECTION.get(kind)
            if direction is None:
                continue
            trace = self._of(pid)
            trace.kinds.add("memcpy")
            ends = (source, target)
            pageable = True if _PAGEABLE in ends else (False if _PINNED in ends else None)
            record = CopyRecord(direction, nbytes, pageable)
            trace.add_record(DeviceRecords.COPY, correlation, start, end - start, f"Memcpy {direction}", record)

    def _sets(self) -> None:
        for start, end, correlation, pid in self._integers(_SET, ("start", "end", "correlationId", "globalPid"), 2):
            trace = self._of(pid)
            trace.kinds.add("memset")
            trace.add_record(DeviceRecords.MEMSET, correlation, start, end - start, "Memset", None)

    def _ranges(self) -> None:
        columns = ("start", "end", "eventType", "globalTid", "textId", "text")
        for start, end, kind, tid, text_id, text in self._rows(_NVTX, columns):
            if not isinstance(start, int) or not isinstance(end, int) or end < start or kind not in _NVTX_RANGES:
                continue
            name = text if isinstance(text, str) else self.texts.get(text_id)
            # torch.autograd.profiler.emit_nvtx marks every operator; they are no ranges that anybody named.
            if not name or ", op_id = " in name or not isinstance(tid, int):
                continue
            self._of(tid).ranges.append(Range(name, start, end, tid & ((1 << _TID_BITS) - 1)))
