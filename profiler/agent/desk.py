"""What the agent answers: one request in, one reply out; no sockets here, so that it can be tested as a function."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict

import msgspec

from ... import __version__
from ...errors import SyncfreeError, Unreachable
from ..calls import Call
from ..collectors.base import CannotCount
from ..sites import blamed, is_foreign, source_line
from ..windows import StepWindow
from .protocol import (
    PART_BYTES,
    PART_ITEMS,
    PROTOCOL,
    AnyReply,
    AnyRequest,
    Done,
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
    decode_request,
    encode,
    head_of,
)
from .recorder import Recorder, Session

logger = logging.getLogger("syncfree")

_KNOWN_CLIENTS = 64
_LEASE_CHECK_MS = 200
_STOPPING_MS = 5


class Desk:
    """Keeps the session of a `Recorder` and its lease. All methods run on the agent's thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._began = time.monotonic()
        self._session: Session | None = None
        self._owner = 0
        self._lease_s = 0.0
        self._expires = 0.0
        self._clients: OrderedDict[bytes, int] = OrderedDict()  # those that said hello -> their pid
        self.heard = self._began  # when any client said anything
        self._leaving: list[Session] = []  # dropped, but the stepping thread has not let go yet

    # --------------------------------------------------------------- messages

    def handle(self, client: bytes, frames: list[bytes]) -> bytes:
        """The reply to one message, whatever it is."""
        self.heard = time.monotonic()
        if len(frames) != 1:
            return encode(Refused(id=0, code="malformed", reason=f"expected one frame, got {len(frames)}"))
        try:
            request = decode_request(frames[0])
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return encode(Refused(id=0, code="malformed", reason=_line(error)))
        try:
            reply = self._reply(client, request)
        except SyncfreeError as error:
            code = "unavailable" if isinstance(error, Unreachable) else "input"
            code = "collector" if isinstance(error, CannotCount) else code
            reply = Refused(id=request.id, code=code, reason=_line(error))
        except Exception as error:  # noqa: BLE001 - a client's message must never end the agent
            logger.warning("syncfree: a request failed: %s", _line(error))
            reply = Refused(id=request.id, code="error", reason=_line(error))
        return encode(reply)

    def _reply(self, client: bytes, request: AnyRequest) -> AnyReply:
        if isinstance(request, Hello):
            return self._hello(client, request)
        if client not in self._clients:
            return Refused(id=request.id, code="protocol", reason="expected hello as the first message")
        if isinstance(request, Health):
            return self._health(request)
        if isinstance(request, Start):
            return self._start(client, request)
        session = self._session
        if session is None or session.token != request.session:
            reason = "no such recording: it was dropped, or its lease ended"
            return Refused(id=request.id, code="session", reason=reason)
        self._renew()
        if isinstance(request, Status):
            return self._state(request.id, session, head=False)
        if isinstance(request, Stop):
            session.close(request.force)
            self._advance(session, request.force)
            self._renew()  # bringing in a large recording may have taken longer than a lease
            return self._state(request.id, session, head=session.state == "stopped")
        if isinstance(request, Take):
            session.take()
            return self._state(request.id, session, head=True)
        if isinstance(request, Fetch):
            return self._part(request, session)
        self._drop(session)
        return Done(id=request.id)

    def _hello(self, client: bytes, request: Hello) -> AnyReply:
        if request.protocol != PROTOCOL:
            reason = f"this agent speaks protocol {PROTOCOL} (syncfree {__version__}), the client {request.protocol}"
            return Refused(id=request.id, code="protocol", reason=reason)
        self._clients[client] = request.pid
        while len(self._clients) > _KNOWN_CLIENTS:
            self._clients.popitem(last=False)
        recorder = self._recorder
        return Welcome(
            id=request.id,
            protocol=PROTOCOL,
            version=__version__,
            pid=os.getpid(),
            rank=recorder.rank,
            engine=recorder.engine,
        )

    def _health(self, request: Health) -> AnyReply:
        recorder = self._recorder
        return Healthy(
            id=request.id,
            pid=os.getpid(),
            rank=recorder.rank,
            engine=recorder.engine,
            uptime_s=time.monotonic() - self._began,
            recording=self._session is not None,
            disabled=recorder.disabled,
        )

    def _start(self, client: bytes, request: Start) -> AnyReply:
        if self._session is not None:
            age = time.monotonic() - self._session.began
            reason = f"busy: process {self._owner} has been recording for {age:.1f} s; try again when it is done"
            return Refused(id=request.id, code="busy", reason=reason)
        if self._leaving:
            return Refused(id=request.id, code="busy", reason="busy: the recording before this one is just ending")
        if self._recorder.disabled is not None:
            reason = f"the hooks in this server are switched off: {self._recorder.disabled}"
            return Refused(id=request.id, code="unavailable", reason=reason)
        self._session = self._recorder.start(request.collectors, request.steps)
        self._owner = self._clients.get(client, 0)
        self._lease_s = request.lease_s
        self._renew()
        return Started(id=request.id, session=self._session.token, rolling=self._session.rolling)

    def _state(self, number: int, session: Session, head: bool) -> State:
        state = State(
            id=number,
            state=session.state,
            steps=session.steps,
            seconds=session.seconds,
            classes=dict(session.classes),
            error=session.error,
            cannot_count=session.cannot_count,
        )
        if head and session.recording is not None:
            state.head = head_of(session.recording)
            state.sizes = [len(session.recording.steps), *(len(item.calls) for item in session.recording.evidence)]
        return state

    def _part(self, request: Fetch, session: Session) -> AnyReply:
        recording = session.recording
        if recording is None:
            return Refused(id=request.id, code="session", reason="nothing to fetch yet: stop or take it first")
        sections: list[list[StepWindow] | list[Call]] = [recording.steps, *(item.calls for item in recording.evidence)]
        if request.section >= len(sections) or request.offset > len(sections[request.section]):
            return Refused(id=request.id, code="input", reason=f"no part {request.offset} of section {request.section}")
        items, begin, count = sections[request.section], request.offset, PART_ITEMS
        while True:
            chosen = items[begin : begin + count]
            part = Part(id=request.id, section=request.section, next=begin + len(chosen))
            part.steps = [item for item in chosen if isinstance(item, StepWindow)]
            part.calls = [portable(item) for item in chosen if isinstance(item, Call)]
            if len(encode(part)) <= PART_BYTES:
                return part
            if count == 1:
                return Part(id=request.id, section=request.section, next=begin + 1, left_out=1)
            count //= 2

    # ------------------------------------------------------------------ leases

    def patience_ms(self) -> int | None:
        """How long the agent may sleep; None: until somebody asks."""
        if self._leaving or (self._session is not None and self._session.state == "stopping"):
            return _STOPPING_MS
        return None if self._session is None else _LEASE_CHECK_MS

    def tick(self) -> None:
        """Move a stopping recording on, and drop one whose client fell silent."""
        session = self._session
        if session is not None:
            began = time.monotonic()
            self._advance(session)
            # Bringing in a large recording keeps this thread busy: that silence is ours, not the client's.
            self._expires += time.monotonic() - began
            if time.monotonic() > self._expires:
                logger.warning("syncfree: a recording was dropped: nothing heard of its client %d", self._owner)
                self._drop(session)
        for session in list(self._leaving):
            self._advance(session)
            if session.finished:
                self._leaving.remove(session)

    def abandon(self) -> None:
        """The agent ends: so does its recording."""
        if self._session is not None:
            self._session.close(force=True)
            self._advance(self._session, force=True)
            self._session = None

    def _renew(self) -> None:
        self._expires = time.monotonic() + self._lease_s

    def _drop(self, session: Session) -> None:
        session.close(force=True)
        self._advance(session)
        self._session = None
        if not session.finished:
            self._leaving.append(session)

    def _advance(self, session: Session, force: bool = False) -> None:
        session.advance(force)
        if session.finished:
            self._recorder.detach(session)


def portable(call: Call) -> Call:
    """The call as another process can read it.

    Only this process can tell frames of its syncfree and its standard library from others, and can surely read the
    source line that will be blamed: the first go, the second travels.
    """
    stack = tuple(f for f in call.stack if is_foreign(f.file) or "/torch/" in f.file) or call.stack
    frame = blamed(stack)
    if frame is not None and not frame.source:
        told = msgspec.structs.replace(frame, source=source_line(frame))
        stack = tuple(told if f is frame else f for f in stack)
    return msgspec.structs.replace(call, stack=stack) if stack != call.stack else call


def _line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]
