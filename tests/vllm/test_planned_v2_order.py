"""Model runner V2's row order, vLLM's three-way split of it, and what the planner does: see docs/vllm-v2-order.md."""

import inspect
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from syncfree.planner import Batch, Environment, Limits, Planner, UnorderedBatch, classify

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent))
import fa_builder  # noqa: E402
import planned_builders as builders  # noqa: E402
from vllm.v1.attention.backends.utils import split_decodes_prefills_and_extends  # noqa: E402
from vllm.v1.worker.gpu import model_runner  # noqa: E402

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
STEP = {"decode": (1, 70), "extend": (50, 100), "fresh prompt": (10, 10)}  # query length, sequence length
LIMITS = Limits(num_kv_heads=2)


def rows_of_v2():
    scheduled = {name: query for name, (query, _) in STEP.items()}
    sort = model_runner.sort_batch_req_ids
    parameters = inspect.signature(sort).parameters
    return sort(scheduled, {}, 1) if "draft_tokens" in parameters else sort(scheduled, 1)


def batch_of(names):
    query, seq = zip(*(STEP[name] for name in names), strict=True)
    return Batch.from_lengths(query, seq, is_prefilling=[q > 1 for q in query])


def test_the_runner_sorts_by_tokens_so_a_short_prompt_comes_before_a_longer_extend():
    assert rows_of_v2() == ["decode", "fresh prompt", "extend"]


def test_vllm_then_serves_the_extend_without_its_context(monkeypatch):
    monkeypatch.setattr(fa_builder.upstream, "torch", fa_builder.TorchWithoutPinning())
    common = fa_builder.metadata_of(batch_of(rows_of_v2()))
    assert split_decodes_prefills_and_extends(common, 1)[:3] == (1, 0, 2)
    builder = builders.fa(LIMITS, Environment(), 1)
    built = builder.build(0, common)
    assert (built.num_extends, built.extend_metadata, built.num_prefills) == (0, None, 2)
    right = builder.build(0, fa_builder.metadata_of(batch_of(["decode", "extend", "fresh prompt"])))
    assert (right.num_extends, right.num_prefills) == (1, 1)
    assert sum(right.extend_metadata.chunk_context_metadata.total_token_per_batch) == 50


def test_the_planner_refuses_that_order_naming_the_row_and_knows_the_right_one():
    batch = batch_of(rows_of_v2())
    planner = Planner(builders.FlashAttention.backend, Environment(), LIMITS)
    with pytest.raises(UnorderedBatch, match=r"rows\[2\]: expected no context"):
        planner.plan(batch)
    assert classify(batch).order == [0, 2, 1]
    assert [s.name for s in planner.plan(batch, reorder=True).segments] == ["decode", "extend", "prefill"]


def test_a_planned_builder_leaves_such_a_step_to_vllm_and_says_so_once(monkeypatch, caplog):
    builders.put_in_aiter(monkeypatch)
    monkeypatch.setattr(fa_builder.upstream, "torch", fa_builder.TorchWithoutPinning())
    tally = builders.tally_of("on")
    builder = builders.planned(builders.fa, LIMITS, Environment(), 1, tally)
    caplog.set_level(logging.WARNING, "syncfree")
    for _ in range(3):
        built = builder.build(0, fa_builder.metadata_of(batch_of(rows_of_v2())))
        assert built.num_prefills == 2
    assert dict(tally.fallbacks) == {"ROCM_AITER_FA: UnorderedBatch": 3}
    assert len(caplog.records) == 1


def test_the_latent_attention_of_vllm_does_not_mind_that_order(monkeypatch):
    builders.put_in_aiter(monkeypatch)
    plan = Planner(builders.LatentAttention.backend, Environment(), Limits()).plan(batch_of(rows_of_v2()))
    assert [s.name for s in plan.segments] == ["decode", "prefill"]
    assert plan["prefill.chunked_context.num_context_tokens"].value == [50]


def test_the_program_of_the_page_prints_what_the_page_says():
    page = (ROOT / "docs" / "vllm-v2-order.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", page, re.S)
    [printed] = re.findall(r"It prints `(.*?)`", page)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == printed
