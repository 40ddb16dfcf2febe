"""The schedule of aiter's FP8 persistent prefill kernel (`get_ps_metadata_v1`)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from ..errors import BadInput
from . import packing
from .arguments import INT32_MAX, Int32Array, check_indptr, int32_vector, integer, power_of_two
from .work import WORK_COLUMNS, ClusterSchedule, WorkSchedule


class _Grid(NamedTuple):
    num_clusters: int
    heads_per_cluster: int
    workgroups: int
    qhead_granularity: int
    qlen_granularity: int
    kvlen_granularity: int
    block_size: int


@lru_cache(maxsize=256, typed=True)
def _grid(
    num_heads_k: int,
    num_cu: int,
    qhead_granularity: int,
    qlen_granularity: int,
    kvlen_granularity: int,
    block_size: int,
) -> _Grid:
    """Checked scalars; workgroups and heads are dealt out over gcd(heads, CUs) clusters that run the same plan."""
    heads = integer("num_heads_k", num_heads_k, 1)
    num_cu = integer("num_cu", num_cu, 1)
    # Column 7 holds the end of the last head range in 16 bits.
    qhead = integer("qhead_granularity", qhead_granularity, 1, 0xFFFF // heads)
    qlen = integer("qlen_granularity", qlen_granularity, 1)
    kvlen = power_of_two("kvlen_granularity", kvlen_granularity)
    block_size = integer("block_size", block_size, 1)
    if kvlen % block_size:
        raise BadInput(f"kvlen_granularity: expected a multiple of block_size = {block_size}, got {kvlen}")
    clusters = math.gcd(heads, num_cu)
    workgroups = num_cu // clusters
    if 2 * workgroups * qlen > INT32_MAX:
        raise BadInput(f"qlen_granularity: partial rows of {workgroups} workgroups leave int32, got {qlen}")
    return _Grid(clusters, heads // clusters, workgroups, qhead, qlen, kvlen, block_size)


def ps_prefill(
    qo_indptr: ArrayLike,
    kv_indptr: ArrayLike,
    context_lens: ArrayLike,
    *,
    num_heads_k: int,
    num_cu: int,
    qhead_granularity: int = 1,
    qlen_granularity: int = 256,
    kvlen_granularity: int = 128,
    block_size: int = 1,
    is_causal: bool = True,
) -> WorkSchedule:
    """Cut a batch's prefill attention into equal shares of KV, one per workgroup.

    `qo_indptr[B + 1]` counts query rows, `kv_indptr[B + 1]` KV pages of `block_size` tokens, `context_lens[B]` KV
    tokens.
    Bit-identical to the meaningful prefixes of `get_ps_metadata_v1`'s buffers (tails: zeros, and the total for
    `reduce_indptr`). One plan serves every head: see `WorkSchedule.cluster`. BadInput for a malformed argument, for
    causal rows with fewer KV tokens than query rows, and where a count leaves int32.

    Like aiter's, the schedule drops a request without KV at the end of the batch: its output rows are never written.
    """
    scalars = (num_heads_k, num_cu, qhead_granularity, qlen_granularity, kvlen_granularity, block_size)
    try:
        grid = _grid(*scalars)
    except TypeError:  # a list or the like cannot be looked up: its own check names it
        grid = _grid.__wrapped__(*scalars)
    qo = int32_vector("qo_indptr", qo_indptr)
    kv = int32_vector("kv_indptr", kv_indptr)
    context = int32_vector("context_lens", context_lens)
    causal = bool(is_causal)
    rule = (grid.qlen_granularity, grid.kvlen_granularity, grid.block_size, causal)

    counted = packing.active.prefill_count(qo, kv, context, *rule)
    if counted is None:
        _refuse(qo, kv, context, grid, causal)
    tiles, units = counted
    workgroups = grid.workgroups
    if (tiles + workgroups) * grid.heads_per_cluster * grid.num_clusters > INT32_MAX or units > INT32_MAX:
        raise BadInput(f"qo_indptr: expected a batch whose work counts fit int32, got {tiles} tiles, {units} KV units")
    groups_most = min(tiles, workgroups)

    a = workgroups + 1
    b = a + WORK_COLUMNS * (tiles + workgroups)
    c = b + groups_most + 1
    d = c + 2 * groups_most
    block = np.empty(d + 2 * workgroups, np.int32)
    pieces, groups, partials = packing.active.prefill_pack(qo, kv, context, workgroups, *rule, tiles, block)
    cluster = ClusterSchedule(
        grid.num_clusters,
        grid.heads_per_cluster,
        grid.qhead_granularity,
        block[:a],
        block[a : a + WORK_COLUMNS * pieces].reshape(pieces, WORK_COLUMNS),
    )
    return WorkSchedule(
        cluster, block[b : b + groups + 1], block[c : c + 2 * groups].reshape(groups, 2), block[d : d + partials]
    )


def _refuse(qo: Int32Array, kv: Int32Array, context: Int32Array, grid: _Grid, causal: bool) -> NoReturn:
    """Find the element that the packing loop stumbled over."""
    requests = len(context)
    check_indptr("qo_indptr", qo, requests)
    check_indptr("kv_indptr", kv, requests)
    rows, pages = np.diff(qo), np.diff(kv)
    for at in range(requests):
        tokens, room = int(context[at]), int(pages[at]) * grid.block_size
        if tokens < 0:
            raise BadInput(f"context_lens[{at}]: expected at least 0, got {tokens}")
        if tokens > room:
            raise BadInput(f"context_lens[{at}]: expected at most {room}, what its KV pages hold, got {tokens}")
        if causal and tokens < rows[at]:
            raise BadInput(f"context_lens[{at}]: expected at least the {rows[at]} query rows (causal), got {tokens}")
    raise AssertionError("the packing loop refused a batch that is well formed")
