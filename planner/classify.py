"""Classification: the kind of every row, the class of the batch, and the order vLLM's V1 runner would give it.

Kinds follow the state of the request, not the kernel that happens to serve it: a fresh 1-token prompt is a causal
prefill although it may ride in a decode segment.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from . import rows as passes
from .batch_rows import BatchRows
from .lengths import UInt8Array
from .vocabulary import BatchClass, RowKind

# Indexed by the codes of rows.py.
KINDS = (RowKind.PADDING, RowKind.DECODE, RowKind.CAUSAL_PREFILL, RowKind.EXTEND, RowKind.CHUNKED_PREFILL)
CLASSES = (
    BatchClass.EMPTY,
    BatchClass.DECODE,
    BatchClass.CAUSAL_PREFILL,
    BatchClass.EXTEND,
    BatchClass.CHUNKED_PREFILL,
)


class Classification:
    """Kinds, class and order of one batch. The lists are made when they are asked for."""

    __slots__ = ("_order", "_regions", "_rows", "_summary", "batch_class", "coarse", "codes", "mixed")

    codes: UInt8Array  # index into KINDS, one a row
    batch_class: BatchClass
    mixed: bool  # decode rows beside others
    coarse: bool  # extend and chunked prefill could not be told apart for certain

    def __init__(self, batch: BatchRows) -> None:
        table = np.empty((2, batch.query_lens.size), dtype=np.uint8)
        self.codes, self._regions = table[0], table[1]
        self._summary = summary = passes.active.describe(
            batch.query_lens,
            batch.computed_lens,
            batch.prefill_lens,
            batch.cached_lens,
            batch.flag_lens,
            batch.given_flags,
            batch.decode_threshold,
            self.codes,
            self._regions,
        )
        top = (summary & 31).bit_length() - 1
        self.batch_class = CLASSES[top] if top > 0 else BatchClass.EMPTY
        self.mixed = top > passes.DECODE and summary & 1 << passes.DECODE != 0
        self.coarse = summary & (passes.GUESSED | passes.CERTAIN_CHUNK) == passes.GUESSED
        self._rows: list[RowKind] | None = None
        self._order: list[int] | None = None

    @property
    def rows(self) -> list[RowKind]:
        """The kind of every row."""
        if self._rows is None:
            self._rows = [KINDS[code] for code in self.codes.tolist()]
        return self._rows

    @property
    def order(self) -> list[int] | None:
        """The stable permutation into vLLM's V1 regions, padding last: row `order[i]` comes `i`-th.

        Regions: decode, short extend, longer rows with context, rows without. `None` if the rows are in that order
        already. Source: vLLM 0.32, `reorder_batch_to_split_decodes_and_prefills`.
        """
        if self._order is None and self._summary & passes.DISORDERED:
            self._order = self._regions.argsort(kind="stable").tolist()
        return self._order

    @property
    def has_long_rows(self) -> bool:
        """Whether a query is longer than the batch's decode threshold."""
        return self._summary & passes.ANY_LONG != 0

    @property
    def padded(self) -> bool:
        """Whether there are padding rows."""
        return self._summary & 1 << passes.PADDING != 0

    @property
    def graph_eligible(self) -> bool:
        """Whether every non-padding row is a decode; the shape alone does not tell (a fresh 1-token prompt)."""
        return self.batch_class is BatchClass.DECODE


class ClassifiedRows(BatchRows, Protocol):
    """Rows that keep what was found of them."""

    classification: Classification | None


def classify(batch: ClassifiedRows) -> Classification:
    """Classify a batch (once; later calls return the same object): `.rows`, `.batch_class`, `.mixed`, `.order`."""
    found = batch.classification
    if found is None:
        found = batch.classification = Classification(batch)
    return found
