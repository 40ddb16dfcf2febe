"""Traces that people already have, as the report that a live profile gives.

    from syncfree.profiler.readers import read_traces
    report = read_traces(["vllm_rank0.pt.trace.json.gz"])

One file, several, or folders: Kineto (CUDA and ROCm, plain or gzip), rocprofv3 CSV and JSON, Nsight Systems sqlite.
No torch is imported; memory is bounded by `Limits`, not by the size of the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ...errors import BadInput
from ..report import Note, Report
from .assemble import assemble, nothing_measured
from .find import Source, find_sources, rank_in_name
from .process_trace import ProcessTrace, shown_name
from .steps import RangeFilter
from .text import DEFAULT_LIMITS, Limits, NoTrace

__all__ = ["DEFAULT_LIMITS", "Limits", "nothing_measured", "read_traces"]


def read_traces(
    paths: Iterable[str | Path],
    *,
    steps: str | Sequence[str] = "auto",
    limits: Limits = DEFAULT_LIMITS,
    timeline: int = 2000,
) -> Report:
    """The report of the traces in `paths` (files and folders), as one.

    `steps`: "auto" finds the step annotations of PyTorch, vLLM, SGLang and torchbench; "none" has none; else names or
    glob patterns of the ranges that are steps. `timeline`: so many phases and waits of each process are kept for
    pictures. Raises `BadInput` for what is no trace, is malformed, or is beyond `limits`. A file that was cut or holds
    odd records gives a report with notes. See `nothing_measured` for a report without any figure.
    """
    sources = find_sources(paths, limits)
    if not sources:
        raise BadInput("expected at least one trace file, got none")
    wanted = RangeFilter(steps)
    traces: list[ProcessTrace] = []
    passed_over: list[Note] = []
    for source in sources:
        try:
            traces += _read(source, wanted, limits)
        except BadInput as error:
            if source.given:
                raise
            kind = "input" if isinstance(error, NoTrace) else "partial"
            text = f"passed over: {error}".encode("utf-8", "replace").decode()  # it names the file, as it is spelt
            passed_over.append(Note(kind=kind, text=text, file=shown_name(source.paths[0])))
    if not traces:
        raise BadInput(passed_over[0].text.removeprefix("passed over: "))
    report = assemble(traces, wanted, timeline)
    report.notes += passed_over
    report.source.partial = report.source.partial or any(note.kind == "partial" for note in passed_over)
    return report


def _read(source: Source, wanted: RangeFilter, limits: Limits) -> list[ProcessTrace]:
    # Each format is loaded when met: reading one kind of file does not pay for the others.
    path = source.paths[0]
    if source.format == "nsys":
        from .nsys import read_nsys

        return read_nsys(path, limits)
    if source.format == "rocprofv3-json":
        from .rocprofv3_json import read_rocprofv3_json

        return read_rocprofv3_json(path, limits)
    if source.format == "rocprofv3-csv":
        from .rocprofv3_csv import read_rocprofv3_csv

        return read_rocprofv3_csv(source.paths, limits)
    from .kineto import read_kineto

    traces = read_kineto(path, wanted, limits)
    for trace in traces:
        if trace.rank is None:
            trace.rank = rank_in_name(path)
    return traces
