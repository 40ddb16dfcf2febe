"""One agent, seen from outside: requests and replies, each with a time-out.

A server that dies is noticed by the kernel's word (nothing listens any more), not by waiting.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec
import zmq

from ... import __version__
from ...errors import BadInput, Unreachable
from ..collectors.base import CannotCount
from . import sockets
from .protocol import (
    MAX_REPLY_BYTES,
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
    Take,
    Welcome,
    decode_reply,
    encode,
)

T = TypeVar("T")

HELLO_SECONDS = 3.0
ANSWER_SECONDS = 30.0  # an agent answers within milliseconds; a host that holds the GIL may keep it waiting
LEASE_SECONDS = 10.0
_LOOK_MS = 200


class Connection:
    """One agent, greeted. Raises `Unreachable` wherever it does not answer, refuses, or dies."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.where = str(self.path)
        sockets.check_target(self.path)
        self._next = 0
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
        try:
            self._socket.connect(f"ipc://{self.path}")
            self.about = self._greet(HELLO_SECONDS)
        except BaseException:
            self.close()
            raise

    def _greet(self, seconds: float) -> Welcome:
        hello = Hello(id=self._number(), protocol=PROTOCOL, version=__version__, pid=os.getpid())
        return self._ask(hello, Welcome, seconds)

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

    def start(self, collectors: str = "auto", steps: int | None = None, lease_s: float = LEASE_SECONDS) -> Started:
        """Begin a recording. Raises `BadInput` for collectors that do not exist."""
        return self._ask(Start(id=self._number(), collectors=collectors, steps=steps, lease_s=lease_s), Started)

    def status(self, session: str) -> State:
        return self._ask(Status(id=self._number(), session=session), State)

    def stop(self, session: str, force: bool = False) -> State:
        return self._ask(Stop(id=self._number(), session=session, force=force), State)

    def take(self, session: str) -> State:
        return self._ask(Take(id=self._number(), session=session), State)

    def drop(self, session: str) -> None:
        self._ask(Drop(id=self._number(), session=session), Done)

    def fetch(self, session: str, section: int, offset: int) -> Part:
        return self._ask(Fetch(id=self._number(), session=session, section=section, offset=offset), Part)

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _ask(self, request: AnyRequest, expected: type[T], seconds: float = ANSWER_SECONDS) -> T:
        self._send(encode(request))
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
            return Unreachable(f"{self.where}: expected another reply, got {type(reply).__name__}")
        if reply.code == "input":
            return BadInput(reply.reason)
        if reply.code == "collector":
            return CannotCount(f"{self.where}: {reply.reason}")
        return Unreachable(f"{self.where}: refused: {reply.reason}")

    def _send(self, data: bytes) -> None:
        try:
            self._socket.send(data, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise Unreachable(f"{self.where}: the request could not be sent: {error.strerror}") from error

    def _reply(self, deadline: float, seconds: float) -> AnyReply:
        data = self._receive(deadline, seconds)
        try:
            reply: AnyReply = decode_reply(data)
        except (msgspec.DecodeError, ValueError) as error:
            raise Unreachable(f"{self.where}: what answers is not a syncfree agent: {error}") from error
        return reply

    def _receive(self, deadline: float, seconds: float) -> bytes:
        while not self._socket.poll(_LOOK_MS):
            reason = sockets.probe(self.path)
            if reason is not None:
                raise Unreachable(f"{self.where}: the server is gone: {reason}")
            if time.monotonic() > deadline:
                raise Unreachable(f"{self.where}: no answer within {seconds:g} s: stopped, or busy and not answering")
        return self._socket.recv()
