"""The GPU program that checks the route on lengths it was not fitted to: what it draws and how it judges."""

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from syncfree.backends import mla_decode_times as model

torch = pytest.importorskip("torch")
GPU = Path(__file__).resolve().parents[2] / "bench" / "gpu"


@pytest.fixture(scope="module")
def program(load):
    return load("gpu/route_check.py")


def test_lengths_are_of_many_kinds_and_fit(program):
    shapes = list(itertools.islice(program.drawn(7), 400))
    assert {name.split(",")[0] for name, *_ in shapes} == set(program.KINDS)
    assert {(heads, query) for _, _, heads, query in shapes} == set(program.HEADS)
    batches = {len(lens) for _, lens, _, _ in shapes}
    assert min(batches) == 1
    assert 200 < max(batches) <= 256
    assert len(batches) > 60  # not the powers of two alone: what lies between them fills its last wave otherwise
    for name, lens, _, _ in shapes:
        assert lens.min() >= 16
        assert lens.max() <= program.LONGEST
        assert lens.sum() <= program.TOKENS + 16 * len(lens)
        assert not name.startswith("one 64k") or lens.max() == program.LONGEST
    again = list(itertools.islice(program.drawn(7), 3))
    assert all((a[1] == b[1]).all() for a, b in zip(shapes, again, strict=False))


@pytest.mark.parametrize(("faster", "slower_by"), [("chosen", 0.0), ("other", 0.25)])
def test_the_choice_is_judged_by_what_was_timed(program, faster, slower_by):
    _, lens, heads, query_len = next(program.drawn(7))
    choice = model.choose(model.Shape(lens, query_len, heads, 132))
    fixed = dict.fromkeys(model.SPLITS, 100.0)
    row = {"lengths": "x", "heads": heads, "query_len": query_len, "persistent_us": 100.0, "fixed_us": fixed}
    chosen = 100.0 if faster == "chosen" else 125.0
    if choice.persistent:
        row["persistent_us"] = chosen
    else:
        fixed[choice.splits] = chosen
    assert program.judged(row, lens, 132)["slower_by"] == pytest.approx(slower_by)


def a_device(slower=lambda splits: 1.0):
    """Times of the model itself, a little apart whenever they are taken."""
    noise = np.random.default_rng(0)

    def time_one(name, lens, heads, query_len):
        shape = model.Shape(lens, query_len, heads, 132)
        us = {splits: model.fixed_us(shape, splits) for splits in model.SPLITS} | {0: model.persistent_us(shape)}
        us = {splits: time * slower(splits) * float(noise.normal(1, 0.002)) for splits, time in us.items()}
        told = {"lengths": name, "batch": len(lens), "tokens": int(lens.sum()), "longest": int(lens.max())}
        told |= {"heads": heads, "query_len": query_len, "persistent_us": us.pop(0), "fixed_us": us}
        return told | {"spread_us": dict.fromkeys(("persistent", *map(str, us)), 0.1)}

    return time_one


def test_seeds_are_kept_with_all_that_a_fit_needs_and_how_far_timings_lie_apart(
    program, load, tmp_path, monkeypatch, capsys
):
    device = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    time_one = a_device()
    timer = SimpleNamespace(
        Run=lambda *_: None,
        Timer=lambda: None,
        triton=SimpleNamespace(__version__="3"),
        time_shape=lambda run, timer, *shape, brief: time_one(*shape),
    )
    monkeypatch.setitem(sys.modules, "mla_h200", timer)
    monkeypatch.setattr(program, "drawn", lambda seed, drawn=program.drawn: itertools.islice(drawn(seed), 25))
    out = tmp_path / "new" / "check.json"
    monkeypatch.setattr(sys, "argv", ["route_check.py", str(out), "--seeds", "3,4", "--seconds", "1000"])
    assert program.main() == 0
    printed = capsys.readouterr().out
    assert "seed 4: 0 of 25 choices off by more than 3%" in printed
    assert "two timings of a kernel lie 0." in printed
    for seed in (3, 4):
        kept = json.loads((tmp_path / "new" / f"check-{seed}.json").read_text())
        assert (kept["seed"], kept["num_cu"], kept["shapes"], kept["off"]) == (seed, 132, 25, 0)
        assert kept["noise"]["kernels"] == 3 * 8
        assert 0 < kept["noise"]["twice_median"] < kept["noise"]["twice_worst"] < 0.02
        rows = kept["timing"]["rows"]
        assert len(rows) == 25
        for row in rows:
            assert len(row["fixed_us"]) == len(row["spread_us"]) - 1 == len(model.SPLITS)
            assert sum(row["kv_lens"]) == row["tokens"]
    fit = load("gpu/fit_times.py")
    for name, values in (("PROGRAMS_EACH", (2,)), ("OVERHEADS", (0.5,)), ("SETTLES", (8.0,)), ("CACHED_ROWS", (6000,))):
        monkeypatch.setattr(fit, name, values)
    files = [str(tmp_path / "new" / f"check-{seed}.json") for seed in (3, 4)]
    monkeypatch.setattr(sys, "argv", ["fit_times.py", files[0], "--folds", "0", "--against", files[1]])
    fit.main()
    assert "choices on check-4.json, which was not fitted to: " in capsys.readouterr().out


def test_a_route_that_is_often_wrong_is_told(program, monkeypatch):
    monkeypatch.setattr(program, "drawn", lambda seed, drawn=program.drawn: itertools.islice(drawn(seed), 40))
    found = program.checked(1, 1000, 132, a_device(lambda splits: 1.0 if splits == 0 else 3.0))
    assert found["off"] > program.OFTEN * found["shapes"]
    assert found["worst"] > program.TOLERANCE
    assert "choices off by more than 3%" in program.summary(found)


INTERPRETED = """
import sys
from types import SimpleNamespace
import numpy as np, torch
sys.path.insert(0, {gpu!r})
import mla_h200

class Once(mla_h200.Timer):
    def __init__(self):
        self.calls = 0
    def in_turn(self, functions, repeats=25):
        times = {{}}
        for name, function in functions.items():
            function()
            self.calls += 1
            times[name] = [10.0 * self.calls + i for i in range(5)]
        return times

torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=4)
timer = Once()
row = mla_h200.time_shape(mla_h200.Run(32, 16, True, 0.0), timer, "two", np.array([70, 20]), 16, 1, brief=True)
assert timer.calls == 8, timer.calls
assert row["persistent_us"] == 12.0
assert row["fixed_us"] == {{2**i: 22.0 + 10 * i for i in range(7)}}, row
assert set(row["spread_us"]) == {{"persistent", "1", "2", "4", "8", "16", "32", "64"}}, row
assert set(row["spread_us"].values()) == {{3.0}}, row
assert row["tokens"] == 90 and row["longest"] == 70
whole = mla_h200.time_shape(mla_h200.Run(32, 16, True, 0.0), timer, "two", np.array([70, 20]), 16, 1)
assert whole["scheduler_us"] > 0 and whole["works"] > 0 and whole["persistent_candidate_us"] > 0
print("timed")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: kernels are not run")
def test_every_kernel_of_a_shape_is_timed():
    import os

    program = [sys.executable, "-c", INTERPRETED.format(gpu=str(GPU))]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "timed"
