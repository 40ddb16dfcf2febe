"""From a stack to the source line that is to blame: the first frame outside torch and this profiler."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import FrameType

from .calls import Frame

# As imported and as it lies: frames name the first, and a checkout may be imported through a link.
_PACKAGES = dict.fromkeys((Path(__file__).absolute().parent.parent, Path(__file__).resolve().parent.parent))
# backends/ stays visible: the embedded engine's own syncs are what its profile is about.
OWN = tuple(f"{package / part}/" for package in _PACKAGES for part in ("profiler", "planner"))
STDLIB = f"{sysconfig.get_paths()['stdlib']}/"
_TORCH_PARTS = ("/torch/", "/site-packages/torch/", "/dist-packages/torch/")
MAX_DEPTH = 48


@lru_cache(maxsize=8192)
def is_foreign(file: str) -> bool:
    """Whether a frame in `file` is a user's: not torch, not this profiler, not the standard library."""
    if file.startswith("<"):
        return file == "<stdin>" or file.startswith("<ipython")
    if file.startswith(OWN):
        return False
    if file.startswith("torch/") or any(part in file for part in _TORCH_PARTS):  # Kineto strips site-packages
        return False
    return not (file.startswith(STDLIB) and "/site-packages/" not in file)


def capture(skip: int = 1) -> tuple[Frame, ...]:
    """The calling thread's Python stack, innermost first, at most `MAX_DEPTH` frames; source lines not read yet."""
    return stack_of(sys._getframe(skip))


def stack_of(frame: FrameType | None) -> tuple[Frame, ...]:
    """`frame` and its callers, likewise."""
    frames: list[Frame] = []
    while frame is not None and len(frames) < MAX_DEPTH:
        code = frame.f_code
        frames.append(Frame(code.co_filename, frame.f_lineno, code.co_qualname))
        frame = frame.f_back
    return tuple(frames)


def blamed(stack: Iterable[Frame]) -> Frame | None:
    """The innermost frame outside torch and syncfree; the innermost of all where every frame is inside."""
    first: Frame | None = None
    for frame in stack:
        if first is None:
            first = frame
        if is_foreign(frame.file):
            return frame
    return first


def source_line(frame: Frame) -> str:
    """The text of the frame's line, stripped; empty where the file cannot be read."""
    return frame.source or linecache.getline(frame.file, frame.line).strip()


def short_path(file: str) -> str:
    """The last two parts of a path, for people."""
    return str(Path(*Path(file).parts[-2:])) if file else ""
