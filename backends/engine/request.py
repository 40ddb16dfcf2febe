"""The nouns of the engine: a request, and its share of one step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False, kw_only=True)
class Request:
    """One prompt being continued. `tokens` holds the prompt and everything sampled so far.

    `computed` tokens have their keys and values in `blocks`. `prefill_len` and `cached_len` are as of the latest
    admission: a preempted request prefills its prompt and its output again.
    """

    request_id: int
    tokens: list[int]
    prompt_len: int
    max_tokens: int
    computed: int = 0
    prefill_len: int = 0
    cached_len: int = 0
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # one per full block of `tokens`, extended as they fill
    preemptions: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def finished(self) -> bool:
        return len(self.tokens) - self.prompt_len >= self.max_tokens


@dataclass(frozen=True, eq=False)
class Row:
    """One request's share of a step: the next `query_len` of its tokens are computed."""

    request: Request
    query_len: int

    @property
    def seq_len(self) -> int:
        return self.request.computed + self.query_len

    @property
    def samples(self) -> bool:
        """Whether this step reaches the request's last token, so that a new one is sampled."""
        return self.seq_len == len(self.request.tokens)
