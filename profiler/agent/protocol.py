"""Messages between a profiler and the agent in a serving process: typed, tagged, bounded.

Every message is one msgpack frame. A request carries a number that its reply repeats, so that a late reply is never
taken for another's. The first request of a connection is `Hello`.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

import msgspec

from ..aggregate import Evidence
from ..calls import Call
from ..recording import Recording
from ..windows import StepWindow

PROTOCOL = 1
MAX_REQUEST_BYTES = 16 * 1024
MAX_REPLY_BYTES = 8 * 1024 * 1024
PART_BYTES = 4 * 1024 * 1024  # what an agent aims below; one oversized step or call is left out, with a note
PART_ITEMS = 512
MAX_STEPS = 20_000  # of one recording: it ends there, and its report is marked partial
MAX_CALLS = 1_000_000  # of one recording and collector; later ones are left out, and the report is marked partial
MAX_LEASE_S = 60.0

Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Text = Annotated[str, msgspec.Meta(max_length=200)]


class Request(msgspec.Struct, kw_only=True, tag=str.lower, tag_field="type", forbid_unknown_fields=True):
    id: Number


class Hello(Request, kw_only=True):
    protocol: Number
    version: Text = ""
    pid: Number = 0


class Health(Request, kw_only=True):
    """Asks how the agent is; changes nothing."""


class Start(Request, kw_only=True):
    """Begin a recording. It is dropped when nothing was heard of the client for `lease_s` seconds."""

    collectors: Text = "auto"
    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)] | None = None
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_LEASE_S)] = 10.0


class Status(Request, kw_only=True):
    """How far the recording is; renews its lease."""

    session: Text


class Stop(Request, kw_only=True):
    """End the recording at the next step boundary; with `force` the open step is given up."""

    session: Text
    force: bool = False


class Take(Request, kw_only=True):
    """Make the steps so far the part to be fetched; the recording goes on without them (a live view)."""

    session: Text


class Fetch(Request, kw_only=True):
    """A part of a recording that was stopped or taken: section 0 is the steps, 1, 2, ... the calls of its evidence."""

    session: Text
    section: Annotated[int, msgspec.Meta(ge=0, le=64)]
    offset: Number


class Drop(Request, kw_only=True):
    """Forget the recording."""

    session: Text


AnyRequest = Hello | Health | Start | Status | Stop | Take | Fetch | Drop


class Reply(msgspec.Struct, kw_only=True, tag=str.lower, tag_field="type"):
    id: int


class Welcome(Reply, kw_only=True):
    protocol: int
    version: str
    pid: int
    rank: int
    engine: str | None = None


class Healthy(Reply, kw_only=True):
    """`disabled`: why the hooks in the engine were switched off, None while they work."""

    pid: int
    rank: int
    engine: str | None
    uptime_s: float
    recording: bool
    disabled: str | None = None


class Started(Reply, kw_only=True):
    """`rolling`: whether `Take` works with this recording's collectors."""

    session: str
    rolling: bool = False


class State(Reply, kw_only=True):
    """`state`: recording, stopping, stopped or failed (then `error`; `cannot_count`: a collector cannot work there).

    `classes`: steps so far by batch class.
    """

    state: str
    steps: int = 0
    seconds: float = 0.0
    classes: dict[str, int] = msgspec.field(default_factory=dict)
    error: str | None = None
    cannot_count: bool = False
    head: Recording | None = None  # once stopped or taken: everything but steps and calls, which are fetched in parts
    sizes: list[int] = msgspec.field(default_factory=list)  # items of each section


class Part(Reply, kw_only=True):
    """`next`: the offset to ask for next; the section is whole when it equals its size."""

    section: int
    next: int
    steps: list[StepWindow] = msgspec.field(default_factory=list)
    calls: list[Call] = msgspec.field(default_factory=list)
    left_out: int = 0


class Done(Reply, kw_only=True):
    pass


class Refused(Reply, kw_only=True):
    """`code`: busy, protocol, session, input, collector, unavailable or malformed."""

    code: str
    reason: str


AnyReply = Welcome | Healthy | Started | State | Part | Done | Refused

_requests = msgspec.msgpack.Decoder(AnyRequest)
encode = msgspec.msgpack.Encoder().encode


@cache
def _replies() -> msgspec.msgpack.Decoder[Any]:
    """Made at a client's first reply: looking through all that a report holds takes 60 ms, which no server needs."""
    return msgspec.msgpack.Decoder(AnyReply)


def decode_request(data: bytes) -> Any:
    """One of the requests. Raises `msgspec.DecodeError` (`ValidationError`), or `ValueError` for other rubbish."""
    return _requests.decode(data)


def decode_reply(data: bytes) -> Any:
    """One of the replies. Raises as `decode_request`."""
    return _replies().decode(data)


def head_of(recording: Recording) -> Recording:
    """The recording without its long lists."""
    evidence = [
        Evidence(
            name=item.name,
            sees=item.sees,
            blind=item.blind,
            notes=item.notes,
            marks=item.marks,
            totals=item.totals,
            kernels_run=item.kernels_run,
        )
        for item in recording.evidence
    ]
    return Recording(source=recording.source, evidence=evidence, notes=recording.notes, threads=recording.threads)
