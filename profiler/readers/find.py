"""Which files are traces, of which format, and which belong together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from ...errors import BadInput
from .rocprofv3_csv import is_rocprofv3_csv, run_prefix
from .text import DEFAULT_LIMITS, GZIP, SQLITE, Limits, head_of, open_regular

_SUFFIXES = (".json", ".json.gz", ".csv", ".csv.gz", ".sqlite", ".sqlite3", ".db", ".gz", ".trace")
_ROCPROFV3 = re.compile(rb'"rocprofiler-sdk-tool"\s*:')
_NSYS_JSON = re.compile(rb'^\s*\{"(?:Type|CudaEvent|TraceProcessEvent|NvtxEvent|data|id)":[^\n]*\}\s*\n\s*\{')
_RANK = re.compile(r"(?:^|[^a-z])rank[-_.]?(\d+)|(?:^|[-_.])TP-?(\d+)(?=[-_.])", re.IGNORECASE)
_MAX_FILES = 10_000


class Source(msgspec.Struct, frozen=True):
    """Files that are read as one. `given` is false for what was only found in a folder."""

    format: str  # kineto, rocprofv3-json, rocprofv3-csv, nsys
    paths: tuple[Path, ...]
    given: bool = True


def find_sources(paths: Iterable[str | Path], limits: Limits = DEFAULT_LIMITS) -> list[Source]:
    """The traces among files and folders (searched below, too), in order, each file once.

    A file that was named has to be a trace, else `BadInput`; what a folder holds beside traces is passed over.
    """
    found: list[tuple[str, Path, bool]] = []
    seen: set[Path] = set()
    empty: list[Path] = []
    for path in map(Path, paths):
        members, given = ([path], True) if not path.is_dir() else (_members(path), False)
        before = len(found)
        for member in members:
            resolved = member.resolve()
            if resolved in seen:
                continue
            seen.add(resolved)
            kind = _format(member, limits) if given else _format_or_none(member, limits)
            if kind is not None:
                found.append((kind, member, given))
        if not given and len(found) == before:
            empty.append(path)
    if empty and not found:
        raise BadInput(f"{empty[0]}: expected trace files in this folder, found none")
    return _grouped(found)


def rank_in_name(path: Path) -> int | None:
    """The rank that a file name tells: `vllm_rank0.1753.pt.trace.json.gz`, `1782-TP-3-DECODE.trace.json.gz`."""
    found = _RANK.search(path.name)
    return int(found[1] or found[2]) if found else None


def _members(folder: Path) -> list[Path]:
    found: list[Path] = []
    for path in sorted(folder.rglob("*")):
        if path.name.startswith(".") or not path.name.lower().endswith(_SUFFIXES) or not path.is_file():
            continue
        found.append(path)
        if len(found) > _MAX_FILES:
            raise BadInput(f"{folder}: expected at most {_MAX_FILES:,} trace files in a folder, found more")
    return found


def _format_or_none(path: Path, limits: Limits) -> str | None:
    try:
        return _format(path, limits)
    except BadInput:
        return None


def _format(path: Path, limits: Limits) -> str:
    head = head_of(path, limits)
    if head.startswith(SQLITE):
        if _is_packed(path):
            raise BadInput(f"{path}: expected a database that is not packed: gunzip it first")
        return "nsys"
    start = head.lstrip()
    if start[:1] in b"{[":
        if _NSYS_JSON.search(head):
            raise BadInput(f"{path}: expected a trace, got a JSON export of nsys: use `nsys export --type sqlite`")
        return "rocprofv3-json" if _ROCPROFV3.search(head) else "kineto"
    if is_rocprofv3_csv(head):
        return "rocprofv3-csv"
    raise BadInput(f"{path}: expected a Kineto, rocprofv3 or Nsight Systems trace, got {_looks_like(path, start)}")


def _is_packed(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(len(GZIP)) == GZIP


def _looks_like(path: Path, start: bytes) -> str:
    if path.name.endswith((".nsys-rep", ".qdrep")):
        return "a report of nsys: export it with `nsys export --type sqlite`"
    if path.name.endswith(".pftrace"):
        return "a Perfetto trace: write CSV or JSON with `rocprofv3 --output-format`"
    return f"something that begins with {start[:8]!r}"


def _grouped(found: Sequence[tuple[str, Path, bool]]) -> list[Source]:
    """CSV files of one run together, everything else by itself."""
    runs: dict[tuple[Path, str], list[int]] = {}
    result: list[list[int]] = []
    for i, (kind, path, _) in enumerate(found):
        if kind != "rocprofv3-csv":
            result.append([i])
            continue
        key = (path.resolve().parent, run_prefix(path))
        if key not in runs:
            runs[key] = []
            result.append(runs[key])
        runs[key].append(i)
    return [
        Source(found[members[0]][0], tuple(found[i][1] for i in members), any(found[i][2] for i in members))
        for members in result
    ]
