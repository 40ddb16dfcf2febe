"""Our modules as one block of compiled code, for a target that has nothing of ours installed.

Compiled here and not there: compiling a file in the target would hold its GIL for tens of milliseconds at a stretch.
Code belongs to one Python release, so for a target of another one its own interpreter is asked to compile.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import marshal
import subprocess
import zlib
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from ...errors import Unreachable

_PACKAGE = __name__.split(".", 1)[0]
_ROOT = Path(__file__).parents[2]
# What never runs in a server: the command line's side, and devices of tests.
_LEFT_OUT = (
    "profiler/renderers",
    "profiler/simulated",
    "profiler/devices",
    "profiler/pytest_plugin.py",
    "profiler/doctor.py",
    "profiler/prometheus.py",
    "planner/schedules",
    "backends/vllm/planned",
    "backends/vllm/endpoint.py",
    "backends/vllm/traced.py",
)
_TAKEN = ("__init__.py", "errors.py", "planner", "profiler", "backends/__init__.py", "backends/vllm")
COMPILE_SECONDS = 60.0

# Runs in the target's interpreter, outside the target: sources in, the finished block out.
_COMPILER = """
import json, marshal, sys, zlib
modules = {}
for name, path, package, source in json.load(sys.stdin):
    modules[name] = (path, package, zlib.compress(marshal.dumps(compile(source, path, "exec", dont_inherit=True))))
sys.stdout.buffer.write(marshal.dumps(modules))
"""


class Source(NamedTuple):
    name: str
    path: str
    package: bool
    text: str


def _sources() -> Iterator[Source]:
    for part in _TAKEN:
        place = _ROOT / part
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            local = path.relative_to(_ROOT)
            if not any(local.is_relative_to(left) for left in _LEFT_OUT):
                package = local.name == "__init__.py"
                parts = local.parent.parts if package else local.with_suffix("").parts
                yield Source(".".join((_PACKAGE, *parts)), str(path), package, path.read_text(encoding="utf-8"))


@lru_cache(maxsize=4)
def build(magic: bytes = importlib.util.MAGIC_NUMBER, interpreter: str = "") -> tuple[bytes, str]:
    """The block for a Python whose code has this magic number, and a digest of what is in it.

    Marshal of `{module: (file, is package, marshalled and compressed code)}`. `interpreter`: the target's executable,
    for a Python of another release than ours. Raises `Unreachable` where that one does not compile.
    """
    sources = list(_sources())
    digest = hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:16]
    if magic == importlib.util.MAGIC_NUMBER:
        modules = {s.name: (s.path, s.package, zlib.compress(marshal.dumps(_compiled(s)))) for s in sources}
        return marshal.dumps(modules), digest
    return _elsewhere(interpreter, sources), digest


def _compiled(source: Source) -> CodeType:
    """From Python's own cache of compiled files where that is fresh: the server needs the processors, too."""
    code = SourceFileLoader(source.name, source.path).get_code(source.name)
    assert code is not None  # a source file always has code
    return code


def _elsewhere(interpreter: str, sources: list[Source]) -> bytes:
    try:
        done = subprocess.run(
            [interpreter, "-I", "-S", "-c", _COMPILER],
            input=json.dumps(sources).encode(),
            capture_output=True,
            timeout=COMPILE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"{interpreter}: the target's Python does not run here: {error}") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no word why"]
        raise Unreachable(f"{interpreter}: the target's Python cannot compile syncfree: {last[0]}")
    return done.stdout
