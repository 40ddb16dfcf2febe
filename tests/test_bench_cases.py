"""The device's work in bench/cases.py: what a GPU would run, interpreted or beside its stand-in, on a CPU."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture(scope="module")
def bench():
    """The modules of the benchmark; they find each other on the path."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCH))
    try:
        import cases
        import serving

        yield cases, serving
    finally:
        sys.path[:] = before


INTERPRETED = """
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
sys.path.insert(0, {bench!r})
import cases, field_builders
from serving import SMOKE, Row

for drafts in (0, 1):
    run = SimpleNamespace(smoke=False, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(drafts)
    q = torch.randn(3 * (1 + drafts), SMOKE.heads, SMOKE.latent + SMOKE.rope, generator=generator)
    cache = torch.randn(3 * SMOKE.room, SMOKE.latent + SMOKE.rope, generator=generator)
    lens = torch.tensor([70, 5, 33], dtype=torch.int32)
    table = torch.arange(3 * SMOKE.room // SMOKE.block, dtype=torch.int32).view(3, -1)
    _, kv, pages = field_builders.token_pages(table, lens, SMOKE.block)
    qo = torch.arange(0, 4 * (1 + drafts), 1 + drafts, dtype=torch.int32)
    rows = [Row(slot, 1 + drafts, int(n) - 1 - drafts, True, True) for slot, n in enumerate(lens)]
    inputs = SimpleNamespace(rows=rows, decode_rows=3, decode_tokens=len(q))
    got = cases.decode_kernel(run, SMOKE, drafts)(q, cache, qo, kv, pages, inputs, 0.3)
    wanted = cases._decode_in_torch(SMOKE, q, cache, qo, kv, pages, inputs, 0.3)
    error = float((got - wanted).norm() / wanted.norm())
    assert error < 1e-5, error
    print("near", drafts)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: kernels are not run")
def test_the_triton_kernel_of_decode_rows_equals_its_stand_in():
    program = [sys.executable, "-c", INTERPRETED.format(bench=str(BENCH))]
    import os

    done = subprocess.run(
        program, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:2] == ["near 0", "near 1"]


@pytest.mark.parametrize(("queries", "keys"), [(1, 7), (5, 5), (4, 19)])
def test_both_ways_of_prefill_attention_agree(bench, queries, keys):
    _, serving = bench
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(1, 2, n, 16, generator=generator) for n in (queries, keys, keys))
    fused, masked = serving._lower_right(q, k, v, 0.3), serving._masked(q, k, v, 0.3)
    torch.testing.assert_close(fused, masked, atol=1e-5, rtol=1e-5)
    # the first query sees the context and itself, the last one everything
    scores = (q[0, 0, 0] @ k[0, 0, : keys - queries + 1].T * 0.3).softmax(-1)
    torch.testing.assert_close(masked[0, 0, 0], scores @ v[0, 0, : keys - queries + 1], atol=1e-5, rtol=1e-5)


def test_times_between_steps_belong_to_the_later_one(bench):
    cases, serving = bench
    records = [
        serving.StepRecord(kind, 1.0, ended) for kind, ended in (("causal", 1.0), ("chunked", 1.5), ("decode", 1.7))
    ]
    times = cases.step_times(records)
    assert {kind: [round(ms, 6) for ms in found] for kind, found in times.items()} == {
        "chunked": [500.0],
        "decode": [200.0],
    }


def test_case_3_alone_keeps_its_timings_in_a_folder_that_was_not_there(bench, tmp_path, monkeypatch):
    """Timings are kept before the results of the case, and so before anything else has made the folder."""
    import json

    cases, _ = bench
    import case3

    timing = json.loads(case3.RECORDED.read_text())["timing"]
    timer = SimpleNamespace(
        time_shapes=lambda run: timing, Run=lambda *_: None, triton=SimpleNamespace(__version__="x")
    )
    monkeypatch.setitem(sys.modules, "mla_h200", timer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    run = cases.Run("cuda", smoke=False, seconds=60, rounds=1, out=tmp_path / "not" / "there")
    told = case3.kernels(run)
    assert len(told["kernels"]) == len(timing["rows"])
    kept = json.loads((run.out / "timing.json").read_text())
    assert kept["timing"] == timing
    assert kept["num_cu"] == 132


class PassedOn:
    """A builder whose metadata are the common ones."""

    def build(self, prefix: int, common):
        return common


def served(bench, forward_of, monkeypatch):
    """Tokens of a few requests on the simulated device; `forward_of(model)` runs a step."""
    cases, serving = bench
    import field_builders as fields
    from syncfree.profiler import simulated_device

    sizes, block = serving.SMOKE, serving.SMOKE.block

    def common(rows, starts, starts_d, lens, table, places):
        return SimpleNamespace(rows=rows, lens=lens, table=table)

    def decode(made, inputs):
        each = inputs.decode_tokens // inputs.decode_rows
        _, kv, pages = fields.token_pages(
            made.table[: inputs.decode_rows], made.lens[: inputs.decode_rows].clone(), block
        )
        return torch.arange(0, inputs.decode_tokens + 1, each, device=pages.device), kv, pages

    def context(made, inputs):
        rows = [row for row in inputs.rows[inputs.decode_rows :] if row.computed]
        places = [torch.arange(row.computed) + row.slot * sizes.room for row in rows]
        return torch.cat(places).to(made.table.device) if places else None

    with simulated_device() as device:
        run = SimpleNamespace(smoke=True, device=device)
        model = serving.Model(sizes, device, cases.decode_kernel(run, sizes, 1))
        forward = forward_of(model)
        loop = serving.Loop(model, PassedOn(), serving.Reader(decode, context), 1, common, forward)
        return [[request.tokens for request in loop.run(requests=3)] for _ in range(2)], forward


def test_captured_forwards_give_the_tokens_of_the_launched_ones(bench, monkeypatch):
    import forwards

    launched, _ = served(bench, lambda model: model.forward, monkeypatch)
    captured, graphs = served(bench, forwards.Forwards, monkeypatch)
    assert launched[0] == launched[1] == captured[0] == captured[1]
    assert len({len(tokens) for tokens in launched[0]}) > 1  # drafts are accepted here and refused there
    kinds = {(layout.decode_rows > 0, len(layout.prefills) > 0) for layout in graphs._captured}
    assert kinds == {(False, True), (True, True), (True, False)}


def test_a_captured_forward_reads_what_the_step_brings(bench, monkeypatch):
    """Buffers that were not refilled would give the first step's context to every step of its layout."""
    import forwards

    filled, _ = served(bench, forwards.Forwards, monkeypatch)
    monkeypatch.setattr(forwards._Captured, "__call__", lambda self, *step: self.graph.replay() or self.following)
    stale, _ = served(bench, forwards.Forwards, monkeypatch)
    assert stale != filled
