"""A small serving loop that builds step N+1 while step N runs, and a model whose attention reads what builders make.

The model stands for the device's work: multi-head latent attention (one cached latent a token), a gated MLP, random
weights, no rotary. What it attends to is found through the metadata object of the step (page lists, indptrs, chunks of
context), so metadata that say something wrong give other tokens, and other drafts are accepted.

The loop is an engine with asynchronous scheduling: lengths of decode rows are exact on the device alone, the host has
an upper bound; a step's tokens come back through pinned memory and are awaited one step later.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

STAGING_SLOTS = 4
# Random attention averages everything away. Sharper, it looks at few tokens, so that reading a wrong one shows; and
# layers that add little to the embedding leave the draft model a chance.
SHARPNESS, GAIN = 4.0, 0.5


class Sizes(NamedTuple):
    """Shapes of the model and of the load. Tokens, rows, features."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 16
    latent: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128
    ffn: int = 11008
    vocab: int = 32000
    chunk: int = 2048
    prompt: int = 8192
    decode_steps: int = 48
    concurrency: int = 16
    requests: int = 24
    block: int = 16
    splits: int = 16

    @property
    def room(self) -> int:
        """Tokens of a slot: the prompt, all drafts accepted, and two to write ahead."""
        return -(-(self.prompt + 2 * self.decode_steps + 4) // self.block) * self.block


SMOKE = Sizes(2, 64, 16, 16, 16, 16, 16, 96, 97, 32, 80, 6, 3, 5, 16, 2)


@dataclass
class Row:
    """One request's share of a step, as the host knows it."""

    slot: int
    query: int
    computed: int  # exact for a prefill row, an upper bound for a decode row
    decode: bool
    samples: bool  # whether a token comes out of it


@dataclass
class Request:
    slot: int
    admitted: float
    computed: int = 0  # known for certain
    ahead: int = 0  # tokens of steps in flight, every draft accepted
    steps: int = 0  # decode steps asked for
    first_token: float | None = None
    ended: float | None = None
    tokens: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0


@dataclass
class Reader:
    """What the model reads of a metadata object: see `field_builders`."""

    decode: Callable[[Any, Inputs], tuple[Any, Any, Any]]  # (qo_indptr, kv_indptr, page_list)
    context: Callable[[Any, Inputs], Any]  # slots of the cached context of rows that have some, packed, or None

    def read(self, metadata: Any, inputs: Inputs) -> tuple[Any, Any]:
        """(paging of the decode rows or None, slots of context or None)."""
        return self.decode(metadata, inputs) if inputs.decode_rows else None, self.context(metadata, inputs)


class Inputs(NamedTuple):
    """One step on the device and what the host knows of it."""

    rows: list[Row]
    slots: Any  # int32 [R]
    starts: Any  # int32 [R + 1]
    lens: Any  # int32 [R], exact
    places: Any  # int64 [T], where each token lies in the cache and in `ids`
    common: Any  # CommonAttentionMetadata

    @property
    def decode_rows(self) -> int:
        return sum(row.decode for row in self.rows)

    @property
    def decode_tokens(self) -> int:
        return sum(row.query for row in self.rows if row.decode)


class Model:
    """Weights, cache and forward; `decode` is the attention kernel of decode rows."""

    def __init__(self, sizes: Sizes, device: Any, decode: Callable[..., Any], seed: int = 0) -> None:
        self.sizes, self.device, self._decode = sizes, device, decode
        self.dtype = torch.bfloat16 if sizes.hidden >= 1024 else torch.float32
        s, self._generator = sizes, torch.Generator(device=device).manual_seed(seed)
        pages = s.concurrency * s.room
        self.embedding = self._random(s.vocab, s.hidden, gain=s.vocab**0.5)
        self.head = self._random(s.hidden, s.vocab)
        gain = GAIN * s.layers**-0.5
        self.layers = [
            {
                "q": self._random(s.hidden, s.heads * (s.nope + s.rope)),
                "kv": self._random(s.hidden, s.latent + s.rope),
                "key": self._random(s.heads, s.nope, s.latent),
                "value": self._random(s.heads, s.latent, s.value),
                "out": self._random(s.heads * s.value, s.hidden, gain=gain),
                "up": self._random(s.hidden, 2 * s.ffn),
                "down": self._random(s.ffn, s.hidden, gain=gain),
                "cache": torch.zeros(pages, s.latent + s.rope, dtype=self.dtype, device=device),
            }
            for _ in range(s.layers)
        ]
        self.scale = SHARPNESS * (s.nope + s.rope) ** -0.5
        self._attention = prefill_attention(torch.device(device), self.dtype)

    def _random(self, *shape: int, gain: float = 1.0) -> Any:
        drawn = torch.randn(*shape, generator=self._generator, device=self.device, dtype=self.dtype)
        return drawn.mul_(gain * shape[-2] ** -0.5)

    def _mlp(self, x: Any, layer: dict[str, Any]) -> Any:
        gate, up = (_norm(x) @ layer["up"]).chunk(2, dim=-1)
        return x + (F.silu(gate) * up) @ layer["down"]

    def draft(self, tokens: Any) -> Any:
        """The token that a much smaller model expects next: the first layer's MLP alone."""
        return (_norm(self._mlp(self.embedding[tokens], self.layers[0])) @ self.head).argmax(-1)

    def forward(self, tokens: Any, inputs: Inputs, paging: Any, context: Any, wanted: Any) -> Any:
        """The tokens that follow those at `wanted` (int64 indices into the step's tokens); what to attend to as
        `Reader.read` gives it."""
        s, n = self.sizes, inputs.decode_tokens
        x = self.embedding[tokens]
        for layer in self.layers:
            h = _norm(x)
            q = (h @ layer["q"]).view(-1, s.heads, s.nope + s.rope)
            latents = h @ layer["kv"]
            layer["cache"].index_copy_(0, inputs.places, latents)
            parts = []
            if n:
                absorbed = torch.einsum("thn,hnl->thl", q[:n, :, : s.nope], layer["key"])
                folded = torch.cat((absorbed, q[:n, :, s.nope :]), -1).contiguous()
                seen = self._decode(folded, layer["cache"], *paging, inputs, self.scale)
                parts.append(torch.einsum("thl,hlv->thv", seen, layer["value"]))
            if n < len(x):
                parts.extend(self._prefill(q, latents, layer, inputs, context))
            x = x + torch.cat(parts).flatten(1) @ layer["out"]
            x = self._mlp(x, layer)
        return (_norm(x[wanted]) @ self.head).argmax(-1)

    def _prefill(self, q: Any, latents: Any, layer: dict[str, Any], inputs: Inputs, context: Any) -> list[Any]:
        s, token, before, parts = self.sizes, inputs.decode_tokens, 0, []
        cached = None if context is None else layer["cache"][context]
        for row in inputs.rows[inputs.decode_rows :]:
            own = slice(token, token + row.query)
            known = latents[own]
            if row.computed:
                assert cached is not None
                known = torch.cat((cached[before : before + row.computed], known))
                before += row.computed
            nope = torch.einsum("tl,hnl->htn", known[:, : s.latent], layer["key"])
            shared = known[None, :, s.latent :].expand(s.heads, -1, -1)
            value = F.pad(torch.einsum("tl,hlv->htv", known[:, : s.latent], layer["value"]), (0, _padding(s)))
            key = torch.cat((nope, shared), -1)
            out = self._attention(q[own].transpose(0, 1)[None], key[None], value[None], self.scale)
            parts.append(out[0].transpose(0, 1)[..., : s.value])
            token += row.query
        return parts


def _lower_right(q: Any, k: Any, v: Any, scale: float) -> Any:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[-2], k.shape[-2]), scale=scale)


def _masked(q: Any, k: Any, v: Any, scale: float) -> Any:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(k.shape[-2] - q.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def prefill_attention(device: Any, dtype: Any) -> Callable[..., Any]:
    """Causal attention of the last queries over all keys: fused where this device has it, else with a mask."""
    if device.type == "cuda" and torch.version.cuda:
        sample = torch.zeros(1, 2, 32, 192, dtype=dtype, device=device)
        try:
            _lower_right(sample[..., :16, :], sample, sample, 1.0)
        except (RuntimeError, ValueError) as error:
            print(f"prefill attention with a mask, for the fused one failed: {error}")
        else:
            return _lower_right
    return _masked


def _padding(sizes: Sizes) -> int:
    """Columns that make values as wide as keys, as the fused attention kernels want them."""
    return max(0, sizes.nope + sizes.rope - sizes.value)


def _norm(x: Any) -> Any:
    return F.rms_norm(x, x.shape[-1:])


class Staging:
    """Pinned blocks for what a step uploads: one copy each, a block reused after its copy has completed."""

    def __init__(self, device: Any, most: int) -> None:
        self.device = device
        self._blocks = [torch.zeros(most, dtype=torch.int32, pin_memory=True) for _ in range(STAGING_SLOTS)]
        self._events = [torch.cuda.Event() for _ in range(STAGING_SLOTS)]
        self._next = 0

    def upload(self, arrays: list[np.ndarray]) -> list[Any]:
        block, event = self._blocks[self._next], self._events[self._next]
        if not event.query():
            event.synchronize()
        self._next = (self._next + 1) % STAGING_SLOTS
        packed = np.concatenate(arrays).astype(np.int32)
        block.numpy()[: len(packed)] = packed
        there = block[: len(packed)].to(self.device, non_blocking=True)
        event.record()
        cuts = np.cumsum([0, *map(len, arrays)])
        return [there[a:b] for a, b in itertools.pairwise(cuts)]


def kind_of(rows: list[Row]) -> str:
    """decode, causal (a prefill without context) or chunked (with it); a step with several is the last of these."""
    kinds = {"decode" if row.decode else "chunked" if row.computed else "causal" for row in rows}
    return next(name for name in ("chunked", "causal", "decode") if name in kinds)


class StepRecord(NamedTuple):
    kind: str
    build_us: float
    ended: float  # seconds by the device's clock: the host, which a wait delays, would notice an end too late


class Loop:
    """Serves `requests` prompts with one metadata builder. `drafts` tokens a decode row are guessed and verified."""

    def __init__(
        self, model: Model, builder: Any, reader: Reader, drafts: int, make_common: Any, forward: Any = None
    ) -> None:
        self.model, self.builder, self.reader, self.drafts = model, builder, reader, drafts
        self.forward = forward or model.forward  # with the arguments of `Model.forward`
        self._make_common = make_common
        s, device = model.sizes, model.device
        generator = torch.Generator().manual_seed(7)
        prompts = torch.randint(s.vocab, (s.concurrency, s.room), generator=generator)
        self._prompts = prompts.to(device)
        self.ids = self._prompts.clone().flatten()
        self.computed = torch.zeros(s.concurrency, dtype=torch.int32, device=device)
        blocks = s.room // s.block
        table = torch.arange(s.concurrency * blocks, dtype=torch.int32).view(s.concurrency, blocks)
        self._table = table.to(device)
        most = s.chunk + (3 + drafts) * s.concurrency
        self._staging = Staging(device, 4 * most + 64)
        self._pinned = [torch.zeros(3, s.concurrency, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self.around_build: Callable[[str], Any] = contextlib.nullcontext  # called with the kind of the step
        self.records: list[StepRecord] = []

    # ------------------------------------------------------------ scheduling

    def _schedule(self, running: list[Request]) -> list[Row]:
        """Decode rows first, then prompts in order of admission, `chunk` tokens of them in all."""
        s, each = self.model.sizes, 1 + self.drafts
        rows = []
        for request in running:
            if request.computed + request.ahead >= s.prompt and request.steps < s.decode_steps:
                rows.append(Row(request.slot, each, request.computed + request.ahead, True, True))
        budget, prefills = s.chunk, []
        for request in running:
            done = request.computed + request.ahead
            if done < s.prompt and budget:
                query = min(budget, s.prompt - done)
                prefills.append(Row(request.slot, query, done, False, done + query == s.prompt))
                budget -= query
        return rows + sorted(prefills, key=lambda row: row.computed == 0)

    def _inputs(self, rows: list[Row]) -> Inputs:
        query = np.array([row.query for row in rows])
        starts = np.concatenate([[0], np.cumsum(query)])
        slots = np.array([row.slot for row in rows])
        fresh = np.array([not row.decode and row.computed == 0 for row in rows])
        owner = np.repeat(np.arange(len(rows)), query)
        within = np.arange(starts[-1]) - starts[owner]
        slots_d, starts_d, query_d, fresh_d, owner_d, within_d = self._staging.upload(
            [slots, starts, query, fresh, owner, within]
        )
        before = self.computed[slots_d] * (1 - fresh_d)
        lens = (before + query_d).to(torch.int32)
        places = (slots_d[owner_d] * self.model.sizes.room + before[owner_d] + within_d).to(torch.int64)
        self.computed.index_copy_(0, slots_d.to(torch.int64), before.to(torch.int32))
        common = self._make_common(rows, starts, starts_d, lens, self._table[slots_d], places)
        return Inputs(rows, slots_d, starts_d, lens, places, common)

    # -------------------------------------------------------------- one step

    def step(self, rows: list[Row], out: Any, event: Any) -> float:
        """Launch a step; (token, next token, accepted) of each slot will be in `out`. Returns the build's host time."""
        model, s = self.model, self.model.sizes
        inputs = self._inputs(rows)
        with self.around_build(kind_of(rows)):
            began = time.perf_counter()
            metadata = self.builder.build(0, inputs.common)
            build_us = (time.perf_counter() - began) * 1e6
        last = inputs.starts[1:].to(torch.int64) - 1
        nd = inputs.decode_rows
        wanted = torch.cat((last, last[:nd] - 1)) if self.drafts else last
        tokens = self.ids[inputs.places]
        following = self.forward(tokens, inputs, *self.reader.read(metadata, inputs), wanted)
        samples = torch.tensor([row.samples for row in rows])
        every_row_samples = bool(samples.all())
        slots = inputs.slots.to(torch.int64)
        newest = following[: len(rows)]
        accepted = torch.zeros(len(rows), dtype=torch.int64, device=model.device)
        first = newest
        if self.drafts and nd:
            first = torch.cat((following[len(rows) :], newest[nd:]))
            accepted = torch.cat((first[:nd] == tokens[last[:nd]], accepted[nd:].bool())).to(torch.int64)
        token = torch.where(accepted.bool(), newest, first)
        kept = inputs.lens - (1 - accepted.to(torch.int32)) * _decoding(inputs, self.drafts)
        self.computed.index_copy_(0, slots, kept.to(torch.int32))
        where = slots * s.room + kept.to(torch.int64)
        sampled = slice(None) if every_row_samples else slice(0, int(samples.sum()))
        self._write(where[sampled], token[sampled])
        out.copy_(self._by_slot(slots, first, token, accepted), non_blocking=True)
        event.record()
        return build_us

    def _write(self, where: Any, token: Any) -> None:
        self.ids.index_copy_(0, where, token)
        if self.drafts:
            self.ids.index_copy_(0, where + 1, self.model.draft(token))

    def _by_slot(self, slots: Any, *columns: Any) -> Any:
        made = torch.zeros(3, self.model.sizes.concurrency, dtype=torch.int64, device=self.model.device)
        return made.index_copy_(1, slots, torch.stack(columns))

    # ------------------------------------------------------------- the whole

    def run(self, most_steps: int | None = None, requests: int | None = None) -> list[Request]:
        """Serve everything; step N+1 is built and launched before step N's tokens are awaited."""
        s = self.model.sizes
        waiting = deque(range(requests or s.requests))
        running: list[Request] = []
        ended: list[Request] = []
        free = deque(range(s.concurrency))
        flight: deque[tuple[list[Row], int, Any, float]] = deque()
        count = 0
        self._began = torch.cuda.Event(enable_timing=True)
        self._began.record()
        self.ids.copy_(self._prompts.flatten())
        while waiting or running:
            while waiting and free:
                waiting.popleft()
                running.append(Request(free.popleft(), time.perf_counter()))
            rows = self._schedule(running)
            if rows and (most_steps is None or count < most_steps):
                event = torch.cuda.Event(enable_timing=True)
                build_us = self.step(rows, self._pinned[count % 2], event)
                by_slot = {request.slot: request for request in running}
                for row in rows:
                    by_slot[row.slot].ahead += row.query
                    by_slot[row.slot].steps += row.decode
                flight.append((rows, count % 2, event, build_us))
                count += 1
            elif not flight:
                break
            if len(flight) == 2 or not rows or (most_steps is not None and count >= most_steps):
                self._await(*flight.popleft(), running)
            for request in [r for r in running if r.steps == s.decode_steps and not r.ahead]:
                request.ended = time.perf_counter()
                running.remove(request)
                ended.append(request)
                free.append(request.slot)
                self._restore(request.slot)
        return ended

    def _await(self, rows: list[Row], slot: int, event: Any, build_us: float, running: list[Request]) -> None:
        event.synchronize()
        now = time.perf_counter()
        first, token, accepted = self._pinned[slot].tolist()
        by_slot = {request.slot: request for request in running}
        for row in rows:
            request = by_slot[row.slot]
            took = row.query - (self.drafts and row.decode and not accepted[row.slot])
            request.computed += took
            request.ahead -= row.query
            if row.samples:
                request.tokens += [first[row.slot], token[row.slot]] if accepted[row.slot] else [token[row.slot]]
                request.first_token = request.first_token or now
            if row.decode and self.drafts:
                request.drafted += 1
                request.accepted += accepted[row.slot]
        self.records.append(StepRecord(kind_of(rows), build_us, self._began.elapsed_time(event) / 1e3))

    def _restore(self, slot: int) -> None:
        """The next request of this slot finds its prompt unharmed."""
        room = self.model.sizes.room
        self.ids[slot * room : (slot + 1) * room].copy_(self._prompts[slot])


def _decoding(inputs: Inputs, drafts: int) -> Any:
    """1 for rows that verify a draft, else 0, on the device."""
    if not drafts:
        return torch.zeros_like(inputs.lens)
    ones = torch.arange(len(inputs.rows), device=inputs.lens.device) < inputs.decode_rows
    return ones.to(torch.int32)
