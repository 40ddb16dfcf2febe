"""AITER FA: which kernels serve what, what is left out and why, bounds, and the values of small cases by hand."""

import pytest
from syncfree.backends.aiter_fa import BACKEND, CONTEXT_TOKENS
from syncfree.planner import BadInput, Batch, Environment, InexactBatch, Limits, Planner

MIXED = ([1, 1, 16, 64], [9, 70, 500, 64])


def plan(lengths=MIXED, environment=None, limits=None, **batch):
    planner = Planner(BACKEND, environment or Environment(), limits or Limits())
    return planner.plan(Batch.from_lengths(*lengths, **batch))


def test_the_three_segments_have_their_kernels():
    assert plan().routes == {
        "decode": "paged_attention_v1",
        "extend": "flash_attn_varlen_func + cp_mha_gather_cache + merge_attn_states",
        "prefill": "flash_attn_varlen_func",
    }


@pytest.mark.parametrize(
    ("environment", "limits", "batch", "kernel"),
    [
        ({}, {}, {}, "paged_attention_v1"),
        ({"shuffle_kv": True}, {}, {}, "paged_attention_common"),
        ({}, {"sliding_window": 64}, {}, "unified_attention"),
        ({}, {"sliding_window": 64}, {"causal": False}, "flash_attn_with_kvcache"),
        ({}, {"sliding_window": 64, "full_attention_layers": True}, {}, "unified_attention + paged_attention_v1"),
        ({"attention_sinks": True}, {}, {}, "unified_attention"),
        ({}, {}, {"causal": False}, "paged_attention_v1"),
    ],
)
def test_decode_kernels_follow_window_sinks_layout_and_causality(environment, limits, batch, kernel):
    made = plan(([1, 1], [9, 70]), Environment(**environment), Limits(**limits), **batch)
    assert made.routes == {"decode": kernel}


def test_several_tokens_a_row_take_the_unified_kernel():
    made = plan(([3, 3], [9, 70]), decode_threshold=3)
    assert made.routes == {"decode": "unified_attention"}
    assert made["decode.max_query_len"].value == 3
    assert "common.causal" in made


@pytest.mark.parametrize(
    ("lengths", "threshold", "environment", "limits"),
    [
        (([3, 3], [9, 70]), 3, {}, {}),
        (([1, 1], [9, 70]), 1, {}, {"sliding_window": 8}),
        (([1, 1], [9, 70]), 1, {"attention_sinks": True}, {}),
        (([16], [70]), 1, {}, {"sliding_window": 8}),
    ],
)
def test_the_shuffle_layout_is_refused_where_no_kernel_reads_it(lengths, threshold, environment, limits):
    with pytest.raises(BadInput, match="shuffle KV layout"):
        plan(lengths, Environment(shuffle_kv=True, **environment), Limits(**limits), decode_threshold=threshold)


def test_scales_are_planned_for_fp8_in_the_shuffle_layout_only_where_the_cache_is_read():
    def has_scales(lengths, **environment):
        return "common.k_scale" in plan(lengths, Environment(**environment))

    decode, extend, prefill = ([1], [9]), ([16], [70]), ([16], [16])
    assert has_scales(decode, shuffle_kv=True)
    assert has_scales(extend, shuffle_kv=True)
    assert not has_scales(prefill, shuffle_kv=True)
    assert not has_scales(decode, shuffle_kv=True, kv_dtype="bf16")
    assert not has_scales(decode)
    reason = plan(decode).skipped["common.k_scale"]
    assert reason == "outside the shuffle KV layout kernels take the layer's own scale"


def test_pure_decode_carries_no_copy_and_none_of_the_fields_that_were_removed():
    made = plan(([1, 1], [9, 70]))
    assert (made.cost.syncs, made.cost.h2d_copies, made.cost.h2d_bytes) == (0, 0, 0)
    removed = ("min_query_len", "max_seq_len", "query_start_loc")
    assert {f"decode.{name}" for name in removed} <= set(made.skipped)
    assert {"common.num_actual_kv_tokens", "common.total_tokens", "common.common_prefix_len"} <= set(made.skipped)
    assert made.graph_eligible


def test_a_prefill_takes_its_lengths_from_its_own_fields_and_reads_no_cache():
    made = plan(([16, 5], [16, 5]))
    assert "common.seq_lens" not in made
    assert "common.block_table" not in made
    assert made["prefill.query_start_loc"].value.tolist() == [0, 16, 21]
    assert made.skipped["common.seq_lens"].startswith("no decode rows in this batch")
    assert made.skipped["common.block_table"].startswith("a prefill without context reads the new keys")


def test_context_is_cut_into_equal_shares_of_the_workspace():
    share = CONTEXT_TOKENS // 2
    made = plan(([10, 10], [10 + share + 5, 10 + 3]), limits=Limits(max_num_batched_tokens=64))
    chunks = {name.rpartition(".")[2]: field.value for name, field in made.fields.items() if "chunk_context" in name}
    assert chunks["num_chunks"] == 2
    assert chunks["chunk_starts"].tolist() == [[0, 0], [share, share]]
    assert chunks["cu_seq_lens_chunk"].tolist() == [[0, share, share + 3], [0, 5, 5]]
    assert chunks["max_seq_lens"] == [share, 5]
    assert chunks["total_token_per_batch"] == [share + 3, 5]
    owners = chunks["token_to_batch"]
    assert owners.shape == (2, share + 3)
    assert owners[0].tolist() == [0] * share + [1] * 3
    assert owners[1, :5].tolist() == [0] * 5
    assert set(owners[1, 5:].tolist()) == {2}


def test_a_window_shows_itself_and_the_queries():
    made = plan(([4, 4], [100, 6]), limits=Limits(sliding_window=8))
    window = {name.rpartition(".")[2]: field.value for name, field in made.fields.items() if ".swa." in name}
    assert window["cu_seqlens"].tolist() == [0, 12, 18]
    assert window["seq_starts"].tolist() == [88, 0]
    assert window["token_to_batch"].tolist() == [0] * 12 + [1] * 6
    assert (window["max_seqlens"], window["total_tokens"]) == (12, 18)
    assert made["extend.swa.workspace"].shape == (2, 18, 1, 128)
    assert made.skipped["extend.chunk_context.chunk_starts"].startswith("every layer has a sliding window")


def test_shared_caches_are_gathered_for_new_rows_only():
    made = plan(environment=Environment(kv_sharing=True))
    assert made["kv_sharing.query_start_loc"].value.tolist() == [0, 16, 80]
    assert made["kv_sharing.seq_starts"].value.tolist() == [484, 0]
    assert made["kv_sharing.token_to_batch"].value.tolist() == [0] * 16 + [1] * 64
    decodes = plan(([1, 1], [9, 70]), Environment(kv_sharing=True))
    assert decodes.skipped["kv_sharing.seq_starts"].startswith("no extend or prefill rows in this batch")


def test_bounds_serve_decodes_and_are_refused_where_loops_depend_on_them():
    made = plan(([3, 16], [70, 500]), decode_threshold=3, seq_lens_lower=[68, 500])
    assert made["common.max_seq_len"].value == 500
    with pytest.raises(InexactBatch, match=r"^seq_lens\[1\]: expected an exact length"):
        plan(([3, 16], [70, 500]), decode_threshold=3, seq_lens_lower=[68, 498])
    # a short row with context behind the first long one rides in the extend segment
    with pytest.raises(InexactBatch, match=r"^seq_lens\[2\]"):
        plan(([3, 16, 3], [70, 500, 70]), decode_threshold=3, seq_lens_lower=[68, 500, 68])


@pytest.mark.parametrize(
    ("environment", "limits", "text"),
    [
        ({"gfx": "gfx90a"}, {}, "environment.gfx: expected gfx942 or gfx950 for aiter_fa, got gfx90a"),
        ({}, {"head_size": 576}, "limits.head_size: expected 64, 128 or 256 for aiter_fa, got 576"),
        ({}, {"block_size": 24}, "limits.block_size: expected a multiple of 16 for aiter_fa, got 24"),
        ({}, {"num_heads": 6, "num_kv_heads": 4}, "limits.num_heads: expected a multiple of num_kv_heads = 4, got 6"),
        ({}, {"max_num_seqs": 40000}, "limits.max_num_seqs: expected <= 32768 for aiter_fa, got 40000"),
    ],
)
def test_environments_and_limits_it_cannot_serve_are_refused_before_any_batch(environment, limits, text):
    with pytest.raises(BadInput) as caught:
        Planner(BACKEND, Environment(**environment), Limits(**limits))
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("lengths", "limits", "text"),
    [
        (
            ([40] + [0] * CONTEXT_TOKENS, [90] + [0] * CONTEXT_TOKENS),
            {},
            "query_lens: expected at most 32768 rows in the extend segment, got 32769",
        ),
        (
            ([40, 40], [90, 2**31 - 1]),
            {},
            "seq_lens[1]: expected contexts of at most 268435456 tokens, chunks times the fullest, got 131072 x 16434",
        ),
        (
            ([40, 40], [90, 2**30]),
            {"sliding_window": 2**29},
            "seq_lens[1]: expected <= 268435456 tokens inside the windows of all extends, got 536871042",
        ),
    ],
)
def test_batches_past_any_cache_are_refused_before_memory_runs_out(lengths, limits, text):
    with pytest.raises(BadInput) as caught:
        plan(lengths, limits=Limits(**limits))
    assert str(caught.value) == text


def test_a_long_context_beside_many_rows_is_planned():
    made = plan(([10] + [2] * 255, [10 + 2**20] + [3] * 255))
    assert made["extend.chunk_context.num_chunks"].value == 2**20 // (CONTEXT_TOKENS // 256)


def test_no_plan_costs_a_sync_or_more_than_one_copy():
    for environment in (Environment(), Environment(kv_sharing=True)):
        for limits in (Limits(), Limits(sliding_window=64), Limits(sliding_window=64, full_attention_layers=True)):
            for lengths in (MIXED, ([1], [9]), ([16], [70]), ([16], [16]), ([], [])):
                cost = plan(lengths, environment, limits).cost
                assert cost.syncs == 0
                assert cost.h2d_copies <= 1
                assert (cost.h2d_bytes > 0) == (cost.h2d_copies == 1)
