"""AITER MLA plans against vLLM 0.32's real builder, field by field."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from syncfree.backends.aiter_mla import BACKEND
from syncfree.backends.mla_host import decode_buffers
from syncfree.planner import Batch, Environment, InexactBatch, Limits, MetadataPlan, Planner, schedules

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent))
import mla_builder  # noqa: E402

pytestmark = pytest.mark.vllm


def _limits(**sizes):
    return Limits(max_num_seqs=mla_builder.MOST_ROWS, max_num_batched_tokens=100_000, **sizes)


SETTINGS = {
    "fp8 cache, full graphs": (Environment(), _limits(workspace_tokens=2048)),
    "fp8 cache, eager": (Environment(full_graphs=False), _limits(workspace_tokens=2048, block_size=64, num_heads=24)),
    "bf16 cache, gfx942": (Environment(kv_dtype="bf16", gfx="gfx942"), _limits(workspace_tokens=4096, num_heads=128)),
    "bf16 cache, gate off": (Environment(kv_dtype="bf16", mla_persistent_max_batch=0), _limits(workspace_tokens=1024)),
    "small heads, gluon": (Environment(kv_dtype="bf16"), _limits(workspace_tokens=1024, num_heads=8)),
    "small heads, odd count": (Environment(kv_dtype="bf16"), _limits(workspace_tokens=1024, num_heads=12)),
    "small heads, padded": (
        Environment(kv_dtype="bf16", mla_small_heads="asm"),
        _limits(workspace_tokens=1024, num_heads=12),
    ),
    "small heads, big cache": (
        Environment(kv_dtype="bf16", kv_cache_bytes=2**31 + 1),
        _limits(workspace_tokens=1024, num_heads=4),
    ),
    "two ranks": (
        Environment(kv_dtype="bf16", gfx="gfx942", dcp_world_size=2, dcp_rank=1),
        _limits(workspace_tokens=1024, num_heads=64),
    ),
    "four ranks, interleaved": (
        Environment(dcp_world_size=4, dcp_rank=2, dcp_interleave=16),
        _limits(workspace_tokens=2048, num_heads=16),
    ),
}


def _schedule(qo, kv, context, heads):
    plan = schedules.ps_prefill(qo.numpy(), kv.numpy(), context.numpy(), num_heads_k=heads, num_cu=256)
    return plan.work_indptr, plan.work_info, plan.reduce_indptr, plan.reduce_final_map, plan.reduce_partial_map


@pytest.fixture(params=SETTINGS)
def settings(request, monkeypatch):
    environment, limits = SETTINGS[request.param]
    return environment, limits, mla_builder.install(monkeypatch, environment, _schedule)


def random_batch(rng, rows, threshold, longest=3_000):
    """Decodes of one or of mixed query lengths first, then rows with and without context in any order, then padding."""
    mix = rng.dirichlet([1, 1, 1])
    kinds = np.sort(rng.choice([0, 1, 2], rows, p=mix)) if rng.random() < 0.8 else rng.choice([0, 1, 2], rows, p=mix)
    uniform = int(rng.integers(1, threshold + 1)) if rng.random() < 0.7 else 0
    short = np.full(rows, uniform) if uniform else rng.integers(1, threshold + 1, rows)
    query = np.where(kinds == 0, short, rng.integers(1, 60, rows) + (rng.random(rows) < 0.9) * threshold)
    computed = np.where(kinds == 2, 0, rng.integers(1, longest, rows))
    if rng.random() < 0.3:
        padding = int(rng.integers(1, 4))
        query, computed = np.append(query, [0] * padding), np.append(computed, [0] * padding)
    total = int(query.sum())
    tokens = total
    if (chance := rng.random()) < 0.15:
        tokens += int(rng.integers(0, 9))
    elif chance < 0.4 and uniform:
        tokens = max(total, uniform * len(query))
    return Batch.from_lengths(
        query, query + computed, is_prefilling=computed == 0, decode_threshold=threshold, num_tokens=tokens
    )


def same(planned, real):
    if isinstance(real, torch.Tensor):
        return real.numpy().shape == np.shape(planned.value) and np.array_equal(real.numpy(), planned.value)
    return planned.value == real


# What the plan knows and upstream passes to a kernel, or leaves out, without a name of its own.
UNNAMED = {"common.seq_lens", "common.block_table", "decode.uni_seqlen_qo", "prefill.fp8_ps.work_indptr"}
SCHEDULE = ("work_info", "reduce_final_map", "reduce_partial_map")


def compare(plan, batch, builder, calls, environment):
    """Differences between a plan and what the builder makes."""
    calls.clear()
    metadata = builder.build(0, mla_builder.metadata_of(batch, environment))
    wrong = []

    def expect(what, good, *seen):
        if not good:
            wrong.append((what, *seen))

    rows = {s.name: s.rows[1] - s.rows[0] for s in plan.segments}
    dropped = "decode.qo_indptr" in plan and plan["decode.qo_indptr"].shape[0] <= rows["decode"]
    expect("padding rows", not dropped or _undefined(plan, environment), plan.fields)
    for name, planned in plan.fields.items():
        real = mla_builder.upstream_field(metadata, name)
        part, _, last = name.rpartition(".")
        if name in UNNAMED or (dropped and part == "decode" and planned.source != "host"):
            continue
        if part == "decode" and last in (*mla_builder.WORK, "work_metadata_ptrs", "work_info"):
            expect(name, real is not None, planned)
        elif part == "prefill.fp8_ps" and last in SCHEDULE:
            expect(name, np.array_equal(real[: len(planned.value)].numpy(), planned.value), planned, real)
        elif name == "prefill.fp8_ps.reduce_indptr":
            expect(name, np.array_equal(real[: len(planned.value)].numpy(), planned.value), planned, real)
            expect(name, bool((real[len(planned.value) - 1 :] == planned.value[-1]).all()), planned, real)
        elif name == "decode.min_kv_seq_len":
            live = batch.seq_lens[: rows["decode"]][batch.query_lens[: rows["decode"]] > 0].min()
            expect(name, 1 < planned.value <= live, planned, live)
            expect(name, real in (live, 0), live, real)
        elif planned.source == "host":
            expect(name, same(planned, real), planned, real)
        else:
            shape = tuple(real.shape)
            expect(name, all(a in (None, b) for a, b in zip(planned.shape, shape, strict=True)), planned, shape)
    if metadata.decode is not None and not dropped:
        buffers = decode_buffers(plan, batch, environment)
        for name in ("qo_indptr", "paged_kv_indptr"):
            real, ours = getattr(metadata.decode, name).tolist(), getattr(buffers, name).tolist()
            if name == "qo_indptr" and not environment.full_graphs and metadata.decode.max_qo_len == 1:
                # Without full graphs upstream counts padding rows as tokens, past the end of the query.
                live = int((batch.query_lens[: rows["decode"]] > 0).sum())
                real, ours = real[: live + 1], ours[: live + 1]
            expect(name, f"decode.{name}" not in plan or real == ours, real, ours)
    split = (rows.get("decode", 0), rows.get("prefill", 0))
    expect("segments", (metadata.num_decodes, metadata.num_prefills) == split)
    _compare_decode(plan, metadata, calls, environment, expect)
    _compare_prefill(plan, metadata, calls, expect)
    return wrong


def _undefined(plan, environment):
    """Whether aiter's schedule is undefined for rows of different query length."""
    return not schedules.reads_query_lens(
        num_heads=plan.heads.decode,
        gfx=environment.gfx,
        q_dtype=mla_builder.mla_decode.query_dtype(environment),
        kv_dtype=environment.kv_dtype,
        max_seqlen_qo=plan["decode.max_qo_len"].value,
    )


def _compare_decode(plan, metadata, calls, environment, expect):
    decode = metadata.decode
    expect("decode", (decode is not None) == ("decode" in plan.routes))
    if decode is None:
        return
    route = plan.routes["decode"]
    gluon = route.startswith("mla_gluon")
    expect("gluon", decode.use_gluon_decode == (gluon and "verify" not in route), route)
    expect("verify", decode.use_gluon_verify == (gluon and "verify" in route), route)
    scheduled = "decode.work_info" in plan
    unread = "(split KV)" in route and plan.skipped["decode.work_info"].startswith(("aiter takes", "no persistent"))
    expect("schedule", decode.has_persistent_metadata == (scheduled or unread), route)
    if not (scheduled and calls["decode"]):
        return
    (args, kwargs), dtypes = calls["decode"][0], (mla_builder.mla_decode.query_dtype(environment), environment.kv_dtype)
    expect("heads", args[3] == plan.heads.decode, args[3], plan.heads)
    expect("causal", args[5] is True)
    expect("max_seqlen_qo", kwargs["max_seqlen_qo"] == plan["decode.max_qo_len"].value, kwargs)
    expect("dtypes", (kwargs["dtype_q"], kwargs["dtype_kv"]) == dtypes)
    planned, real = plan["decode.uni_seqlen_qo"].value, int(kwargs["uni_seqlen_qo"])
    # Where aiter is undefined for ragged rows, upstream asks for it all the same.
    expect("uni_seqlen_qo", planned == real or (real == -1 and _undefined(plan, environment)), planned, real)


def _compare_prefill(plan, metadata, calls, expect):
    prefill = metadata.prefill
    expect("prefill", (prefill is not None) == ("prefill" in plan.routes))
    if prefill is None:
        return
    expect("context", (prefill.chunked_context is not None) == ("prefill.chunked_context.starts" in plan), plan.routes)
    expect("fp8", bool(calls["prefill"]) == ("prefill.fp8_ps.work_info" in plan), plan.routes)
    if calls["prefill"]:
        qo, _, _, gqa_ratio, heads, rules = calls["prefill"][0]
        expect("fp8 heads", heads == plan.heads.fp8_prefill, heads)
        expect("fp8 rules", gqa_ratio == 1 and rules["qlen_granularity"] == 256 and rules["is_causal"], rules)
        expect("fp8 queries", qo.tolist() == plan["prefill.query_start_loc"].value.tolist())
        whole = metadata.fp8_prefill_work_indptr.tolist()
        expect("fp8 work_indptr", whole == plan["prefill.fp8_ps.work_indptr"].value.tolist())


def is_served(plan_or_batch, environment):
    """Whether this backend plans the batch: DCP blocks of several tokens a row are left to vLLM."""
    decode = next((s for s in plan_or_batch.segments("two", "uniform") if s.name == "decode"), None)
    return environment.dcp_world_size == 1 or decode is None or decode.max_query_len(plan_or_batch) <= 1


def sweep(settings, batches, seen):
    environment, limits, calls = settings
    planners = {t: Planner(BACKEND, environment, limits) for t in range(1, 5)}
    builders = {t: mla_builder.make_builder(limits, environment, t) for t in range(1, 5)}
    for number, batch in enumerate(batches):
        if not is_served(batch, environment):
            seen["refused: dcp"] += 1
            with pytest.raises(ValueError, match="decode context parallelism"):
                planners[batch.decode_threshold].plan(batch)
            continue
        plan = planners[batch.decode_threshold].plan(batch)
        wrong = compare(plan, batch, builders[batch.decode_threshold], calls, environment)
        assert not wrong, (number, batch.query_lens, batch.seq_lens, batch.num_tokens, batch.decode_threshold, wrong)
        assert plan.cost.syncs == 0
        assert plan.cost.h2d_copies <= 1
        assert plan.cost.h2d_bytes == sum(a.nbytes for a in plan.host_arrays().values())
        seen["+".join(s.name for s in plan.segments)] += 1
        seen["context"] += "prefill.chunked_context.starts" in plan
        seen["fp8"] += "prefill.fp8_ps.work_info" in plan
        seen["split"] += bool(plan.fields.get("prefill.chunked_context.num_chunks", 0)) and (
            plan["prefill.chunked_context.num_chunks"].value > 1
        )
        seen[plan.routes.get("decode", "")] += 1
    return seen


def test_thousands_of_small_batches_are_planned_as_upstream_builds_them(settings):
    rng = np.random.default_rng(11)
    seen = Counter()
    sweep(settings, (random_batch(rng, int(rng.integers(1, 33)), int(rng.integers(1, 5))) for _ in range(800)), seen)
    environment, _, _ = settings
    assert set(seen) >= {"decode", "prefill", "decode+prefill"}
    assert seen["context"] > 100
    assert seen["split"] > 50
    assert (seen["fp8"] > 10) == (environment.gfx == "gfx950" and environment.kv_dtype == "fp8")


def test_contexts_longer_than_the_workspace_are_cut_into_the_same_chunks(settings):
    rng = np.random.default_rng(12)
    seen = Counter()
    sweep(settings, (random_batch(rng, int(rng.integers(1, 6)), 1, 40_000) for _ in range(40)), seen)
    assert seen["split"] > 10


def test_big_batches_are_planned_as_upstream_builds_them(settings):
    rng = np.random.default_rng(13)
    batches = (random_batch(rng, int(rng.integers(200, 1025)), int(rng.integers(1, 5)), 400) for _ in range(6))
    sweep(settings, batches, Counter())


def test_rows_known_by_bounds_decode_and_are_refused_in_the_prefill_segment(settings):
    """Upstream takes the optimistic bound there, and gathers context that a rejected draft never wrote."""
    environment, limits, _ = settings
    if environment.dcp_world_size > 1:
        pytest.skip("blocks of several tokens a row are left to vLLM under decode context parallelism")
    planner = Planner(BACKEND, environment, limits)
    exact = Batch.from_lengths([4, 4, 3], [90, 70, 60], decode_threshold=4)
    common = mla_builder.metadata_of(exact, environment)
    assert [s.name for s in exact.segments("two", "uniform")] == ["decode", "prefill"]
    with pytest.raises(InexactBatch, match=r"seq_lens\[2\]: expected an exact length, .* got 57 to 60"):
        planner.plan(Batch.from_vllm_metadata(common, decode_threshold=4))
    assert planner.plan(Batch.from_vllm_metadata(common, decode_threshold=4, drafts_in_flight=0)).cost.syncs == 0
    uniform = mla_builder.metadata_of(Batch.from_lengths([4, 4, 4], [90, 70, 60], decode_threshold=4), environment)
    plan = planner.plan(Batch.from_vllm_metadata(uniform, decode_threshold=4))
    assert all(planned.source != "host" or planned.dtype == "int" for planned in plan.fields.values())


def test_a_plan_in_bytes_is_the_same_plan(settings):
    environment, limits, _ = settings
    rng = np.random.default_rng(14)
    planner = Planner(BACKEND, environment, limits)
    for _ in range(40):
        plan = planner.plan(random_batch(rng, 6, 1))
        assert MetadataPlan.from_bytes(plan.to_bytes()) == plan
