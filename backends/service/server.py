"""The planning service: one thread, one ROUTER socket, until somebody stops it.

It disturbs nobody and is disturbed by nobody: what comes is bounded before it is read, a client that goes away or does
not read loses its own replies, and at the end socket and lock are gone.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import zmq

from ...errors import BadInput, Unreachable
from ...profiler.agent import sockets
from .desk import Desk
from .protocol import IN_FLIGHT, MAX_REQUEST_BYTES

SOCKET_NAME = "plan.sock"
_BURST = 64  # messages answered between two looks at whether to stop
_GOODBYE_MS = 500  # for the last replies to leave
_ENDING = (signal.SIGTERM, signal.SIGINT)
_RUNG = b"\0"  # as `stop` rings; a signal rings with its number


def default_path() -> Path:
    """`plan.sock` in the socket directory: not named after a process, so that clients find the next server too."""
    return sockets.socket_directory() / SOCKET_NAME


class Service:
    """Serves plans on one socket: `open`, then `run` until `stop` (any thread, or a signal handler), then `close`.

    `idle_s`: end by itself after so many seconds without a request. Raises `Unreachable` on `open` where the socket's
    directory is not ours alone or a live server holds the path, `BadInput` for a path that is too long.
    """

    def __init__(self, path: Path | None = None, *, idle_s: float | None = None) -> None:
        if idle_s is not None and not idle_s > 0:
            raise BadInput(f"idle: expected more than 0 seconds, got {idle_s}")
        self.path = (path or default_path()).absolute()
        self.idle_s = idle_s
        self._desk = Desk()
        self._claim: sockets.Claim | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._ear, self._bell = socket.socketpair()
        for end in (self._ear, self._bell):
            end.setblocking(False)

    def open(self) -> None:
        """Claim the path and listen."""
        self._claim = sockets.claim(self.path)
        try:
            self._context = zmq.Context(io_threads=1)
            self._router = self._listen(self._context, self._claim)
        except zmq.ZMQError as error:
            self.close()
            raise Unreachable(f"{self.path}: cannot listen: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def _listen(self, context: zmq.Context[zmq.Socket[bytes]], claim: sockets.Claim) -> zmq.Socket[bytes]:
        router = context.socket(zmq.ROUTER)
        try:
            router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            router.setsockopt(zmq.RCVHWM, 4 * IN_FLIGHT)
            router.setsockopt(zmq.SNDHWM, 2 * IN_FLIGHT)  # ZeroMQ learns of what was read by the half of this
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tells which replies nobody gets, rather than drop them unsaid
            # Peer credentials, checked by the kernel: a second wall behind the folder's and the socket's modes.
            for uid in {0, os.geteuid()}:
                router.setsockopt(zmq.IPC_FILTER_UID, uid)
            router.bind(claim.endpoint)
            claim.secure()
        except BaseException:
            router.close(linger=0)
            raise
        return router

    def run(self) -> None:
        """Answer until stopped, idle for too long, or asked by a client to stop."""
        assert self._router is not None, "open() comes first"
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._ear, zmq.POLLIN)
        heard = time.monotonic()
        while not self._desk.stopping:
            left = None if self.idle_s is None else heard + self.idle_s - time.monotonic()
            if left is not None and left <= 0:
                return
            events = dict(poller.poll(None if left is None else int(left * 1000) + 1))
            if self._ear.fileno() in events and self._rung():
                return
            if self._router in events:
                self._answer(self._router)
                heard = time.monotonic()

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        for _ in range(_BURST):
            try:
                frames = router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            reply = self._desk.handle(frames[0], frames[1:])
            if not (_sent(router, frames[0], reply) or _sent(router, frames[0], reply)):
                self._desk.undelivered += 1  # the client went away or does not read: its business
            if self._desk.stopping:
                return

    def _rung(self) -> bool:
        """Whether somebody wants the end; other signals of the host program ring too."""
        try:
            rings = self._ear.recv(4096)
        except BlockingIOError:
            return False
        return any(ring in (_RUNG[0], *_ENDING) for ring in rings)

    def stop(self) -> None:
        """Make `run` return; from any thread."""
        try:
            self._bell.send(_RUNG)
        except OSError:
            return  # rung already, or closed

    @contextmanager
    def ended_by_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the service; what was set before comes back. Does nothing outside the main thread.

        The interpreter's own handler writes to the bell: a Python handler would wait for ZeroMQ's poll to return, and
        a signal that comes between two turns of that poll's inner loop does not end it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        fd = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in _ENDING}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(fd)

    def close(self) -> None:
        """Let the last replies leave, then remove socket and lock."""
        if self._router is not None:
            self._router.close(linger=_GOODBYE_MS)
            self._router = None
        if self._context is not None:
            self._context.term()
            self._context = None
        if self._claim is not None:
            self._claim.release()
            self._claim = None
        self._ear.close()
        self._bell.close()

    def __enter__(self) -> Service:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _sent(router: zmq.Socket[bytes], client: bytes, reply: bytes) -> bool:
    try:
        router.send_multipart([client, reply], zmq.DONTWAIT)
    except zmq.ZMQError:
        router.getsockopt(zmq.EVENTS)  # a send looks for news of what clients have read now and then only; this does
        return False
    return True


def serve(
    path: Path | None = None, *, idle_s: float | None = None, announce: Callable[[Path], None] | None = None
) -> None:
    """Serve plans until SIGTERM, SIGINT, a client's stop, or `idle_s` seconds without a request.

    `announce(path)` is called when the service listens. Errors as `Service.open`.
    """
    with Service(path, idle_s=idle_s) as service, service.ended_by_signals():
        if announce is not None:
            announce(service.path)
        service.run()
