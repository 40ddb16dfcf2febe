"""rocprofv3's CSV output: one file a kind of record, all files of one run (same folder and prefix) read together."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

from ...errors import BadInput
from .process_trace import CopyRecord, DeviceRecords, ProcessTrace, Range, record_direction, shown_name
from .text import DEFAULT_LIMITS, MIB, Limits, Text

_SUFFIX = re.compile(
    r"[_.-]?(?:(?:hip|hip_api|hip_runtime|hip_runtime_api|hip_compiler|hip_compiler_api|hip_compile|hsa|hsa_api|hsa_core_api|rccl|rccl_api"
    r"|marker|marker_api|kernel|memory_copy|memory_allocation|scratch_memory|rocdecode_api|rocjpeg_api|kokkos)_trace"
    r"|agent_info|counter_collection|(?:\w+_)?stats)$",
    re.IGNORECASE,
)
_MARKS = frozenset({"MARKER_CORE_API", "MARKER_CORE_RANGE_API", "MARKER_API"})
_API_COLUMNS = frozenset({"domain", "function", "start_timestamp", "end_timestamp"})
_KERNEL_COLUMNS = frozenset({"kernel_name", "correlation_id", "start_timestamp", "end_timestamp"})
_COPY_COLUMNS = frozenset({"direction", "start_timestamp", "end_timestamp"})
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d{1,2})?")
_LINE = MIB  # no row is longer: kernel names reach some 10 KB


def is_rocprofv3_csv(head: bytes) -> bool:
    """Whether the first line is the header of one of rocprofv3's CSV files that matter here."""
    columns = {c.strip().strip('"').lower() for c in head.split(b"\n", 1)[0].decode("utf-8", "replace").split(",")}
    if "counter_name" in columns:  # a row a counter, not a row a kernel
        return False
    return any(wanted <= columns for wanted in (_API_COLUMNS, _KERNEL_COLUMNS, _COPY_COLUMNS))


def run_prefix(path: Path) -> str:
    """What the names of one run's files have in common: `bench_hip_api_trace.csv` -> `bench`."""
    name = path.name.lower()
    stem = path.name[: len(name.removesuffix(".gz").removesuffix(".csv"))]
    return _SUFFIX.sub("", stem)


def _whole(text: str) -> int:
    """A whole number; also as a spreadsheet or data frame writes it back (`100.0`, `1.5E+3`), exactly."""
    try:
        return int(text)
    except ValueError:
        value = Decimal(text.strip()) if _NUMBER.fullmatch(text.strip()) else None
    if value is None:
        raise ValueError(f"expected a number, got {text!r}")
    return round(value)


def read_rocprofv3_csv(paths: Sequence[Path], limits: Limits = DEFAULT_LIMITS) -> list[ProcessTrace]:
    """The process whose files these are."""
    trace = ProcessTrace(paths[0], "rocprofv3", limits)
    trace.files = [shown_name(path) for path in paths]
    for path in paths:
        _CsvReader(path, trace, limits).read()
    return [trace]


class _CsvReader:
    def __init__(self, path: Path, trace: ProcessTrace, limits: Limits) -> None:
        self.path = path
        self.trace = trace
        self.text = Text(path, limits)
        self.columns: dict[str, int] = {}

    def read(self) -> None:
        rows = csv.reader(self._lines(), skipinitialspace=True)
        header = next(rows, None)
        if header is None:
            raise BadInput(f"{self.path}: expected a rocprofv3 CSV file, got an empty one")
        self.columns = {name.strip().lower(): i for i, name in enumerate(header)}
        have = self.columns.keys()
        if have >= _API_COLUMNS:
            take = self._api
        elif have >= _KERNEL_COLUMNS:
            take = self._kernel
        elif have >= _COPY_COLUMNS:
            take = self._copy
        else:
            raise BadInput(
                f"{self.path}: expected a rocprofv3 API, marker, kernel or memory copy trace, got other columns"
            )
        while True:
            try:
                row = next(rows)
                if row:
                    take(row)
            except StopIteration:
                break
            except BadInput:  # is a ValueError, too
                raise
            except (ValueError, IndexError, OverflowError, csv.Error):
                self.trace.odd["a CSV row that cannot be read, left out"] += 1
            if rows.line_num % 65536 == 0:
                self.trace.check_size()
        self.trace.check_size()
        self._ended()

    def _ended(self) -> None:
        if self.text.damaged or self.text.truncated:
            self.trace.partial = True
            self.trace.note("partial", f"{shown_name(self.path)} ends early: figures are of what is there")

    def _lines(self) -> Iterator[str]:
        rest = b""
        for block in self.text:
            *lines, rest = (rest + block).split(b"\n")
            if len(rest) > _LINE:
                raise BadInput(f"{self.path}: expected CSV with lines of at most {_LINE >> 20} MiB, got a longer one")
            for line in lines:
                yield line.decode("utf-8", "replace") + "\n"
        if rest:
            yield rest.decode("utf-8", "replace")

    def _number(self, row: list[str], column: str) -> int | None:
        at = self.columns.get(column)
        return None if at is None or not row[at].strip() else _whole(row[at])

    def _times(self, row: list[str]) -> tuple[int, int]:
        start, end = _whole(row[self.columns["start_timestamp"]]), _whole(row[self.columns["end_timestamp"]])
        return start, end - start

    def _api(self, row: list[str]) -> None:
        domain, function = row[self.columns["domain"]], row[self.columns["function"]]
        start, duration = self._times(row)
        thread = self._number(row, "thread_id") or 0
        if domain in _MARKS:
            # The text of a marker may be the name of a HIP function: only the domain tells.
            if duration > 0:
                self.trace.ranges.append(Range(function, start, start + duration, thread))
        elif domain.startswith("HIP_"):
            if not domain.startswith(
                "HIP_COMPILER_API"
            ):  # those neither launch nor wait: alone they tell nothing of it
                self.trace.kinds.add("api")
            self.trace.pid = self.trace.pid or self._number(row, "process_id")
            self.trace.add_call(function, start, duration, thread, self._number(row, "correlation_id"))

    def _kernel(self, row: list[str]) -> None:
        start, duration = self._times(row)
        name = row[self.columns["kernel_name"]]
        self.trace.kinds.add("kernel")
        self.trace.add_record(DeviceRecords.KERNEL, self._number(row, "correlation_id"), start, duration, name, None)

    def _copy(self, row: list[str]) -> None:
        start, duration = self._times(row)
        name = row[self.columns["direction"]]
        self.trace.kinds.add("memcpy")
        nbytes = self._number(row, "bytes") if "bytes" in self.columns else self._number(row, "size")
        self.trace.add_record(
            DeviceRecords.COPY,
            self._number(row, "correlation_id"),
            start,
            duration,
            name,
            CopyRecord(record_direction(name), nbytes),
        )
