"""The planning service from a scheduler's side: a plan for a batch, over a restart of the server if need be."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec
import numpy as np
import zmq

from ... import __version__
from ...errors import BadInput, Unreachable
from ...planner import Batch, Environment, InexactBatch, Limits, MetadataPlan, UnorderedBatch
from ...planner.lengths import Int32Array
from ...profiler.agent import sockets
from .protocol import (
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    MAX_ROWS,
    PROTOCOL,
    AnyReply,
    AnyRequest,
    Health,
    Healthy,
    Hello,
    KnownLengths,
    Plan,
    Planned,
    Refused,
    Stop,
    Stopping,
    Welcome,
    decode_reply,
    encode,
)
from .server import default_path

T = TypeVar("T")

HELLO_SECONDS = 3.0
_LOOK_MS = 200  # between two looks at whether the server still lives
_RETRY_SECONDS = 0.05
_NEVER_MS = 24 * 3600 * 1000
_BAD_INPUT = {"unordered": UnorderedBatch, "inexact": InexactBatch}


class _Gone(Unreachable):
    """Nothing listens any more: worth waiting for the next server."""


class PlanClient:
    """Asks a planning service for plans; one thread at a time.

    `path`: the service's socket, by default `plan.sock` in the socket directory. A server that goes away in the middle
    is waited for `reconnect_s` seconds and asked again: planning changes nothing, so asking twice is harmless. Raises
    `Unreachable` where nothing answers within `timeout_s` seconds, or refuses; connects at the first request.
    """

    def __init__(self, path: Path | str | None = None, *, timeout_s: float = 10.0, reconnect_s: float = 5.0) -> None:
        for name, value in (("timeout_s", timeout_s), ("reconnect_s", reconnect_s)):
            if not 0 <= value < 1e6:
                raise BadInput(f"{name}: expected 0 or more seconds, got {value}")
        self.path = (default_path() if path is None else Path(path)).absolute()
        self.timeout_s = timeout_s
        self.reconnect_s = reconnect_s
        self.server: Welcome | None = None  # who was greeted last
        self._next = 0
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] | None = None
        self._file: tuple[int, ...] | None = None  # the socket's file as it was when we connected

    def plan(
        self,
        backend: str,
        batch: Batch,
        environment: Environment | None = None,
        limits: Limits | None = None,
        *,
        reorder: bool = False,
    ) -> MetadataPlan:
        """The plan that `Planner(attention_backend(backend), environment, limits).plan(batch)` gives.

        Raises what planning raises (`BadInput`, `UnorderedBatch`, `InexactBatch`), with the same text.
        """
        return MetadataPlan.from_bytes(self.plan_bytes(backend, batch, environment, limits, reorder=reorder))

    def plan_bytes(
        self,
        backend: str,
        batch: Batch,
        environment: Environment | None = None,
        limits: Limits | None = None,
        *,
        reorder: bool = False,
    ) -> bytes:
        """The same as bytes, to be handed on to other processes unread."""
        request = plan_request(backend, batch, environment or Environment(), limits or Limits(), reorder=reorder)
        return self._ask(request, Planned).plan

    def health(self) -> Healthy:
        return self._ask(Health(id=0), Healthy)

    def stop(self) -> None:
        """End the service."""
        self._ask(Stop(id=0), Stopping)

    def close(self) -> None:
        self._disconnect()
        self._context.term()

    def __enter__(self) -> PlanClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -------------------------------------------------------------- connecting

    def _ask(self, request: AnyRequest, expected: type[T]) -> T:
        """Ask, and ask the next server where this one has ended."""
        give_up: float | None = None
        while True:
            try:
                socket = self._connected()
                return self._exchange(socket, request, expected, self.timeout_s)
            except _Gone:
                self._disconnect()
                now = time.monotonic()
                give_up = now + self.reconnect_s if give_up is None else give_up
                if now >= give_up or (self.server is None and sockets.probe(self.path) is not None):
                    raise  # it never was there: a wrong path is told at once
                time.sleep(_RETRY_SECONDS)
            except Unreachable:
                self._disconnect()  # a late reply to this request must not meet the next one
                raise

    def _connected(self) -> zmq.Socket[bytes]:
        if self._socket is not None and _file_at(self.path) == self._file:
            return self._socket
        self._disconnect()
        try:
            sockets.check_target(self.path, hint="is `syncfree serve` running?")
        except Unreachable as error:
            raise _Gone(str(error)) from error
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
        # A new server is greeted first, by a new connection. (-1, never, would drop the last replies of the old one.)
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._socket, self._file = socket, _file_at(self.path)
        socket.connect(f"ipc://{self.path}")
        hello = Hello(id=0, protocol=PROTOCOL, version=__version__, pid=os.getpid())
        self.server = self._exchange(socket, hello, Welcome, min(HELLO_SECONDS, self.timeout_s))
        return socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    # ---------------------------------------------------------------- messages

    def _exchange(self, socket: zmq.Socket[bytes], request: AnyRequest, expected: type[T], seconds: float) -> T:
        self._next += 1
        request.id = self._next
        data = encode(request)
        if len(data) > MAX_REQUEST_BYTES:
            raise BadInput(f"request: expected at most {MAX_REQUEST_BYTES} bytes, got {len(data)}")
        try:
            socket.send(data, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise _Gone(f"{self.path}: the request could not be sent: {error.strerror}") from error
        deadline = time.monotonic() + seconds
        while True:
            reply = self._reply(socket, deadline, seconds)
            if reply.id not in (request.id, 0):
                continue  # a reply to a request that was given up
            if isinstance(reply, expected):
                return reply
            raise self._refusal(reply)

    def _reply(self, socket: zmq.Socket[bytes], deadline: float, seconds: float) -> AnyReply:
        while not socket.poll(_LOOK_MS):
            reason = sockets.probe(self.path)
            if reason is None and _file_at(self.path) != self._file:
                reason = "another one has taken its place"
            if reason is not None and not socket.poll(_LOOK_MS):  # its last reply may still have been on its way
                raise _Gone(f"{self.path}: the server is gone: {reason}")
            if time.monotonic() > deadline:
                raise Unreachable(f"{self.path}: no answer within {seconds:g} s: stopped, or busy and not answering")
        try:
            reply: AnyReply = decode_reply(socket.recv())
        except (msgspec.DecodeError, ValueError) as error:
            raise Unreachable(f"{self.path}: what answers is not a syncfree planning service: {error}") from error
        return reply

    def _refusal(self, reply: AnyReply) -> Exception:
        if not isinstance(reply, Refused):
            return Unreachable(f"{self.path}: expected another reply, got {type(reply).__name__}")
        if reply.code == "hello":
            return _Gone(f"{self.path}: another server than the one that was greeted")
        if reply.code in ("input", "too_large", "malformed", *_BAD_INPUT):
            return _BAD_INPUT.get(reply.code, BadInput)(reply.reason)
        return Unreachable(f"{self.path}: refused: {reply.reason}")


def _file_at(path: Path) -> tuple[int, ...] | None:
    """Which file it is: a server that was restarted binds a new one."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def plan_request(
    backend: str, batch: Batch, environment: Environment, limits: Limits, *, reorder: bool = False
) -> Plan:
    """The message that asks for a batch's plan. Raises `BadInput` for more rows than a service takes."""
    if len(batch) > MAX_ROWS:
        raise BadInput(f"query_lens: expected at most {MAX_ROWS} rows, got {len(batch)}")
    declared = batch.max_seq_len
    return Plan(
        id=0,
        backend=backend,
        query_lens=_bytes(batch.query_lens),
        seq_lens=_bytes(batch.seq_lens),
        prefill_lens=_known(batch.prefill_lens),
        cached_lens=_known(batch.cached_lens),
        is_prefilling=None if batch.given_flags is None else batch.given_flags.tobytes(),
        seq_lens_lower=None if batch.seq_lens_lower is None else _bytes(batch.seq_lens_lower),
        flag_lens=_known(batch.flag_lens),
        decode_threshold=batch.decode_threshold,
        short_extends_as_decodes=batch.short_extends_as_decodes,
        num_tokens=batch.num_tokens,
        max_seq_len=None if declared == batch.longest_seq else declared,
        causal=batch.causal,
        reorder=reorder,
        environment=environment,
        limits=limits,
    )


def _bytes(array: Int32Array) -> bytes:
    return array.astype("<i4", copy=False).tobytes()


def _known(array: Int32Array | None) -> KnownLengths | None:
    """Lengths that may be unknown (negative) for some rows."""
    if array is None:
        return None
    if array.size and int(np.min(array)) < 0:
        return [None if value < 0 else value for value in array.tolist()]
    return _bytes(array)
