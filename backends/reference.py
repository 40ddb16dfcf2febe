"""Reference attention in plain torch: paged decode, extend, causal prefill, merging; by a plan, or by MLA work items.

Written for being right, not fast: rows are padded to the longest and masked. Nothing here waits for the device, so a
caller that knows its lengths on the host stays sync-free. Run it on float64 tensors for a result to compare with.

Shapes: T tokens, R rows, H query heads, J KV heads (H a multiple of J), D head size, N blocks of B tokens, W of them a
row at most.
`q` [T, H, D]; `k`, `v` [T, J, D]; caches [N, B, J, D]; `block_table` [R, W], `seq_lens` [R], `query_start_loc` [R + 1]
integer tensors on the device of `q`. A log-sum-exp is natural, [T, H], in the dtype of `q`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..planner import BadInput, MetadataPlan

Tensor = Any  # torch.Tensor; torch is not followed by the type checker


@dataclass(frozen=True)
class Padding:
    """How the tokens of a segment map to a [rows, max_query_len] rectangle and back."""

    index: Tensor  # [R, M] the token in each cell; cells past a row's end repeat some token
    offset: Tensor  # [R, M] the cell's position within its row's query
    cell: Tensor  # [T'] the flat cell of each token of the segment
    query_lens: Tensor  # [R]


def pad_rows(query_start_loc: Tensor, max_query_len: int, num_tokens: int) -> Padding:
    """Lay out a segment's `num_tokens` tokens as one row per request.

    `query_start_loc` [R + 1] from 0. Rows without tokens are fine; tokens past the last row's end (padding) get some
    cell.
    """
    device = query_start_loc.device
    starts, ends = query_start_loc[:-1, None], query_start_loc[1:, None]
    offset = torch.arange(max_query_len, device=device, dtype=query_start_loc.dtype)[None].expand(len(starts), -1)
    index = torch.minimum(starts + offset, ends - 1).clamp(0, num_tokens - 1)
    token = torch.arange(num_tokens, device=device, dtype=query_start_loc.dtype)
    row = torch.searchsorted(query_start_loc[1:].contiguous(), token, right=True).clamp(max=len(starts) - 1)
    within = (token - query_start_loc[row]).clamp(0, max_query_len - 1)
    return Padding(index, offset, row * max_query_len + within, (ends - starts)[:, 0])


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention over what is visible.

    `q` [R, M, H, D], `k` [R, L, J, D], `v` [R, L, J, E], `visible` bool [R, M, L]. Returns out [R, M, H, E] and the
    log-sum-exp [R, M, H]; a query that sees nothing gives 0 and -inf.
    """
    rows, queries, heads, size = q.shape
    grouped = q.view(rows, queries, k.shape[2], heads // k.shape[2], size)
    scores = torch.einsum("rmjgd,rljd->rmjgl", grouped, k) * scale
    scores = scores.masked_fill(~visible[:, :, None, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    # exp(-inf - -inf) is nan: a row that sees nothing subtracts 0 instead, and its weights are exp(-inf) = 0.
    weights = torch.exp(scores - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    out = torch.einsum("rmjgl,rlje->rmjge", weights, v)
    return out.reshape(rows, queries, heads, v.shape[3]), lse.reshape(rows, queries, heads)


def gather_paged(cache: Tensor, block_table: Tensor, num_tokens: int) -> Tensor:
    """The first `num_tokens` cached tokens of every row: [N, B, J, D] by [R, W] -> [R, L, J, D], L >= num_tokens."""
    width = -(-num_tokens // cache.shape[1])
    return cache[block_table[:, :width]].flatten(1, 2)


def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, max_seq_len: int, scale: float
) -> tuple[Tensor, Tensor]:
    """One query token a row (T = R) over its `seq_lens` cached tokens. Returns (out [R, H, D], lse [R, H])."""
    k = gather_paged(k_cache, block_table, max_seq_len)
    v = gather_paged(v_cache, block_table, max_seq_len)
    visible = torch.arange(k.shape[1], device=q.device)[None, None] < seq_lens[:, None, None]
    out, lse = masked_attention(q[:, None], k, v, visible, scale)
    return out[:, 0], lse[:, 0]


def extend_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    padding: Padding,
    max_seq_len: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Several query tokens a row, causal, over cached context and themselves (already in the cache).

    Returns (out, lse) of the segment's tokens, in order.
    """
    k = gather_paged(k_cache, block_table, max_seq_len)
    v = gather_paged(v_cache, block_table, max_seq_len)
    position = (seq_lens - padding.query_lens)[:, None] + padding.offset
    visible = torch.arange(k.shape[1], device=q.device)[None, None] <= position[:, :, None]
    out, lse = masked_attention(q[padding.index], k, v, visible, scale)
    return out.flatten(0, 1)[padding.cell], lse.flatten(0, 1)[padding.cell]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, padding: Padding, scale: float) -> tuple[Tensor, Tensor]:
    """Rows without context attend causally within their own fresh tokens; the cache is not read.

    Returns (out, lse) of the segment's tokens, in order.
    """
    index = padding.index
    visible = padding.offset[:, None, :] <= padding.offset[:, :, None]
    out, lse = masked_attention(q[index], k[index], v[index], visible, scale)
    return out.flatten(0, 1)[padding.cell], lse.flatten(0, 1)[padding.cell]


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets from the results over each: out [..., E], lse [...]."""
    lse = torch.logaddexp(lse_a, lse_b)
    base = torch.where(lse == float("-inf"), 0.0, lse)
    out = out_a * torch.exp(lse_a - base)[..., None] + out_b * torch.exp(lse_b - base)[..., None]
    return out, lse


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, q_padding: Padding, kv_padding: Padding, scale: float
) -> tuple[Tensor, Tensor]:
    """Every query token of a row over all the row's keys, not causal; `k`, `v` [T', J, D] packed by `kv_padding`."""
    visible = kv_padding.offset[:, None, :] < kv_padding.query_lens[:, None, None]
    visible = visible.expand(-1, q_padding.index.shape[1], -1)
    out, lse = masked_attention(q[q_padding.index], k[kv_padding.index], v[kv_padding.index], visible, scale)
    return out.flatten(0, 1)[q_padding.cell], lse.flatten(0, 1)[q_padding.cell]


# ------------------------------------------------------------ driven by a plan


@dataclass(frozen=True)
class PlannedStep:
    """One step of one attention layer, to be computed from a plan of `aiter_fa` and nothing else.

    `q` [T, H, D], `k`, `v` [T, J, D] the step's own tokens, which the caches hold already; `on_device` what the engine
    has on the device, by field name (`common.seq_lens`, `common.block_table`, `common.query_start_loc`).
    """

    plan: MetadataPlan
    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    on_device: Mapping[str, Tensor]
    scale: float

    def value(self, name: str) -> Any:
        """A planned host value. Raises `SkippedField` for a field that the plan leaves out."""
        return self.plan[name].value

    def tensor(self, name: str) -> Tensor:
        """A planned array as a tensor, or the engine's own where the plan says that the device has it."""
        planned = self.plan[name]
        if planned.value is None:
            return self.on_device[name]
        return torch.tensor(planned.value, device=self.q.device)


def attend_by_plan(step: PlannedStep) -> Tensor:
    """Attention of the whole step, [T, H, D], reading planned fields only; a field too few raises `SkippedField`.

    Covers decode (several tokens a row too), extend by chunks of context merged by their log-sum-exp, and causal
    prefill. Raises `BadInput` for a plan with a sliding window, KV sharing or another backend's fields.
    """
    plan = step.plan
    if plan.backend != "aiter_fa":
        raise BadInput(f"plan.backend: expected aiter_fa, got {plan.backend}")
    for part in ("extend.swa.workspace", "kv_sharing.workspace"):
        if part in plan:
            raise BadInput(f"plan: expected none of {part.rpartition('.')[0]}, which this reference does not compute")
    out = torch.zeros_like(step.q)
    for segment in plan.segments:
        tokens = slice(*segment.tokens)
        out[tokens] = _PARTS[segment.name](step, slice(*segment.rows), tokens)
    return out


def _decode_part(step: PlannedStep, rows: slice, tokens: slice) -> Tensor:
    table, lens = step.tensor("common.block_table")[rows], step.tensor("common.seq_lens")[rows]
    longest = step.value("common.max_seq_len")
    if step.value("decode.max_query_len") == 1:
        return decode_attention(step.q[tokens], step.k_cache, step.v_cache, table, lens, longest, step.scale)[0]
    starts = step.tensor("common.query_start_loc")[: rows.stop + 1]
    padding = pad_rows(starts, step.value("decode.max_query_len"), tokens.stop - tokens.start)
    return extend_attention(step.q[tokens], step.k_cache, step.v_cache, table, lens, padding, longest, step.scale)[0]


def _prefill_part(step: PlannedStep, rows: slice, tokens: slice) -> Tensor:
    starts = step.tensor("prefill.query_start_loc")
    padding = pad_rows(starts, step.value("prefill.max_query_len"), tokens.stop - tokens.start)
    return causal_attention(step.q[tokens], step.k[tokens], step.v[tokens], padding, step.scale)[0]


def _extend_part(step: PlannedStep, rows: slice, tokens: slice) -> Tensor:
    q, table = step.q[tokens], step.tensor("common.block_table")[rows]
    starts = step.tensor("extend.query_start_loc")
    padding = pad_rows(starts, step.value("extend.max_query_len"), tokens.stop - tokens.start)
    state = causal_attention(q, step.k[tokens], step.v[tokens], padding, step.scale)
    for chunk in range(step.value("extend.chunk_context.num_chunks")):
        k, v = _gather_chunk(step, table, chunk)
        chunk_starts = step.tensor("extend.chunk_context.cu_seq_lens_chunk")[chunk]
        longest = step.value("extend.chunk_context.max_seq_lens")[chunk]
        context = varlen_attention(q, k, v, padding, pad_rows(chunk_starts, longest, len(k)), step.scale)
        state = merge_states(*state, *context)
    return state[0]


def _gather_chunk(step: PlannedStep, table: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """One round's context tokens of all extends, packed, found by the chunk's token-to-row map."""
    total = step.value("extend.chunk_context.total_token_per_batch")[chunk]
    row = step.tensor("extend.chunk_context.token_to_batch")[chunk, :total]
    before = step.tensor("extend.chunk_context.cu_seq_lens_chunk")[chunk][row]
    first = step.tensor("extend.chunk_context.chunk_starts")[chunk][row]
    position = first + torch.arange(total, device=row.device) - before
    block_size = step.k_cache.shape[1]
    block, offset = table[row, position // block_size], position % block_size
    return step.k_cache[block, offset], step.v_cache[block, offset]


_PARTS = {"decode": _decode_part, "extend": _extend_part, "prefill": _prefill_part}


# ------------------------------------------------------------------- MLA decode


class Works(Protocol):
    """The five index buffers of the persistent MLA decode kernel; `planner.schedules.WorkSchedule` is one.

    The sixth, `work_metadata_ptrs`, holds the addresses of the first two and says nothing else.
    """

    @property
    def work_indptr(self) -> Any: ...
    @property
    def work_info(self) -> Any: ...
    @property
    def reduce_indptr(self) -> Any: ...
    @property
    def reduce_final_map(self) -> Any: ...
    @property
    def reduce_partial_map(self) -> Any: ...


@dataclass(frozen=True)
class LatentCache:
    """Cached latents of MLA: token `i` of a request is `pages[page_list[kv_start + i]]`.

    `pages` [P, D], keys are all D columns and values the first `latent_size`; `page_list` [sum of KV lengths].
    """

    pages: Tensor
    page_list: Tensor
    latent_size: int

    def keys(self, start: int, stop: int) -> Tensor:
        return self.pages[self.page_list[start:stop]]


def mla_decode(
    q: Tensor,
    cache: LatentCache,
    qo_indptr: Sequence[int],
    works: Works,
    *,
    scale: float,
    fold: int = 1,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Run the work items and the reduce lists of a schedule, one after the other.

    `q` [T, H, D]; `qo_indptr` [B + 1] query tokens of the requests. With `fold` R the kernel sees T * R rows of H / R
    heads: row `t * R + g` is head group `g` of token `t`; request `b` is folded requests `b * R` to `b * R + R - 1`.
    Returns (out [T, H, latent_size], lse [T, H]). Rows that no work item covers (aiter's parallel planner leaves
    requests without KV out) are nan. A row that sees no KV is 0, its lse -inf.
    """
    tokens, heads, size = q.shape
    rows = q.reshape(tokens * fold, heads // fold, size)
    out = q.new_full((*rows.shape[:2], cache.latent_size), float("nan"))
    lse = q.new_full(rows.shape[:2], float("nan"))
    items = torch.as_tensor(works.work_info).tolist()[: int(works.work_indptr[-1])]
    pool_rows = max((item[1] + item[3] - item[2] for item in items if item[1] >= 0), default=0)
    pool_out, pool_lse = torch.full_like(out[:1], float("nan")).repeat(pool_rows, 1, 1), lse[:1].repeat(pool_rows, 1)
    for item in items:
        _, partial, first, stop = item[:4]
        part = _run_item(rows[first:stop], cache, qo_indptr, item, scale, fold, is_causal)
        place = slice(first, stop) if partial < 0 else slice(partial, partial + stop - first)
        target = (out, lse) if partial < 0 else (pool_out, pool_lse)
        target[0][place], target[1][place] = part
    _reduce(works, pool_out, pool_lse, out, lse)
    return out.reshape(tokens, heads, -1), lse.reshape(tokens, heads)


def _run_item(
    q: Tensor, cache: LatentCache, qo_indptr: Sequence[int], item: list[int], scale: float, fold: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    request, _, first, stop, kv_start, kv_stop, behind, _ = item
    k = cache.keys(kv_start, max(kv_start, kv_stop))  # shorter than its query, a request can give kv_stop < kv_start
    kv = torch.arange(kv_start, kv_start + len(k), device=q.device)
    last_visible = torch.full((stop - first,), kv_stop + behind, device=q.device)
    if is_causal:
        token = torch.arange(first, stop, device=q.device) // fold
        last_visible -= int(qo_indptr[request // fold + 1]) - 1 - token
    visible = kv[None] < last_visible[:, None]
    # All rows of an item share its KV: one "row" of the padded form, with a single KV head.
    out, lse = masked_attention(q[None], k[None, :, None], k[None, :, None, : cache.latent_size], visible[None], scale)
    return out[0], lse[0]


def _reduce(works: Works, pool_out: Tensor, pool_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    starts = torch.as_tensor(works.reduce_indptr).tolist()
    for group, (first, stop) in enumerate(torch.as_tensor(works.reduce_final_map).tolist()):
        partials = works.reduce_partial_map[starts[group] : starts[group + 1]]
        if len(partials) == 0:
            continue
        merged: tuple[Tensor, Tensor] | None = None
        for partial in map(int, partials):
            part = pool_out[partial : partial + stop - first], pool_lse[partial : partial + stop - first]
            merged = part if merged is None else merge_states(*merged, *part)
        assert merged is not None
        out[first:stop], lse[first:stop] = merged
