"""Continuous batching: which requests compute how many tokens in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from ...planner import BadInput
from .blocks import BlockPool, hash_block
from .request import Request, Row


class Scheduler:
    """First come, first served, within a token budget a step.

    Running requests go first, then waiting ones are admitted, each as far as the budget reaches (chunked prefill).
    When blocks run out the request admitted last is preempted: its blocks are freed and it prefills again later.
    """

    def __init__(self, pool: BlockPool, *, token_budget: int, max_num_seqs: int) -> None:
        if token_budget < 1 or max_num_seqs < 1:
            raise BadInput(f"token_budget, max_num_seqs: expected >= 1, got {token_budget}, {max_num_seqs}")
        self.pool = pool
        self.token_budget = token_budget
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises `BadInput` if it could never fit the KV cache."""
        longest = request.prompt_len + request.max_tokens
        capacity = self.pool.num_blocks * self.pool.block_size
        if longest > capacity:
            raise BadInput(f"request {request.request_id}: expected prompt + max_tokens <= {capacity}, got {longest}")
        self.waiting.append(request)

    def schedule(self) -> list[Row]:
        """The rows of the next step, in order of admission; empty when nothing is left to do."""
        preempted_before = self.num_preemptions
        rows = list(self._continue_running())
        if self.num_preemptions == preempted_before:
            rows += self._admit(self.token_budget - sum(row.query_len for row in rows))
        return rows

    def commit(self, rows: Sequence[Row], sampled: Sequence[int]) -> list[Request]:
        """Record a step that has run: `sampled` has one token for each row that samples. Returns who finished."""
        tokens = iter(sampled)
        finished: list[Request] = []
        for row in rows:
            request = row.request
            samples = row.samples
            first_unnamed = request.computed // self.pool.block_size
            request.computed = row.seq_len
            self._name_full_blocks(request, first_unnamed)
            if samples:
                request.tokens.append(next(tokens))
            if request.finished:
                self.running.remove(request)
                self._release(request)
                finished.append(request)
        return finished

    # -------------------------------------------------------------- admission

    def _continue_running(self) -> Iterator[Row]:
        budget = self.token_budget
        for request in list(self.running):
            if budget == 0:
                return
            query_len = min(len(request.tokens) - request.computed, budget)
            while request in self.running and not self._grow(request, query_len):
                self._preempt(self.running[-1])
            if request not in self.running:  # it was the last one itself
                return
            budget -= query_len
            yield Row(request, query_len)

    def _admit(self, budget: int) -> Iterator[Row]:
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            self._hash_full_blocks(request)
            # The last token is computed even if its block is known: its logits are needed.
            reusable = (len(request.tokens) - 1) // self.pool.block_size
            request.blocks = self.pool.share(request.block_hashes[:reusable])
            request.computed = request.cached_len = len(request.blocks) * self.pool.block_size
            query_len = min(len(request.tokens) - request.computed, budget)
            if not self._grow(request, query_len):
                self._release(request)
                return
            self.waiting.popleft()
            self.running.append(request)
            request.prefill_len = len(request.tokens)
            self.num_cached_tokens += request.cached_len
            budget -= query_len
            yield Row(request, query_len)

    def _grow(self, request: Request, query_len: int) -> bool:
        needed = -(-(request.computed + query_len) // self.pool.block_size) - len(request.blocks)
        blocks = self.pool.allocate(max(needed, 0))
        if blocks is None:
            return False
        request.blocks += blocks
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        self.waiting.appendleft(request)
        request.preemptions += 1
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.computed = 0

    # ------------------------------------------------------------ prefix cache

    def _hash_full_blocks(self, request: Request) -> None:
        size = self.pool.block_size
        hashes = request.block_hashes
        for index in range(len(hashes), len(request.tokens) // size):
            parent = hashes[-1] if hashes else b""
            hashes.append(hash_block(parent, request.tokens[index * size : (index + 1) * size]))

    def _name_full_blocks(self, request: Request, first: int) -> None:
        self._hash_full_blocks(request)
        for index in range(first, request.computed // self.pool.block_size):
            self.pool.name(request.blocks[index], request.block_hashes[index])
