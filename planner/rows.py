"""The passes over rows behind one interface: a C extension where it was built, else its NumPy twin.

Arrays are C-contiguous int32, bool or uint8 of one size. What each pass returns is told in `_rows.c`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from . import _rows_twin
from .lengths import BoolArray, Int32Array, UInt8Array

PADDING, DECODE, CAUSAL, EXTEND, CHUNKED = range(5)  # ordered: the largest one present names the batch class
GUESSED, CERTAIN_CHUNK, DISORDERED, ANY_LONG = 32, 64, 128, 256
HAS_UNKNOWN, FLAG_DIFFERS, REPEATED = 1, 2, 4
MISALIGNED = -1


class RowPasses(Protocol):
    """The passes, each over all rows once."""

    def read_rows(
        self, rows: list[str], scheduled: dict[str, int], ids: list[str] | None, computed: Any, out: Int32Array, /
    ) -> int:
        """Query, sequence and computed lengths of one step into `out[3, rows]`; the sum of queries, -1 or -2 - i."""

    def gather(self, rows: list[str], slots: dict[str, int], table: Int32Array, out: Int32Array, /) -> int:
        """Lengths at admission into `out[3, rows]`; HAS_UNKNOWN, FLAG_DIFFERS, REPEATED."""

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
        """Kind and region of every row; the kinds present and the bits above."""

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

    def unpack(self, starts: Int32Array, seq_lens: Int32Array, out: Int32Array, /) -> int:
        """Query, sequence and computed lengths into `out[3, rows]`; the sum of queries, or -2 - i."""

    def even_chunks(
        self, context: Int32Array, share: int, starts: Int32Array, ends: Int32Array, longest: Int32Array, /
    ) -> None:
        """Contexts cut into chunks of `share` tokens of every row."""

    def spread(self, ends: Int32Array, rows: int, width: int, out: Int32Array, /) -> None:
        """The row of every token, from running sums `ends[chunks, rows + 1]` into `out[chunks, width]`."""


IMPLEMENTATIONS: dict[str, RowPasses] = {"python": _rows_twin}
try:
    from . import _rows
except ImportError:  # built where a compiler was found; everything works without
    pass
else:
    IMPLEMENTATIONS["native"] = _rows


def token_to_row(ends: Int32Array, width: int) -> Int32Array:
    """The row that each token belongs to, int32: (width,) from running sums (rows + 1,), or (chunks, width).

    `ends`: C-contiguous int32, from 0, never falling. Behind a chunk's last token: the number of rows.
    """
    out = np.empty((*ends.shape[:-1], width), dtype=np.int32)
    active.spread(ends, ends.shape[-1] - 1, width, out)
    return out


active: RowPasses = IMPLEMENTATIONS.get("native", _rows_twin)
