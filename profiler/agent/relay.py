"""Agents behind a server's URL: their messages travel over HTTP, and inside the server as its engine's own calls do.

A worker's agent may be on another node, behind an executor of the engine's. So nothing is streamed: each exchange
carries what we have for the workers there, and brings what they have answered since the last one.
"""

from __future__ import annotations

import os
import secrets
import time
import urllib.error
import urllib.request
from collections import deque
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from ...errors import BadInput, Unreachable
from .connection import ANSWER_SECONDS, Connection
from .protocol import MAX_REPLY_BYTES

PATH = "/syncfree/exchange"
TOKEN_VARIABLE = "SYNCFREE_TOKEN"
MAX_EXCHANGE_BYTES = 1 << 20
_POLL_SECONDS = 0.03


class Exchange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """To the server: messages by worker. `client`: a secret name that keeps two clients' replies apart."""

    client: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    messages: dict[str, list[bytes]] = msgspec.field(default_factory=dict)


class WorkerMail(msgspec.Struct, kw_only=True):
    """From one worker. `error`: why its agent cannot be reached."""

    worker: str
    rank: int
    replies: list[bytes] = msgspec.field(default_factory=list)
    error: str | None = None


class Mail(msgspec.Struct, kw_only=True):
    workers: list[WorkerMail]


class NoPlugin(Unreachable):
    """The server is there, but has no syncfree endpoint."""


class Relay:
    """One server's URL. `workers`: who is behind it, by name, in the order of their ranks.

    `token`: what the server was started with in SYNCFREE_TOKEN. Raises `NoPlugin`, or `Unreachable` with the reason.
    """

    def __init__(self, url: str, token: str | None = None, seconds: float = ANSWER_SECONDS) -> None:
        self.url = check_url(url)
        self.seconds = seconds
        self._token = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
        self._client = secrets.token_hex(16)
        self._out: dict[str, list[bytes]] = {}
        self._in: dict[str, deque[bytes]] = {}
        mail = self._exchange()
        broken = next((worker for worker in mail.workers if worker.error), None)
        if broken is not None:
            raise Unreachable(f"{self.url}: worker {broken.worker}: {broken.error}")
        self.workers = [worker.worker for worker in sorted(mail.workers, key=lambda worker: worker.rank)]
        if not self.workers:
            raise Unreachable(f"{self.url}: the server has no worker")

    def send(self, worker: str, data: bytes) -> None:
        """Queue a message; it leaves with the next exchange."""
        self._out.setdefault(worker, []).append(data)

    def receive(self, worker: str, deadline: float) -> bytes | None:
        """The next reply of `worker`; None where none came by `deadline`."""
        waiting = self._in.setdefault(worker, deque())
        while not waiting:
            self._exchange()
            if not waiting:
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_SECONDS)
        return waiting.popleft()

    def _exchange(self) -> Mail:
        messages, self._out = self._out, {}
        body = msgspec.msgpack.encode(Exchange(client=self._client, messages=messages))
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/msgpack"}
        data = post(self.url + PATH, body, headers, self.seconds)
        try:
            mail = msgspec.msgpack.decode(data, type=Mail)
        except (msgspec.DecodeError, ValueError) as error:
            raise Unreachable(f"{self.url}: what answers is not syncfree's endpoint: {error}") from None
        for worker in mail.workers:
            self._in.setdefault(worker.worker, deque()).extend(worker.replies)
        return mail


class RelayedConnection(Connection):
    """One worker behind a `Relay`, greeted."""

    def __init__(self, relay: Relay, worker: str) -> None:
        self.where = f"{relay.url} {worker}"
        self._relay = relay
        self._worker = worker
        self._next = 0
        self.about = self._greet(relay.seconds)

    def close(self) -> None:
        """Nothing is held open between two exchanges."""

    def _send(self, data: bytes) -> None:
        self._relay.send(self._worker, data)

    def _receive(self, deadline: float, seconds: float) -> bytes:
        data = self._relay.receive(self._worker, deadline)
        if data is None:
            raise Unreachable(f"{self.where}: no answer within {seconds:g} s: stopped, or busy and not answering")
        return data


def check_url(url: str) -> str:
    """The server's base URL, without a slash at its end. Raises `BadInput` unless it is http(s)://HOST[:PORT][/PATH]."""
    try:
        parts = urlsplit(url)
        bad = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:
        bad = True
    if bad:
        raise BadInput(f"url: expected http://HOST:PORT, got {url!r}")
    return url.rstrip("/")


def post(url: str, body: bytes, headers: dict[str, str], seconds: float) -> bytes:
    """POST. Raises `NoPlugin` where the server does not know the path, `Unreachable` with the reason otherwise."""
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            data: bytes = response.read(16 * MAX_REPLY_BYTES)
            return data
    except urllib.error.HTTPError as error:
        said = error.read(300).decode("utf-8", "replace").strip() or error.reason
        if error.code in (404, 405):
            raise NoPlugin(f"{url}: the server does not know this path") from None
        raise Unreachable(f"{url}: refused: {error.code} {' '.join(str(said).split())}") from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise Unreachable(f"{url}: {' '.join(str(reason).split())}") from None
