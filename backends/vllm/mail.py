"""In a worker: messages that came through `collective_rpc` go to its agent, and what it answered goes back.

vLLM calls this between two steps, on the thread that steps. It never waits: the agent answers on its own thread, and
its reply is fetched by a later call.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any

METHOD = "syncfree_exchange"
_KEPT = 8  # clients at a time; the one that was silent longest loses its place


class _Mailbox:
    """One client's socket to this process's agent."""

    def __init__(self, context: Any, path: Any) -> None:
        import zmq

        self.used = time.monotonic()
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(f"ipc://{path}")

    def exchange(self, messages: list[bytes]) -> list[bytes]:
        import zmq

        self.used = time.monotonic()
        replies = []
        with contextlib.suppress(zmq.Again):
            for message in messages:
                self._socket.send(message, zmq.DONTWAIT)
            while True:
                replies.append(self._socket.recv(zmq.DONTWAIT))
        return replies

    def close(self) -> None:
        self._socket.close(linger=0)


class _Office:
    """The mailboxes of one process."""

    def __init__(self, runner: Any) -> None:
        import zmq

        from .watch import start_agent

        self.pid = os.getpid()
        self.agent = start_agent(runner)
        self._context = zmq.Context(io_threads=1)
        self._boxes: dict[str, _Mailbox] = {}

    def exchange(self, client: str, messages: list[bytes]) -> list[bytes]:
        box = self._boxes.get(client)
        if box is None:
            if len(self._boxes) >= _KEPT:
                oldest = min(self._boxes, key=lambda name: self._boxes[name].used)
                self._boxes.pop(oldest).close()
            box = self._boxes[client] = _Mailbox(self._context, self.agent.path)
        return box.exchange(messages)


_office: _Office | None = None


def exchange(worker: Any, client: str, messages: dict[str, list[bytes]]) -> list[Any]:
    """A method of vLLM's workers. `messages`: by worker's name. Returns [name, rank, replies, error or None]."""
    global _office
    name = f"{socket.gethostname()}:{os.getpid()}"
    try:
        if _office is None or _office.pid != os.getpid():
            _office = _Office(getattr(worker, "model_runner", None))
        agent = _office.agent
        if not agent.ready.is_set():
            agent.ready.wait(1.0)
        if agent.error is not None:
            return [name, agent.recorder.rank, [], agent.error]
        return [name, agent.recorder.rank, _office.exchange(client, messages.get(name, [])), None]
    except Exception as error:  # noqa: BLE001 - an exception here would end vLLM's worker
        return [name, 0, [], f"{type(error).__name__}: {error}".splitlines()[0]]
