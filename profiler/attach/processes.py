"""Which processes below a pid are the workers of a serving engine: by the names that engines give their processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ...errors import Unreachable

# vLLM's prefix can be changed (VLLM_PROCESS_NAME_PREFIX); the part after it cannot. SGLang: sglang::scheduler_TP0.
_WORKER = re.compile(r"\S*::(EngineCore|Worker|scheduler)\S*")
_TORCH = re.compile(r"/libtorch_(cpu|python)\.so")


class Process(NamedTuple):
    """`title`: what it calls itself. `start`: when it was started, in the kernel's ticks; tells it from a later one."""

    pid: int
    parent: int
    start: int
    title: str

    @property
    def label(self) -> str:
        """Its title where it chose one, else the program's name."""
        match = _WORKER.match(self.title)
        return match[0] if match else Path(self.title.split(" ", 1)[0] or "?").name


def read_process(pid: int) -> Process | None:
    """None where it does not exist, or has ended and waits for its parent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] in "ZXx":
        return None
    return Process(pid, int(fields[1]), int(fields[19]), title.replace(b"\0", b" ").decode("utf-8", "replace").strip())


def below(pid: int) -> list[Process]:
    """The process and all its descendants, parents first. Raises `Unreachable` where it does not exist."""
    root = read_process(pid)
    if root is None:
        raise Unreachable(f"process {pid} does not exist")
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        process = read_process(int(entry.name)) if entry.name.isdigit() else None
        if process is not None:
            children.setdefault(process.parent, []).append(process)
    found = [root]
    for process in found:
        found += sorted(children.get(process.pid, ()))
    return found


def find_workers(pid: int) -> list[Process]:
    """The processes to attach to.

    Those named as workers that have no worker below them (a vLLM engine core with one worker runs it itself); else
    those with torch loaded; else the process itself, which then says what it lacks.
    """
    family = below(pid)
    named = [process for process in family if _WORKER.match(process.title)]
    if named:
        return _leaves(named, family)
    return [process for process in family if has_torch(process.pid)] or family[:1]


def _leaves(named: list[Process], family: list[Process]) -> list[Process]:
    parents = {process.pid: process.parent for process in family}
    inner: set[int] = set()
    for process in named:
        above = process.parent
        while above in parents:
            inner.add(above)
            above = parents[above]
    return [process for process in named if process.pid not in inner]


def has_torch(pid: int) -> bool:
    """Whether torch's libraries are loaded in it; False too where its memory map may not be read."""
    try:
        return _TORCH.search(Path(f"/proc/{pid}/maps").read_text(errors="replace")) is not None
    except OSError:
        return False


def seen_from_here(pid: int, path: Path) -> Path:
    """A path of that process as we see it: it may live in a container with a file system of its own."""
    own, its = (Path(f"/proc/{who}/ns/mnt").readlink() for who in ("self", pid))
    return path if own == its else Path(f"/proc/{pid}/root{path}")
