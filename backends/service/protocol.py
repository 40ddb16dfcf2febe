"""Messages between a scheduler and the planning service: typed, tagged, bounded. `docs/service.md` is the wire format.

Every message is one msgpack map in one frame. A request carries a number that its reply repeats. The first request of
a connection is `Hello`; a server that was restarted asks for it again (`Refused`, code "hello").
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ...planner.environment import Environment, Limits

PROTOCOL = 1
MAX_REQUEST_BYTES = 1024 * 1024
MAX_REPLY_BYTES = 48 * 1024 * 1024
MAX_ROWS = 16_384
IN_FLIGHT = 4  # requests that a client may have open: replies beyond may be lost, and are counted as undelivered

# What one plan may take, in entries of its arrays: a message of a few bytes must not cost gigabytes.
MAX_CONTEXT_ENTRIES = 2**23  # rows of an extend or prefill with context, times the longest context
MAX_CONTEXT_ROUNDS = 2**12  # the same over the workspace's tokens, for each rank of decode context parallelism
MAX_TOKENS = 2**20  # launched in one step
MAX_COMPUTE_UNITS = 2**14
MAX_HEADS = 2**16
MAX_CONTEXT_RANKS = 256

Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Text = Annotated[str, msgspec.Meta(max_length=200)]
Lengths = list[int] | bytes  # bytes: little-endian int32, four a row
KnownLengths = list[int | None] | bytes  # None: nobody knows this row's
Flags = list[bool] | bytes  # bytes: 0 or 1, one a row


class Request(msgspec.Struct, kw_only=True, tag=str.lower, tag_field="type", forbid_unknown_fields=True):
    id: Number


class Hello(Request, kw_only=True):
    """`protocol` has to be the server's; `version` and `pid` of the client are for its log."""

    protocol: Number
    version: Text = ""
    pid: Number = 0


class Plan(Request, kw_only=True, omit_defaults=True):
    """Plan one batch: the rows as for `Batch.from_lengths`, settings as for `syncfree plan --input`.

    `max_seq_len`: an engine's declared bound, at least the largest of `seq_lens`. `flag_lens`: instead of
    `is_prefilling`, what the engine's own flag compares computed tokens against. `causal`: null where rows differ.
    """

    backend: Text
    query_lens: Lengths
    seq_lens: Lengths
    prefill_lens: KnownLengths | None = None
    cached_lens: KnownLengths | None = None
    is_prefilling: Flags | None = None
    seq_lens_lower: Lengths | None = None
    flag_lens: KnownLengths | None = None
    decode_threshold: int = 1
    short_extends_as_decodes: bool = True
    num_tokens: int | None = None
    max_seq_len: int | None = None
    causal: bool | None = True
    reorder: bool = False
    environment: Environment = Environment()
    limits: Limits = Limits()


class Health(Request, kw_only=True):
    """Asks how the service is; changes nothing."""


class Stop(Request, kw_only=True):
    """Ends the service, once this was answered."""


AnyRequest = Hello | Plan | Health | Stop


class Reply(msgspec.Struct, kw_only=True, tag=str.lower, tag_field="type"):
    id: int


class Welcome(Reply, kw_only=True):
    """`plan`: the version that the bytes of a plan begin with. The rest: what a request may be, and a reply."""

    protocol: int
    version: str
    pid: int
    plan: str
    max_request_bytes: int = MAX_REQUEST_BYTES
    max_reply_bytes: int = MAX_REPLY_BYTES
    max_rows: int = MAX_ROWS
    max_tokens: int = MAX_TOKENS
    max_context_entries: int = MAX_CONTEXT_ENTRIES


class Planned(Reply, kw_only=True):
    """`plan`: what `MetadataPlan.to_bytes` gives in one's own process."""

    plan: bytes


class Healthy(Reply, kw_only=True):
    """Since the start: `plans` made, requests `refused`, replies `undelivered` (their client was gone or did not read).

    `planners` are kept now, one a client, backend, environment and limits; `memory_bytes` is resident.
    """

    pid: int
    version: str
    uptime_s: float
    plans: int
    refused: int
    undelivered: int
    clients: int
    planners: int
    memory_bytes: int


class Stopping(Reply, kw_only=True):
    pass


class Refused(Reply, kw_only=True):
    """`code`: hello, protocol, malformed, input, unordered, inexact, too_large or error. `id`: 0 if unreadable."""

    code: str
    reason: str


AnyReply = Welcome | Planned | Healthy | Stopping | Refused


class _Envelope(msgspec.Struct):
    id: Number = 0


_requests = msgspec.msgpack.Decoder(AnyRequest)
_replies = msgspec.msgpack.Decoder(AnyReply)
_envelopes = msgspec.msgpack.Decoder(_Envelope)
encode = msgspec.msgpack.Encoder().encode


def decode_request(data: bytes) -> Any:
    """One of the requests. Raises `msgspec.DecodeError` (`ValidationError`), or `ValueError` for other rubbish."""
    return _requests.decode(data)


def decode_reply(data: bytes) -> Any:
    """One of the replies. Raises as `decode_request`."""
    return _replies.decode(data)


def number_of(data: bytes) -> int:
    """The number of a request that could not be decoded, so that its client learns which one; 0 without one."""
    try:
        return _envelopes.decode(data).id
    except (msgspec.DecodeError, ValueError, RecursionError):
        return 0


def message_schemas() -> dict[str, Any]:
    """JSON Schemas of all messages by name (in JSON, bytes are base64 text; on the wire they are msgpack's bin)."""
    kinds = (Hello, Plan, Health, Stop, Welcome, Planned, Healthy, Stopping, Refused)
    _, components = msgspec.json.schema_components(kinds)
    return components
