"""Several agents recording at once: the ranks of a server, or of several servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from ...errors import SyncfreeError, Unreachable
from ..calls import Call
from ..collectors.base import CannotCount
from ..ranks import join
from ..recording import Recording
from ..report import Note, Report
from ..windows import StepWindow
from .connection import Connection
from .protocol import MAX_STEPS, State

STOP_SECONDS = 20.0  # for the step that is running to end; after that it is left out


Where = Path | Callable[[], Connection]  # a socket, or whatever else leads to an agent


class Target:
    """One agent's share of a recording."""

    def __init__(self, at: Where, collectors: str, steps: int | None) -> None:
        self.connection = at() if callable(at) else Connection(at)
        self._collectors = collectors
        self._steps = steps
        self.session: str | None = None
        self.state = State(id=0, state="recording")
        try:
            self._start()
        except BaseException:
            self.connection.close()
            raise

    def _start(self) -> None:
        started = self.connection.start(self._collectors, self._steps)
        self.session, self.rolling = started.session, started.rolling

    @property
    def name(self) -> str:
        about = self.connection.about
        return f"rank {about.rank} (pid {about.pid})"

    @property
    def running(self) -> bool:
        return self.state.state == "recording" and self.steps < (self._steps or MAX_STEPS)

    @property
    def steps(self) -> int:
        return sum(self.state.classes.values())

    def refresh(self) -> None:
        self.state = self.connection.status(self._session())
        if self.state.state == "failed":
            raise self._failure()

    def finish(self) -> Recording:
        """Stop, fetch every part, and let the agent forget it."""
        session = self._session()
        deadline = time.monotonic() + STOP_SECONDS
        self.state = self.connection.stop(session)
        while self.state.state == "stopping":
            time.sleep(0.01)
            self.state = self.connection.stop(session, force=time.monotonic() > deadline)
        recording = self._bring(session)
        self.connection.drop(session)
        self.session = None
        return recording

    def take(self) -> Recording:
        """The steps since the last call; the recording goes on."""
        if not self.rolling:
            recording = self.finish()
            self._start()
            return recording
        self.state = self.connection.take(self._session())
        return self._bring(self._session())

    def close(self) -> None:
        if self.session is not None:
            with contextlib.suppress(SyncfreeError):  # the lease ends it anyway
                self.connection.drop(self.session)
        self.connection.close()

    def _session(self) -> str:
        if self.session is None:
            raise Unreachable(f"{self.connection.where}: its recording has ended")
        return self.session

    def _failure(self) -> Unreachable:
        kind = CannotCount if self.state.cannot_count else Unreachable
        return kind(f"{self.connection.where}: the recording failed in the server: {self.state.error}")

    def _bring(self, session: str) -> Recording:
        recording = self.state.head
        if recording is None:
            raise self._failure()
        for section, size in enumerate(self.state.sizes):
            self._fetch(session, recording, section, size)
        return recording

    def _fetch(self, session: str, recording: Recording, section: int, size: int) -> None:
        at = left_out = 0
        steps: list[StepWindow] = []
        calls: list[Call] = []
        while at < size:
            part = self.connection.fetch(session, section, at)
            if part.next <= at:
                raise Unreachable(f"{self.connection.where}: expected a part after item {at}, got none")
            at, left_out = part.next, left_out + part.left_out
            steps += part.steps
            calls += part.calls
        if section == 0:
            recording.steps = steps
        elif section <= len(recording.evidence):
            recording.evidence[section - 1].calls = calls
        if left_out:
            text = f"{left_out} records too large for a message were left out"
            recording.notes.append(Note(kind="partial", text=text, count=left_out))
            recording.source.partial = True


class Fleet:
    """Starts a recording on every path. `tolerant`: agents that refuse are left out, as long as one does not.

    A rank that is lost later is left out too, and the report is partial. Raises `Unreachable` when none is left.
    """

    def __init__(self, paths: Sequence[Where], collectors: str, steps: int | None, *, tolerant: bool = False) -> None:
        self.targets: list[Target] = []
        self._lost: list[Note] = []
        refused: Unreachable | None = None
        try:
            for path in paths:
                try:
                    self.targets.append(Target(path, collectors, steps))
                except Unreachable as error:
                    if not tolerant:
                        raise
                    refused = error
                    self._lost.append(Note(kind="partial", text=f"left out: {error}"))
            if not self.targets and refused is not None:
                raise refused
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for target in self.targets:
            target.close()
        self.targets = []

    @property
    def running(self) -> bool:
        return any(target.running for target in self.targets)

    @property
    def steps(self) -> int:
        """Steps of the rank that has most."""
        return max(target.steps for target in self.targets)

    def refresh(self) -> None:
        """Ask every agent how far it is; keeps the leases."""
        self._each(Target.refresh)

    def finish(self) -> Report:
        """Stop all, and one report of what they recorded."""
        for target in self.targets:  # all at about the same time, before the first one's parts are fetched
            with contextlib.suppress(Unreachable):  # `finish` meets it again
                target.connection.stop(target._session())
        return self._joined(self._each(Target.finish))

    def take(self) -> Report:
        """One report of the steps since the last call."""
        return self._joined(self._each(Target.take))

    def _joined(self, recordings: list[Recording]) -> Report:
        report = join(recordings)
        if self._lost:
            report.source.partial = True
            report.notes += self._lost
        return report

    def _each(self, work: Callable[[Target], Recording | None]) -> list[Recording]:
        results: list[Recording] = []
        for target in list(self.targets):
            try:
                result = work(target)
            except Unreachable as error:
                self.targets.remove(target)
                target.close()
                if not self.targets and not results:
                    raise
                self._lost.append(Note(kind="partial", text=f"{target.name} was lost while recording: {error}"))
                continue
            if result is not None:
                results.append(result)
        return results
