"""Reference attention against softmax written out per query, and over the golden MLA decode schedules."""

import dataclasses
import gzip
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from syncfree.backends import aiter_fa, fa_context
from syncfree.backends.reference import (
    LatentCache,
    PlannedStep,
    attend_by_plan,
    causal_attention,
    decode_attention,
    extend_attention,
    merge_states,
    mla_decode,
    pad_rows,
)
from syncfree.planner import BadInput, Batch, Environment, Limits, Planner, SkippedField

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "mla_decode.jsonl.gz"
HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 4
SCALE = SIZE**-0.5
F64 = torch.float64


def softmax_over(q, k, v, scale):
    """One query [D] over keys [L, D] and values [L, E]: out [E] and log-sum-exp, in plain Python sums."""
    if len(k) == 0:
        return torch.zeros(v.shape[-1], dtype=q.dtype), float("-inf")
    scores = [float(q @ key) * scale for key in k]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return torch.stack([w / total * value for w, value in zip(weights, v, strict=True)]).sum(0), top + math.log(total)


def paged_case(query_lens, seq_lens, seed=0):
    """Random caches and queries; `k[r]`, `v[r]` [seq_len, KV_HEADS, SIZE] of each row, scattered into blocks."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64)

    widths = [-(-n // BLOCK) for n in seq_lens]
    free = torch.randperm(sum(widths) + 3, generator=generator).tolist()
    caches = rand(2, len(free), BLOCK, KV_HEADS, SIZE)
    table = torch.zeros(len(seq_lens), max(max(widths), 1), dtype=torch.int32)
    keys, values = [], []
    for row, (length, width) in enumerate(zip(seq_lens, widths, strict=True)):
        table[row, :width] = torch.tensor([free.pop() for _ in range(width)], dtype=torch.int32)
        blocks = table[row, :width].tolist()
        keys.append(torch.cat([caches[0, b] for b in blocks] or [caches[0, 0, :0]])[:length])
        values.append(torch.cat([caches[1, b] for b in blocks] or [caches[1, 0, :0]])[:length])
    starts = torch.tensor(np.concatenate(([0], np.cumsum(query_lens))), dtype=torch.int32)
    return SimpleNamespace(
        q=rand(sum(query_lens), HEADS, SIZE),
        k_cache=caches[0],
        v_cache=caches[1],
        table=table,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        starts=starts,
        keys=keys,
        values=values,
    )


def expected(case, query_lens, seq_lens):
    outs, lses = [], []
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for i in range(query_len):
            token, visible = int(case.starts[row]) + i, seq_len - query_len + i + 1
            pairs = [
                softmax_over(
                    case.q[token, head],
                    case.keys[row][:visible, head * KV_HEADS // HEADS],
                    case.values[row][:visible, head * KV_HEADS // HEADS],
                    SCALE,
                )
                for head in range(HEADS)
            ]
            outs.append(torch.stack([out for out, _ in pairs]))
            lses.append(torch.tensor([lse for _, lse in pairs], dtype=F64))
    return torch.stack(outs), torch.stack(lses)


def assert_same(got, wanted):
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seq_lens", [[1], [9, 4, 1, 17], [5, 0, 8]])
def test_decode_sees_its_cached_tokens_and_no_others(seq_lens):
    ones = [1] * len(seq_lens)
    case = paged_case(ones, seq_lens)
    got = decode_attention(case.q, case.k_cache, case.v_cache, case.table, case.seq_lens, max(seq_lens), SCALE)
    assert_same(got, expected(case, ones, seq_lens))


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([3], [3]), ([1, 5, 2], [9, 11, 2]), ([4, 0, 3], [4, 7, 19]), ([7, 1], [30, 30])]
)
def test_extend_is_causal_over_context_and_itself(query_lens, seq_lens):
    case = paged_case(query_lens, seq_lens)
    padding = pad_rows(case.starts, max(query_lens), sum(query_lens))
    got = extend_attention(case.q, case.k_cache, case.v_cache, case.table, case.seq_lens, padding, max(seq_lens), SCALE)
    assert_same(got, expected(case, query_lens, seq_lens))


def test_causal_prefill_reads_fresh_keys_and_values():
    query_lens = [2, 6, 1, 4]
    case = paged_case(query_lens, query_lens)
    k, v = torch.cat(case.keys), torch.cat(case.values)
    got = causal_attention(case.q, k, v, pad_rows(case.starts, 6, 13), SCALE)
    assert_same(got, expected(case, query_lens, query_lens))


def test_parts_of_the_context_merge_into_the_whole():
    case = paged_case([1] * 3, [20, 13, 20])
    k, v = case.k_cache.flatten(0, 1), case.v_cache.flatten(0, 1)

    def part(first, last):
        slots = torch.arange(first, last)
        return decode_attention(
            case.q,
            k[:, None],
            v[:, None],
            slots[None].expand(3, -1),
            torch.full((3,), last - first),
            last - first,
            SCALE,
        )

    merged = merge_states(*merge_states(*part(0, 7), *part(7, 8)), *part(8, 20))
    assert_same(merged, part(0, 20))


def test_merging_with_nothing_changes_nothing():
    out, lse = torch.randn(3, HEADS, SIZE, dtype=F64), torch.randn(3, HEADS, dtype=F64)
    nothing = torch.zeros_like(out), torch.full_like(lse, float("-inf"))
    assert_same(merge_states(out, lse, *nothing), (out, lse))
    assert_same(merge_states(*nothing, *nothing), nothing)


def test_padding_tokens_behind_the_last_row_are_harmless():
    case = paged_case([3, 2], [8, 5])
    q = torch.cat((case.q, torch.full((4, HEADS, SIZE), 7.0, dtype=F64)))
    padding = pad_rows(case.starts, 3, 9)
    out, _ = extend_attention(q, case.k_cache, case.v_cache, case.table, case.seq_lens, padding, 8, SCALE)
    assert_same([out[:5]], [expected(case, [3, 2], [8, 5])[0]])


# ------------------------------------------------------------ driven by a plan

PLAN_SIZE = 64  # the smallest head that aiter_fa takes


def planned_case(batch, query_lens, seq_lens, seed):
    """A plan of `aiter_fa` for `batch` and the tensors of a step whose true lengths are `seq_lens`."""
    limits = Limits(num_heads=2, num_kv_heads=1, head_size=PLAN_SIZE, block_size=16, max_num_seqs=64)
    plan = Planner(aiter_fa.BACKEND, Environment(kv_dtype="bf16"), limits).plan(batch)
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64)

    widths = [-(-n // 16) for n in seq_lens]
    free = torch.randperm(sum(widths) + 2, generator=generator).tolist()
    k_cache, v_cache = rand(2, len(free), 16, 1, PLAN_SIZE)
    table = torch.zeros(len(seq_lens), max(widths), dtype=torch.int32)
    for row, width in enumerate(widths):
        table[row, :width] = torch.tensor([free.pop() for _ in range(width)], dtype=torch.int32)
    fresh, keys, values = [], [], []
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        slots = [(int(table[row, i // 16]), i % 16) for i in range(seq_len)]
        keys.append(torch.stack([k_cache[slot] for slot in slots]))
        values.append(torch.stack([v_cache[slot] for slot in slots]))
        fresh += slots[seq_len - query_len :]
    step = PlannedStep(
        plan,
        rand(len(fresh), 2, PLAN_SIZE),
        torch.stack([k_cache[slot] for slot in fresh]),
        torch.stack([v_cache[slot] for slot in fresh]),
        k_cache,
        v_cache,
        {
            "common.seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
            "common.block_table": table,
            "common.query_start_loc": torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
        },
        0.1,
    )
    return step, keys, values


def assert_planned_step_is_right(batch, query_lens, seq_lens, seed=0):
    step, keys, values = planned_case(batch, query_lens, seq_lens, seed)
    got, token = attend_by_plan(step), 0
    for query_len, seq_len, k, v in zip(query_lens, seq_lens, keys, values, strict=True):
        for i in range(query_len):
            seen = seq_len - query_len + i + 1
            weights = torch.einsum("hd,ld->hl", step.q[token], k[:seen, 0] * 0.1).softmax(-1)
            torch.testing.assert_close(got[token], weights @ v[:seen, 0], rtol=1e-10, atol=1e-12)
            token += 1
    return step.plan


def test_the_minimal_plan_is_enough_for_random_batches(monkeypatch):
    for module in (aiter_fa, fa_context):  # so that contexts of tokens, not thousands, need several rounds
        monkeypatch.setattr(module, "CONTEXT_TOKENS", 96)
    rng, seen, rounds = random.Random(6), set(), set()
    for seed in range(60):
        rows = [(1, rng.randrange(1, 60)) for _ in range(rng.randrange(4))]
        rows += [(q := rng.randrange(2, 30), q + rng.randrange(1, 130)) for _ in range(rng.randrange(4))]
        rows += [(q, q) for q in [rng.randrange(2, 40) for _ in range(rng.randrange(3))]]
        if rows:
            query_lens, seq_lens = map(list, zip(*rows, strict=True))
            plan = assert_planned_step_is_right(Batch.from_lengths(query_lens, seq_lens), query_lens, seq_lens, seed)
            seen |= {segment.name for segment in plan.segments}
            if "extend.chunk_context.num_chunks" in plan:
                rounds.add(plan["extend.chunk_context.num_chunks"].value)
    assert seen == {"decode", "extend", "prefill"}
    assert max(rounds) >= 3


def test_upper_bounds_of_decode_rows_do_not_change_the_answer():
    true_lens, bounds = [7, 21, 40, 30], [9, 21, 44, 30]
    batch = Batch.from_lengths([1, 1, 1, 12], bounds, seq_lens_lower=[6, 21, 40, 30])
    assert_planned_step_is_right(batch, [1, 1, 1, 12], true_lens)


def test_several_tokens_a_decode_row_are_causal_among_themselves():
    query_lens, seq_lens = [3, 2, 3], [9, 30, 17]
    batch = Batch.from_lengths(query_lens, seq_lens, decode_threshold=3)
    assert_planned_step_is_right(batch, query_lens, seq_lens)


@pytest.mark.parametrize(
    "name", ["extend.chunk_context.cu_seq_lens_chunk", "extend.query_start_loc", "common.block_table"]
)
def test_a_plan_with_a_field_too_few_fails_by_name(name):
    step, _, _ = planned_case(Batch.from_lengths([4], [30]), [4], [30], 0)
    fields = {other: field for other, field in step.plan.fields.items() if other != name}
    short = msgspec.structs.replace(step.plan, fields=fields, skipped={name: "cut out by the test"})
    with pytest.raises(SkippedField, match=f"{name}: left out: cut out by the test"):
        attend_by_plan(dataclasses.replace(step, plan=short))


def test_a_plan_with_a_sliding_window_is_refused():
    limits = Limits(num_heads=2, num_kv_heads=1, head_size=PLAN_SIZE, block_size=16, sliding_window=8)
    plan = Planner(aiter_fa.BACKEND, Environment(kv_dtype="bf16"), limits).plan(Batch.from_lengths([4], [30]))
    step, _, _ = planned_case(Batch.from_lengths([4], [30]), [4], [30], 0)
    with pytest.raises(BadInput, match="expected none of extend\\.swa"):
        attend_by_plan(dataclasses.replace(step, plan=plan))


# ------------------------------------------------------------------ MLA decode


def golden_cases(most_work):
    """Golden records of moderate size: scores (query row, head, KV token) to compute, and work items."""
    with gzip.open(GOLDEN, "rt") as lines:
        for line in lines:
            record = json.loads(line)
            qo, kv = record["seqlens_qo_indptr"], record["seqlens_kv_indptr"]
            scores = qo[-1] * record["num_heads_per_head_k"] * kv[-1] // (len(kv) - 1)
            if scores <= most_work and record["num_works"] <= 200:
                yield record


def buffers_of(record):
    tiles = len(record["reduce_indptr"]) - 1
    final_map = np.full((tiles, 2), -1, dtype=np.int32)
    for row, first, stop in record["reduce_final_map_rows"]:
        final_map[row] = first, stop
    return SimpleNamespace(
        work_indptr=record["work_indptr"],
        work_info=np.array(record["work_info"], dtype=np.int32).reshape(8, -1).T,
        reduce_indptr=record["reduce_indptr"],
        reduce_final_map=final_map,
        reduce_partial_map=record["reduce_partial_map"],
    )


def fold_of(record, works):
    """Folded requests per request, from the work items themselves: they cover every folded request's rows."""
    tokens = record["seqlens_qo_indptr"][-1]
    return max(1, round(int(works.work_info[:, 3].max(initial=0)) / tokens)) if tokens else 1


def latent_case(record, seed=0):
    generator = torch.Generator().manual_seed(seed)
    qo, kv = record["seqlens_qo_indptr"], record["seqlens_kv_indptr"]
    heads = record["num_heads_per_head_k"]
    pages = torch.randn(kv[-1] + 5, 12, generator=generator, dtype=F64)
    page_list = torch.randperm(kv[-1] + 5, generator=generator)[: kv[-1]]
    return torch.randn(qo[-1], heads, 12, generator=generator, dtype=F64), LatentCache(pages, page_list, 8)


def dense_mla(q, cache, qo, kv, scale, is_causal):
    out = torch.zeros(*q.shape[:2], cache.latent_size, dtype=q.dtype)
    for request in range(len(kv) - 1):
        k = cache.pages[cache.page_list[kv[request] : kv[request + 1]]]
        for token in range(qo[request], qo[request + 1]):
            seen = max(0, len(k) - (qo[request + 1] - 1 - token)) if is_causal else len(k)
            out[token] = (q[token] @ k[:seen].T * scale).softmax(-1) @ k[:seen, : cache.latent_size]
    return out


def test_mla_decode_by_the_golden_schedules_equals_dense_attention():
    checked = folded = split = 0
    for record in golden_cases(most_work=1_000_000):
        works = buffers_of(record)
        fold = fold_of(record, works)
        q, cache = latent_case(record)
        qo, kv = record["seqlens_qo_indptr"], record["seqlens_kv_indptr"]
        out, lse = mla_decode(q, cache, qo, works, scale=0.3, fold=fold, is_causal=record["is_causal"])
        wanted = dense_mla(q, cache, qo, kv, 0.3, record["is_causal"])
        left_out = out.isnan().any(-1)
        empty = torch.tensor(np.repeat(np.diff(kv) == 0, np.diff(qo)))
        assert not (left_out.any(-1) & ~empty).any(), record["id"]
        torch.testing.assert_close(out[~left_out], wanted[~left_out], rtol=1e-10, atol=1e-12, msg=record["id"])
        assert (lse[~left_out] == float("-inf")).any() == (wanted[~left_out] == 0).all(-1).any(), record["id"]
        checked, folded, split = checked + 1, folded + (fold > 1), split + (record["num_partials"] > 0)
    assert checked > 130
    assert folded > 20
    assert split > 60


@pytest.mark.parametrize("column", [1, 2, 3, 4, 5, 6])
def test_a_wrong_work_item_gives_a_wrong_answer(column):
    # Otherwise the test above would pass for schedules that nobody reads.
    record = next(
        r for r in golden_cases(1_000_000) if r["num_partials"] > 4 and r["max_seqlen_qo"] > 1 and r["is_causal"]
    )
    works = buffers_of(record)
    q, cache = latent_case(record)
    qo, kv = record["seqlens_qo_indptr"], record["seqlens_kv_indptr"]
    # column 6 only matters near the causal diagonal, where a piece ends with its request
    candidates = np.flatnonzero((works.work_info[:, 1] >= 0) & ((column != 6) | (works.work_info[:, 6] == 0)))
    works.work_info[candidates[0], column] += 1 if column != 3 else -1
    out, _ = mla_decode(q, cache, qo, works, scale=0.3, fold=fold_of(record, works))
    assert not torch.allclose(out, dense_mla(q, cache, qo, kv, 0.3, True), rtol=1e-6)
