"""The engine loop: schedule, classify, build, forward, sample, fetch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ...planner import BadInput, Batch, Classification, Limits, classify
from ...profiler.session import Profiler
from .attention import KVCache
from .blocks import BlockPool
from .builders import make_builder
from .model import ModelConfig, TinyTransformer
from .request import Request, Row
from .scheduler import Scheduler

Tensor = Any


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine. `token_budget`: tokens a step at most; a longer prompt is prefilled in chunks."""

    builder: str = "planned"  # or unplanned
    num_blocks: int = 64
    block_size: int = 8
    token_budget: int = 64
    max_num_seqs: int = 8
    model: ModelConfig = field(default_factory=ModelConfig)
    seed: int = 0


class Engine:
    """Greedy continuous-batching engine on one device.

    `profiler`: where steps and phases are marked; recording or not, the engine does the same work.
    """

    def __init__(
        self, config: EngineConfig, *, device: Any, dtype: Any = torch.float32, profiler: Profiler | None = None
    ) -> None:
        model = config.model
        self.config = config
        self.profiler = profiler
        self.device = device
        self.model = TinyTransformer(model, device=device, dtype=dtype, seed=config.seed)
        self.cache = KVCache(
            model.num_layers,
            config.num_blocks,
            config.block_size,
            model.num_kv_heads,
            model.head_size,
            device=device,
            dtype=dtype,
        )
        self.scheduler = Scheduler(
            BlockPool(config.num_blocks, config.block_size),
            token_budget=config.token_budget,
            max_num_seqs=config.max_num_seqs,
        )
        limits = Limits(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.token_budget,
        )
        self.builder = make_builder(config.builder, device, limits, -(-model.max_model_len // config.block_size))
        self.last_classification: Classification | None = None
        self._fetch = TokenFetch(device, config.max_num_seqs)
        self._next_id = 0

    def add_request(self, prompt: Sequence[int], max_tokens: int) -> Request:
        """Queue a prompt of token ids. Raises `BadInput` for what can never be served."""
        limit, vocab = self.config.model.max_model_len, self.config.model.vocab_size
        if not prompt or max_tokens < 1:
            raise BadInput(f"prompt, max_tokens: expected >= 1 token each, got {len(prompt)}, {max_tokens}")
        if len(prompt) + max_tokens > limit:
            raise BadInput(f"prompt + max_tokens: expected <= {limit}, got {len(prompt) + max_tokens}")
        for index, token in enumerate(prompt):
            if not 0 <= token < vocab:
                raise BadInput(f"prompt[{index}]: expected 0 to {vocab - 1}, got {token}")
        request = Request(request_id=self._next_id, tokens=list(prompt), prompt_len=len(prompt), max_tokens=max_tokens)
        self.scheduler.add(request)
        self._next_id += 1
        return request

    def step(self) -> list[Request] | None:
        """Run one step. Returns the requests that finished in it; None if there was nothing to do."""
        rows = self.scheduler.schedule()
        if not rows:
            return None
        rows, batch = _in_order(rows)
        self.last_classification = found = classify(batch)
        with self._step(batch, found):
            with self._phase("build"):
                metadata = self.builder.build(rows, batch)
            with self._phase("forward"):
                logits = self.model.forward(metadata, self.cache)
            with self._phase("sample"):
                sampled = logits.argmax(dim=-1)
            with self._phase("output"):
                tokens = self._fetch(sampled)
        return self.scheduler.commit(rows, tokens)

    def run(self) -> Iterator[Request]:
        """Step until nothing is left to do; requests as they finish."""
        while (finished := self.step()) is not None:
            yield from finished

    @contextmanager
    def _step(self, batch: Batch, found: Classification) -> Iterator[None]:
        if self.profiler is None:
            yield
            return
        about = {"mixed": found.mixed, "coarse": found.coarse, "num_reqs": len(batch), "num_tokens": batch.num_tokens}
        with self.profiler.step(found.batch_class.value, **about):
            yield

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.profiler is None else self.profiler.phase(name)


class TokenFetch:
    """Brings sampled tokens to the host: the one wait a step cannot avoid, as one copy and one event."""

    def __init__(self, device: Any, capacity: int) -> None:
        self._on_cpu = torch.device(device).type == "cpu"
        self._host = torch.empty(capacity, dtype=torch.int64, pin_memory=not self._on_cpu)
        self._copied = None if self._on_cpu else torch.cuda.Event()

    def __call__(self, sampled: Tensor) -> list[int]:
        count = len(sampled)
        if count == 0:
            return []
        host = self._host[:count]
        host.copy_(sampled, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
            self._copied.synchronize()
        tokens: list[int] = host.tolist()
        return tokens


def _in_order(rows: list[Row]) -> tuple[list[Row], Batch]:
    """The rows sorted into the regions that attention kernels expect, and their batch."""
    requests = [row.request for row in rows]
    batch = Batch.from_lengths(
        [row.query_len for row in rows],
        [row.seq_len for row in rows],
        prefill_lens=[request.prefill_len for request in requests],
        cached_lens=[request.cached_len for request in requests],
    )
    order = classify(batch).order
    if order is None:
        return rows, batch
    return [rows[index] for index in order], batch.take(order)
