"""What the planning service answers, as a function: one request in, one reply out, no sockets."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ... import __version__
from ...errors import BadInput, SyncfreeError
from ...planner import Batch, Environment, InexactBatch, Limits, Planner, UnorderedBatch, classify
from ...planner.lengths import Int32Array, read_count, read_lengths
from ...planner.plan import SCHEMA
from ..attention import attention_backend
from .protocol import (
    MAX_COMPUTE_UNITS,
    MAX_CONTEXT_ENTRIES,
    MAX_CONTEXT_RANKS,
    MAX_CONTEXT_ROUNDS,
    MAX_HEADS,
    MAX_REPLY_BYTES,
    MAX_ROWS,
    MAX_TOKENS,
    PROTOCOL,
    AnyReply,
    AnyRequest,
    Health,
    Healthy,
    Hello,
    Plan,
    Planned,
    Refused,
    Stop,
    Stopping,
    Welcome,
    decode_request,
    encode,
    number_of,
)

_KNOWN_CLIENTS = 1024
_KEPT_PLANNERS = 128  # those of clients that went away are among them until others take their place
_KEPT_PLAN_BYTES = 1024 * 1024  # a planner remembers its last plan; what is larger than this is not worth its memory
_GATHERING = ("extend", "prefill")  # segments whose fields hold something for each token of context
_LENGTHS = ("query_lens", "seq_lens", "prefill_lens", "cached_lens", "seq_lens_lower", "flag_lens")

Settings = tuple[bytes, str, Environment, Limits]


class TooLarge(BadInput):
    """A plan that would be larger than the service makes."""


class Desk:
    """Answers requests, and keeps a planner for each client and its settings: steps near one another cost less."""

    def __init__(self) -> None:
        self.stopping = False
        self.undelivered = 0
        self._began = time.monotonic()
        self._plans = 0
        self._refused = 0
        self._clients: OrderedDict[bytes, int] = OrderedDict()  # those that said hello -> their pid
        self._planners: OrderedDict[Settings, Planner] = OrderedDict()

    def handle(self, client: bytes, frames: list[bytes]) -> bytes:
        """The reply to one message, whatever it is."""
        reply = self._answer(client, frames)
        if isinstance(reply, Refused):
            self._refused += 1
        data = encode(reply)
        if len(data) > MAX_REPLY_BYTES:
            self._refused += 1
            reason = f"expected a plan of at most {MAX_REPLY_BYTES} bytes, got {len(data)}"
            return encode(Refused(id=reply.id, code="too_large", reason=reason))
        return data

    def _answer(self, client: bytes, frames: list[bytes]) -> AnyReply:
        if len(frames) != 1:
            return Refused(id=0, code="malformed", reason=f"expected one frame, got {len(frames)}")
        try:
            request = decode_request(frames[0])
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return Refused(id=number_of(frames[0]), code="malformed", reason=_line(error))
        try:
            return self._reply(client, request)
        except SyncfreeError as error:
            return Refused(id=request.id, code=_code(error), reason=_line(error))
        except Exception as error:  # noqa: BLE001 - one client's message must never end the others' service
            return Refused(id=request.id, code="error", reason=f"{type(error).__name__}: {_line(error)}")

    def _reply(self, client: bytes, request: AnyRequest) -> AnyReply:
        if isinstance(request, Hello):
            return self._hello(client, request)
        if client not in self._clients:
            return Refused(id=request.id, code="hello", reason="expected hello as the first message")
        self._clients.move_to_end(client)
        if isinstance(request, Plan):
            return self._plan(client, request)
        if isinstance(request, Stop):
            self.stopping = True
            return Stopping(id=request.id)
        return self._health(request)

    def _hello(self, client: bytes, request: Hello) -> AnyReply:
        if request.protocol != PROTOCOL:
            reason = f"this service speaks protocol {PROTOCOL} (syncfree {__version__}), the client {request.protocol}"
            return Refused(id=request.id, code="protocol", reason=reason)
        self._clients[client] = request.pid
        while len(self._clients) > _KNOWN_CLIENTS:
            self._clients.popitem(last=False)
        return Welcome(id=request.id, protocol=PROTOCOL, version=__version__, pid=os.getpid(), plan=SCHEMA)

    def _health(self, request: Health) -> AnyReply:
        return Healthy(
            id=request.id,
            pid=os.getpid(),
            version=__version__,
            uptime_s=time.monotonic() - self._began,
            plans=self._plans,
            refused=self._refused,
            undelivered=self.undelivered,
            clients=len(self._clients),
            planners=len(self._planners),
            memory_bytes=_resident_bytes(),
        )

    def _plan(self, client: bytes, request: Plan) -> AnyReply:
        key = (client, request.backend, request.environment, request.limits)
        planner = self._planner(key)
        batch = read_batch(request)
        if batch.num_tokens > MAX_TOKENS:
            raise TooLarge(f"num_tokens: expected at most {MAX_TOKENS}, got {batch.num_tokens}")
        _refuse_large_context(batch, planner, request.reorder)
        data = planner.plan(batch, reorder=request.reorder).to_bytes()
        self._plans += 1
        if len(data) > _KEPT_PLAN_BYTES:
            del self._planners[key]
        return Planned(id=request.id, plan=data)

    def _planner(self, key: Settings) -> Planner:
        planner = self._planners.get(key)
        if planner is not None:
            self._planners.move_to_end(key)
            return planner
        _, backend, environment, limits = key
        _refuse_large_settings(environment, limits)
        planner = self._planners[key] = Planner(attention_backend(backend), environment, limits)
        if len(self._planners) > _KEPT_PLANNERS:
            self._planners.popitem(last=False)
        return planner


def read_batch(request: Plan) -> Batch:
    """The rows of a request. Raises `BadInput` naming the element."""
    given: dict[str, Any] = {name: _integers(name, getattr(request, name)) for name in _LENGTHS}
    flag_lens = given.pop("flag_lens")
    flags = request.is_prefilling
    if isinstance(flags, bytes):
        flags = np.frombuffer(flags, dtype=np.uint8)  # type: ignore[assignment]
    plain = flag_lens is None and request.max_seq_len is None and request.causal is not None
    batch = Batch.from_lengths(
        **given,
        is_prefilling=flags,  # type: ignore[arg-type]
        decode_threshold=request.decode_threshold,
        short_extends_as_decodes=request.short_extends_as_decodes or not plain,
        num_tokens=request.num_tokens,
        causal=request.causal is True,
    )
    return batch if plain else _with_engine_facts(batch, request, flag_lens)


def _with_engine_facts(batch: Batch, request: Plan, flag_lens: Any) -> Batch:
    """The batch with what only an engine's own batches carry."""
    longest = request.max_seq_len
    if longest is not None and read_count("max_seq_len", longest, 0) < batch.longest_seq:
        raise BadInput(f"max_seq_len: expected >= the largest of seq_lens = {batch.longest_seq}, got {longest}")
    if flag_lens is not None:
        flag_lens = read_lengths("flag_lens", flag_lens, len(batch), unknown_allowed=True)
    return Batch(
        batch.query_lens,
        batch.seq_lens,
        batch.computed_lens,
        decode_threshold=batch.decode_threshold,
        short_extends_as_decodes=request.short_extends_as_decodes,
        num_tokens=batch.num_tokens,
        prefill_lens=batch.prefill_lens,
        cached_lens=batch.cached_lens,
        is_prefilling=batch.given_flags,
        flag_lens=flag_lens,
        seq_lens_lower=batch.seq_lens_lower,
        max_seq_len=longest,
        causal=request.causal,
    )


def _integers(name: str, values: list[int] | bytes | None) -> Any:
    if values is None:
        return None
    if isinstance(values, bytes):
        if len(values) % 4:
            raise BadInput(f"{name}: expected a multiple of 4 bytes (little-endian int32), got {len(values)}")
        values = np.frombuffer(values, dtype="<i4")  # type: ignore[assignment]
    if len(values) > MAX_ROWS:
        raise TooLarge(f"{name}: expected at most {MAX_ROWS} rows, got {len(values)}")
    return values


def _refuse_large_settings(environment: Environment, limits: Limits) -> None:
    for name, value, most in (
        ("environment.num_cu", environment.num_cu, MAX_COMPUTE_UNITS),
        ("environment.dcp_world_size", environment.dcp_world_size, MAX_CONTEXT_RANKS),
        ("limits.num_heads", limits.num_heads, MAX_HEADS),
    ):
        if value > most:
            raise TooLarge(f"{name}: expected at most {most} from this service, got {value}")


def _refuse_large_context(batch: Batch, planner: Planner, reorder: bool) -> None:
    """Arrays over context grow with the rows that gather theirs, times the longest: known before any array is made."""
    found = _context_entries(batch.computed_lens)
    if found <= MAX_CONTEXT_ENTRIES and _rounds(found, planner) <= MAX_CONTEXT_ROUNDS:
        return
    order = classify(batch).order if reorder else None
    ordered = batch if order is None else batch.take(order)
    backend = planner.backend
    query_lens = backend.query_lens_for(planner.environment, planner.limits)
    segments = [s for s in ordered.segments(backend.split, query_lens) if s.name in _GATHERING]
    found = sum(_context_entries(ordered.computed_lens[slice(*s.rows)]) for s in segments)
    if found > MAX_CONTEXT_ENTRIES:
        raise TooLarge(
            f"seq_lens: expected at most {MAX_CONTEXT_ENTRIES} for the rows of an extend or prefill with context, "
            f"times the longest context, got {found}"
        )
    rounds = _rounds(found, planner)
    if rounds > MAX_CONTEXT_ROUNDS:
        most = MAX_CONTEXT_ROUNDS
        raise TooLarge(f"limits.workspace_tokens: expected at most {most} rounds over these contexts, got {rounds}")


def _context_entries(context: Int32Array) -> int:
    return int(np.count_nonzero(context)) * int(context.max(initial=0))


def _rounds(entries: int, planner: Planner) -> int:
    return entries * planner.environment.dcp_world_size // planner.limits.workspace_tokens


def _code(error: SyncfreeError) -> str:
    codes = ((TooLarge, "too_large"), (UnorderedBatch, "unordered"), (InexactBatch, "inexact"))
    return next((code for kind, code in codes if isinstance(error, kind)), "input")


def _resident_bytes() -> int:
    """0 where the kernel does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGESIZE")


def _line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:500]
