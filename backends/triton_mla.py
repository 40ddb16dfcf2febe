"""MLA decode in Triton, to run the schedules of `planner.schedules.mla_decode` on a GPU rather than only compute them.

Persistent decode reads the six work buffers as aiter lays them out; `DeviceScheduler` fills them where the lengths are
known on the device only; `fixed_split_decode` is the plain peer to compare with. Nothing here waits for the device,
and every launch has a grid that depends on shapes alone, so all of it may be captured into a graph.

Shapes: T query tokens, B requests, H launched heads, D = latent_size + rope size (powers of two), `q` [T, H, D],
`pages` [P, D] (page size 1), `page_list` [sum of KV lengths] int32, `qo_indptr` and `kv_indptr` [B + 1] int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import BadInput
from ..planner.schedules import PackingRule, WorkSchedule
from . import triton_mla_kernels as kernels

Tensor = Any
INT32_BUFFERS = ("work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")


@dataclass(frozen=True)
class WorkBuffers:
    """The six buffers on the device, at stable addresses; all of them or none."""

    work_metadata_ptrs: Tensor  # int64 [2]: addresses of work_indptr and work_info, which is how a kernel finds them
    work_indptr: Tensor
    work_info: Tensor
    reduce_indptr: Tensor
    reduce_final_map: Tensor
    reduce_partial_map: Tensor

    @classmethod
    def allocate(cls, shapes: dict[str, tuple[int, ...]], device: Any) -> WorkBuffers:
        """Buffers of the shapes that `mla_decode_shapes` of the planner gives. Raises `BadInput` if one is missing."""
        missing = [name for name in INT32_BUFFERS if name not in shapes]
        if missing:
            raise BadInput(f"work buffers: expected all of {', '.join(INT32_BUFFERS)}; missing {', '.join(missing)}")
        made = {name: torch.zeros(shapes[name], dtype=torch.int32, device=device) for name in INT32_BUFFERS}
        addresses = [made["work_indptr"].data_ptr(), made["work_info"].data_ptr()]
        return cls(torch.tensor(addresses, dtype=torch.int64, device=device), **made)

    def load(self, schedule: WorkSchedule) -> None:
        """Copy a schedule's meaningful prefixes in (blocking); what lies behind keeps its old contents."""
        for name in INT32_BUFFERS:
            values = torch.from_numpy(getattr(schedule, name))
            target = getattr(self, name)
            if len(values) > len(target):
                raise BadInput(f"{name}: expected at most {len(target)} rows, as allocated, got {len(values)}")
            target[: len(values)].copy_(values)
        # What lies behind the last group has no partial results.
        self.reduce_indptr[len(schedule.reduce_indptr) :] = int(schedule.reduce_indptr[-1])


class Tuning(NamedTuple):
    """Launch parameters of a block of packed rows (query rows times heads)."""

    block_n: int  # KV tokens a program holds at once
    stages: int  # loads in flight
    warps: int


# By packed rows of a block. 64 is the most whose float32 sums (512 wide) stay in registers on sm_90 without spilling.
TUNING = {16: Tuning(64, 2, 4), 32: Tuning(64, 2, 8), 64: Tuning(32, 2, 8)}


@dataclass(frozen=True)
class PartialPool:
    """Where pieces of split tiles leave their results: float32 [rows, heads, latent_size] and [rows, heads]."""

    out: Tensor
    lse: Tensor

    @classmethod
    def allocate(cls, rows: int, heads: int, latent_size: int, device: Any) -> PartialPool:
        shape = (max(rows, 1), heads, latent_size)
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape[:2], dtype=torch.float32, device=device),
        )


@dataclass(frozen=True)
class DecodeShape:
    """Sizes that a launch depends on and lengths do not change. `rows_per_tile`: query rows of a tile at most."""

    heads: int
    latent_size: int
    rope_size: int
    rows_per_tile: int
    fold: int = 1
    is_causal: bool = True
    tuning: Tuning | None = None  # default: by the size of a block

    def __post_init__(self) -> None:
        for name in ("latent_size", "rope_size"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise BadInput(f"{name}: expected a power of two >= 16, got {size}")
        if self.heads % self.fold:
            raise BadInput(f"heads: expected a multiple of fold = {self.fold}, got {self.heads}")

    @property
    def launched_heads(self) -> int:
        return self.heads // self.fold

    @property
    def block_m(self) -> int:
        """Packed rows of a block: no more than the tile has; the matrix units want 16 at least."""
        return min(64, max(16, 1 << (self.rows_per_tile * self.launched_heads - 1).bit_length()))

    @property
    def num_blocks(self) -> int:
        """Programs that share one work item, each with some of its packed rows."""
        return -(-self.rows_per_tile * self.launched_heads // self.block_m)

    def launch(self) -> dict[str, int]:
        tuning = TUNING[self.block_m] if self.tuning is None else self.tuning
        return {
            "LATENT": self.latent_size,
            "ROPE": self.rope_size,
            "BLOCK_M": self.block_m,
            "BLOCK_N": tuning.block_n,
            "STAGES": tuning.stages,
            "num_warps": tuning.warps,
        }

    def allocate_output(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Uninitialised (out [T, H, latent_size] in the dtype of `q`, lse [T, H] float32)."""
        out = torch.empty((*q.shape[:2], self.latent_size), dtype=q.dtype, device=q.device)
        return out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


def persistent_decode(
    q: Tensor,
    pages: Tensor,
    page_list: Tensor,
    qo_indptr: Tensor,
    work: WorkBuffers,
    pool: PartialPool,
    shape: DecodeShape,
    scale: float,
    output: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode by the work buffers: one launch for the pieces, one to merge those of split tiles.

    Returns (out, lse) as `DecodeShape.allocate_output` makes them; a row that no work item covers is not written.
    """
    out, lse = shape.allocate_output(q) if output is None else output
    _check(q, pages, shape)
    groups, workgroups = len(work.reduce_indptr) - 1, len(work.work_indptr) - 1
    kernels.persistent_decode[(workgroups, shape.num_blocks)](
        q,
        pages,
        page_list,
        qo_indptr,
        work.work_metadata_ptrs,
        out,
        lse,
        pool.out,
        pool.lse,
        scale,
        shape.launched_heads,
        shape.fold,
        int(shape.is_causal),
        **shape.launch(),
    )
    kernels.reduce_partials[(groups, shape.rows_per_tile, shape.launched_heads)](
        work.reduce_indptr,
        work.reduce_final_map,
        work.reduce_partial_map,
        pool.out,
        pool.lse,
        out,
        lse,
        shape.launched_heads,
        LATENT=shape.latent_size,
        BLOCK_P=8,
        num_warps=4,
    )
    return out, lse


def fixed_split_decode(
    q: Tensor,
    pages: Tensor,
    page_list: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    pool: PartialPool,
    shape: DecodeShape,
    scale: float,
    num_splits: int,
    output: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The peer: every request's KV in `num_splits` (a power of two) equal parts, whatever its length.

    `shape.rows_per_tile` is the longest query, `shape.fold` 1; `pool` needs `num_splits * T` rows.
    """
    if num_splits < 1 or num_splits & (num_splits - 1):
        raise BadInput(f"num_splits: expected a power of two, got {num_splits}")
    if shape.fold != 1:
        raise BadInput(f"fold: expected 1 with fixed splits, got {shape.fold}")
    if len(pool.out) < num_splits * len(q):
        raise BadInput(f"pool: expected >= {num_splits} * {len(q)} rows, got {len(pool.out)}")
    out, lse = shape.allocate_output(q) if output is None else output
    _check(q, pages, shape)
    kernels.fixed_split_decode[(num_splits, len(kv_indptr) - 1, shape.num_blocks)](
        q,
        pages,
        page_list,
        qo_indptr,
        kv_indptr,
        pool.out,
        pool.lse,
        len(q),
        scale,
        shape.heads,
        int(shape.is_causal),
        **shape.launch(),
    )
    kernels.reduce_splits[(len(q), shape.heads)](
        pool.out,
        pool.lse,
        out,
        lse,
        len(q),
        shape.heads,
        SPLITS=num_splits,
        LATENT=shape.latent_size,
        num_warps=4,
    )
    return out, lse


class DeviceScheduler:
    """Fills the work buffers from lengths that only the device knows, equal to `planner.schedules.mla_decode`.

    Made once per batch size; calling it launches two kernels. `rule` from `planner.schedules.packing_rule` for the same
    arguments; `uni_seqlen_qo` -1 reads query lengths from `qo_indptr`. Rows of `reduce_final_map` of unsplit tiles
    become (-1, -1), the tail of `reduce_indptr` repeats the total, as a kernel with a fixed grid needs it.
    """

    def __init__(
        self,
        rule: PackingRule,
        requests: int,
        *,
        max_seqlen_qo: int,
        uni_seqlen_qo: int = -1,
        kv_granularity: int = 16,
        is_causal: bool = True,
        device: Any,
    ) -> None:
        self.requests = requests
        self.tiles = requests * rule.fold * rule.tiles_per_request
        self._notes = torch.zeros(self.tiles + 1, 8, dtype=torch.int32, device=device)
        self._workgroups = rule.workgroups
        shared = (rule.fold, uni_seqlen_qo, rule.tiles_per_request, max_seqlen_qo, kv_granularity, rule.overhead)
        drops_empty = int(rule.drops_empty)
        self._scan = (*shared, rule.num_splits, rule.workgroups, drops_empty)
        self._emit = (*shared, int(is_causal), drops_empty)

    def __call__(self, qo_indptr: Tensor, kv_indptr: Tensor, work: WorkBuffers) -> None:
        """Launch on the current stream. Raises `BadInput` where a buffer cannot hold any schedule of this size."""
        workgroups = self._workgroups
        for name, needed in (
            ("work_indptr", workgroups + 1),
            ("work_info", self.tiles + workgroups - 1),
            ("reduce_indptr", self.tiles + 1),
            ("reduce_final_map", self.tiles),
        ):
            if len(getattr(work, name)) < needed:
                raise BadInput(f"{name}: expected >= {needed} rows, got {len(getattr(work, name))}")
        kernels.scan_tiles[(1,)](
            qo_indptr,
            kv_indptr,
            work.work_indptr,
            work.reduce_indptr,
            self._notes,
            self.requests,
            len(work.reduce_indptr),
            *self._scan,
            BLOCK=128,
            num_warps=1,
        )
        kernels.emit_works[(self.tiles,)](
            qo_indptr,
            kv_indptr,
            work.work_indptr,
            work.work_info,
            work.reduce_final_map,
            work.reduce_partial_map,
            self._notes,
            *self._emit,
            BLOCK=64,
            num_warps=2,
        )


def _check(q: Tensor, pages: Tensor, shape: DecodeShape) -> None:
    size = shape.latent_size + shape.rope_size
    if q.shape[1:] != (shape.heads, size) or not q.is_contiguous():
        raise BadInput(f"q: expected contiguous [tokens, {shape.heads}, {size}], got {list(q.shape)}")
    if pages.shape[1:] != (size,) or not pages.is_contiguous():
        raise BadInput(f"pages: expected contiguous [pages, {size}], got {list(pages.shape)}")
