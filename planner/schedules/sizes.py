"""Buffer sizes of the persistent kernels: `get_ps_metadata_info_v1` and `get_mla_metadata_info_v1` of aiter."""

from __future__ import annotations

import math
from functools import lru_cache

from ..errors import BadInput
from .arguments import choice, integer
from .work import WORK_COLUMNS

Shapes = dict[str, tuple[int, ...]]

GFX = ("gfx942", "gfx950")
DTYPES = ("bf16", "fp16", "fp8")


def _shapes(workgroups: int, works: int, tiles: int, partials: int) -> Shapes:
    return {
        "work_metadata_ptrs": (2,),
        "work_indptr": (workgroups + 1,),
        "work_info": (works, WORK_COLUMNS),
        "reduce_indptr": (tiles + 1,),
        "reduce_final_map": (tiles, 2),
        "reduce_partial_map": (partials,),
    }


def ps_prefill_shapes(batch_size: int, num_heads_k: int, max_qlen: int, qlen_granularity: int, num_cu: int) -> Shapes:
    """Shape of each buffer of the FP8 prefill kernel; `work_metadata_ptrs` is uint64, the rest int32.

    The kernel reads the number of works from the last element of `work_indptr`, so that buffer must have exactly this
    length; the others may be longer.
    """
    batch_size = integer("batch_size", batch_size, 0)
    num_heads_k = integer("num_heads_k", num_heads_k, 1)
    max_qlen = integer("max_qlen", max_qlen, 0)
    qlen_granularity = integer("qlen_granularity", qlen_granularity, 1)
    num_cu = integer("num_cu", num_cu, 1)
    workgroups = num_cu // math.gcd(num_heads_k, num_cu)
    tiles = -(-max_qlen // qlen_granularity)
    works = (batch_size + workgroups - 1) * tiles * num_heads_k
    partials = min(batch_size + workgroups - 1, 2 * (workgroups - 1)) * tiles
    return _shapes(num_cu, works, batch_size * tiles, partials)


def has_two_workgroups_per_cu(
    gfx: str, q_dtype: str, kv_dtype: str, heads: int, max_seqlen_qo: int, experimental: bool
) -> bool:
    """Whether the 64-row FP8 kernel runs, whose occupancy is 2 (gfx950, AITER_ENABLE_EXPERIMENTAL)."""
    both_fp8 = q_dtype == kv_dtype == "fp8"
    return experimental and gfx == "gfx950" and both_fp8 and heads * max_seqlen_qo == 64


def mla_decode_max_splits(
    num_heads: int,
    max_seqlen_qo: int,
    q_dtype: str,
    kv_dtype: str,
    *,
    gfx: str,
    num_cu: int,
    experimental: bool = False,
) -> int:
    """Workgroups of the decode grid, which bounds the pieces of one tile (`get_mla_decode_fwd_max_splits`)."""
    _check_common(num_heads, max_seqlen_qo, q_dtype, kv_dtype, gfx, num_cu)
    return num_cu * (
        2 if has_two_workgroups_per_cu(gfx, q_dtype, kv_dtype, num_heads, max_seqlen_qo, experimental) else 1
    )


def _check_common(num_heads: int, max_seqlen_qo: int, q_dtype: str, kv_dtype: str, gfx: str, num_cu: int) -> None:
    integer("num_heads", num_heads, 1)
    integer("max_seqlen_qo", max_seqlen_qo, 1)
    choice("q_dtype", q_dtype, DTYPES)
    choice("kv_dtype", kv_dtype, DTYPES)
    choice("gfx", gfx, GFX)
    integer("num_cu", num_cu, 1)


@lru_cache(maxsize=256, typed=True)
def _tiles_per_request(gfx: str, q_dtype: str, kv_dtype: str, heads: int, query_len: int, experimental: bool) -> int:
    """Upper bound on the query tiles of one request; the rules are those of the size function, not of the planner."""
    packed = query_len * heads
    both_fp8 = q_dtype == kv_dtype == "fp8"
    both_bf16 = q_dtype == kv_dtype == "bf16"
    gfx942, gfx950 = gfx == "gfx942", gfx == "gfx950"
    half_tiles = (gfx950 and both_bf16 and packed >= 64 and heads <= 64 and (packed < 128 or heads == 48)) or (
        gfx950 and both_fp8 and heads == 32 and query_len == 3
    )
    if half_tiles:
        return query_len if heads > 32 else -(-packed // 64)
    full_tiles = (
        heads == 16
        or (both_fp8 and gfx942 and heads == 128)
        or (both_fp8 and gfx950 and (heads in (64, 128) or (heads == 32 and query_len == 4)))
        or (both_fp8 and heads == 64 and query_len == 1)
        or (both_fp8 and gfx942 and heads in (16, 32, 64) and packed == 128 and experimental)
    )
    if full_tiles:
        return -(-packed // 128)
    if gfx950 and both_bf16 and heads != 48 and (packed >= 128 or heads > 64):
        return query_len if heads > 64 else -(-packed // 128)
    return -(-packed // 16)


def mla_decode_shapes(
    batch_size: int,
    max_seqlen_qo: int,
    num_heads: int,
    q_dtype: str,
    kv_dtype: str,
    *,
    gfx: str,
    num_cu: int,
    is_sparse: bool = False,
    fast_mode: bool = True,
    num_kv_splits: int = 32,
    intra_batch_mode: bool = False,
    max_split_per_batch: int = -1,
    experimental: bool = False,
) -> Shapes:
    """Shape of each buffer of the MLA decode kernel; `work_metadata_ptrs` is uint64, the rest int32.

    `num_heads` is the launched count, a multiple of 8; `q_dtype` and `kv_dtype` are "bf16", "fp16" or "fp8".
    """
    _check_common(num_heads, max_seqlen_qo, q_dtype, kv_dtype, gfx, num_cu)
    batch_size = integer("batch_size", batch_size, 0)
    integer("num_kv_splits", num_kv_splits, 1)
    integer("max_split_per_batch", max_split_per_batch, -1)
    if num_heads % 8:
        raise BadInput(f"num_heads: expected a multiple of 8, got {num_heads}")
    experimental = bool(experimental)
    two_each = has_two_workgroups_per_cu(gfx, q_dtype, kv_dtype, num_heads, max_seqlen_qo, experimental)
    workgroups = num_cu * (2 if two_each else 1)
    query_len = 1 if is_sparse else max_seqlen_qo
    tiles_each = _tiles_per_request(gfx, q_dtype, kv_dtype, num_heads, query_len, experimental)
    requests = batch_size * max_seqlen_qo if is_sparse else batch_size
    tiles = requests * tiles_each
    if fast_mode:
        works = (requests + workgroups - 1) * tiles_each
        partials = min(requests + workgroups - 1, 2 * (workgroups - 1)) * tiles_each
    else:
        works = partials = tiles * workgroups
    if max_split_per_batch > 0:
        partials = max(partials, tiles + min(workgroups, max_split_per_batch * requests))
    if intra_batch_mode:
        works = partials = tiles * num_kv_splits
    return _shapes(workgroups, works, tiles, partials)
