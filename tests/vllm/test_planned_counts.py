"""What a build costs on the simulated device: vLLM 0.32's AITER builders and planned ones, above the aiter double."""

import sys
from pathlib import Path

import pytest
from syncfree.backends.vllm.planned.batches import BATCHES as BATCHES_OF_THIS_PROCESS
from syncfree.planner import Batch, Environment, Limits
from syncfree.profiler import Profiler, simulated_device

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent))
import planned_builders as builders  # noqa: E402
import planned_simulated as simulated  # noqa: E402

pytestmark = pytest.mark.vllm

FA = Limits(max_num_seqs=256, num_kv_heads=2)
MLA = Limits(max_num_seqs=256, max_num_batched_tokens=4096, workspace_tokens=2048)
BF16 = Environment(kv_dtype="bf16")
BATCHES = {
    "decode": ([1] * 6, [50, 60, 70, 80, 90, 1000]),
    "verify": ([4] * 4, [50, 60, 70, 80]),
    "extend": ([16] * 4, [66, 76, 3000, 96]),
    "prefill": ([64] * 3, [64] * 3),
    "mixed": ([1, 1, 16, 20, 64], [50, 60, 90, 2000, 64]),
}
# (d2h, event waits, asynchronous uploads) of vLLM's own build.
UPSTREAM = {
    ("fa", "decode"): (0, 0, 0),
    ("fa", "extend"): (1, 0, 3),
    ("fa", "prefill"): (1, 0, 0),
    ("fa", "mixed"): (1, 0, 3),
    ("mla", "decode"): (0, 0, 0),
    ("mla", "prefill"): (0, 1, 5),
    ("mla", "extend"): (0, 0, 4),
    ("mla", "mixed"): (0, 0, 4),
    ("triton_mla", "decode"): (0, 0, 0),
    ("triton_mla", "prefill"): (0, 0, 0),
    ("triton_mla", "extend"): (0, 0, 4),
    ("triton_mla", "mixed"): (0, 0, 4),
}
MAKERS = {
    "fa": (builders.fa, FA),
    "mla": (builders.mla, MLA),
    "triton_mla": (builders.triton_mla_builder.make_builder, MLA),
}


WARM_UP = 5


def counted(builder, common, repeats=3):
    """The steps of a few builds, after some in which every staging slot has been used."""
    for _ in range(WARM_UP):
        builder.build(0, common)
    with Profiler() as profiler:
        for _ in range(repeats):
            with profiler.step(), profiler.phase("build"):
                made = builder.build(0, common)
    notes = [note for note in profiler.report.notes if note.kind == "hazard"]
    return profiler.report.steps, made, notes


def both(make, limits, environment, kind, monkeypatch):
    threshold = 4 if kind == "verify" else 1
    query, seq = BATCHES[kind]
    batch = Batch.from_lengths(query, seq, decode_threshold=threshold, is_prefilling=[q > threshold for q in query])
    with simulated_device() as device:
        simulated.install(monkeypatch, environment)
        common = simulated.metadata(batch, device)
        theirs = simulated.builder(make, limits, environment, threshold, device)
        tally = builders.tally_of("on")
        adapter = builders.ADAPTERS[make]()
        ours = simulated.builder(make, limits, environment, threshold, device)
        ours = builders.adopt(ours, adapter, limits, environment, tally)
        upstream, unplanned, _ = counted(theirs, common)
        planned, served, hazards = counted(ours, common)
        assert not hazards
        assert tally.planned == WARM_UP + 3, tally.fallbacks
        _, plan = ours._attached.plan(ours, common)
        assert builders.differences(adapter, plan, unplanned, served) == []
        if "decode" in plan.routes and make is builders.mla:
            simulated.same_decode_buffers(theirs, ours, plan, unplanned, served)
    return upstream, planned


@pytest.mark.parametrize("kind", ["decode", "extend", "prefill", "mixed"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_build_waits_for_nothing_and_copies_once(name, kind, monkeypatch):
    make, limits = MAKERS[name]
    upstream, planned = both(make, limits, Environment(), kind, monkeypatch)
    d2h, events, uploads = UPSTREAM[name, kind]
    for step in upstream:
        assert (step.syncs.d2h, step.syncs.event, step.syncs.total) == (d2h, events, d2h + events)
        assert step.copies.h2d == uploads
    for ours, theirs in zip(planned, upstream, strict=True):
        assert ours.syncs.total == 0
        assert ours.copies.h2d <= 1
        assert ours.launches.kernels <= theirs.launches.kernels


def test_verifying_drafts_with_few_heads_waits_upstream_only(monkeypatch):
    limits = Limits(max_num_seqs=256, max_num_batched_tokens=4096, workspace_tokens=2048, num_heads=8)
    upstream, planned = both(builders.mla, limits, BF16, "verify", monkeypatch)
    assert all(step.syncs.total == 1 for step in upstream)
    assert all(step.syncs.total == 0 and step.copies.h2d <= 1 for step in planned)


def test_shadow_adds_no_wait_and_finds_a_difference_later(monkeypatch):
    from syncfree.backends import aiter_fa

    right = aiter_fa.context_chunks
    monkeypatch.setattr(aiter_fa, "context_chunks", lambda step: right(step)._replace(starts=right(step).starts + 1))
    BATCHES_OF_THIS_PROCESS._kept.clear()  # a batch of another test carries its right plan
    batch = Batch.from_lengths(*BATCHES["extend"], is_prefilling=[True] * 4)
    with simulated_device() as device:
        simulated.install(monkeypatch, Environment())
        common = simulated.metadata(batch, device)
        theirs = simulated.builder(builders.fa, FA, Environment(), 1, device)
        tally = builders.tally_of("shadow")
        shadow = simulated.builder(builders.fa, FA, Environment(), 1, device)
        shadow = builders.adopt(shadow, builders.ADAPTERS[builders.fa](), FA, Environment(), tally)
        upstream, _, _ = counted(theirs, common)
        steps, _, hazards = counted(shadow, common, repeats=40)
    assert not hazards
    assert {step.syncs.total for step in steps} == {step.syncs.total for step in upstream} == {1}
    assert tally.compared == WARM_UP + 40
    assert not tally.fallbacks
    assert tally.mismatches >= 1
    assert tally.first_mismatch.startswith("aiter_fa: extend.chunk_context.chunk_starts: planned")
