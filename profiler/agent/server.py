"""The agent: a daemon thread in the serving process that lets a profiler start, follow, stop and fetch recordings.

It never disturbs its host: it starts lazily, sleeps while nobody asks, answers whatever comes with a typed message,
and drops a recording whose client fell silent.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import zmq

from ...errors import SyncfreeError
from ..yielding import gently
from . import sockets
from .desk import Desk
from .protocol import MAX_REQUEST_BYTES
from .recorder import Recorder

logger = logging.getLogger("syncfree")

_BURST = 64  # messages answered between two looks at the recording
_WAKE = "inproc://syncfree-wake"


class Agent:
    """Serves one process's `recorder` on one socket. `start` returns at once; `ready` is set when it listens.

    `path`: the socket, by default `<pid>-<rank>.sock` in the socket directory. `error` says why it does not listen.
    """

    def __init__(self, recorder: Recorder, path: Path | None = None) -> None:
        self.recorder = recorder
        self.path = path or sockets.worker_path(recorder.rank)
        self.ready = threading.Event()  # set when listening or when that failed
        self.error: str | None = None
        self.pid = os.getpid()
        self._desk = Desk(recorder)
        self._claim: sockets.Claim | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> Agent:
        self._context = zmq.Context(io_threads=1)
        self._thread = threading.Thread(target=self._run, name="syncfree-agent", daemon=True)
        self._thread.start()
        return self

    def close(self, timeout: float = 2.0) -> None:
        """Stop serving and remove the socket. Nothing in a forked child: the agent is its parent's."""
        if self.pid != os.getpid() or self._thread is None or self._context is None or not self._thread.is_alive():
            return
        with self._context.socket(zmq.PAIR) as wake:
            wake.linger = 0
            wake.connect(_WAKE)
            wake.send(b"", zmq.DONTWAIT)
            self._thread.join(timeout)
        if not self._thread.is_alive():
            self._context.term()  # ZeroMQ's two threads, which would else live as long as we

    @property
    def quiet_seconds(self) -> float:
        """Time since any client said anything."""
        return time.monotonic() - self._desk.heard

    def forget(self) -> None:
        """In a forked child: let go of what only the parent may use."""
        if self._claim is not None:
            self._claim.forget()

    # ---------------------------------------------------------- its own thread

    def _run(self) -> None:
        assert self._context is not None
        router = wake = None
        try:
            wake = self._context.socket(zmq.PAIR)
            wake.bind(_WAKE)
            router = self._listen(self._context)
            self.ready.set()
            self._serve(router, wake)
        except SyncfreeError as error:
            self.error = str(error)
            logger.warning("syncfree: no agent in this process: %s", error)
        except Exception as error:  # noqa: BLE001 - whatever happens here, the host program goes on
            self.error = f"{type(error).__name__}: {error}"
            logger.warning("syncfree: the agent ended: %s", self.error)
        finally:
            self._desk.abandon()
            for socket in (router, wake):
                if socket is not None:
                    socket.close(linger=0)
            if self._claim is not None:
                self._claim.release()
            self.ready.set()

    def _listen(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        self._claim = sockets.claim(self.path)
        sockets.clean_stale(self.path.parent)
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        router.setsockopt(zmq.RCVHWM, 256)
        router.setsockopt(zmq.SNDHWM, 64)
        # Peer credentials, checked by the kernel: a second wall behind the folder's and the socket's modes.
        for uid in {0, os.geteuid()}:
            router.setsockopt(zmq.IPC_FILTER_UID, uid)
        router.bind(self._claim.endpoint)
        self._claim.secure()
        return router

    def _serve(self, router: zmq.Socket[bytes], wake: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        while True:
            events = dict(poller.poll(self._desk.patience_ms()))
            if wake in events:
                return
            with gently():  # bringing in a recording takes a while
                if router in events:
                    self._answer(router)
                self._desk.tick()

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        for _ in range(_BURST):
            try:
                frames = router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            reply = self._desk.handle(frames[0], frames[1:])
            try:
                router.send_multipart([frames[0], reply], zmq.DONTWAIT)
            except zmq.ZMQError:
                continue  # the client went away or does not read: its business


# ------------------------------------------------------------ one agent a process

_lock = threading.Lock()
_current: Agent | None = None
_finalizer: Any = None
_orphans: list[Any] = []  # a parent's agents: never finalised in the child, their sockets are not ours


def ensure_agent(*, rank: int = 0, engine: str | None = None, path: Path | None = None) -> Agent:
    """This process's agent, started at the first call; a forked child gets one of its own.

    Costs the caller one thread start; listening happens in that thread, and a failure is logged once.
    """
    global _current, _finalizer
    agent = _current
    if agent is not None and agent.pid == os.getpid():
        return agent
    with _lock:
        if _current is None or _current.pid != os.getpid():
            _current = Agent(Recorder(rank=rank, engine=engine), path).start()
            worker = sys.modules.get("multiprocessing.util")
            if worker is not None:  # its child processes end without running atexit
                _finalizer = worker.Finalize(None, _current.close, exitpriority=10)
        return _current


def retire_agent() -> None:
    """Close this process's agent; the next `ensure_agent` makes a new one."""
    global _current, _finalizer
    with _lock:
        agent, _current = current_agent(), None
        finalizer, _finalizer = _finalizer, None
    if finalizer is not None:
        finalizer.cancel()
    if agent is not None:
        agent.close()


def current_agent() -> Agent | None:
    """This process's agent, if it has one already."""
    return _current if _current is not None and _current.pid == os.getpid() else None


def _after_fork() -> None:
    global _current, _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    if _current is not None:
        _current.forget()
        _orphans.append(_current)
        _current = None


def _at_exit() -> None:
    if _current is not None:
        _current.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
