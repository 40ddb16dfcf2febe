"""The profiler's side: follow recordings of one or many ranks and bring them home as one report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from ...errors import BadInput, NothingMeasured, Unreachable
from ..report import Note, Report
from . import sockets
from .fleet import Fleet, Where
from .protocol import MAX_STEPS

Advance = Callable[[int, float], None]

POLL_SECONDS = 0.1
IDLE_SECONDS = 60.0  # with --steps alone: give up when no step ends for so long


def profile_socket(
    path: Path | Sequence[Where] | None = None,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    collectors: str = "auto",
    progress: Advance | None = None,
    totals_suffice: bool = False,
) -> Report:
    """Record a running server through its agents' sockets, until `steps` steps or `seconds` seconds (default 10).

    `path`: one socket, several (the ranks of one server; functions that connect will do), or None for all that are
    found. `progress(steps, seconds)` is called about ten times a second. An interrupt (Ctrl-C) ends the recording early
    and keeps it; a rank that dies while others live makes the report partial. Raises `Unreachable` where a server is
    not there, refuses or dies, `NothingMeasured` when no step ended meanwhile, unless `totals_suffice` and some call
    was counted.
    """
    if steps is not None and not 1 <= steps <= MAX_STEPS:
        raise BadInput(f"steps: expected 1 to {MAX_STEPS}, got {steps}")
    if seconds is not None and not seconds > 0:
        raise BadInput(f"seconds: expected more than 0, got {seconds}")
    if steps is None and seconds is None:
        seconds = 10.0
    with Fleet(_paths(path), collectors, steps, tolerant=path is None) as fleet:
        interrupted = _wait(fleet, seconds, progress)
        report = fleet.finish()
    if not report.steps and not (totals_suffice and report.totals.api):
        raise NothingMeasured("no step ended while recording: send the server requests, or record for longer")
    if interrupted:
        report.source.partial = True
        report.notes.append(Note(kind="partial", text="interrupted: the recording is shorter than was asked for"))
    return report


def watch_socket(
    path: Path | Sequence[Where] | None = None, *, interval: float = 1.0, collectors: str = "auto"
) -> Generator[Report, None, None]:
    """A report of the steps of each `interval` seconds, without an end; one without steps where none ended.

    Ranks and errors as `profile_socket`. Where a collector hands over its calls at the end only, each interval is a
    recording of its own, and the steps between two are not seen.
    """
    if not interval > 0:
        raise BadInput(f"interval: expected more than 0 seconds, got {interval}")
    with Fleet(_paths(path), collectors, None, tolerant=path is None) as fleet:
        due = time.monotonic()
        while True:
            due = max(due + interval, time.monotonic())
            while (left := due - time.monotonic()) > 0:
                time.sleep(min(left, 1.0))
                fleet.refresh()
            yield fleet.take()


def _paths(path: Path | Sequence[Where] | None) -> list[Where]:
    if path is None:
        found = sockets.discover()
        if not found:
            where = sockets.socket_directory()
            text = "no live agent: is a server with syncfree in it running, as this user? (--pid N needs nothing in it)"
            raise Unreachable(f"{where}: {text}")
        return [address.path for address in found]
    given: Sequence[Where] = [Path(path)] if isinstance(path, (str, Path)) else path
    if not given:
        raise BadInput("sockets: expected at least one path, got none")
    return list(dict.fromkeys(at if callable(at) else Path(at).absolute() for at in given))


def _wait(fleet: Fleet, seconds: float | None, progress: Advance | None) -> bool:
    """Follow the recordings until all are done or the time is up. True if the user interrupted it."""
    began = moved = time.monotonic()
    seen = 0
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            fleet.refresh()
            now, done = time.monotonic(), fleet.steps
            moved, seen = (now, done) if done != seen else (moved, seen)
            if progress is not None:
                progress(done, now - began)
            if not fleet.running or (seconds is None and now - moved > IDLE_SECONDS):
                return False
            left = POLL_SECONDS if seconds is None else min(POLL_SECONDS, seconds - (now - began))
            if left <= 0:
                return False
            time.sleep(left)
    return True
