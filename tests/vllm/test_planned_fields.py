"""Planned builders against vLLM's own on random batches: every field that a kernel reads is equal, faults are seen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from syncfree.backends import aiter_fa, aiter_mla, mla_triton
from syncfree.backends.vllm.planned.batches import BATCHES

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent))
import planned_sweep  # noqa: E402
from planned_faults import OneWrongElement  # noqa: E402
from released import released_tree  # noqa: E402

pytestmark = pytest.mark.vllm

SEEN_IN_ALL = ("padding rows", "padding tokens", "draft blocks", "not in order", "decode", "prefill")


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    BATCHES._kept.clear()
    yield
    torch.set_num_threads(before)
    BATCHES._kept.clear()


@pytest.mark.parametrize("setting", planned_sweep.FA_SETTINGS)
def test_flash_attention(setting, monkeypatch):
    seen = planned_sweep.flash_attention(monkeypatch, setting, seed=1, batches=500)
    shuffled = "shuffle" in setting
    assert seen["served"] > (90 if shuffled else 230)
    assert seen["extend"] > 50
    assert min(seen[kind] for kind in SEEN_IN_ALL if kind != "draft blocks" or not shuffled) > 5
    assert (seen["ROCM_AITER_FA: BadInput"] > 50) == shuffled  # no kernel reads blocks of drafts from that layout


@pytest.mark.parametrize("setting", planned_sweep.MLA_SETTINGS)
def test_latent_attention(setting, monkeypatch):
    seen = planned_sweep.latent_attention(monkeypatch, setting, seed=2, batches=300)
    assert seen["served"] > 150
    assert seen["context"] > 30
    assert seen["decode on the host"] > 50
    assert min(seen[kind] for kind in (*SEEN_IN_ALL, "decodes alone", "bounded")) > 5


@pytest.mark.parametrize("setting", planned_sweep.SHARDED_SETTINGS)
def test_latent_attention_over_ranks(setting, monkeypatch):
    seen = planned_sweep.sharded_latent_attention(monkeypatch, setting, seed=2, batches=300)
    assert seen["served"] > 150
    assert seen["sharded context"] > 30


@pytest.mark.parametrize("setting", planned_sweep.TRITON_MLA_SETTINGS)
def test_latent_attention_on_triton(setting, monkeypatch):
    seen = planned_sweep.triton_latent_attention(monkeypatch, setting, seed=3, batches=300)
    assert seen["served"] > 200
    assert seen["context"] > 100
    assert min(seen[kind] for kind in (*SEEN_IN_ALL, "decodes alone", "bounded")) > 5


@pytest.mark.timeout(900)
def test_latent_attention_on_triton_in_026():
    """Its files do not import beside 0.32: the program runs with that release's package in front."""
    try:
        tree = released_tree("0.26.0")
    except OSError as error:
        pytest.skip(str(error))
    command = [sys.executable, planned_sweep.__file__, "--only", "triton_latent_attention", "--batches", "3000"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["vllm"].startswith("0.26.")
    assert told["seen"]["served"] > 2_000
    assert min(told["seen"][kind] for kind in ("context", "decodes alone", "bounded", "padding rows")) > 200


# What a planned builder hands on as the engine gave it, or counts from other fields: wrong, it is seen in shadow only.
HANDED_ON = {
    "common.num_actual_tokens",
    "common.max_seq_len",
    "common.causal",
    "prefill.chunked_context.num_chunks",
}
# vLLM keeps it under no name; a wrong one is refused by aiter or makes another schedule.
UNNAMED = {"decode.uni_seqlen_qo"}
FAULTY = {
    "flash_attention": (planned_sweep.flash_attention, ("plain", "kv sharing, window"), aiter_fa.BACKEND),
    "latent_attention": (
        planned_sweep.latent_attention,
        ("fp8 cache, full graphs", "small heads, gluon"),
        aiter_mla.BACKEND,
    ),
    "triton_latent_attention": (planned_sweep.triton_latent_attention, ("bf16",), mla_triton.BACKEND),
}


def served_fields(backend):
    """Host fields that vLLM 0.32 has without decode context parallelism, and under a name."""
    old = ("seq_tot", "max_seq_lens", "chunk_total_token", "has_empty_context", "prefill_tokens_with_context")
    sharded = ("local", "cu_seq_lens_lst", "chunk_size")
    for field in backend.fields:
        last = field.name.removeprefix("prefill.chunked_context.")
        left_out = last in old or any(word in last for word in sharded) if "chunked_context" in field.name else False
        if field.source == "host" and not left_out and field.name not in UNNAMED:
            yield field.name


def faults():
    """(sweep, field, mode) of every fault that a builder can carry into its metadata, or shadow into its comparison."""
    for name, (_, _, backend) in FAULTY.items():
        for field in served_fields(backend):
            yield from ((name, field, mode) for mode in ("on", "shadow") if mode == "shadow" or field not in HANDED_ON)


@pytest.mark.parametrize(("sweep", "field", "mode"), faults())
def test_one_wrong_element_of_one_plan_is_found(sweep, field, mode, monkeypatch):
    """One element of one field of one batch is changed: the sweep names the field."""
    run, settings, _ = FAULTY[sweep]
    for setting in settings:
        BATCHES._kept.clear()
        with pytest.MonkeyPatch.context() as patches:
            fault = OneWrongElement(patches, field, mode)
            try:
                run(patches, setting, seed=5, batches=150)
            except AssertionError as error:
                assert field in str(error), error  # noqa: PT017 - which of the settings reaches the field is not told
                return
            assert fault.done is None, f"not found: {fault.done}"
    if field not in ("prefill.fp8_ps.reduce_final_map", "prefill.fp8_ps.reduce_partial_map"):
        pytest.fail("no batch had this field")


def test_the_planner_failing_in_a_way_of_its_own_is_found(monkeypatch):
    """A sweep does not take an exception for a refusal."""
    monkeypatch.setattr(aiter_fa, "context_chunks", lambda step: 1 / 0)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        planned_sweep.flash_attention(monkeypatch, "plain", seed=1, batches=60)
