"""The schedule of aiter's persistent MLA decode kernel (`get_mla_metadata_v1`, fast mode, dense)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from ..errors import BadInput
from . import packing
from .arguments import INT32_MAX, Int32Array, check_indptr, choice, int32_vector, integer, power_of_two
from .sizes import DTYPES, GFX, has_two_workgroups_per_cu
from .work import WORK_COLUMNS, WorkSchedule

PLANNERS = ("auto", "serial", "parallel")

# What starting a piece costs, in KV tokens.
_PIECE_OVERHEAD_TOKENS = 16

_LDS_BYTES = {"gfx942": 65536, "gfx950": 163840}


class _Rule(NamedTuple):
    """What head count, dtypes and query length decide, whatever the batch."""

    fold: int
    tiles_per_request: int
    splits_queries: bool
    workgroups: int
    overhead: int


def _is_native(gfx: str, neither_fp8: bool, both_fp8: bool, heads: int, query_len: int, experimental: bool) -> bool:
    """Whether a kernel takes this head count as it is; others are folded into requests of 16 heads."""
    if heads == 16 or (gfx == "gfx950" and neither_fp8):
        return True
    if not both_fp8:
        return False
    if (gfx == "gfx950" and heads in (32, 64, 128)) or (gfx == "gfx942" and heads == 128):
        return True
    if heads == 64 and query_len == 1:
        return True
    return experimental and heads in (16, 32, 64, 128) and heads * query_len == 128


def _fold_factor(gfx: str, neither_fp8: bool, both_fp8: bool, heads: int, query_len: int, experimental: bool) -> int:
    if _is_native(gfx, neither_fp8, both_fp8, heads, query_len, experimental):
        return 1
    if heads % 16 == 0:
        return heads // 16
    eight_heads = (gfx == "gfx950" and both_fp8 and query_len == 4) or (
        gfx == "gfx942" and neither_fp8 and query_len == 2
    )
    if heads == 8 and eight_heads:
        return 1
    raise BadInput(
        "num_heads: expected a multiple of 16, any count for bf16 on gfx950, or 8 with fp8 at query length 4 on gfx950 "
        f"or bf16 at query length 2 on gfx942, got {heads} at query length {query_len} on {gfx}"
    )


@lru_cache(maxsize=256, typed=True)
def _rule(
    num_heads: int,
    num_cu: int,
    gfx: str,
    q_dtype: str,
    kv_dtype: str,
    max_seqlen_qo: int,
    uni_seqlen_qo: int,
    experimental: bool,
) -> _Rule:
    heads = integer("num_heads", num_heads, 1)
    num_cu = integer("num_cu", num_cu, 1)
    longest = integer("max_seqlen_qo", max_seqlen_qo, 1)
    uniform = integer("uni_seqlen_qo", uni_seqlen_qo, -1, longest)
    if uniform == 0:
        raise BadInput("uni_seqlen_qo: expected -1 (read the lengths) or a query length, got 0")
    both_fp8 = q_dtype == kv_dtype == "fp8"
    neither_fp8 = "fp8" not in (q_dtype, kv_dtype)
    fold = _fold_factor(gfx, neither_fp8, both_fp8, heads, longest, experimental)
    launched = 16 if fold > 1 else heads
    rows = launched * longest
    half_tile = (
        gfx == "gfx950" and neither_fp8 and launched <= 64 and rows >= 64 and (rows < 128 or launched == 48)
    ) or (gfx == "gfx950" and both_fp8 and launched == 32 and longest == 3)
    tile_rows = 64 if half_tile else 128
    # The unfolded head count decides, so a folded request may count as split and still be one tile.
    splits = longest * heads > tile_rows
    tiles = 1
    if splits:
        tiles = uniform if 2 * launched > tile_rows else -(-uniform * launched // tile_rows)
    if uniform < 0 and (fold > 1 or splits):
        what = "heads are folded" if fold > 1 else "queries are tiled"
        raise BadInput(
            f"uni_seqlen_qo: expected a uniform query length where {what}; aiter's result is undefined, got -1"
        )
    two_each = has_two_workgroups_per_cu(gfx, q_dtype, kv_dtype, heads, longest, experimental)
    return _Rule(fold, tiles, splits, num_cu * (2 if two_each else 1), _PIECE_OVERHEAD_TOKENS)


def _runs_parallel(planner: str, rule: _Rule, gfx: str, longest: int, requests: int, ragged: bool) -> bool:
    """Whether aiter launches its parallel planner, which differs from the serial one on requests without KV."""
    if planner == "serial":
        return False
    eligible = longest == 1 and rule.fold == 1 and not rule.splits_queries
    fits = 4 * (3 + (6 if ragged else 5) * requests) <= _LDS_BYTES[gfx]
    if planner == "parallel" and not (eligible and fits):
        raise BadInput(
            "planner: expected 'auto' or 'serial'; the parallel planner needs query length 1, unfolded heads, untiled "
            f"queries and at most {(_LDS_BYTES[gfx] // 4 - 3) // (6 if ragged else 5)} requests, got {requests}"
        )
    return eligible and fits


class PackingRule(NamedTuple):
    """All that decides a schedule besides the lengths."""

    fold: int  # requests of 16 heads per request
    tiles_per_request: int  # query tiles of a folded request
    workgroups: int
    num_splits: int  # workgroups that the work is shared out over
    overhead: int  # blocks of KV that starting a piece costs
    drops_empty: bool  # a request without KV that does not fit its workgroup gets no piece


def packing_rule(
    requests: int,
    *,
    num_heads: int,
    num_cu: int,
    gfx: str,
    q_dtype: str,
    kv_dtype: str,
    max_seqlen_qo: int,
    uni_seqlen_qo: int = -1,
    max_split_per_batch: int = -1,
    experimental: bool = False,
    planner: str = "auto",
) -> PackingRule:
    """The rule `mla_decode` packs a batch of `requests` by, for a scheduler that runs where the lengths are known.

    Arguments and refusals as there.
    """
    choice("gfx", gfx, GFX)
    choice("q_dtype", q_dtype, DTYPES)
    choice("kv_dtype", kv_dtype, DTYPES)
    choice("planner", planner, PLANNERS)
    requests = integer("requests", requests, 1)
    scalars = (num_heads, num_cu, gfx, q_dtype, kv_dtype, max_seqlen_qo, uni_seqlen_qo, bool(experimental))
    try:
        rule = _rule(*scalars)
    except TypeError:  # a list or the like cannot be looked up: its own check names it
        rule = _rule.__wrapped__(*scalars)
    num_splits = rule.workgroups
    if max_split_per_batch != -1:
        integer("max_split_per_batch", max_split_per_batch, 1)
        num_splits = min(num_splits, max_split_per_batch * requests * rule.fold)
    drops_empty = _runs_parallel(planner, rule, gfx, max_seqlen_qo, requests, uni_seqlen_qo < 0)
    return PackingRule(rule.fold, rule.tiles_per_request, rule.workgroups, num_splits, rule.overhead, drops_empty)


def reads_query_lens(*, num_heads: int, gfx: str, q_dtype: str, kv_dtype: str, max_seqlen_qo: int) -> bool:
    """Whether aiter's planner is defined for rows of different query length (`uni_seqlen_qo=-1`) here."""
    rule = _rule(num_heads, 1, gfx, q_dtype, kv_dtype, max_seqlen_qo, max_seqlen_qo, False)
    return rule.fold == 1 and not rule.splits_queries


def mla_decode(
    qo_indptr: ArrayLike,
    kv_indptr: ArrayLike,
    *,
    num_heads: int,
    num_cu: int,
    gfx: str,
    q_dtype: str,
    kv_dtype: str,
    max_seqlen_qo: int,
    uni_seqlen_qo: int = -1,
    kv_granularity: int = 16,
    page_size: int = 1,
    is_causal: bool = True,
    max_split_per_batch: int = -1,
    experimental: bool = False,
    planner: str = "auto",
) -> WorkSchedule:
    """Share a decode batch's KV out over the workgroups, by a cost of one block of KV plus a fixed overhead a piece.

    `qo_indptr[B + 1]` counts query rows (read only where `uni_seqlen_qo` is -1), `kv_indptr[B + 1]` KV tokens, from 0.
    `q_dtype` and `kv_dtype` are "bf16", "fp16" or "fp8"; `num_heads` is the launched (padded) count. With
    `planner="auto"` the result is that of the kernel aiter would launch; they differ only where a request has no KV.
    Bit-identical to what aiter writes, as prefixes; rows of `reduce_final_map` that aiter leaves unwritten (tiles that
    are not split) are (-1, -1). Columns 0, 2, 3 and the reduce lists count folded requests where heads are folded.
    BadInput for a malformed argument, head counts without a kernel, and combinations that aiter leaves undefined.
    """
    if page_size != 1:
        # Larger pages need the length of each request's last page, which the callers of this kernel do not have.
        raise BadInput(f"page_size: expected 1, as vLLM and SGLang launch this kernel, got {page_size!r}")
    power_of_two("kv_granularity", kv_granularity)
    qo = int32_vector("qo_indptr", qo_indptr)
    kv = int32_vector("kv_indptr", kv_indptr)
    requests = len(kv) - 1
    if requests < 1:
        raise BadInput(f"kv_indptr: expected at least one request, got {len(kv)} entries")
    rule = packing_rule(
        requests,
        num_heads=num_heads,
        num_cu=num_cu,
        gfx=gfx,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        max_seqlen_qo=max_seqlen_qo,
        uni_seqlen_qo=uni_seqlen_qo,
        max_split_per_batch=max_split_per_batch,
        experimental=experimental,
        planner=planner,
    )
    workgroups = rule.workgroups
    tiles = requests * rule.fold * rule.tiles_per_request
    if (tiles + workgroups) * max_seqlen_qo > INT32_MAX:
        raise BadInput(f"kv_indptr: expected a batch whose query rows fit int32, got {requests} requests")
    a = workgroups + 1
    b = a + tiles + 1
    c = b + 2 * tiles
    d = c + tiles + workgroups
    block = np.empty(d + WORK_COLUMNS * (tiles + workgroups), np.int32)
    packed = packing.active.decode_pack(
        qo,
        kv,
        rule.fold,
        uni_seqlen_qo,
        rule.tiles_per_request,
        max_seqlen_qo,
        kv_granularity,
        rule.overhead,
        rule.num_splits,
        workgroups,
        bool(is_causal),
        rule.drops_empty,
        block,
    )
    if packed is None:
        _refuse(qo, kv, uni_seqlen_qo, max_seqlen_qo)
    works, partials = packed
    return WorkSchedule(
        (block[:a], block[d : d + WORK_COLUMNS * works].reshape(works, WORK_COLUMNS)),
        block[a:b],
        block[b:c].reshape(tiles, 2),
        block[c : c + partials],
    )


def _refuse(qo: Int32Array, kv: Int32Array, uniform: int, longest: int) -> NoReturn:
    """Find the element that the packing loop stumbled over."""
    requests = len(kv) - 1
    # Schedules count KV from 0, whatever the first entry: only 0 gives ranges that the kernel can index with.
    check_indptr("kv_indptr", kv, requests, start=0)
    check_indptr("qo_indptr", qo, requests)
    if uniform < 0:
        lens = np.diff(qo)
        over = np.flatnonzero(lens > longest)
        if over.size:
            at = int(over[0])
            raise BadInput(f"qo_indptr[{at + 1}]: expected at most max_seqlen_qo = {longest} rows, got {lens[at]}")
    raise BadInput(f"kv_indptr: expected a batch whose work costs fit int32 ({INT32_MAX}), got {kv[-1]} tokens")
