"""AITER FA plans against vLLM's real builder, field by field."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from syncfree.backends.aiter_fa import BACKEND
from syncfree.planner import (
    BadInput,
    Batch,
    Environment,
    InexactBatch,
    Limits,
    MetadataPlan,
    Planner,
    UnorderedBatch,
    classify,
)
from syncfree.planner.order import refuse_mis_served

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent))
import fa_builder  # noqa: E402

pytestmark = pytest.mark.vllm


def limits(**changes):
    return Limits(max_num_seqs=1100, max_num_batched_tokens=2**18, **({"num_kv_heads": 2} | changes))


SETTINGS = {
    "plain": (Environment(), limits()),
    "bf16 cache": (Environment(kv_dtype="bf16", gfx="gfx942"), limits(num_kv_heads=4, head_size=64)),
    "sliding window": (Environment(), limits(sliding_window=64)),
    "window beside full layers": (Environment(), limits(sliding_window=128, full_attention_layers=True)),
    "kv sharing": (Environment(kv_sharing=True), limits()),
    "kv sharing, window": (Environment(kv_sharing=True), limits(sliding_window=32)),
    "shuffle, fp8": (Environment(shuffle_kv=True, kv_cache_bytes=7 * 2 * 16 * 2 * 128), limits()),
    "shuffle, bf16": (Environment(shuffle_kv=True, kv_dtype="bf16"), limits()),
}


@pytest.fixture(params=SETTINGS, autouse=True)
def settings(request, monkeypatch):
    environment, limits = SETTINGS[request.param]
    monkeypatch.setattr(fa_builder.upstream, "torch", fa_builder.TorchWithoutPinning())
    monkeypatch.setattr(
        fa_builder.upstream.rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: environment.shuffle_kv
    )
    return environment, limits


def random_batch(rng, rows, extends, threshold, long=2_000):
    """At most `extends` rows with context and a long query; fresh short prompts and padding in odd places."""
    kinds = rng.choice(["decode", "extend", "prefill", "fresh short"], rows, p=rng.dirichlet([1, 1, 1, 0.3]))
    query, computed = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
    left = extends
    for i, kind in enumerate(kinds):
        if kind == "extend" and not left:
            kind = "decode"
        left -= kind == "extend"
        short = int(rng.integers(1, threshold + 1))
        query[i] = short if kind in ("decode", "fresh short") else int(rng.integers(threshold + 1, 80))
        computed[i] = 0 if kind in ("prefill", "fresh short") else int(rng.integers(1, long))
    flags = computed == 0
    if rng.random() < 0.3:
        padding = int(rng.integers(1, 4))
        query = np.append(query, np.zeros(padding, dtype=np.int64))
        computed = np.append(computed, np.zeros(padding, dtype=np.int64))
        flags = np.append(flags, np.zeros(padding, dtype=bool))
    tokens = int(query.sum()) + (int(rng.integers(0, 9)) if rng.random() < 0.3 else 0)
    return Batch.from_lengths(
        query, query + computed, is_prefilling=flags, decode_threshold=threshold, num_tokens=tokens
    )


def ordered(rng, batch):
    """Half of the batches as the runner orders them, half as they are."""
    order = classify(batch).order
    return batch if order is None or rng.random() < 0.5 else batch.take(order)


def same(planned, real):
    if isinstance(real, torch.Tensor):
        return real.numpy().shape == np.shape(planned.value) and np.array_equal(real.numpy(), planned.value)
    return type(planned.value) is type(real) and planned.value == real


def compare(plan, batch, builder):
    """Differences between a plan and what the builder makes: planned fields, rows and tokens of the segments."""
    common = fa_builder.metadata_of(batch)
    metadata = builder.build(0, common)
    twins = {"seq_lens": common.seq_lens, "block_table": common.block_table_tensor}
    twins |= {"slot_mapping": common.slot_mapping, "query_start_loc": common.query_start_loc}
    wrong = []
    for name, planned in plan.fields.items():
        real = fa_builder.upstream_field(metadata, name)
        if planned.source == "host":
            good = same(planned, real)
        elif planned.source == "device":
            good = real is twins[name.removeprefix("common.")]
            good = good and all(a in (None, b) for a, b in zip(planned.shape, real.shape, strict=True))
        else:
            good = all(a in (None, b) for a, b in zip(planned.shape, real.shape, strict=True))
        if not good:
            wrong.append((name, planned, real))
    counts = {s.name: (s.rows[1] - s.rows[0], s.tokens[1] - s.tokens[0]) for s in plan.segments}
    rows = (metadata.num_decodes, metadata.num_extends, metadata.num_prefills)
    if rows != tuple(counts.get(name, (0, 0))[0] for name in ("decode", "extend", "prefill")):
        wrong.append(("segments", plan.segments, rows))
    tokens = (metadata.num_decode_tokens, metadata.num_extend_tokens)
    if tokens != tuple(counts.get(name, (0, 0))[1] for name in ("decode", "extend")):
        wrong.append(("tokens", plan.segments, tokens))
    return wrong


def served(environment, batch):
    """Whether a decode kernel reads the shuffle layout for this batch: only one token a row."""
    decode = next((s for s in batch.segments("three") if s.name == "decode"), None)
    return not environment.shuffle_kv or decode is None or decode.max_query_len(batch) == 1


def sweep(settings, batches, seen):
    environment, limits = settings
    planners = {t: Planner(BACKEND, environment, limits) for t in range(1, 5)}
    builders = {t: fa_builder.make_builder(limits, environment, t) for t in range(1, 5)}
    for number, batch in enumerate(batches):
        planner = planners[batch.decode_threshold]
        try:
            refuse_mis_served(batch, "three", batch.segments("three"))
        except UnorderedBatch:
            seen["refused: order"] += 1
            batch = batch.take(classify(batch).order)
        if not served(environment, batch):
            seen["refused: shuffle"] += 1
            with pytest.raises(BadInput, match="shuffle KV layout"):
                planner.plan(batch)
            continue
        plan = planner.plan(batch)
        wrong = compare(plan, batch, builders[batch.decode_threshold])
        assert not wrong, (number, wrong)
        assert plan.cost.syncs == 0
        assert plan.cost.h2d_copies <= 1
        assert plan.cost.h2d_bytes == sum(a.nbytes for a in plan.host_arrays().values())
        seen["+".join(s.name for s in plan.segments)] += 1
    return seen


MIXES = {
    "decode",
    "extend",
    "prefill",
    "decode+extend",
    "decode+prefill",
    "extend+prefill",
    "decode+extend+prefill",
}


def test_thousands_of_small_batches_are_planned_as_upstream_builds_them(settings):
    rng = np.random.default_rng(5)
    seen = Counter()
    batches = (
        ordered(rng, random_batch(rng, int(rng.integers(1, 33)), 12, int(rng.integers(1, 5)), 700)) for _ in range(1000)
    )
    sweep(settings, batches, seen)
    assert set(seen) >= MIXES
    assert seen["refused: order"] > 50
    assert (seen["refused: shuffle"] > 50) == settings[0].shuffle_kv


def test_contexts_longer_than_the_workspace_are_cut_into_the_same_chunks(settings):
    rng = np.random.default_rng(6)
    batches = (ordered(rng, random_batch(rng, int(rng.integers(1, 6)), 5, 1, 100_000)) for _ in range(60))
    sweep(settings, batches, Counter())


def test_big_batches_with_up_to_64_extends(settings):
    rng = np.random.default_rng(8)
    batches = (random_batch(rng, int(rng.integers(200, 1025)), 64, int(rng.integers(1, 5)), 1500) for _ in range(12))
    sweep(settings, batches, Counter())


def test_what_upstream_fills_and_no_kernel_reads_is_left_out_by_name(settings):
    """With window layers only, upstream still builds the chunks; with full layers only, nothing of the window."""
    environment, limits = settings
    plan = Planner(BACKEND, environment, limits).plan(Batch.from_lengths([16, 16], [416, 700]))
    windows_only = limits.sliding_window is not None and not limits.full_attention_layers
    for name in ("workspace", "cu_seq_lens_chunk", "chunk_starts", "token_to_batch", "num_chunks"):
        assert (f"extend.chunk_context.{name}" in plan.skipped) == windows_only
    assert ("extend.swa.cu_seqlens" in plan.fields) == (limits.sliding_window is not None)
    assert ("kv_sharing.seq_starts" in plan.fields) == environment.kv_sharing
    assert ("common.k_scale" in plan.fields) == (environment.shuffle_kv and environment.kv_dtype == "fp8")


def test_rows_known_by_bounds_are_fine_as_decodes_and_refused_as_extends(settings):
    environment, limits = settings
    planner = Planner(BACKEND, environment, limits)
    decodes = Batch.from_lengths([1, 1], [50, 60], seq_lens_lower=[48, 60])
    plan = planner.plan(decodes)
    assert plan["common.max_seq_len"].value == 60
    assert not compare(plan, decodes, fa_builder.make_builder(limits, environment, 1))
    extends = Batch.from_lengths([1, 16], [50, 60], seq_lens_lower=[50, 58])
    with pytest.raises(InexactBatch, match=r"seq_lens\[1\]: expected an exact length, which extend\..* got 58 to 60"):
        planner.plan(extends)


def test_a_plan_in_bytes_is_the_same_plan(settings):
    environment, limits = settings
    rng = np.random.default_rng(9)
    planner = Planner(BACKEND, environment, limits)
    for _ in range(50):
        plan = planner.plan(random_batch(rng, 6, 3, 1), reorder=True)
        assert MetadataPlan.from_bytes(plan.to_bytes()) == plan
