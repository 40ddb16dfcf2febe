"""Runs in the target: brings up the agent and the engine's hooks, and takes everything back.

Called by the client through bootstrap.py, on frida's thread. What stays after `depart` are modules, which cost memory
and nothing else, and one arena, which the next visit uses again.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .. import collectors
from ..agent.server import Agent, current_agent, ensure_agent, retire_agent
from ..collectors.probe import ProbeCollector
from ..probe import arena as layout
from ..probe.events import Decoder
from .processes import read_process

logger = logging.getLogger("syncfree")

QUIET_SECONDS = 60.0  # a client that we cannot see, in another container, and that said nothing for so long, is gone
_LOOK_SECONDS = 0.5


class BroughtProbe(ProbeCollector):
    """Counts through hooks that somebody outside put in: they count from then on, a recording takes its share."""

    def __init__(self, arena: layout.Arena, names: list[str], missing: list[str], walkers: tuple[int, int]) -> None:
        super().__init__()
        self._brought = (arena, names, missing, walkers)
        self._calls_before: list[int] = []

    def start(self) -> None:
        arena, names, missing, walkers = self._brought
        self.__init__(*self._brought)  # type: ignore[misc]
        self._pid = os.getpid()
        self._arena = arena
        self._decoder = Decoder(names, arena.peek)
        if missing:
            self._note("blind", f"not hooked, too short: {', '.join(missing)}")
        self._calibrate(*walkers)
        layout.take_records(arena.peek, arena.poke)  # from before this recording
        self._calls_before = layout.calls(arena.peek, len(names))

    def stop(self) -> None:
        arena = self._arena
        if arena is None or os.getpid() != self._pid:
            return
        layout.set_step_thread(arena.poke, 0, 0, 0)
        names = self._brought[1]
        self._last = self._read()
        self._take_records()
        counts = zip(names, layout.calls(arena.peek, len(names)), self._calls_before, strict=True)
        self.api = {name: now - before for name, now, before in counts if now > before}
        self._describe_losses(died=False)
        self._calls = self._decoder.decode(self._records) if self._decoder else []
        self._records = []
        self._describe_blind()
        self._arena = None  # stays mapped: the hooks still write to it


class Visit:
    """One client's stay. `resident`: an agent was here before us and stays."""

    def __init__(self, client: int, started: int, same_namespace: bool) -> None:
        self.client = client
        self.over = threading.Event()
        self.began = time.monotonic()
        self.agent: Agent | None = None
        self.resident = False
        self.hooked: list[str] = []  # modules of ours that have put hooks into an engine
        self._started = started
        self._visible = same_namespace and self._client_lives()

    def _client_lives(self) -> bool:
        process = read_process(self.client)
        return process is not None and process.start == self._started

    def watch(self) -> None:
        """Leaves where the client has died without a word; ends with the visit."""
        while not self.over.wait(_LOOK_SECONDS):
            silent = self.agent is not None and self.agent.quiet_seconds > QUIET_SECONDS
            if not self._client_lives() if self._visible else silent:
                logger.warning(
                    "syncfree: the profiler (pid %d) is gone: its hooks and agent are taken out", self.client
                )
                depart()


_lock = threading.Lock()
_visit: Visit | None = None
_arena: layout.Arena | None = None
_inside_old: list[layout.Arena] = []  # a thread was still inside a hooked call when their visit ended


def arrive(client: int, started: int, namespace: str, engines: dict[str, str]) -> dict[str, Any]:
    """Bring up an agent. `engines`: engine's module -> module of ours with `register` and `unregister`.

    Returns its socket, the engines found here, and what the hooks need to know of torch.
    """
    global _visit
    with _lock:
        if _visit is not None and not _visit.over.is_set():
            age = time.monotonic() - _visit.began
            return {"refused": f"process {_visit.client} has been profiling it for {age:.1f} s"}
        visit = _visit = Visit(client, started, namespace == _namespace())
        try:
            _settle(visit, engines)
        except BaseException:
            _depart(visit)
            raise
    assert visit.agent is not None
    if visit.agent.error is not None:
        depart()
        return {"refused": visit.agent.error}
    threading.Thread(target=visit.watch, name="syncfree-visit", daemon=True).start()
    torch = sys.modules["torch"]
    return {
        "socket": str(visit.agent.path),
        "engines": [name for name in engines if name in sys.modules],
        "resident": visit.resident,
        "hip": getattr(torch.version, "hip", None),
    }


def _settle(visit: Visit, engines: dict[str, str]) -> None:
    agent = current_agent()
    if agent is not None:  # a plugin's: its hooks are there too
        visit.agent, visit.resident = agent, True
        return
    found = [name for name in engines if name in sys.modules]
    engine = ", ".join(f"{name} {getattr(sys.modules[name], '__version__', 'unknown')}" for name in found) or None
    # Before the first hook: a step that ends meanwhile would make an agent of its own, under the rank it knows.
    visit.agent = ensure_agent(rank=_rank(), engine=engine)
    for name in found:
        ours = importlib.import_module(engines[name])
        if ours.register(attached=True):
            visit.hooked.append(engines[name])
    visit.agent.ready.wait(10)


def _rank() -> int:
    """As vLLM counts, over replicas too; 0 where torch.distributed is not in use."""
    distributed = getattr(sys.modules["torch"], "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    return int(distributed.get_rank())


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def prepare_arena() -> dict[str, Any]:
    """Memory for the hooks: the one of the last visit, emptied, unless somebody may still write to it."""
    global _arena
    if _arena is not None and _threads_inside(_arena):
        _inside_old.append(_arena)
        _arena = None
    if _arena is None:
        _arena = layout.Arena()
    else:
        ctypes.memset(_arena.address + 16, 0, layout.SIZE - 16)  # all but the magic number and the size
    return {"arena": _arena.address}


def _threads_inside(arena: layout.Arena) -> bool:
    used = min(layout.word(arena.peek, "threads_used"), layout.MAX_THREADS)
    depth = layout.OFFSETS["threads"] + layout.OFFSETS["thread_depth"]
    depths = (arena.peek(depth + layout.THREAD_SIZE * i, 8) for i in range(used))
    return any(depth != bytes(8) for depth in depths)


def use_hooks(names: list[str], missing: list[str], walkers: list[int]) -> dict[str, Any]:
    """The hooks are in: recordings count through them from now on."""
    arena = _arena
    assert arena is not None
    collectors.brought = lambda: BroughtProbe(arena, names, missing, (walkers[0], walkers[1]))
    return {}


def depart() -> dict[str, Any]:
    """Take everything back. The client takes out the probe's hooks after this."""
    with _lock:
        if _visit is not None and not _visit.over.is_set():
            _depart(_visit)
    return {}


def _depart(visit: Visit) -> None:
    visit.over.set()
    collectors.brought = None
    if visit.resident:
        return
    if visit.agent is not None:
        retire_agent()
    for name in visit.hooked:
        importlib.import_module(name).unregister()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not hasattr(finder, "syncfree_digest")]
