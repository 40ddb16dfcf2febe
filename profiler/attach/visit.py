"""The client's side: one visit a worker, and a report over all of them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from ...errors import Unreachable
from ..agent import sockets
from ..agent.client import Advance, profile_socket, watch_socket
from ..probe.attach import Attachment
from ..report import Note, Report
from . import bundle
from .processes import Process, find_workers, has_torch, read_process, seen_from_here
from .rights import why_not

_AT_ONCE = 8  # workers that are attached to at the same time

# Text, so the target compiles it, with its GIL held: short.
_FACTS = """
import importlib.util, json, sys
ours = sys.modules.get("syncfree")
brought = hasattr(getattr(getattr(ours, "__spec__", None), "loader", None), "syncfree_digest")
answer = json.dumps({
    "magic": importlib.util.MAGIC_NUMBER.hex(),
    "python": sys.version.split()[0],
    "torch": "torch" in sys.modules,
    "missing": [n for n in ("msgspec", "zmq", "numpy") if n not in sys.modules and not importlib.util.find_spec(n)],
    "digest": ours.__spec__.loader.syncfree_digest if brought else None,
    "installed": None if ours is None or brought else str(getattr(ours, "__version__", "of another release")),
})
"""
_SETTLE = """
import ctypes, marshal, zlib
modules = marshal.loads(ctypes.string_at({address}, {size}))
names = {{"__name__": "syncfree.profiler.attach.bootstrap"}}
exec(marshal.loads(zlib.decompress(modules[names["__name__"]][2])), names)
answer = names["settle"](modules, {digest!r})
"""
_RESUME = """
from syncfree.profiler.attach.bootstrap import resume
answer = resume()
"""
_CALL = """
from syncfree.profiler.attach.bootstrap import call
answer = call({function!r}, {request!r})
"""


class Visit:
    """Our hooks and agent in one process, until `leave`. Raises `Unreachable` with the reason wherever it cannot be.

    `engines`: an engine's module -> the module of ours that hooks it (`register(attached=True)`, `unregister()`).
    """

    def __init__(self, process: Process, engines: Mapping[str, str]) -> None:
        self.process = process
        self.name = f"process {process.pid} ({process.label})"
        self.notes: list[Note] = []
        self.engines: list[str] = []
        check(process)
        bundle.build()  # before anything is at the target: it takes a while where Python has not compiled us yet
        self._attachment = Attachment(process.pid)
        self._inside = False
        try:
            self.path = self._move_in(engines)
        except BaseException as error:
            self.leave()
            if isinstance(error, Unreachable) and read_process(process.pid) is None:
                raise Unreachable(f"{self.name} has ended") from None
            raise

    def __enter__(self) -> Visit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    # -------------------------------------------------------------------- in

    def _move_in(self, engines: Mapping[str, str]) -> Path:
        self._bring_modules(self._facts())
        self._inside = True
        me = read_process(os.getpid())
        found = self._call(
            "arrive",
            client=os.getpid(),
            started=me.start if me else 0,
            namespace=str(Path("/proc/self/ns/pid").readlink()),
            engines=dict(engines),
        )
        self.engines = found["engines"]
        text = f"attached to {self.name} in {self._attachment.attach_seconds:.2f} s"
        if self._attachment.libraries and not found["resident"]:
            text += f"; its busiest threads stood still for {self._hook(found['hip']):.1f} ms while hooks were written"
        self.notes.append(Note(kind="attach", text=text))
        return seen_from_here(self.process.pid, Path(found["socket"]))

    def _facts(self) -> dict[str, Any]:
        if not self._attachment.has_python:
            raise Unreachable(f"{self.name} runs no Python")
        facts: dict[str, Any] = json.loads(self._python(_FACTS))
        if not facts["torch"]:
            raise Unreachable(f"{self.name} has not imported torch")
        if facts["missing"]:
            raise Unreachable(f"{self.name}: its Python {facts['python']} lacks {', '.join(facts['missing'])}")
        return facts

    def _bring_modules(self, facts: dict[str, Any]) -> None:
        from ... import __version__

        if facts["installed"] is not None:  # its own syncfree, imported: two of them would not know each other
            if facts["installed"] != __version__:
                text = f"has syncfree {facts['installed']} loaded, this is {__version__}: use the same release"
                raise Unreachable(f"{self.name} {text}")
            return
        interpreter = str(Path(f"/proc/{self.process.pid}/exe").readlink())
        block, digest = bundle.build(bytes.fromhex(facts["magic"]), interpreter)
        if facts["digest"] == digest:
            self._python(_RESUME)
            return
        address = self._attachment.bring(block)
        self._python(_SETTLE.format(address=address, size=len(block), digest=digest))

    def _hook(self, hip: str | None) -> float:
        attachment = self._attachment
        arena = self._call("prepare_arena")["arena"]
        installed = attachment.install(
            arena=arena, preferred="hip" if hip else "cuda", hip_major=int(hip.split(".")[0]) if hip else 6
        )
        walkers = [installed.callbacks[name] for name in ("stack", "waiter")]
        self._call("use_hooks", names=installed.names, missing=installed.missing, walkers=walkers)
        return installed.pause_ms

    def _python(self, code: str) -> str:
        answer = self._attachment.run_python(code)
        if answer is None:
            raise Unreachable(f"{self.name}: its Python could not run what was brought")
        return answer

    def _call(self, function: str, **request: Any) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._python(_CALL.format(function=function, request=json.dumps(request))))
        if "refused" in answer:
            raise Unreachable(f"{self.name}: {answer['refused']}")
        return answer

    # ------------------------------------------------------------------- out

    @property
    def attached(self) -> bool:
        """Whether the hooks are still held by us."""
        return self._attachment.alive

    def leave(self) -> float:
        """Take everything out again; never raises: the target may be gone. Returns the last pause in ms."""
        with contextlib.suppress(Unreachable, ValueError):
            if self._inside and self._attachment.alive:
                self._call("depart")
        self._inside = False
        return self._attachment.detach()


def check(process: Process) -> None:
    """Raises `Unreachable` for what can be told without touching the process."""
    reason = why_not(process.pid)
    if reason is not None:
        raise Unreachable(reason if reason.startswith("process") else f"process {process.pid}: {reason}")
    if not has_torch(process.pid):
        mapped = Path(f"/proc/{process.pid}/maps")
        with contextlib.suppress(OSError):
            lacks = "has not loaded torch" if "python3" in mapped.read_text(errors="replace") else "runs no Python"
            raise Unreachable(f"process {process.pid} ({process.label}) {lacks}: nothing to profile")
        raise Unreachable(f"process {process.pid} has ended")


# ---------------------------------------------------------------------- profiling


def profile_pid(
    pids: int | Sequence[int],
    engines: Mapping[str, str],
    *,
    steps: int | None = None,
    seconds: float | None = None,
    collectors: str = "auto",
    progress: Advance | None = None,
    arrived: Callable[[list[str]], None] | None = None,
) -> Report:
    """Record the workers at or below each process of `pids`, in which nothing was prepared; nothing stays in them.

    `engines` as for `Visit`; the rest as `agent.client.profile_socket`, and raises like it. `arrived` is called with
    the names of the workers once all were attached to.
    """
    with contextlib.ExitStack() as stack:
        there = _Company(stack, pids, engines)
        if arrived is not None:
            arrived(there.labels)
        report = profile_socket(
            there.paths,
            steps=steps,
            seconds=seconds,
            collectors=collectors,
            progress=progress,
            totals_suffice=not there.stepping,
        )
        there.remark(report)
        report.notes += there.notes
    return report


def watch_pid(
    pids: int | Sequence[int], engines: Mapping[str, str], *, interval: float = 1.0, collectors: str = "auto"
) -> Generator[Report, None, None]:
    """A report of each `interval` seconds of the same workers, without an end; all is taken out when it is closed.

    What attaching cost stands in the first one's notes.
    """
    with contextlib.ExitStack() as stack:
        there = _Company(stack, pids, engines)
        reports = watch_socket(there.paths, interval=interval, collectors=collectors)
        notes = there.notes
        for report in stack.enter_context(contextlib.closing(reports)):
            there.remark(report)
            report.notes += notes
            notes = []
            yield report


class _Company:
    """All workers at or below some processes, each visited unless it has an agent of its own.

    `paths`: the sockets to record through. `stepping`: whether any of them has steps to tell.
    """

    def __init__(self, stack: contextlib.ExitStack, pids: int | Sequence[int], engines: Mapping[str, str]) -> None:
        given = [pids] if isinstance(pids, int) else pids
        workers = list({worker.pid: worker for pid in given for worker in find_workers(pid)}.values())
        listening = {a.pid: a.path for a in sockets.discover()}
        own = [listening[w.pid] for w in workers if w.pid in listening]
        visits = _visit_all(stack, [w for w in workers if w.pid not in listening], engines)
        self.labels = [w.label for w in workers]
        self.stepping = bool(own) or any(v.engines for v in visits)
        self._visits = [v for v in visits if v.engines] or visits
        self.paths = [*own, *(v.path for v in self._visits)]
        self.notes = [note for visit in self._visits for note in visit.notes]

    def remark(self, report: Report) -> None:
        """Say of the visited what its figures do not."""
        for visit in self._visits:
            if not visit.engines:
                text = f"{visit.name} runs no engine that syncfree knows: there are totals, no steps"
                report.notes.append(Note(kind="attach", text=text))
            if not visit.attached:
                report.source.partial = True
                text = f"the probe's helper for {visit.name} died: calls after that were not counted"
                report.notes.append(Note(kind="partial", text=text))


def _visit_all(stack: contextlib.ExitStack, workers: list[Process], engines: Mapping[str, str]) -> list[Visit]:
    """All or none: the first that refuses ends the others' visits too."""
    if not workers:
        return []
    for worker in workers:
        check(worker)
    refused: list[BaseException] = []
    visits: list[Visit] = []
    with ThreadPoolExecutor(min(_AT_ONCE, len(workers))) as pool:
        attempts: list[Future[Visit]] = []
        try:
            for worker in workers:
                attempts.append(pool.submit(Visit, worker, engines))
            for attempt in attempts:
                try:
                    visits.append(stack.enter_context(attempt.result()))
                except Unreachable as error:
                    refused.append(error)
        except KeyboardInterrupt:  # what still arrives meanwhile is nobody's: it has to go again
            pool.shutdown(cancel_futures=True)
            for attempt in attempts[len(visits) + len(refused) :]:
                if not attempt.cancelled() and attempt.exception() is None:
                    attempt.result().leave()
            raise
    if refused:
        raise refused[0]
    return visits
