"""What usually mends a sync, from its kind and the source line at which it was made."""

from __future__ import annotations

import ast
import linecache
import re
from functools import lru_cache

from .report import Site

_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_MAX_LINES = 20_000

_READ_ONE = re.compile(r"\.item\(\)|\b(?:int|float|bool)\(")
_SCALAR = re.compile(
    r"\b(?:scalar_tensor\(|(?:tensor|as_tensor)\(\s*(?:[-+\d]|(?:int|float|len|max|min|sum|bool)\(|True\b|False\b)).*\bdevice\s*="
)
_FROM_LIST = re.compile(r"\b(?:tensor|as_tensor)\(.*\bdevice\s*=")
_NUMBER_INTO = re.compile(r"\]\s*=\s*-?[\d.]")
_INDEX_LIST = re.compile(r"\[\s*\[")

# First match wins; each says what the operation needs the host for, then what does without.
_READS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"\brepeat_interleave\("),
        "repeat_interleave reads back how long its result is: pass output_size=, which the host knows",
    ),
    (re.compile(r"\bone_hot\("), "one_hot reads back the largest class: pass num_classes= and validated indices"),
    (
        re.compile(r"\b(?:nonzero|argwhere|masked_select|unique|unique_consecutive|bincount)\(|\bwhere\([^,]*\)"),
        "the size of the result depends on the data, so the host must wait for it: keep a mask, "
        "use torch.where with three arguments, or a bound that the host knows (nonzero_static)",
    ),
    (
        re.compile(r"\b(?:print|repr|str|format|log\w*|debug|info|warning)\(|\bf[\"']"),
        "formatting a device tensor reads it: log outside the step, or a host copy",
    ),
    (
        re.compile(r"^\s*(?:if|elif|while|assert)\b|\b(?:equal|allclose|is_nonzero)\("),
        "a condition on device data stops the host: decide from host values, or stay on the device with torch.where",
    ),
    (
        re.compile(r"non_blocking\s*=\s*True"),
        "a non-blocking copy waits all the same where the host side is pageable: copy into pinned memory, "
        "wait on an event where the values are needed",
    ),
    (
        re.compile(r"\[[^\]]*(?:[<>]|[!=]=|mask)[^\]]*\]"),
        "indexing by a mask reads back how many elements it selects: use torch.where, or indices that the host knows",
    ),
    (
        re.compile(r"\blinalg\.|\bcholesky\(|\binverse\("),
        "linear algebra reads back its error flag: use the _ex form with check_errors=False",
    ),
)
_UPLOADS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        _SCALAR,
        "a device scalar made from a Python number is a blocking upload: torch.full((), x, device=...) fills it on the "
        "device; or make it once, outside the step; or pass the number itself",
    ),
    (
        _FROM_LIST,
        "built in pageable memory, then copied with a wait: build it in pinned memory (pin_memory=True) and "
        "copy with .to(device, non_blocking=True), one packed copy a step; a single number needs no copy: "
        "torch.full((), x, device=...)",
    ),
    (_NUMBER_INTO, "assigning a Python number uploads it: use .fill_(x), or index_fill_ with device indices"),
    (_INDEX_LIST, "a Python list as an index is uploaded each time: keep the index tensor on the device"),
    (
        re.compile(r"non_blocking\s*=\s*True"),
        "non_blocking has no effect from pageable memory: pin the source (pin_memory=True, or a reused pinned buffer)",
    ),
)
_SIMPLE = {
    "d2h": "keep a host copy of what the scheduler knows, or copy into pinned memory and wait on an event later",
    "copy": "find out its direction; keep host data on the host, and copy through pinned memory with non_blocking=True",
    "h2d": "a pageable upload waits: build it in pinned memory and copy with non_blocking=True",
    "stream": "order work with events or stream.wait_stream() instead of stopping the host",
    "device": "order work with events or stream.wait_stream() instead of stopping the whole device",
    "event": "wait later, where the value is needed, or query the event",
    "memset": "a blocking memset: zero_() or fill_() on the stream does not wait",
    "maybe": "may wait: allocate before the loop and reuse, and keep frees and empty_cache() off the step path",
}


def hint_for(site: Site) -> str:
    """One sentence for people: the usual mend for this kind at this source line; empty where nothing is known."""
    if site.allowed_upstream:
        return "inside a region the engine's own checker allows"
    if site.kind in ("d2h", "copy"):
        return _read_hint(site)
    if site.kind == "h2d":
        found = next((text for pattern, text in _UPLOADS if pattern.search(site.source)), _SIMPLE["h2d"])
        return f"{found}{_times(site)}"
    if site.kind == "device" and "empty_cache" in site.source:
        return "empty_cache() frees and waits for the whole device: keep it off the step path"
    found = _SIMPLE.get(site.kind, "")
    return f"{found}{_times(site)}" if found else ""


def _read_hint(site: Site) -> str:
    if site.same_value:
        return f"the same value is read again and again{_times(site)}: read it once a step and pass it on"
    looped = site.repeated and in_loop(site.file, site.line)
    if looped and _READ_ONE.search(site.source):
        return (
            f"one element a round of the loop{_times(site)}: read all of them once before it (.tolist()), "
            "or keep them on the host: the scheduler already knows lengths"
        )
    found = next((text for pattern, text in _READS if pattern.search(site.source)), "")
    if found:
        return f"{found}{_times(site)}"
    if site.repeated:
        return (
            f"read once a step and pass the value on{_times(site)}, "
            "or keep it on the host: the scheduler already knows lengths"
        )
    return _SIMPLE[site.kind]


def _times(site: Site) -> str:
    """The text "(7x in one step)" for a site that repeats within a step."""
    most = max((at.count for at in site.steps), default=0)
    return f" ({most}x in one step)" if site.repeated and most > 1 else ""


def in_loop(file: str, line: int) -> bool:
    """Whether the code at `file:line` runs inside a loop or comprehension of its own function; False if unreadable."""
    return any(first <= line <= last for first, last in _loops(file))


@lru_cache(maxsize=256)
def _loops(file: str) -> tuple[tuple[int, int], ...]:
    """First and last line of every loop body in `file`, nested functions' own code left out of outer loops."""
    lines = linecache.getlines(file)
    if not lines or len(lines) > _MAX_LINES:
        return ()
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return ()
    found: list[tuple[int, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, _LOOPS):
            body: list[ast.stmt | ast.expr] = (
                [*node.body] if isinstance(node, ast.For | ast.AsyncFor | ast.While) else [node]
            )
            body += [node.test] if isinstance(node, ast.While) else []
            for part in body:
                if not isinstance(part, _SCOPES):
                    found.append((part.lineno, part.end_lineno or part.lineno))
    return tuple(found)
