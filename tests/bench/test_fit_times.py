"""The program that fits the times of the decode kernels: what it finds in timings whose truth is known."""

import json
import sys

import msgspec
import numpy as np
import pytest
from syncfree.backends import mla_decode_times as model

TRUTH = model.Coefficients(
    block_n=64,
    programs_each=2,
    overhead=0.5,
    settle=8.0,
    cached_rows=10_000,
    fixed=dict(zip(model.FIXED, (9.0, 3.0, 0.5, 0.4, 0.3, 1.2, 3e-4, 6e-4, 0.012), strict=True)),
    persistent=dict(zip(model.PERSISTENT, (10.0, 3.5, 0.4, 2.0, 0.14, 1e-3), strict=True)),
)


@pytest.fixture(scope="module")
def fit(load):
    return load("gpu/fit_times.py")


def timed(lens, heads, times, more=0.0, noise=None):
    """A row as the GPU programs write it; every launch costs `more`."""
    shape = model.Shape(np.asarray(lens), 1, heads, times.num_cu)

    def us(exact):
        return (exact + more) * (1.0 if noise is None else float(noise.normal(1.0, 0.004)))

    return {
        "lengths": f"{len(lens)} rows",
        "heads": heads,
        "query_len": 1,
        "tokens": int(sum(lens)),
        "longest": int(max(lens)),
        "kv_lens": [int(n) for n in lens],
        "persistent_us": us(model.persistent_us(shape, times)),
        "fixed_us": {str(s): us(model.fixed_us(shape, s, times)) for s in model.SPLITS},
    }


def batches(seed, count):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        lens = rng.lognormal(rng.uniform(6, 9), rng.uniform(0.2, 1.3), int(2 ** rng.uniform(0, 7)))
        yield np.clip(lens, 16, 65536).astype(int)


@pytest.fixture(scope="module")
def times():
    return model.Times("a device", "", 132, {16: TRUTH})


@pytest.fixture
def few_settings(fit, monkeypatch):
    """The grid of settings around the truth: the others only take time."""
    monkeypatch.setattr(fit, "PROGRAMS_EACH", (1, 2))
    monkeypatch.setattr(fit, "OVERHEADS", (0.5, 1.0))
    monkeypatch.setattr(fit, "SETTLES", (8.0,))
    monkeypatch.setattr(fit, "CACHED_ROWS", (8_000, 10_000))


def test_what_made_the_timings_is_found_again_though_launches_cost_more_in_one_run(fit, times, few_settings):
    rows = [timed(lens, 16, times, more=2.5) | {"run": 0} for lens in batches(1, 25)]
    rows += [timed(lens, 16, times) | {"run": 1} for lens in batches(2, 25)]
    data = fit.Data(16, 132, 2, rows)
    found = fit.fitted(data, data.tables(), np.ones(len(data.us), bool))
    settings = ("programs_each", "overhead", "settle", "cached_rows")
    assert [getattr(found, name) for name in settings] == [getattr(TRUTH, name) for name in settings]
    assert found.fixed == pytest.approx(TRUTH.fixed, rel=0.02, abs=1e-5)
    assert found.persistent == pytest.approx(TRUTH.persistent, rel=0.02, abs=1e-4)


def test_the_program_says_what_a_choice_is_worth_on_shapes_left_out(
    fit, times, few_settings, tmp_path, monkeypatch, capsys
):
    noise = np.random.default_rng(3)
    result = {"device": "a device", "torch": "1", "triton": "2", "num_cu": 132}
    for name, seed in (("a.json", 4), ("b.json", 5)):
        rows = [timed(lens, 16, times, noise=noise) for lens in batches(seed, 20)]
        (tmp_path / name).write_text(json.dumps(result | {"timing": {"rows": rows}}))
    data = tmp_path / "times.json"
    monkeypatch.setattr(model, "DATA", data)
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    monkeypatch.setattr(sys, "argv", ["fit_times.py", *files])
    assert fit.main() == 0
    assert not data.exists()
    printed = capsys.readouterr().out
    assert "choices on the shapes fitted to: 40 of 40 within 3%" in printed
    assert "choices on shapes left out of the fit:" in printed
    assert "40 shapes, 320 timings; 2 programs a unit" in printed
    monkeypatch.setattr(sys, "argv", ["fit_times.py", *files, "--folds", "0", "--write"])
    assert fit.main() == 0
    assert "left out" not in capsys.readouterr().out
    written = msgspec.json.decode(data.read_bytes(), type=model.Times, strict=False)
    assert written.device == "a device, torch 1, Triton 2"
    assert written.source.endswith("a.json, " + "/".join((tmp_path / "b.json").parts[-4:]))
    assert set(written.blocks) == {16}


def test_a_file_whose_best_kernel_is_not_chosen_fails_the_program(
    fit, times, few_settings, tmp_path, monkeypatch, capsys
):
    rows = [timed(lens, 16, times) for lens in batches(6, 12)]
    unfair = min(rows[0]["fixed_us"], key=lambda s: -rows[0]["fixed_us"][s])
    rows[0]["fixed_us"][unfair] = 0.8 * min(rows[0]["persistent_us"], *rows[0]["fixed_us"].values())
    file = tmp_path / "a.json"
    result = {"device": "a device", "torch": "1", "triton": "2", "num_cu": 132}
    file.write_text(json.dumps(result | {"timing": {"rows": rows}}))
    monkeypatch.setattr(sys, "argv", ["fit_times.py", str(file), "--folds", "0"])
    assert fit.main() == 1
    printed = capsys.readouterr().out
    assert "choices on the shapes fitted to: 12 of 12" not in printed
    assert f"{rows[0]['lengths']}, 16 heads, query 1: " in printed.partition("choices on")[2]


def test_the_least_squares_are_the_least_without_negative_coefficients(fit):
    """By their conditions: where a coefficient is positive the error has no slope, where it is zero more would add."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        a = rng.random((60, 6)) * 10.0 ** rng.integers(-3, 4, 6)
        b = a / np.sqrt((a**2).sum(0)) @ rng.normal(0, 1, 6) + 1
        x, error = fit.solved(a, b)
        assert (x >= 0).all()
        slope = (a @ x - b) @ a / np.sqrt((a**2).sum(0))
        assert np.abs(slope[x > 0]).max(initial=0) < 1e-6
        assert slope[x == 0].min(initial=0) > -1e-6
        assert error == pytest.approx(np.sqrt(np.mean((a @ x - b) ** 2)))


def test_what_all_kernels_of_a_shape_have_in_common_counts_less_than_how_they_differ(fit, times):
    """A clock that was slow while one shape was timed: the same factor on all its kernels."""
    rows = [timed(lens, 16, times) | {"run": 0} for lens in batches(7, 12)]
    data = fit.Data(16, 132, 1, rows)
    exact = np.array([fit.predicted(rows[i], s, times) for i, s in zip(data.row_of, data.splits, strict=True)])
    slow = data.relative(exact[:, None] * 1.1)
    near = np.array(data.near)
    assert slow[near, 0] - slow[near, 1] == pytest.approx(0.1 * fit.COMMON)
    first = np.array(data.row_of) == 0
    one_off = exact.copy()
    one_off[np.flatnonzero(first & near)[0]] *= 1.1
    parted = data.relative(one_off[:, None])
    errors = (parted[:, 0] - parted[:, 1])[first & near]
    assert errors[0] == pytest.approx(0.1 * (1 - (1 - fit.COMMON) / len(errors)))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("uniform 64 x 4096, 16 heads, query 1", "uniform, 16 heads x 1"),
        ("one 65536 + 63 x 1024, 16 heads, query 4", "one, 16 heads x 4"),
        ("one 64k, 9 rows, up to 65536, 64 heads, query 1", "one 64k, 64 heads x 1"),
        ("two sizes, 9 rows, up to 700, 16 heads, query 2", "two sizes, 16 heads x 2"),
    ],
)
def test_misses_are_counted_by_kind(fit, name, kind):
    assert fit.kind_of(name) == kind


def test_lengths_that_are_not_those_of_the_name_are_refused(fit):
    row = {"lengths": "uniform 4 x 8192", "tokens": 5, "longest": 3, "heads": 16, "query_len": 1}
    with pytest.raises(SystemExit, match="uniform 4 x 8192: the lengths of this name"):
        fit.shape_of(row, 132)
