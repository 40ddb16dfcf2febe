"""The batch of one step: query and sequence lengths per row, and what the scheduler knows about each request."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import numpy as np

from .attention_metadata import read_metadata
from .classify import Classification
from .errors import BadInput
from .lengths import (
    INT32_MAX,
    BoolArray,
    Int32Array,
    Lengths,
    read_count,
    read_flags,
    read_lengths,
)
from .plan import MetadataPlan
from .scheduler_output import read_step
from .segments import QueryLens, Segment, Split, cut

_ARRAYS = ("query_lens", "seq_lens", "computed_lens", "prefill_lens", "cached_lens", "flag_lens", "seq_lens_lower")


class Batch:
    """One step's rows, validated once and immutable. Make it with one of the `from_` constructors.

    A row is one request's share of the step: `query_len` tokens to compute after `computed = seq_len - query_len`
    tokens of context. Arrays are int32 (flags bool), one element a row, read-only. `None` stands for "not known".
    """

    __slots__ = (
        "_is_prefilling",
        "_longest_seq",
        "_max_query_len",
        "_max_seq_len",
        "_query_start_loc",
        "_siblings",
        "cached_lens",
        "causal",
        "classification",
        "computed_lens",
        "decode_threshold",
        "flag_lens",
        "given_flags",
        "num_tokens",
        "plans",
        "prefill_lens",
        "query_lens",
        "req_ids",
        "seq_lens",
        "seq_lens_lower",
        "short_extends_as_decodes",
    )

    query_lens: Int32Array
    seq_lens: Int32Array  # upper bounds; exact where seq_lens_lower equals them or is None
    computed_lens: Int32Array
    prefill_lens: Int32Array | None
    cached_lens: Int32Array | None
    seq_lens_lower: Int32Array | None
    decode_threshold: int
    short_extends_as_decodes: bool
    num_tokens: int  # launched tokens, graph padding included
    req_ids: Sequence[str] | None
    causal: bool | None  # None: differs by row, known on the device only
    given_flags: BoolArray | None  # the engine's own is_prefilling, where it came with the batch
    flag_lens: Int32Array | None  # else what that flag compares against, where prefill_lens is something else
    classification: Classification | None  # filled by classify()
    plans: list[tuple[Any, bool, MetadataPlan]]  # filled by planners: one plan for all builders with equal settings

    def __init__(
        self,
        query_lens: Int32Array,
        seq_lens: Int32Array,
        computed_lens: Int32Array,
        *,
        decode_threshold: int = 1,
        short_extends_as_decodes: bool = True,
        num_tokens: int,
        prefill_lens: Int32Array | None = None,
        cached_lens: Int32Array | None = None,
        is_prefilling: BoolArray | None = None,
        flag_lens: Int32Array | None = None,
        seq_lens_lower: Int32Array | None = None,
        max_seq_len: int | None = None,
        req_ids: Sequence[str] | None = None,
        causal: bool | None = True,
    ) -> None:
        """Take arrays that are already valid; callers outside this package want `from_lengths`.

        Arrays are C-contiguous. `flag_lens`: the length that the engine's own `is_prefilling` compares against (V1: the
        prompt's), used when `is_prefilling` itself was not given and `prefill_lens` is something else. `max_seq_len`:
        an engine's declared bound, at least the largest length.
        """
        self.query_lens = query_lens
        self.seq_lens = seq_lens
        self.computed_lens = computed_lens
        self.decode_threshold = decode_threshold
        self.short_extends_as_decodes = short_extends_as_decodes
        self.num_tokens = num_tokens
        self.prefill_lens = prefill_lens
        self.cached_lens = cached_lens
        self.seq_lens_lower = seq_lens_lower
        self.req_ids = req_ids
        self.causal = causal
        self.given_flags = self._is_prefilling = is_prefilling
        self.flag_lens = flag_lens
        self.classification = None
        self.plans = []
        self._max_seq_len = max_seq_len
        self._longest_seq: int | None = None
        self._max_query_len: int | None = None
        self._query_start_loc: Int32Array | None = None
        self._siblings: dict[tuple[str, int, int], Batch] | None = None
        if not short_extends_as_decodes and is_prefilling is None and flag_lens is None and prefill_lens is None:
            raise BadInput(
                "short_extends_as_decodes: false needs prefill_lens or is_prefilling, which tell a short extend "
                "from a decode; got neither"
            )

    @classmethod
    def from_lengths(
        cls,
        query_lens: Lengths,
        seq_lens: Lengths,
        *,
        prefill_lens: Lengths | None = None,
        cached_lens: Lengths | None = None,
        is_prefilling: Sequence[bool] | BoolArray | None = None,
        seq_lens_lower: Lengths | None = None,
        decode_threshold: int = 1,
        short_extends_as_decodes: bool = True,
        num_tokens: int | None = None,
        causal: bool = True,
    ) -> Batch:
        """Make a batch from plain lengths.

        Lists or 1-D integer arrays, one element a row. `prefill_lens`: tokens to prefill as of the latest admission
        (prompt, plus regenerated output after a preemption); `cached_lens`: tokens already computed at that admission;
        in both a list may hold `None` for a row that nobody knows. `seq_lens_lower`: lower bounds where `seq_lens` are
        only upper bounds. `decode_threshold`: 1 + speculative tokens. `num_tokens`: launched tokens with graph padding,
        default the sum of `query_lens`. Raises `BadInput` naming the element.
        """
        query = read_lengths("query_lens", query_lens)
        rows = query.size
        seq = read_lengths("seq_lens", seq_lens, rows)
        if (seq < query).any():
            index = int((seq < query).argmax())
            raise BadInput(f"seq_lens[{index}]: expected >= query_lens[{index}] = {query[index]}, got {seq[index]}")
        prefill = (
            None if prefill_lens is None else read_lengths("prefill_lens", prefill_lens, rows, unknown_allowed=True)
        )
        cached = None if cached_lens is None else read_lengths("cached_lens", cached_lens, rows, unknown_allowed=True)
        if not isinstance(short_extends_as_decodes, bool | np.bool_):
            raise BadInput(f"short_extends_as_decodes: expected true or false, got {short_extends_as_decodes!r}")
        return cls(
            query,
            seq,
            seq - query,
            prefill_lens=prefill,
            cached_lens=cached,
            is_prefilling=None if is_prefilling is None else read_flags("is_prefilling", is_prefilling, rows),
            seq_lens_lower=_read_lower_bounds(seq_lens_lower, query, seq),
            decode_threshold=read_count("decode_threshold", decode_threshold, 1),
            short_extends_as_decodes=bool(short_extends_as_decodes),
            num_tokens=_read_num_tokens(num_tokens, query),
            causal=causal,
        )

    @classmethod
    def from_vllm_scheduler(
        cls,
        scheduler_output: Any,
        prefill_lens_by_request: MutableMapping[str, int] | Any,
        *,
        req_ids: Sequence[str] | None = None,
        decode_threshold: int = 1,
        short_extends_as_decodes: bool = True,
        num_tokens: int | None = None,
    ) -> Batch:
        """Make a batch from a vLLM `SchedulerOutput` (model runner V1 or V2), and bring the table up to date.

        `prefill_lens_by_request`: one `PrefillTable` kept for the life of the engine and shown *every* step, also those
        that schedule nothing (cached rows carry no prompt length). A plain dict works too, but forgets prefix hits.
        `req_ids`: the runner's row order; default the order of `num_scheduled_tokens`.
        """
        return read_step(
            cls,
            scheduler_output,
            prefill_lens_by_request,
            req_ids=req_ids,
            decode_threshold=decode_threshold,
            short_extends_as_decodes=short_extends_as_decodes,
            num_tokens=num_tokens,
        )

    @classmethod
    def from_vllm_metadata(
        cls,
        common_attn_metadata: Any,
        *,
        decode_threshold: int = 1,
        short_extends_as_decodes: bool = True,
        drafts_in_flight: int | None = None,
    ) -> Batch:
        """Make a batch from a vLLM `CommonAttentionMetadata`, reading its host members only (never `seq_lens`).

        Extend and chunked prefill cannot be told apart for certain, so such classes are `coarse`. `drafts_in_flight`:
        draft tokens a decode row may have had rejected since `seq_lens_cpu_upper_bound` was written; default the most
        that asynchronous scheduling allows (`decode_threshold - 1`), 0 where scheduling is synchronous.
        """
        return read_metadata(
            cls,
            common_attn_metadata,
            decode_threshold=decode_threshold,
            short_extends_as_decodes=short_extends_as_decodes,
            drafts_in_flight=drafts_in_flight,
        )

    def __len__(self) -> int:
        return int(self.query_lens.size)

    def __repr__(self) -> str:
        return f"Batch(rows={len(self)}, num_tokens={self.num_tokens}, max_query_len={self.max_query_len})"

    @property
    def max_query_len(self) -> int:
        """Longest query in tokens; 0 without rows."""
        if self._max_query_len is None:
            self._max_query_len = int(np.maximum.reduce(self.query_lens)) if self.query_lens.size else 0
        return self._max_query_len

    @property
    def max_seq_len(self) -> int:
        """Upper bound of all sequence lengths in tokens: the engine's declared one, else the largest length."""
        return self.longest_seq if self._max_seq_len is None else self._max_seq_len

    @property
    def longest_seq(self) -> int:
        """The largest of `seq_lens`, in tokens; 0 without rows."""
        if self._longest_seq is None:
            self._longest_seq = int(np.maximum.reduce(self.seq_lens)) if self.seq_lens.size else 0
        return self._longest_seq

    @property
    def query_start_loc(self) -> Int32Array:
        """(rows + 1,) int32: first token of each row, then the sum."""
        if self._query_start_loc is None:
            starts = np.zeros(self.query_lens.size + 1, dtype=np.int32)
            np.add.accumulate(self.query_lens, out=starts[1:])
            starts.setflags(write=False)
            self._query_start_loc = starts
        return self._query_start_loc

    @property
    def is_prefilling(self) -> BoolArray | None:
        """(rows,) bool: vLLM's own flag, as given, else as the lengths tell it (padding rows: False).

        Where no length is known: whether nothing was computed.
        """
        if self._is_prefilling is None and (target := self._flag_target) is not None:
            below = self.computed_lens < np.maximum(target, target < 0)
            self._is_prefilling = below & self.query_lens.astype(np.bool_)
        return self._is_prefilling

    @property
    def _flag_target(self) -> Int32Array | None:
        return self.prefill_lens if self.flag_lens is None else self.flag_lens

    def row_without_flag(self, decode_threshold: int) -> int | None:
        """The first row that may be a decode or a short extend: neither its flag nor a length to compare is known."""
        target = self._flag_target
        if self.given_flags is not None or target is None or int(target.min(initial=0)) >= 0:
            return None
        open_end = (target < 0) & (self.computed_lens > 0) & (self.query_lens > 0)
        open_end &= self.query_lens <= decode_threshold
        return int(open_end.argmax()) if open_end.any() else None

    @property
    def inexact(self) -> BoolArray | None:
        """(rows,) bool: rows whose sequence length is known by bounds only; `None` where all are exact."""
        if self.seq_lens_lower is None:
            return None
        rows: BoolArray = self.seq_lens_lower != self.seq_lens
        return rows if rows.any() else None

    def segments(
        self,
        split: Split = "three",
        query_lens: QueryLens = "varlen",
        *,
        decode_threshold: int | None = None,
        short_extends_as_decodes: bool | None = None,
        padding_cuts: bool = False,
    ) -> list[Segment]:
        """Cut the rows into the non-empty positional ranges that vLLM's own functions cut, in order.

        `split`: "three" (decode, extend, prefill), "two" (decode, prefill) or "none" (one range, named "all").
        `query_lens`: what the decode kernel takes ("single", "uniform", "varlen"); only "two" looks at it.
        Thresholds default to the batch's. `padding_cuts`: vLLM 0.26 with short extends off also cuts at zero rows.
        """
        return cut(
            self,
            split,
            query_lens,
            self.decode_threshold if decode_threshold is None else decode_threshold,
            self.short_extends_as_decodes if short_extends_as_decodes is None else short_extends_as_decodes,
            padding_cuts,
        )

    def take(self, order: Sequence[int] | Int32Array) -> Batch:
        """The same rows in another order: row `i` of the result is row `order[i]` of this batch."""
        index = np.asarray(order, dtype=np.intp)
        if index.shape != self.query_lens.shape or not np.array_equal(np.sort(index), np.arange(index.size)):
            raise BadInput(f"order: expected each of 0 to {len(self) - 1} once, got {list(order)[:8]}")
        return self._with_rows(index)

    def at_threshold(self, decode_threshold: int) -> Batch:
        """The same rows as a builder with another threshold sees them (a draft model's beside the target's)."""
        if decode_threshold == self.decode_threshold:
            return self
        threshold = read_count("decode_threshold", decode_threshold, 1)
        return self._sibling(
            ("threshold", threshold, 0), lambda: self._with_rows(slice(None), decode_threshold=threshold)
        )

    def micro_batch(self, start: int, stop: int) -> Batch:
        """The part of a step that launches the tokens `start` to `stop`; a request cut by an edge gives a part of it.

        Its first part keeps a shorter sequence, its second part has the first as context. Source: vLLM 0.32,
        `split_attn_metadata`. Rows without tokens go with the last part.
        """
        if not 0 <= start < stop <= self.num_tokens:
            raise BadInput(
                f"micro_batch: expected 0 <= start < stop <= {self.num_tokens} tokens, got {start} and {stop}"
            )
        return self._sibling(("tokens", start, stop), lambda: self._cut(start, stop))

    def _sibling(self, key: tuple[str, int, int], make: Callable[[], Batch]) -> Batch:
        if self._siblings is None:
            self._siblings = {}
        found = self._siblings.get(key)
        if found is None:
            found = self._siblings[key] = make()
        return found

    def _cut(self, start: int, stop: int) -> Batch:
        starts = self.query_start_loc
        first = int(np.searchsorted(starts[1:], start, side="right"))
        last = len(self) if stop >= starts[-1] else int(np.searchsorted(starts[:-1], stop, side="left"))
        query, seq = self.query_lens[first:last].copy(), self.seq_lens[first:last].copy()
        lower = None if self.seq_lens_lower is None else self.seq_lens_lower[first:last].copy()
        if query.size:
            query[0] -= max(0, start - int(starts[first]))
            beyond = max(0, int(starts[last]) - stop)
            query[-1] -= beyond
            seq[-1] -= beyond
            if lower is not None:
                lower[-1] -= beyond
        return self._with_rows(
            slice(first, last),
            query_lens=query,
            seq_lens=seq,
            computed_lens=seq - query,
            seq_lens_lower=lower,
            num_tokens=stop - start,
            max_seq_len=self.max_seq_len,
        )

    def _with_rows(self, index: Any, **changes: Any) -> Batch:
        """These rows of every array, other values kept or replaced."""

        def picked(array: Any) -> Any:
            return None if array is None else array[index]

        arrays = (
            "query_lens",
            "seq_lens",
            "computed_lens",
            "prefill_lens",
            "cached_lens",
            "flag_lens",
            "seq_lens_lower",
        )
        parts = {name: picked(getattr(self, name)) for name in arrays if name not in changes}
        ids = self.req_ids
        if ids is not None:
            ids = ids[index] if isinstance(index, slice) else [ids[i] for i in index]
        values = {
            "is_prefilling": picked(self.given_flags),
            "decode_threshold": self.decode_threshold,
            "short_extends_as_decodes": self.short_extends_as_decodes,
            "num_tokens": self.num_tokens,
            "max_seq_len": self._max_seq_len,
            "req_ids": ids,
            "causal": self.causal,
        }
        return Batch(**(parts | values | changes))


def _read_lower_bounds(lower: Lengths | None, query: Int32Array, seq: Int32Array) -> Int32Array | None:
    if lower is None:
        return None
    array = read_lengths("seq_lens_lower", lower, query.size)
    for wrong, relation, other, name in (
        (array > seq, "<=", seq, "seq_lens"),
        (array < query, ">=", query, "query_lens"),
    ):
        if wrong.any():
            i = int(wrong.argmax())
            raise BadInput(f"seq_lens_lower[{i}]: expected {relation} {name}[{i}] = {other[i]}, got {array[i]}")
    return array


def _read_num_tokens(num_tokens: int | None, query: Int32Array) -> int:
    total = int(query.sum(dtype=np.int64))
    if total > INT32_MAX:
        raise BadInput(f"query_lens: expected a sum <= {INT32_MAX}, got {total}")
    if num_tokens is None:
        return total
    count = read_count("num_tokens", num_tokens, 0)
    if count < total:
        raise BadInput(f"num_tokens: expected >= the sum of query_lens = {total}, got {count}")
    return count
