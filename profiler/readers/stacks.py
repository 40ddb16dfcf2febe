"""Source lines of the calls that waited, from the host spans of a trace around them."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache

from ..calls import Call, Frame
from ..sites import MAX_DEPTH
from .process_trace import ProcessTrace, Spans

# Kineto prints "file.py(12): function"; the line is where the function begins, not where it was.
_FRAME = re.compile(r"(?P<file>.*)\((?P<line>\d+)\): (?P<function>.*)", re.DOTALL)
_OP_FILE = "<operator>"


@lru_cache(maxsize=16384)
def parse_frame(text: str) -> Frame:
    """A frame from its name in a trace: a Python function, a built-in, an `nn.Module`."""
    found = _FRAME.match(text)
    if found:
        return Frame(_library_file(found["file"]), int(found["line"]), found["function"])
    kind, colon, name = text.partition(": ")
    if kind == "nn.Module" and colon:
        return Frame("<nn.Module>", 0, name)
    return Frame("<built-in>", 0, text.strip("<>"))


def _library_file(file: str) -> str:
    """Kineto strips the library's folder: a bare `threading.py` is Python's own, and nobody's fault."""
    if file.partition("/")[0].removesuffix(".py") in sys.stdlib_module_names:
        return f"<stdlib>/{file}"
    return file


def attach_stacks(trace: ProcessTrace, calls: Iterable[Call]) -> None:
    """Give each of `calls` the Python frames around it, innermost first; operators where there are no frames."""
    by_thread: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        by_thread[call.thread].append(call)
    for thread, members in by_thread.items():
        members.sort(key=lambda c: c.ts_ns)
        moments = [call.ts_ns / 1e3 for call in members]
        frames = _around(trace.frames.get(thread), moments)
        ops = _around(trace.ops.get(thread), moments)
        for i, call in enumerate(members):
            rows = frames.get(i, [])[:MAX_DEPTH]
            call.stack = tuple(parse_frame(trace.names[trace.frames[thread].name[row]]) for row in rows)
            if not call.stack and i in ops:
                call.stack = _op_stack(trace, trace.ops[thread], ops[i])


def _around(spans: Spans | None, moments: list[float]) -> dict[int, list[int]]:
    """By index of moment the rows around it, the one that began last (the innermost) first."""
    found: dict[int, list[int]] = defaultdict(list)
    if spans is not None:
        for moment, row in spans.enclosing(moments):
            found[moment].append(row)
        for rows in found.values():
            rows.sort(key=lambda row: (spans.start[row], -spans.end[row], row), reverse=True)
    return found


def _op_stack(trace: ProcessTrace, ops: Spans, rows: list[int]) -> tuple[Frame, ...]:
    for row in rows:
        if row in ops.stacks:
            return tuple(parse_frame(part) for part in re.split(r"[;\n]", trace.names[ops.stacks[row]]) if part)
    names = [trace.names[ops.name[row]] for row in rows]
    # aten::item says more than the aten::_local_scalar_dense and aten::copy_ inside it.
    depth = 0
    while depth + 1 < len(names) and names[depth].startswith("aten::") and names[depth + 1].startswith("aten::"):
        depth += 1
    return tuple(Frame(_OP_FILE, 0, name) for name in names[depth:])
