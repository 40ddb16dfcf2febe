"""How long our MLA decode kernels take, and so which one, from timings of a real device: persistent or fixed split.

The data, `mla_decode_times.json`, are of ONE NVIDIA H200 (the file names the run): 72 shapes, and on each the choice is
within 3 % of the best kernel. Lengths that nothing was fitted to are another matter: of 171 drawn at random it was on
124, and on the worst 42 % off; batches between the powers of two that were timed fill their last wave otherwise. Every
other device is a guess by the number of its compute units until somebody times the kernels there:
`bench/gpu/mla_h200.py`, then `bench/gpu/fit_times.py`; `bench/gpu/route_check.py` draws lengths of its own. Times are
of the kernels of one layer; scheduling, once a step, is not in them.

A time is a sum over what the lengths cause, with coefficients in microseconds fitted to the timings:
- fixed split: the latest end of a request's last part, whose start waits for the parts before it, or, where that is
  more, all blocks over the memory's rate; blocks, programs and the rows of the pool that are merged.
- persistent: KV blocks of a workgroup with the overhead of its pieces, one fresh workgroup's share, the rows of the
  pool, and the longest chain of pieces that one program merges.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..errors import BadInput
from ..planner.lengths import Int32Array

DATA = Path(__file__).with_suffix(".json")
SPLITS = (1, 2, 4, 8, 16, 32, 64)  # those that were timed
MOST_PACKED_ROWS = 64  # of a block, as `triton_mla.DecodeShape`
GRANULARITY, OVERHEAD, MERGED_AT_ONCE = 16, 16, 8  # of a schedule (tokens, blocks), of `reduce_partials` (pieces)
TIE = 0.01  # splits whose times are closer than this are a tie, and fewer need less memory


class Coefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of blocks of one size, fitted to one device's timings. Times in microseconds."""

    block_n: int  # KV tokens of a block
    programs_each: int  # fixed-split programs that a compute unit runs at once
    exponent: float  # of the norm that joins the two limits: large, the larger counts alone
    rate: float  # all blocks over all units, relative to a block of the longest chain
    fixed: dict[str, float]  # launch, chain, pool_rows, blocks, programs
    persistent: dict[str, float]  # launch, workgroup, pool_rows, chain, fresh


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device's data, by packed rows (query rows times heads) of a block."""

    device: str
    source: str
    num_cu: int
    blocks: dict[int, Coefficients]

    def of(self, packed_rows: int) -> Coefficients:
        """Of the block size that serves so many packed rows; the next larger one where this one was not timed."""
        size = block_rows(packed_rows)
        return self.blocks[min((known for known in self.blocks if known >= size), default=max(self.blocks))]


@lru_cache(maxsize=1)
def measured() -> Times:
    """The data of this package."""
    return msgspec.json.decode(DATA.read_bytes(), type=Times, strict=False)


def block_rows(packed_rows: int) -> int:
    """Packed rows of a block: a power of two, 16 to 64."""
    return min(MOST_PACKED_ROWS, max(16, 1 << (packed_rows - 1).bit_length()))


class Shape(NamedTuple):
    """What a decode launch does: `kv_lens` of requests with `query_len` rows of `heads` heads each."""

    kv_lens: Int32Array
    query_len: int
    heads: int
    num_cu: int
    copies: int = 1  # folded requests and tiles a request: each reads its KV again

    @property
    def num_blocks(self) -> int:
        """Programs that share one request's rows."""
        return -(-self.query_len * self.heads // MOST_PACKED_ROWS)

    @property
    def workgroups(self) -> int:
        """Workgroups of a schedule: one program of each work item a compute unit, `num_blocks` programs an item."""
        return max(1, self.num_cu // self.num_blocks)

    @property
    def rows(self) -> int:
        return len(self.kv_lens) * self.query_len * self.heads


class Choice(NamedTuple):
    """A kernel and the time expected of it. `splits` 0: the persistent one."""

    splits: int
    us: float

    @property
    def persistent(self) -> bool:
        return self.splits == 0


def fixed_us(shape: Shape, splits: int, times: Times | None = None) -> float:
    """Microseconds of a layer with `splits` equal parts a request. `shape.copies` is 1."""
    c = (times or measured()).of(shape.query_len * shape.heads)
    kept = _with_kv(shape)
    piece = _ceil(_ceil(kept, splits), c.block_n)
    blocks = _ceil(kept, c.block_n)
    counts = _ceil(blocks, piece) * shape.num_blocks
    programs, total = int(counts.sum()), int(blocks.sum()) * shape.num_blocks
    slots = c.programs_each * shape.num_cu
    # Parts start in the order of requests. The last one of a request starts when what is before it has been shared out.
    before = np.cumsum(blocks * shape.num_blocks) - piece
    starts = np.where(np.cumsum(counts) > slots, before / slots, 0.0)
    chain = float((starts + piece).max(initial=0.0))
    joined = (chain**c.exponent + (c.rate * total / shape.num_cu) ** c.exponent) ** (1 / c.exponent)
    figures = {"launch": 1.0, "chain": joined, "pool_rows": splits * shape.rows, "blocks": total, "programs": programs}
    return _sum(c.fixed, figures)


def persistent_us(shape: Shape, times: Times | None = None) -> float:
    """Microseconds of a layer that follows a schedule."""
    c = (times or measured()).of(shape.query_len * shape.heads)
    kept = np.repeat(_with_kv(shape), shape.copies)
    units = _ceil(kept, GRANULARITY)
    share = -(-int((units + OVERHEAD).sum()) // shape.workgroups)  # a workgroup's, the overhead of its pieces included
    pieces = _ceil(units, max(share, 1))
    per_block = c.block_n // GRANULARITY
    figures = {
        "launch": 1.0,
        "workgroup": float((units + OVERHEAD).sum()) / shape.workgroups / per_block,
        "pool_rows": int(pieces[pieces > 1].sum()) * shape.query_len * shape.heads,
        "chain": -(-int(pieces.max(initial=0)) // MERGED_AT_ONCE),
        "fresh": min(share, int(units.max(initial=0))) / per_block,
    }
    return _sum(c.persistent, figures)


def choose(shape: Shape, scheduled: Shape | None = None, times: Times | None = None) -> Choice:
    """The kernel that should take least time on this shape. Lengths may be upper bounds: a choice is never wrong.

    `scheduled`: the same launch as a schedule divides it, where that folds heads or tiles queries. Raises `BadInput`
    for a query length or head count below 1.
    """
    for name in ("query_len", "heads", "num_cu", "copies"):
        if getattr(shape, name) < 1:
            raise BadInput(f"{name}: expected >= 1, got {getattr(shape, name)}")
    fixed = [Choice(splits, fixed_us(shape, splits, times)) for splits in SPLITS]
    least = min(choice.us for choice in fixed)
    best = next(choice for choice in fixed if choice.us <= least * (1 + TIE))
    persistent = Choice(0, persistent_us(shape if scheduled is None else scheduled, times))
    return persistent if persistent.us < least else best


def _with_kv(shape: Shape) -> Int32Array:
    lens: Int32Array = np.asarray(shape.kv_lens)
    return lens[lens > 0]


def _ceil(values: Any, divisor: Any) -> Any:
    return -(-values // divisor)


def _sum(coefficients: dict[str, float], figures: dict[str, float]) -> float:
    return sum(coefficients[name] * figures[name] for name in coefficients)
