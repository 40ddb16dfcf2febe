"""AITER MLA: which kernel serves a batch, and that a plan holds what that kernel reads and no more."""

from typing import Any

import numpy as np
import pytest
from syncfree.backends.aiter_mla import BACKEND
from syncfree.backends.mla_host import decode_buffers, decode_schedule, paged_kv_indices
from syncfree.backends.mla_kernels import WORK_BUFFERS
from syncfree.planner import (
    BadInput,
    Batch,
    Environment,
    InexactBatch,
    Limits,
    MetadataPlan,
    Planner,
    SkippedField,
    UnorderedBatch,
    schedules,
)

WORK = [f"decode.{name}" for name in WORK_BUFFERS]
FP8 = [f"prefill.fp8_ps.{name}" for name in (*WORK_BUFFERS[1:], "num_partial_tiles", "kv_indices")]
BF16 = {"kv_dtype": "bf16"}


def plan_of(query: list[int], seq: list[int], heads: int = 16, threshold: int = 1, **settings: Any) -> MetadataPlan:
    names = ("seq_lens_lower", "num_tokens", "is_prefilling")
    batch = {name: settings.pop(name) for name in names if name in settings}
    planner = Planner(BACKEND, Environment(**settings), Limits(num_heads=heads))
    return planner.plan(Batch.from_lengths(query, seq, decode_threshold=threshold, **batch))


def decodes(rows: int, heads: int = 16, query: int = 1, **settings: Any) -> MetadataPlan:
    return plan_of([query] * rows, [100] * rows, heads, query, **settings)


def all_or_none(plan: MetadataPlan) -> bool:
    """Whether the six work buffers are planned; they come together or not at all."""
    planned = {name in plan for name in WORK}
    assert len(planned) == 1
    return planned.pop()


# ---------------------------------------------------------------- the gate


@pytest.mark.parametrize(
    ("rows", "padding", "settings", "persistent"),
    [
        (31, 0, BF16, True),
        (32, 0, BF16, False),
        (31, 1, BF16, False),
        (31, 1, {**BF16, "full_graphs": False}, False),
        (400, 0, {"kv_dtype": "fp8"}, True),
        (31, 1, {"kv_dtype": "fp8"}, True),
        (32, 0, {**BF16, "mla_persistent_max_batch": 0}, True),
        (64, 0, {**BF16, "mla_persistent_max_batch": 65}, True),
        (65, 0, {**BF16, "mla_persistent_max_batch": 65}, False),
        (32, 0, {**BF16, "aiter": "0.1.17"}, True),
        (32, 0, {**BF16, "aiter": "0.1.18"}, False),
        (32, 0, {**BF16, "gfx": "gfx942"}, True),
        (32, 0, {**BF16, "vllm": "0.26"}, False),
    ],
)
def test_aiter_leaves_the_persistent_kernel_from_32_launched_bf16_rows_on(
    rows: int, padding: int, settings: dict[str, Any], persistent: bool
) -> None:
    limits = Limits(max_num_seqs=512)
    batch = Batch.from_lengths([1] * rows + [0] * padding, [100] * rows + [0] * padding, num_tokens=rows + padding)
    plan = Planner(BACKEND, Environment(**settings), limits).plan(batch)
    assert all_or_none(plan) == persistent
    if not persistent:
        assert plan.routes == {"decode": "mla_decode_fwd (split KV)"}
        with pytest.raises(SkippedField, match=r"aiter takes the split-KV kernel from (32|65) launched rows on"):
            plan["decode.work_info"]


def test_graph_padding_named_by_tokens_alone_counts_as_rows() -> None:
    assert not all_or_none(decodes(31, num_tokens=32, **BF16))
    assert all_or_none(decodes(31, num_tokens=32, full_graphs=False, **BF16))


@pytest.mark.parametrize("heads", [32, 128])
def test_the_gate_is_for_16_launched_heads(heads: int) -> None:
    assert all_or_none(decodes(64, heads, **BF16))
    assert not all_or_none(decodes(64, 12, **BF16))  # 12 heads run as 16


# ---------------------------------------------------------------- head counts


@pytest.mark.parametrize(
    ("vllm", "heads", "launched"),
    [
        ("0.32", 12, 16),
        ("0.32", 20, 32),
        ("0.32", 24, 32),
        ("0.32", 100, 112),
        ("0.32", 128, 128),
        ("0.32", 144, 144),
        ("0.26", 1, 16),
        ("0.26", 8, 16),
        ("0.26", 48, 48),
    ],
)
def test_the_plan_records_the_launched_head_count(vllm: str, heads: int, launched: int) -> None:
    plan = decodes(4, heads, vllm=vllm)
    assert plan.heads.decode == launched
    sizes = schedules.mla_decode_shapes(256, 1, launched, "fp8", "fp8", gfx="gfx950", num_cu=256)
    assert {name: plan[f"decode.{name}"].shape for name in WORK_BUFFERS} == sizes


@pytest.mark.parametrize(
    ("vllm", "heads", "expected"),
    [
        ("0.32", 136, "1 to 128 (padded to a multiple of 16) or a larger multiple of 16"),
        ("0.26", 136, "a multiple or a divisor of 16"),
        ("0.26", 12, "a multiple or a divisor of 16"),
        ("0.26", 20, "a multiple or a divisor of 16"),
        ("0.26", 24, "a multiple or a divisor of 16"),
    ],
)
def test_a_head_count_without_a_kernel_is_refused_before_any_batch(vllm: str, heads: int, expected: str) -> None:
    with pytest.raises(BadInput) as caught:
        Planner(BACKEND, Environment(vllm=vllm), Limits(num_heads=heads))
    assert str(caught.value) == f"num_heads: expected {expected} for aiter_mla with vLLM {vllm}, got {heads}"


def test_heads_gathered_over_ranks_are_checked_too() -> None:
    with pytest.raises(BadInput, match=r"num_heads of 2 ranks: expected 1 to 128 .* got 136"):
        Planner(BACKEND, Environment(dcp_world_size=2), Limits(num_heads=68))


def test_sizes_come_from_the_longest_draft_block_and_the_scheduler_s_cap() -> None:
    plan = Planner(BACKEND, Environment(), Limits(max_num_seqs=64, num_heads=128)).plan(
        Batch.from_lengths([4, 4], [50, 60], decode_threshold=4)
    )
    sizes = schedules.mla_decode_shapes(64, 4, 128, "fp8", "fp8", gfx="gfx950", num_cu=256)
    assert plan["decode.work_info"].shape == sizes["work_info"]


# ---------------------------------------------------------------- blocks of several tokens


@pytest.mark.parametrize("gfx", ["gfx942", "gfx950"])
def test_five_bf16_tokens_a_row_at_16_heads_have_no_persistent_kernel(gfx: str) -> None:
    plan = decodes(4, query=5, gfx=gfx, **BF16)
    assert not all_or_none(plan)
    assert plan.skipped["decode.work_info"].startswith(
        "no persistent kernel takes 16 heads and more than 4 bf16 tokens"
    )
    assert all_or_none(decodes(4, query=4, gfx=gfx, **BF16))
    assert all_or_none(decodes(4, query=5, gfx=gfx, kv_dtype="fp8"))
    assert all_or_none(decodes(4, 32, query=5, gfx=gfx, **BF16))


def test_026_schedules_one_token_a_row_only() -> None:
    plan = decodes(4, query=2, vllm="0.26")
    assert not all_or_none(plan)
    assert plan.skipped["decode.work_info"] == "vLLM 0.26 launches decode blocks of this length without a schedule"


def test_padding_rows_of_a_full_graph_stand_for_whole_draft_blocks() -> None:
    plan = plan_of([3, 3, 0, 0], [50, 60, 0, 0], threshold=3, num_tokens=12)
    assert plan["decode.max_qo_len"].value == plan["decode.uni_seqlen_qo"].value == 3
    batch = Batch.from_lengths([3, 3, 0, 0], [50, 60, 0, 0], decode_threshold=3, num_tokens=12)
    buffers = decode_buffers(plan, batch, Environment())
    assert buffers.qo_indptr.tolist() == [0, 3, 6, 9, 12]
    assert buffers.paged_kv_indptr.tolist() == [0, 50, 110, 113, 116]


@pytest.mark.parametrize(
    ("query", "tokens", "rows", "uniform"),
    [
        ([1, 1, 0], 3, 3, 1),  # launched padding: a row like any other
        ([1, 1, 0], 2, 2, 1),  # padding without tokens: left out of the launch
    ],
)
def test_rows_of_different_length_never_reach_aiter_where_its_planner_is_undefined(
    query: list[int], tokens: int, rows: int, uniform: int
) -> None:
    """128 bf16 heads on gfx942 are folded, and for uni_seqlen_qo = -1 aiter then reads the indptr out of bounds."""
    plan = plan_of(query, [50, 60, 0], heads=128, num_tokens=tokens, gfx="gfx942", **BF16)
    assert plan["decode.uni_seqlen_qo"].value == uniform
    assert plan["decode.qo_indptr"].shape == (rows + 1,)
    assert plan_of(query, [50, 60, 0], num_tokens=tokens)["decode.uni_seqlen_qo"].value == -1  # defined: as upstream


# ---------------------------------------------------------------- Gluon


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_gluon_serves_one_token_a_row_without_schedule_or_bound(heads: int) -> None:
    plan = decodes(4, heads, **BF16)
    assert plan.routes == {"decode": "mla_gluon"}
    assert plan.heads.decode == heads
    assert not all_or_none(plan)
    for name in ("qo_indptr", "paged_kv_last_page_len", "min_kv_seq_len"):
        assert f"decode.{name}" in plan.skipped


@pytest.mark.parametrize("heads", [1, 7, 12, 15])
def test_gluon_verify_serves_draft_blocks_of_any_small_head_count_and_reads_a_bound(heads: int) -> None:
    plan = decodes(4, heads, query=3, **BF16)
    assert plan.routes == {"decode": "mla_gluon (verify)"}
    assert not all_or_none(plan)
    assert plan["decode.min_kv_seq_len"].consumer == "mla_gluon (verify)(min_kv_seq_len)"


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_dtype": "fp8"},
        {**BF16, "gfx": "gfx942"},
        {**BF16, "mla_small_heads": "asm"},
        {**BF16, "kv_cache_bytes": 2**31 + 1},
        {**BF16, "vllm": "0.26"},
    ],
)
@pytest.mark.parametrize("query", [1, 3])
def test_small_heads_are_padded_where_gluon_has_no_build_or_no_bounds_mask(
    settings: dict[str, Any], query: int
) -> None:
    plan = decodes(4, 8, query=query, **settings)
    assert "mla_decode_fwd" in plan.routes["decode"]
    assert plan.heads.decode == 16


def test_gluon_takes_a_count_that_does_not_divide_16_only_when_asked() -> None:
    assert decodes(4, 12, **BF16).heads.decode == 16
    assert decodes(4, 12, mla_small_heads="gluon", **BF16).routes == {"decode": "mla_gluon"}
    assert decodes(4, 4, kv_cache_bytes=2**31, **BF16).routes == {"decode": "mla_gluon"}


# ---------------------------------------------------------------- bounds


def test_the_shortest_sequence_is_a_lower_bound_never_the_upper_one() -> None:
    query, upper, lower = [3, 3, 0], [90, 80, 0], [88, 78, 0]
    plan = plan_of(query, upper, 8, 3, seq_lens_lower=lower, full_graphs=False, **BF16)
    assert plan["decode.min_kv_seq_len"].value == 78  # padding rows are not asked for


def test_under_full_graphs_the_bound_holds_for_every_replay() -> None:
    short = plan_of([3, 3], [4, 900], 8, 3, **BF16)["decode.min_kv_seq_len"].value
    long = plan_of([3, 3], [800, 900], 8, 3, **BF16)["decode.min_kv_seq_len"].value
    assert short == long == 3
    mixed = plan_of([3, 3, 50], [800, 900, 50], 8, 3, **BF16)  # a prefill beside it: no full graph replays this
    assert mixed["decode.min_kv_seq_len"].value == 800


def test_a_decode_of_bounded_rows_leaves_all_lengths_to_the_device() -> None:
    plan = plan_of([1, 1], [90, 80], seq_lens_lower=[88, 80])
    assert all(planned.source != "host" or planned.dtype == "int" for planned in plan.fields.values())
    assert plan.cost.h2d_bytes == 0
    with pytest.raises(InexactBatch, match=r"seq_lens\[0\]: expected an exact length"):
        decode_buffers(plan, Batch.from_lengths([1, 1], [90, 80], seq_lens_lower=[88, 80]), Environment())


def test_a_bounded_row_in_the_prefill_segment_is_refused() -> None:
    with pytest.raises(InexactBatch, match=r"seq_lens\[2\]: expected an exact length, which prefill\.chunked_context"):
        plan_of([4, 4, 3], [90, 70, 60], threshold=4, seq_lens_lower=[90, 70, 57])


# ---------------------------------------------------------------- prefill


def test_fp8_prefill_needs_gfx950_an_fp8_cache_and_a_segment_without_context() -> None:
    plan = plan_of([1, 300, 40], [70, 300, 40])
    assert plan.routes["prefill"] == "mla_prefill_ps_asm_fwd + mla_reduce_v1"
    assert plan.heads.fp8_prefill == 16
    assert all(name in plan for name in FP8)
    for settings, reason in (
        ({"gfx": "gfx942"}, "built for gfx950 only"),
        (BF16, "the KV cache is not FP8"),
        ({"dtype": "fp16"}, "writes bf16 through a raw pointer"),
    ):
        other = plan_of([1, 300, 40], [70, 300, 40], **settings)
        assert other.routes["prefill"] == "flash_attn_varlen_func"
        assert other.heads.fp8_prefill is None
        assert all(reason in other.skipped[name] for name in FP8)
    context = plan_of([1, 300, 40], [70, 300, 90])
    assert all("the segment has context" in context.skipped[name] for name in FP8)
    assert "prefill.chunked_context.starts" in context


def test_the_fp8_prefill_schedule_is_the_planner_s_for_the_new_tokens() -> None:
    plan = plan_of([1, 700, 40], [70, 700, 40], heads=20)
    assert plan.heads.fp8_prefill == 32
    starts = plan["prefill.query_start_loc"].value
    assert starts.tolist() == [0, 700, 740]
    expected = schedules.ps_prefill(starts, starts, [700, 40], num_heads_k=32, num_cu=256)
    for name in WORK_BUFFERS[1:]:
        assert np.array_equal(plan[f"prefill.fp8_ps.{name}"].value, getattr(expected, name)), name
    assert plan["prefill.fp8_ps.num_partial_tiles"].value == expected.num_partials
    assert plan["prefill.fp8_ps.kv_indices"].shape == (740,)


def test_026_runs_fp8_prefill_at_its_own_head_count() -> None:
    assert plan_of([300], [300], heads=8, vllm="0.26").heads.fp8_prefill == 8
    assert plan_of([300], [300], heads=8, vllm="0.32").heads.fp8_prefill == 16


def test_each_vllm_version_gets_the_fields_it_reads() -> None:
    batch = [1, 30, 40], [70, 130, 90]
    new, old = plan_of(*batch, vllm="0.32"), plan_of(*batch, vllm="0.26")
    only_new = {"request_slice", "token_slice", "is_continuation", "empty_token_slices", "query_start_loc"}
    only_old = {"seq_tot", "max_seq_lens", "chunk_total_token", "has_empty_context", "prefill_tokens_with_context"}
    for name in only_new:
        assert f"prefill.chunked_context.{name}" in new
        assert "cuts contexts differently" in old.skipped[f"prefill.chunked_context.{name}"]
    for name in only_old:
        assert f"prefill.chunked_context.{name}" in old
        assert "cuts contexts differently" in new.skipped[f"prefill.chunked_context.{name}"]
    assert new["prefill.chunked_context.starts"].shape == (2,)
    assert old["prefill.chunked_context.starts"].shape == (1, 2)


@pytest.mark.parametrize(("kv_dtype", "mapped"), [("bf16", False), ("fp8", True)])
def test_a_rank_gathers_its_shard_and_only_an_fp8_gather_maps_tokens(kv_dtype: str, mapped: bool) -> None:
    for vllm in ("0.26", "0.32"):
        plan = plan_of([30, 40], [130, 90], dcp_world_size=2, kv_dtype=kv_dtype, vllm=vllm)
        assert "prefill.chunked_context.padded_local_cu_seq_lens" in plan
        assert ("prefill.chunked_context.padded_local_token_to_seq" in plan) == mapped
        assert "gathers its shard" in plan.skipped["prefill.chunked_context.token_to_seq"]


# ---------------------------------------------------------------- what is refused


def test_decode_context_parallelism_plans_single_tokens_and_leaves_blocks_to_vllm() -> None:
    plan = decodes(4, dcp_world_size=2)
    assert plan.heads.decode == 32
    assert plan["decode.seq_lens"].consumer == "dcp_combine(seq_lens)"
    with pytest.raises(BadInput, match="decode context parallelism of blocks of 3 tokens a row is left to vLLM"):
        decodes(4, query=3, dcp_world_size=2)
    with pytest.raises(BadInput, match=r"vLLM 0\.26 has no decode context parallelism for this backend"):
        decodes(4, dcp_world_size=2, vllm="0.26")


def test_a_drafter_s_non_causal_block_is_left_to_vllm() -> None:
    planner = Planner(BACKEND, Environment(), Limits())
    with pytest.raises(BadInput, match="only causal batches are planned"):
        planner.plan(Batch.from_lengths([4, 4], [90, 80], decode_threshold=4, causal=False))


@pytest.mark.parametrize(
    ("environment", "limits", "message"),
    [
        ({"gfx": "gfx90a"}, {}, "gfx: expected gfx942 or gfx950 for aiter_mla, got gfx90a"),
        ({}, {"num_kv_heads": 2}, "num_kv_heads: expected 1, the latent head of MLA, got 2"),
        ({}, {"sliding_window": 128}, "sliding_window: expected none for aiter_mla, got 128"),
        ({"kv_sharing": True}, {}, "kv_sharing: expected false, MLA layers do not share caches"),
        ({"attention_sinks": True}, {}, "attention_sinks: expected false for aiter_mla"),
    ],
)
def test_settings_the_backend_cannot_serve_are_refused(
    environment: dict[str, Any], limits: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput) as caught:
        Planner(BACKEND, Environment(**environment), Limits(**limits))
    assert str(caught.value) == message


@pytest.mark.parametrize("vllm", ["0.26", "0.32"])
def test_a_context_past_any_cache_is_refused_with_its_row(vllm: str) -> None:
    planner = Planner(BACKEND, Environment(vllm=vllm))
    with pytest.raises(BadInput, match=r"^seq_lens\[2\]: expected at most 268435456 tokens of context in a step, got"):
        planner.plan(Batch.from_lengths([1, 40, 40], [9, 90, 2**30]))


def test_padding_before_a_row_is_refused_and_ordered_when_asked() -> None:
    batch = Batch.from_lengths([1, 0, 1], [50, 0, 60])
    planner = Planner(BACKEND, Environment(), Limits())
    with pytest.raises(UnorderedBatch, match=r"rows\[1\]"):
        planner.plan(batch)
    assert planner.plan(batch, reorder=True).order == [0, 2, 1]


def test_026_context_behind_a_row_without_is_ordered_when_asked() -> None:
    batch = Batch.from_lengths([30, 40], [30, 90])
    planner = Planner(BACKEND, Environment(vllm="0.26"), Limits())
    with pytest.raises(UnorderedBatch, match=r"rows\[1\]: expected no context behind a row without"):
        planner.plan(batch)
    assert planner.plan(batch, reorder=True).order == [1, 0]
    assert Planner(BACKEND, Environment(), Limits()).plan(batch).routes["prefill"].startswith("flash_attn")


# ---------------------------------------------------------------- the decode's buffers on the host


@pytest.mark.parametrize("heads", [16, 128])
def test_a_decode_can_be_planned_on_the_host_alone(heads: int) -> None:
    environment = Environment(gfx="gfx942", num_cu=80, **BF16)
    batch = Batch.from_lengths([2, 2, 2], [700, 33, 129], decode_threshold=2)
    plan = Planner(BACKEND, environment, Limits(num_heads=heads)).plan(batch)
    buffers = decode_buffers(plan, batch, environment)
    schedule = decode_schedule(plan, buffers, environment)
    assert len(schedule.work_info) <= plan["decode.work_info"].shape[0]
    assert schedule.work_indptr.shape == plan["decode.work_indptr"].shape
    fold = heads // 16
    assert sorted({row[0] for row in schedule.work_info.tolist()}) == list(range(3 * fold))


def test_pages_of_single_tokens_follow_the_block_table() -> None:
    indptr = np.array([0, 5, 5, 8], np.int32)
    table = np.array([[7, 2], [9, 9], [4, 1]], np.int32)
    assert paged_kv_indices(indptr, table, 4).tolist() == [28, 29, 30, 31, 8, 16, 17, 18]


def test_a_rank_s_decode_counts_its_own_tokens() -> None:
    environment = Environment(dcp_world_size=2, dcp_rank=1, dcp_interleave=4)
    batch = Batch.from_lengths([1, 1], [11, 4])
    plan = Planner(BACKEND, environment, Limits()).plan(batch)
    assert decode_buffers(plan, batch, environment).paged_kv_indptr.tolist() == [0, 4, 4]


# ---------------------------------------------------------------- reuse


def test_a_steady_decode_keeps_its_plan_and_a_new_context_changes_the_route() -> None:
    planner = Planner(BACKEND, Environment(), Limits())
    first = planner.plan(Batch.from_lengths([1, 1], [50, 60]))
    second = planner.plan(Batch.from_lengths([1, 1], [51, 61]))
    assert second.fields == first.fields
    assert second.segments[0].max_seq_len == 61
    fresh = planner.plan(Batch.from_lengths([1, 300], [50, 300]))
    chunk = planner.plan(Batch.from_lengths([1, 300], [51, 600]))
    assert "prefill.fp8_ps.work_info" in fresh
    assert "prefill.fp8_ps.work_info" not in chunk
    assert chunk["prefill.chunked_context.num_context_tokens"].value == [300]
    later = planner.plan(Batch.from_lengths([1, 300], [52, 900]))
    assert later["prefill.chunked_context.num_context_tokens"].value == [600]
    assert chunk["prefill.chunked_context.num_context_tokens"].value == [300]


def test_every_plan_costs_no_sync_and_one_copy_at_most() -> None:
    rng = np.random.default_rng(3)
    planner = Planner(BACKEND, Environment(), Limits(workspace_tokens=512))
    for _ in range(200):
        rows = int(rng.integers(1, 20))
        query = np.where(rng.random(rows) < 0.5, 1, rng.integers(2, 60, rows))
        batch = Batch.from_lengths(query, query + rng.integers(0, 900, rows))
        plan = planner.plan(batch, reorder=True)
        assert plan.cost.syncs == 0
        assert plan.cost.h2d_copies == bool(plan.host_arrays())
        assert plan.cost.h2d_bytes == sum(array.nbytes for array in plan.host_arrays().values())
