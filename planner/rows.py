"""The passes over rows behind one interface: a C extension where it was built, else its NumPy twin.

Arrays are C-contiguous int32, bool or uint8 of one size. What each pass returns is told in `_rows.c`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from . import _rows_twin
from .lengths import BoolArray, Int32Array, UInt8Array

PADDING, DECODE, CAUSAL, EXTEND, CHUNKED = range(5)  # ordered: the largest one present names the batch class
GUESSED, CERTAIN_CHUNK, DISORDERED = 32, 64, 128
HAS_UNKNOWN, FLAG_DIFFERS = 1, 2
MISALIGNED = -1


class RowPasses(Protocol):
    """The six passes."""

    def read_rows(
        self, rows: list[str], scheduled: dict[str, int], ids: list[str] | None, computed: Any, out: Int32Array, /
    ) -> int:
        """Query, sequence and computed lengths of one step into `out[3, rows]`; the sum of queries, -1 or -2 - i."""

    def gather(self, rows: list[str], slots: dict[str, int], table: Int32Array, out: Int32Array, /) -> int:
        """Lengths at admission into `out[3, rows]`; HAS_UNKNOWN, FLAG_DIFFERS."""

    def describe(
        self,
        query: Int32Array,
        computed: Int32Array,
        prefill: Int32Array | None,
        cached: Int32Array | None,
        flag_lens: Int32Array | None,
        flags: BoolArray | None,
        threshold: int,
        codes: UInt8Array,
        regions: UInt8Array,
        /,
    ) -> int:
        """Kind and region of every row; the kinds present, GUESSED, CERTAIN_CHUNK, DISORDERED."""

    def cut_three(self, query: Int32Array, computed: Int32Array, threshold: int, /) -> tuple[int, int, int, int]:
        """First row of extend and of prefill, and the tokens before each."""

    def cut_two(
        self,
        query: Int32Array,
        flags: BoolArray | None,
        threshold: int,
        uniform: bool,
        short_extends: bool,
        padding_cuts: bool,
        /,
    ) -> tuple[int, int]:
        """First row of prefill, and the tokens before it."""

    def spread(self, lengths: Int32Array, rows: int, width: int, out: Int32Array, /) -> None:
        """The row of every token, from `lengths[chunks, rows]` into `out[chunks, width]`; `rows` behind the last."""


IMPLEMENTATIONS: dict[str, RowPasses] = {"python": _rows_twin}
try:
    from . import _rows
except ImportError:  # built where a compiler was found; everything works without
    pass
else:
    IMPLEMENTATIONS["native"] = _rows


def token_to_row(lengths: Int32Array, width: int | None = None) -> Int32Array:
    """The row that each token belongs to, int32: (tokens,) from (rows,), or (chunks, width) from (chunks, rows).

    Behind a chunk's last token: the number of rows. C-contiguous int32 lengths >= 0; one pass over the tokens.
    """
    if width is None:
        width = int(np.add.reduce(lengths, axis=None))
    out = np.empty((*lengths.shape[:-1], width), dtype=np.int32)
    if lengths.size:
        active.spread(lengths, lengths.shape[-1], width, out)
    return out


active: RowPasses = IMPLEMENTATIONS.get("native", _rows_twin)
