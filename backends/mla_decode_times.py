"""How long our MLA decode kernels take, and so which one, from timings of a real device: persistent or fixed split.

The data, `mla_decode_times.json`, are of ONE NVIDIA H200 (the file names the run). Every other device is a guess by the
number of its compute units until somebody times the kernels there: `bench/gpu/mla_h200.py` or, with lengths of its
own, `bench/gpu/route_check.py`; then `bench/gpu/fit_times.py`, which also says what a choice is worth on shapes that
it was not fitted to. Times are of the kernels of one layer; scheduling, once a step, is not in them.

A time is a sum over what the lengths cause, with coefficients in microseconds fitted to the timings. Both kernels are a
list of programs that the device's slots take one after the other (`list_schedule`; a persistent workgroup's pieces
are known from its schedule), each as long as its KV blocks and an overhead. From the last ends of the slots follow:
- chain: the very last end: every block of the slowest slot costs what one costs on an idle device;
- work: all blocks a compute unit; the more programs read at once, the slower each;
- crowded: of that, what the second and further programs of units are busy with, and outnumbered: how long there are
  more programs than units, for so long the unit of the very last program may hold another one;
- together: programs that start together read at the same moments, until after some blocks they have drifted apart.
Then what merging costs: partial rows written and read, those that outgrow the cache again, and the longest merge.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import BadInput
from ..planner.lengths import Int32Array
from ..planner.schedules import packing
from ..planner.schedules.arguments import INT32_MAX
from ..planner.schedules.work import WORK_COLUMNS
from .list_schedule import last_ends

DATA = Path(__file__).with_suffix(".json")
SPLITS = (1, 2, 4, 8, 16, 32, 64)  # those that were timed
MOST_PACKED_ROWS = 64  # of a block, as `triton_mla.DecodeShape`
GRANULARITY, OVERHEAD = 16, 16  # of a schedule: tokens of a unit of KV, units that a piece costs besides its KV
# Splits whose times are closer than this are a tie, and fewer need less memory. Otherwise the least time decides: with
# errors like those of the fit, drawn at random, a liking for any kind of kernel among those within 3 % doubles the
# choices that are off, and weighing by each kind's error changes nothing; this tie costs none.
TIE = 0.01
REMEMBERED = 64  # choices; a request's next token changes its units of KV once in 16 steps


class Coefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of blocks of one size, fitted to one device's timings. Times in microseconds."""

    block_n: int  # KV tokens of a block
    programs_each: int  # fixed-split programs that a compute unit runs at once
    overhead: float  # of a program or piece, in blocks
    settle: float  # blocks after which programs that started together have drifted apart
    cached_rows: int  # partial rows that the last-level cache holds between their writing and their merge
    fixed: dict[str, float]  # `FIXED`
    persistent: dict[str, float]  # `PERSISTENT`


FIXED = ("launch", "chain", "work", "crowded", "outnumbered", "together", "pool_rows", "spilled_rows", "splits")
PERSISTENT = ("launch", "chain", "work", "together", "pieces", "merged_rows")


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

    @property
    def units(self) -> Int32Array:
        """Units of KV [B] by which schedules and, in multiples, blocks divide it: nothing else of a length matters."""
        lens = np.asarray(self.kv_lens)
        return np.maximum(-(-lens // GRANULARITY), 0).astype(np.int32)


class Choice(NamedTuple):
    """A kernel and the time expected of it. `splits` 0: the persistent one."""

    splits: int
    us: float

    @property
    def persistent(self) -> bool:
        return self.splits == 0

    @property
    def kernel(self) -> str:
        """Its name in reports."""
        return "persistent" if self.persistent else f"{self.splits} splits"


def fixed_us(shape: Shape, splits: int, times: Times | None = None) -> float:
    """Microseconds of a layer with `splits` equal parts a request. `shape.copies` is 1."""
    c = (times or measured()).of(shape.query_len * shape.heads)
    return _sum(c.fixed, fixed_figures(shape, splits, c))


def persistent_us(shape: Shape, times: Times | None = None) -> float:
    """Microseconds of a layer that follows a schedule."""
    c = (times or measured()).of(shape.query_len * shape.heads)
    return _sum(c.persistent, persistent_figures(shape, c))


def fixed_figures(shape: Shape, splits: int, c: Coefficients) -> dict[str, float]:
    """What each coefficient of `FIXED` is multiplied with. The grid: splits first, then requests, then blocks of rows.

    Parts are whole blocks, so a short request fills fewer than `splits` and leaves programs that only write nothing.
    """
    return _fixed_figures(shape, shape.units, splits, c)


def _fixed_figures(shape: Shape, units: Int32Array, splits: int, c: Coefficients) -> dict[str, float]:
    per_block = c.block_n // GRANULARITY
    piece = _ceil(units, splits * per_block)[:, None]
    left = _ceil(units, per_block)[:, None] - np.arange(splits, dtype=np.int32) * piece
    durations = np.minimum(np.maximum(left, 0), piece).ravel().astype(np.float32) + np.float32(c.overhead)
    if shape.num_blocks > 1:
        durations = np.tile(durations, shape.num_blocks)
    ends = last_ends(durations, c.programs_each * shape.num_cu)
    crowded = ends[: -shape.num_cu]
    pool_rows = splits * shape.rows
    return {
        "launch": 1.0,
        "chain": float(ends[-1]),
        "work": float(ends.sum()) / shape.num_cu,
        "crowded": float(crowded.sum()) / shape.num_cu,
        "outnumbered": float(crowded[-1]) if len(crowded) else 0.0,
        "together": _together(ends, shape, c),
        "pool_rows": pool_rows,
        "spilled_rows": max(0, pool_rows - c.cached_rows),
        "splits": splits,
    }


def persistent_figures(shape: Shape, c: Coefficients) -> dict[str, float]:
    """What each coefficient of `PERSISTENT` is multiplied with: workgroups as the schedule loads them."""
    kv_tokens, pieces_of, groups = _scheduled(shape)
    blocks = _ceil(kv_tokens, c.block_n).astype(np.float32) + np.float32(c.overhead)
    ends = np.bincount(pieces_of, blocks, shape.workgroups)
    return {
        "launch": 1.0,
        "chain": float(ends.max()),
        "work": float(ends.sum()) * shape.num_blocks / shape.num_cu,
        "together": _together(ends, shape, c) * shape.num_blocks,
        "pieces": int(groups.max(initial=0)),
        "merged_rows": int(np.count_nonzero(groups)) * shape.query_len * shape.heads,
    }


def _together(ends: Any, shape: Shape, c: Coefficients) -> float:
    """Blocks of a unit before its programs have drifted apart; blocks of rows that share KV read it once."""
    apart = float(np.exp(ends * (-1 / c.settle)).sum())
    return (len(ends) - apart) * c.settle / shape.num_cu / shape.num_blocks


def _scheduled(shape: Shape) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """(KV tokens [pieces], workgroup [pieces], pieces to merge of each tile [tiles]) of `schedules.mla_decode`.

    Bounds whose sum leaves int32 have no schedule: then an even share for each workgroup.
    """
    units, workgroups = shape.units, shape.workgroups
    tokens = np.zeros(len(units) + 1, np.int64)
    units.cumsum(out=tokens[1:])
    tokens *= GRANULARITY
    total, tiles = int(tokens[-1]) * shape.copies, len(units) * shape.copies
    groups = workgroups + 1  # sections: work_indptr, reduce_indptr, two maps, work_info
    info = groups + tiles + 1 + 3 * tiles + workgroups
    block = np.empty(info + WORK_COLUMNS * (tiles + workgroups), np.int32)
    packed = None
    if 0 < total <= INT32_MAX:
        qo = np.arange(0, len(tokens) * shape.query_len, shape.query_len, dtype=np.int32)
        rows, shares = (shape.query_len, 1, shape.query_len), (workgroups, workgroups)
        packed = packing.active.decode_pack(
            qo, tokens.astype(np.int32), shape.copies, *rows, GRANULARITY, OVERHEAD, *shares, True, False, block
        )
    if packed is None:
        return np.full(workgroups, -(-total // workgroups)), np.arange(workgroups), np.zeros(0, np.int32)
    works = block[info : info + WORK_COLUMNS * packed[0]].reshape(-1, WORK_COLUMNS)
    counts, pieces = block[1:groups] - block[: groups - 1], block[groups : groups + tiles + 1]
    return works[:, 5] - works[:, 4], np.arange(workgroups).repeat(counts), pieces[1:] - pieces[:-1]


def choose(shape: Shape, scheduled: Shape | None = None, times: Times | None = None) -> Choice:
    """The kernel that should take least time on this shape. Lengths may be upper bounds: a choice is never wrong.

    `scheduled`: the same launch as a schedule divides it, where that folds heads or tiles queries. Raises `BadInput`
    for a query length or head count below 1.
    """
    for name in ("query_len", "heads", "num_cu", "copies"):
        if getattr(shape, name) < 1:
            raise BadInput(f"{name}: expected >= 1, got {getattr(shape, name)}")
    scheduled = shape if scheduled is None else scheduled
    if times is not None:
        return _chosen(shape, scheduled, times)
    return _remembered(shape.units.tobytes(), shape[1:], scheduled[1:])


@lru_cache(maxsize=REMEMBERED)
def _remembered(units: bytes, shape: Any, scheduled: Any) -> Choice:
    lens = np.frombuffer(units, np.int32) * GRANULARITY
    return _chosen(Shape(lens, *shape), Shape(lens, *scheduled), measured())


def _chosen(shape: Shape, scheduled: Shape, times: Times) -> Choice:
    """Looks closely only at splits whose least possible time does not exceed the best time known."""
    c, units = times.of(shape.query_len * shape.heads), shape.units
    persistent = Choice(0, persistent_us(scheduled, times))
    found, limit = [], persistent.us
    for bound, splits in sorted(zip(_least_us(shape, units, c), SPLITS, strict=True)):
        if bound > limit:
            break
        found.append(Choice(splits, _sum(c.fixed, _fixed_figures(shape, units, splits, c))))
        limit = min(limit, found[-1].us * (1 + TIE))
    fixed = min((choice.us for choice in found), default=persistent.us)
    if persistent.us <= fixed:
        return persistent
    return min((choice for choice in found if choice.us <= fixed * (1 + TIE)), key=lambda choice: choice.splits)


def _least_us(shape: Shape, units: Int32Array, c: Coefficients) -> list[float]:
    """What `fixed_us` cannot be below, for each of SPLITS: the longest part, or all of them evenly shared out."""
    per_block, of, row_blocks, each = c.block_n // GRANULARITY, c.fixed, shape.num_blocks, c.programs_each
    blocks, longest = int(_ceil(units, per_block).sum()) * row_blocks, int(units.max(initial=0))
    others = max(1, each - 1)  # programs of a unit besides its last one
    beside = of["crowded"] + of["outnumbered"] / others
    found = []
    for splits in SPLITS:
        part = -(-longest // (splits * per_block)) + c.overhead
        work = (blocks + c.overhead * len(units) * splits * row_blocks) / shape.num_cu
        # A longer chain leaves less beside it, which costs less where a block beside it costs more than one of it.
        chain = max(part, work / each, work if of["chain"] < beside else 0.0)
        at_most = part + work / each  # the chain of any list schedule
        # Concave in the ends of the slots, whose sum is known: least where each is 0 or the longest.
        together = (1 - math.exp(-at_most / c.settle)) * c.settle * work / at_most / row_blocks
        rows = splits * shape.rows
        found.append(
            of["launch"]
            + of["chain"] * chain
            + of["work"] * work
            + beside * max(0.0, work - chain)
            + of["together"] * together
            + of["pool_rows"] * rows
            + of["spilled_rows"] * max(0, rows - c.cached_rows)
            + of["splits"] * splits
        )
    return found


def _ceil(values: Any, divisor: Any) -> Any:
    return -(-values // divisor)


def _sum(coefficients: dict[str, float], figures: dict[str, float]) -> float:
    return sum(coefficients[name] * figures[name] for name in coefficients)
