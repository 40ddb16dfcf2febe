"""Classification: the kind of every row, the class of the batch, and the order vLLM's V1 runner would give it.

Kinds follow the state of the request, not the kernel that happens to serve it: a fresh 1-token prompt is a causal
prefill although it may ride in a decode segment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .vocabulary import BatchClass, RowKind

if TYPE_CHECKING:
    from .batch import Batch

# Codes are ordered so that the largest one among the rows names the batch class.
KINDS = (RowKind.PADDING, RowKind.DECODE, RowKind.CAUSAL_PREFILL, RowKind.EXTEND, RowKind.CHUNKED_PREFILL)
CLASSES = (
    BatchClass.EMPTY,
    BatchClass.DECODE,
    BatchClass.CAUSAL_PREFILL,
    BatchClass.EXTEND,
    BatchClass.CHUNKED_PREFILL,
)
PADDING, DECODE, CAUSAL, EXTEND, CHUNKED = range(5)

# What is known about a row, as bits; every rule about one row is a look-up by them.
HAS_CONTEXT, LONG, DONE, WHOLE, IS_PADDING = 1, 2, 4, 8, 16


def _kind(bits: int) -> int:
    if bits & IS_PADDING:
        return PADDING
    if not bits & HAS_CONTEXT:
        return CAUSAL
    if bits & DONE:
        return EXTEND if bits & LONG else DECODE
    return EXTEND if bits & WHOLE else CHUNKED


def _region(bits: int) -> int:
    """vLLM's V1 regions: decode, short extend, long rows with context, rows without; padding last."""
    if bits & IS_PADDING:
        return 4
    if not bits & HAS_CONTEXT:
        return 3
    if bits & LONG:
        return 2
    return 0 if bits & DONE else 1


_KIND_OF = np.array([_kind(bits) for bits in range(32)], dtype=np.uint8)
_REGION_OF = np.array([_region(bits) for bits in range(32)], dtype=np.uint8)

_Bits = npt.NDArray[np.uint8]


class Classification:
    """Kinds, class and order of one batch; what is not asked for is not computed."""

    __slots__ = ("_batch", "_bits", "_bytes", "_order", "_rows", "_sorted", "batch_class", "coarse", "codes", "mixed")

    codes: npt.NDArray[np.uint8]  # index into KINDS, one a row
    batch_class: BatchClass
    mixed: bool  # decode rows beside others
    coarse: bool  # extend and chunked prefill could not be told apart for certain

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._bits = bits = _known_bits(batch)
        self.codes = codes = _KIND_OF.take(bits)
        self._bytes = present = codes.tobytes()
        self._rows: list[RowKind] | None = None
        self._order: list[int] | None = None
        self._sorted = False
        has_decode = DECODE in present
        top = (
            CHUNKED
            if CHUNKED in present
            else EXTEND
            if EXTEND in present
            else CAUSAL
            if CAUSAL in present
            else DECODE
            if has_decode
            else PADDING
        )
        self.batch_class = CLASSES[top]
        self.mixed = has_decode and top != DECODE
        self.coarse = top >= EXTEND and _is_coarse(batch, codes)

    @property
    def rows(self) -> list[RowKind]:
        """The kind of every row."""
        if self._rows is None:
            self._rows = [KINDS[code] for code in self._bytes]
        return self._rows

    @property
    def order(self) -> list[int] | None:
        """The stable permutation into vLLM's V1 regions, padding last: row `order[i]` comes `i`-th.

        `None` if the rows are in that order already. Source: vLLM's `reorder_batch_to_split_decodes_and_prefills`.
        """
        if not self._sorted:
            self._order, self._sorted = self._sort(), True
        return self._order

    @property
    def graph_eligible(self) -> bool:
        """Whether every non-padding row is a decode; the shape alone does not tell (a fresh 1-token prompt)."""
        return self.batch_class is BatchClass.DECODE

    def _sort(self) -> list[int] | None:
        regions = _REGION_OF.take(self._flagged_bits())
        if np.count_nonzero(regions[1:] < regions[:-1]) == 0:
            return None
        order: list[int] = regions.argsort(kind="stable").tolist()
        return order

    def _flagged_bits(self) -> _Bits:
        """The bits with DONE as the engine's own flag has it, which after a V1 resume differs from the lengths'."""
        batch = self._batch
        if batch._is_prefilling is None and batch._flag_lens is None:
            return self._bits
        flags = batch.is_prefilling
        if flags is None:
            return self._bits
        bits: _Bits = (self._bits & ~np.uint8(DONE)) | np.where(flags, 0, DONE).astype(np.uint8)
        return bits


def classify(batch: Batch) -> Classification:
    """Classify a batch (computed once a batch). `.rows`, `.batch_class`, `.mixed`, `.order`, `.coarse`."""
    found = batch._classification
    if found is None:
        found = batch._classification = Classification(batch)
    assert isinstance(found, Classification)
    return found


def _known_bits(batch: Batch) -> _Bits:
    query, computed = batch.query_lens, batch.computed_lens
    context = computed.astype(np.bool_)
    bits: _Bits
    done = _prefill_done(batch)
    if done is None:
        bits = context + np.uint8(DONE)
    else:
        bits = done.view(np.uint8) + done.view(np.uint8)
        bits += bits
        bits += context.view(np.uint8)
    if batch.max_query_len > batch.decode_threshold:
        long = batch.longer_than(batch.decode_threshold).view(np.uint8)
        bits += long
        bits += long
    prefill, cached = batch.prefill_lens, batch.cached_lens
    if prefill is not None and cached is not None and done is not None and np.count_nonzero(done) != done.size:
        whole = (batch.seq_lens >= prefill) & (computed == cached) & (prefill >= 0)
        bits += whole.view(np.uint8) * np.uint8(WHOLE)
    if np.count_nonzero(query) != query.size:
        bits[query == 0] |= IS_PADDING
    return bits


def _prefill_done(batch: Batch) -> npt.NDArray[np.bool_] | None:
    """(rows,) bool, `None` where nothing says otherwise. Lengths decide; the flag only where they are unknown."""
    prefill = batch.prefill_lens
    if prefill is None:
        return None if batch._is_prefilling is None else ~batch._is_prefilling
    done: npt.NDArray[np.bool_] = batch.computed_lens >= prefill  # an UNKNOWN of -1 counts as done
    if batch._has_unknown_prefill and batch._is_prefilling is not None:
        done = np.where(prefill < 0, ~batch._is_prefilling, done)
    return done


def _is_coarse(batch: Batch, codes: npt.NDArray[np.uint8]) -> bool:
    prefill, cached = batch.prefill_lens, batch.cached_lens
    if prefill is None:
        return True
    if not batch._has_unknown_prefill and cached is not None and np.count_nonzero(cached < 0) == 0:
        return False
    unknown = prefill < 0
    done = (batch.computed_lens >= prefill) & ~unknown
    guessed = unknown.copy()
    if cached is None:
        guessed |= ~done & (batch.seq_lens >= prefill)
    else:
        guessed |= ~done & (batch.seq_lens >= prefill) & (cached < 0)
    if ((codes == CHUNKED) & ~guessed).any():
        return False
    return bool(((codes >= EXTEND) & guessed).any())
