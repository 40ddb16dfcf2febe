"""The profiler's side: talk to agents, follow a recording, bring it home as a report.

Everything has a time-out, and a server that dies is noticed by the kernel's word (nothing listens any more), not by
waiting: `Unreachable`, one line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec
import zmq

from ... import __version__
from ...planner.errors import BadInput, NothingMeasured, Unreachable
from ..calls import Call
from ..recording import Recording
from ..report import Note, Report
from ..windows import StepWindow
from . import sockets
from .protocol import (
    MAX_REPLY_BYTES,
    MAX_STEPS,
    PROTOCOL,
    AnyReply,
    AnyRequest,
    Done,
    Drop,
    Fetch,
    Health,
    Healthy,
    Hello,
    Part,
    Refused,
    Start,
    Started,
    State,
    Status,
    Stop,
    Welcome,
    decode_reply,
    encode,
)

Advance = Callable[[int, float], None]
T = TypeVar("T")

HELLO_SECONDS = 3.0
ANSWER_SECONDS = 30.0  # an agent answers within milliseconds; a host that holds the GIL may keep it waiting
STOP_SECONDS = 20.0  # for the step that is running to end; after that it is left out
LEASE_SECONDS = 10.0
POLL_SECONDS = 0.1
IDLE_SECONDS = 60.0  # with --steps alone: give up when no step ends for so long
_LOOK_MS = 200


class Connection:
    """One agent, greeted. Raises `Unreachable` wherever it does not answer, refuses, or dies."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        sockets.check_target(self.path)
        self._next = 0
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
        try:
            self._socket.connect(f"ipc://{self.path}")
            hello = Hello(id=self._number(), protocol=PROTOCOL, version=__version__, pid=os.getpid())
            self.about = self._ask(hello, Welcome, HELLO_SECONDS)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --------------------------------------------------------------- requests

    def health(self) -> Healthy:
        return self._ask(Health(id=self._number()), Healthy)

    def start(self, collectors: str, steps: int | None, lease_s: float = LEASE_SECONDS) -> str:
        """Begin a recording; returns the name of its session."""
        request = Start(id=self._number(), collectors=collectors, steps=steps, lease_s=lease_s)
        return self._ask(request, Started).session

    def status(self, session: str) -> State:
        return self._ask(Status(id=self._number(), session=session), State)

    def stop(self, session: str, force: bool = False) -> State:
        return self._ask(Stop(id=self._number(), session=session, force=force), State)

    def drop(self, session: str) -> None:
        self._ask(Drop(id=self._number(), session=session), Done)

    def fetch(self, session: str, section: int, offset: int) -> Part:
        return self._ask(Fetch(id=self._number(), session=session, section=section, offset=offset), Part)

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _ask(self, request: AnyRequest, expected: type[T], seconds: float = ANSWER_SECONDS) -> T:
        data = encode(request)
        try:
            self._socket.send(data, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise Unreachable(f"{self.path}: the request could not be sent: {error.strerror}") from error
        deadline = time.monotonic() + seconds
        while True:
            reply = self._reply(deadline, seconds)
            if reply.id != request.id and not (isinstance(reply, Refused) and reply.id == 0):
                continue  # a reply to a request that was given up
            if isinstance(reply, expected):
                return reply
            raise self._refusal(reply)

    def _refusal(self, reply: AnyReply) -> Exception:
        if not isinstance(reply, Refused):
            return Unreachable(f"{self.path}: expected another reply, got {type(reply).__name__}")
        if reply.code == "input":
            return BadInput(reply.reason)
        return Unreachable(f"{self.path}: refused: {reply.reason}")

    def _reply(self, deadline: float, seconds: float) -> AnyReply:
        while not self._socket.poll(_LOOK_MS):
            reason = sockets.probe(self.path)
            if reason is not None:
                raise Unreachable(f"{self.path}: the server is gone: {reason}")
            if time.monotonic() > deadline:
                raise Unreachable(f"{self.path}: no answer within {seconds:g} s: stopped, or busy and not answering")
        try:
            reply: AnyReply = decode_reply(self._socket.recv())
        except (msgspec.DecodeError, ValueError) as error:
            raise Unreachable(f"{self.path}: what answers is not a syncfree agent: {error}") from error
        return reply


# ------------------------------------------------------------------- profiling


class _Target:
    """One agent's share of a recording."""

    def __init__(self, connection: Connection, collectors: str, steps: int | None) -> None:
        self.connection = connection
        self.session = connection.start(collectors, steps)
        self.wanted = steps or MAX_STEPS
        self.state = State(id=0, state="recording")

    @property
    def running(self) -> bool:
        return self.state.state == "recording" and self.state.steps < self.wanted

    def refresh(self) -> None:
        self.state = self.connection.status(self.session)
        if self.state.state == "failed":
            raise Unreachable(f"{self.connection.path}: the recording failed in the server: {self.state.error}")

    def finish(self) -> Recording:
        """Stop, fetch every part, and let the agent forget it."""
        deadline = time.monotonic() + STOP_SECONDS
        self.state = self.connection.stop(self.session)
        while self.state.state == "stopping":
            time.sleep(0.01)
            late = time.monotonic() > deadline
            self.state = self.connection.stop(self.session, force=late)
        if self.state.head is None:
            raise Unreachable(f"{self.connection.path}: the recording failed in the server: {self.state.error}")
        recording = self.state.head
        for section, size in enumerate(self.state.sizes):
            self._fetch(recording, section, size)
        self.connection.drop(self.session)
        return recording

    def _fetch(self, recording: Recording, section: int, size: int) -> None:
        at = left_out = 0
        steps: list[StepWindow] = []
        calls: list[Call] = []
        while at < size:
            part = self.connection.fetch(self.session, section, at)
            if part.next <= at:
                raise Unreachable(f"{self.connection.path}: expected a part after item {at}, got none")
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


def profile_socket(
    path: Path | Sequence[Path] | None = None,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    collectors: str = "auto",
    progress: Advance | None = None,
) -> Report:
    """Record a running server through its agents' sockets, until `steps` steps or `seconds` seconds (default 10).

    `path`: one socket, several (the ranks of one server), or None for all that are found. `progress(steps, seconds)`
    is called about ten times a second. An interrupt (Ctrl-C) ends the recording early and keeps it. Raises
    `Unreachable` where a server is not there, refuses or dies, `NothingMeasured` when no step ended meanwhile.
    """
    if steps is not None and not 1 <= steps <= MAX_STEPS:
        raise BadInput(f"steps: expected 1 to {MAX_STEPS}, got {steps}")
    if seconds is not None and not seconds > 0:
        raise BadInput(f"seconds: expected more than 0, got {seconds}")
    if steps is None and seconds is None:
        seconds = 10.0
    with ExitStack() as stack:
        connections = [stack.enter_context(Connection(p)) for p in _paths(path)]
        targets = [_Target(connection, collectors, steps) for connection in connections]
        interrupted = _wait(targets, seconds, progress)
        recordings = [target.finish() for target in targets]
    reports = [recording.build() for recording in recordings]
    if not any(report.steps for report in reports):
        raise NothingMeasured("no step ended while recording: send the server requests, or record for longer")
    report = reports[0]
    if interrupted:
        report.source.partial = True
        report.notes.append(Note(kind="partial", text="interrupted: the recording is shorter than was asked for"))
    return report


def _paths(path: Path | Sequence[Path] | None) -> list[Path]:
    if path is None:
        found = sockets.discover()
        if not found:
            where = sockets.socket_directory()
            raise Unreachable(
                f"{where}: no live agent: is a server with syncfree in it running, and has it stepped yet?"
            )
        return [address.path for address in found]
    return [Path(path)] if isinstance(path, (str, Path)) else [Path(p) for p in path]


def _wait(targets: list[_Target], seconds: float | None, progress: Advance | None) -> bool:
    """Follow the recordings until all are done or the time is up. True if the user interrupted it."""
    began = moved = time.monotonic()
    seen = 0
    try:
        while True:
            for target in targets:
                target.refresh()
            now = time.monotonic()
            done = max(target.state.steps for target in targets)
            moved, seen = (now, done) if done != seen else (moved, seen)
            if progress is not None:
                progress(done, now - began)
            if not any(target.running for target in targets):
                return False
            if seconds is None and now - moved > IDLE_SECONDS:
                return False
            left = POLL_SECONDS if seconds is None else min(POLL_SECONDS, seconds - (now - began))
            if left <= 0:
                return False
            time.sleep(left)
    except KeyboardInterrupt:
        return True
