"""Reading vLLM's `SchedulerOutput`: what the scheduler knows on the host, before anything runs.

Model runner V1 sends a prompt once, with the new request, and resumes preempted requests as cached rows; V2 sends a
resumed request as a new one with `prefill_token_ids`. Cached rows carry no prompt length in either, hence the table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from . import rows as passes
from .errors import BadInput
from .lengths import INT32_MAX, UNKNOWN, Int32Array, read_count

Made = TypeVar("Made")
_UNKNOWN_SLOT = 0  # a request whose admission nobody saw, e.g. when the reader starts in a running server


class Admissions(NamedTuple):
    """Lengths of the rows of one step at their latest admission, int32, in row order."""

    prefill: Int32Array
    cached: Int32Array
    flag: Int32Array | None  # what the engine's is_prefilling compares against, None where it is the prefill length
    repeated: bool = False  # two rows may be the same request


class PrefillTable:
    """Prefill lengths by request, kept across preemption and resume; finished requests are dropped.

    Show it every `SchedulerOutput`, through `Batch.from_vllm_scheduler` or `observe`. `steps_in_flight`: steps whose
    accepted drafts the scheduler has not seen when it schedules the next one: 1 with asynchronous scheduling (the
    default: sound for both), 0 where scheduling is synchronous and every length is exact.
    """

    def __init__(self, *, steps_in_flight: int = 1) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._lengths = np.full((3, 256), UNKNOWN, dtype=np.int32)  # prefill, cached, flag; by slot
        self._used = 1
        self._drafts: deque[dict[str, int]] = deque(maxlen=read_count("steps_in_flight", steps_in_flight, 0))
        self._rows: list[str] | None = None
        self._admissions: Admissions | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._slots

    def __getitem__(self, req_id: str) -> int:
        """Tokens to prefill as of the latest admission of the request."""
        return int(self._lengths[0, self._slots[req_id]])

    def observe(self, scheduler_output: Any) -> None:
        """Bring the table up to date with one step: drop what finished, admit what is new or resumed."""
        for req_id in scheduler_output.finished_req_ids:
            self._drop(req_id)
        for new in scheduler_output.scheduled_new_reqs:
            # V2 sends the tokens to prefill (prompt, plus output regenerated after a preemption) beside the prompt
            tokens = getattr(new, "prefill_token_ids", None)
            prompt = _prompt_len(new)
            prefill = prompt if tokens is None else len(tokens)
            self._admit(new.req_id, prefill, new.num_computed_tokens, prefill)
        cached = scheduler_output.scheduled_cached_reqs
        for index in _resumed(cached):
            req_id = cached.req_ids[index]
            prompt = int(self._lengths[2, self._slots.get(req_id, _UNKNOWN_SLOT)])
            prefill = _resumed_prefill_len(cached, index, prompt)
            self._admit(req_id, prefill, cached.num_computed_tokens[index], prompt)

    def admit(self, req_id: str, prefill_len: int) -> None:
        """Note a request whose admission nobody saw, e.g. one that ran already when its reader came."""
        self._admit(req_id, prefill_len, UNKNOWN, prefill_len)

    def remember_drafts(self, scheduler_output: Any) -> None:
        """Note the drafts of a step: until its result is known, later lengths of these requests are upper bounds."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if drafts or self._drafts:
            self._drafts.append({req_id: len(tokens) for req_id, tokens in drafts.items()})

    def admissions(self, rows: list[str]) -> Admissions:
        """Lengths of these requests, in this order. Unchanged rows cost one comparison."""
        if self._admissions is None or rows != self._rows:
            out = np.empty((3, len(rows)), dtype=np.int32)
            found = passes.active.gather(rows, self._slots, self._lengths, out)
            prefill, cached, flag = out
            repeated = found & passes.REPEATED != 0
            self._admissions = Admissions(prefill, cached, flag if found & passes.FLAG_DIFFERS else None, repeated)
            self._rows = rows
        return self._admissions

    def rejected_at_most(self, rows: list[str]) -> Int32Array | None:
        """(rows,) drafts still in flight for each request, `None` where there are none."""
        pending = [step for step in self._drafts if step]
        if not pending:
            return None
        return np.array([sum(step.get(req_id, 0) for step in pending) for req_id in rows], dtype=np.int32)

    def _admit(self, req_id: str, prefill: int, cached: int, flag: int) -> None:
        slot = self._slots.get(req_id)
        if slot is None:
            slot = self._free.pop() if self._free else self._new_slot()
            self._slots[req_id] = slot
        self._lengths[:, slot] = prefill, cached, flag
        self._admissions = None
        for step in self._drafts:
            step.pop(req_id, None)  # a preemption restarts the count of computed tokens; late drafts no longer move it

    def _drop(self, req_id: str) -> None:
        slot = self._slots.pop(req_id, None)
        if slot is not None:
            self._free.append(slot)
            self._admissions = None
        for step in self._drafts:
            step.pop(req_id, None)

    def _new_slot(self) -> int:
        slot, self._used = self._used, self._used + 1
        if slot == self._lengths.shape[1]:
            self._lengths = np.hstack([self._lengths, np.full((3, slot), UNKNOWN, dtype=np.int32)])
        return slot


def read_step(
    make: Callable[..., Made],
    step: Any,
    table: PrefillTable | MutableMapping[str, int],
    *,
    req_ids: Sequence[str] | None,
    decode_threshold: int,
    short_extends_as_decodes: bool,
    num_tokens: int | None,
) -> Made:
    """See `Batch.from_vllm_scheduler`."""
    scheduled = step.num_scheduled_tokens
    rows = list(scheduled) if req_ids is None else list(req_ids)
    lower = None
    if isinstance(table, PrefillTable):
        table.observe(step)
        admitted = table.admissions(rows)
        rejected = table.rejected_at_most(rows) if table._drafts else None
        table.remember_drafts(step)
    else:
        admitted = _observe_mapping(table, step, rows)
        rejected = None
    # as many rows as requests, none twice, and each found below: the same requests
    if req_ids is not None and (len(rows) != len(scheduled) or admitted.repeated):
        _refuse_other_requests(rows, scheduled)
    block = np.empty((3, len(rows)), dtype=np.int32)
    total = _read_rows(step, rows, block)
    query, seq, computed = block
    if num_tokens is not None and num_tokens < total:
        raise BadInput(f"num_tokens: expected >= the scheduled tokens = {total}, got {num_tokens}")
    if rejected is not None:
        # a row with drafts in flight has finished its prefill: it keeps at least one token of context
        lower = np.maximum(seq - rejected, np.minimum(query + 1, seq)).astype(np.int32)
    return make(
        query,
        seq,
        computed,
        decode_threshold=decode_threshold,
        short_extends_as_decodes=short_extends_as_decodes,
        num_tokens=total if num_tokens is None else num_tokens,
        prefill_lens=admitted.prefill,
        cached_lens=admitted.cached,
        flag_lens=admitted.flag,
        seq_lens_lower=lower,
        req_ids=rows,
    )


def _refuse_other_requests(rows: list[str], scheduled: Mapping[str, int]) -> None:
    odd = sorted(set(rows) ^ scheduled.keys())
    if odd or len(set(rows)) != len(rows):
        differs = repr(odd[0]) if odd else "a repeated request"
        raise BadInput(f"req_ids: expected the requests of num_scheduled_tokens, once each; differs by {differs}")


def _read_rows(step: Any, rows: list[str], block: Int32Array) -> int:
    """Query, sequence and computed lengths into `block[3, rows]`; returns the sum of the query lengths."""
    cached, new = step.scheduled_cached_reqs, step.scheduled_new_reqs
    ids, computed = cached.req_ids, cached.num_computed_tokens
    if new:
        ids = [*ids, *(request.req_id for request in new)]
        computed = [*computed, *(request.num_computed_tokens for request in new)]
    try:
        total = passes.active.read_rows(rows, step.num_scheduled_tokens, ids, computed, block)
        if total == passes.MISALIGNED:
            by_request = dict(zip(ids, computed, strict=True))
            total = passes.active.read_rows(rows, step.num_scheduled_tokens, None, by_request, block)
    except KeyError as error:
        raise BadInput(
            f"num_scheduled_tokens: expected each request among the new or the cached ones, not so {error.args[0]!r}"
        ) from error
    if total < 0:
        row = rows[-2 - total]
        raise BadInput(
            f"num_scheduled_tokens[{row!r}]: expected tokens and computed tokens >= 0 with a sum <= {INT32_MAX}, "
            f"got {step.num_scheduled_tokens[row]} and {dict(zip(ids, computed, strict=True))[row]}"
        )
    return total


def _prompt_len(new: Any) -> int:
    length = getattr(new, "prompt_len", None)  # a property of 0.32; older ones have only the tokens
    if length is None:
        tokens = new.prompt_token_ids if new.prompt_token_ids is not None else getattr(new, "prompt_embeds", None)
        length = 0 if tokens is None else len(tokens)
    return int(length)


def _resumed(cached: Any) -> list[int]:
    """Indices of the cached rows that come back from a preemption (V1)."""
    resumed = getattr(cached, "resumed_req_ids", None)
    if resumed is None:  # before resumed_req_ids: one flag a row
        return [i for i, flag in enumerate(getattr(cached, "resumed_from_preemption", ())) if flag]
    return [i for i, req_id in enumerate(cached.req_ids) if req_id in resumed] if resumed else []


def _resumed_prefill_len(cached: Any, index: int, prompt: int) -> int:
    """Prompt plus regenerated output; the placeholders of asynchronous scheduling are zero at a resume."""
    tokens = getattr(cached, "all_token_ids", {}).get(cached.req_ids[index])
    if tokens is not None:
        return len(tokens)
    return UNKNOWN if prompt < 0 else prompt + int(cached.num_output_tokens[index])


class _PrefillLen(int):
    """A prefill length in a plain mapping. A request that is preempted again needs its prompt's length, too."""

    prompt: int

    @classmethod
    def of(cls, prefill: int, prompt: int) -> _PrefillLen:
        value = cls(prefill)
        value.prompt = prompt
        return value


def _observe_mapping(table: MutableMapping[str, int], step: Any, rows: list[str]) -> Admissions:
    """The table as a plain mapping of prefill lengths: no memory of prefix hits."""
    for req_id in step.finished_req_ids:
        table.pop(req_id, None)
    cached_lens: dict[str, int] = {}
    for new in step.scheduled_new_reqs:
        tokens = getattr(new, "prefill_token_ids", None)
        prompt = _prompt_len(new)
        table[new.req_id] = _PrefillLen.of(prompt if tokens is None else len(tokens), prompt)
        cached_lens[new.req_id] = new.num_computed_tokens
    cached = step.scheduled_cached_reqs
    for index in _resumed(cached):
        req_id = cached.req_ids[index]
        known = table.get(req_id, UNKNOWN)
        prompt = getattr(known, "prompt", known)
        table[req_id] = _PrefillLen.of(_resumed_prefill_len(cached, index, prompt), prompt)
        cached_lens[req_id] = cached.num_computed_tokens[index]
    prefill = np.array([table.get(req_id, UNKNOWN) for req_id in rows], dtype=np.int32)
    hits = np.array([cached_lens.get(req_id, UNKNOWN) for req_id in rows], dtype=np.int32)
    return Admissions(prefill, hits, None, repeated=True)
