"""The benchmark of what counting costs: its figures, and a whole run on a driver that does nothing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from syncfree.profiler.probe.permission import why_not

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))


@pytest.fixture(scope="module")
def overhead():
    import overhead as program

    return program


@pytest.fixture(scope="module")
def worker():
    import overhead_worker as program

    return program


def test_the_interval_of_a_median_is_that_of_order_statistics(overhead):
    figure = overhead.median_of([float(k) for k in range(1, 101)])
    assert (figure["ratio"], figure["ci95"], figure["rounds"]) == (50.5, [40.0, 61.0], 100)  # binomial(100, 1/2)


def test_few_rounds_have_all_of_them_as_interval(overhead):
    assert overhead.median_of([1.3, 1.0, 1.1])["ci95"] == [1.0, 1.3]


def test_the_interval_over_two_phases_contains_their_ratio(overhead):
    figure = overhead.median_over([2.0, 2.2, 2.1, 2.4, 2.1], [1.0, 1.1, 1.05])
    assert figure["ratio"] == 2.0
    assert figure["ci95"][0] < 2.0 < figure["ci95"][1]


def test_drift_that_both_processes_share_cancels(overhead):
    drift = [1000, 1100, 1300, 1200]
    blocks = {
        "first": [[2000]] * 4,
        "first_control": [[1000]] * 4,
        "on": [[2.02 * x] for x in drift],
        "on_control": [[x] for x in drift],
        "off": [[2 * x] for x in (1000, *drift)],
        "off_control": [[x] for x in (1000, *drift)],
    }
    figure = overhead.summary("kineto", blocks)
    assert figure["ratio"] == 1.01
    assert figure["after"]["ratio"] == 1.0


def test_what_neighbours_did_to_most_steps_does_not_count_for_the_undisturbed(overhead):
    off = [[1000, 1000, 1500, 1500, 1500]] * 20
    on = [[1010, 1010, 1900, 1900, 2500]] * 20
    figure = overhead.undisturbed(on, off)
    assert (figure["ratio"], figure["ci95"], figure["off_us"]) == (1.01, [1.01, 1.01], 1.0)


def test_the_bytes_of_a_hook_are_found_by_comparing(worker):
    assert worker._differences(b"abcdefgh", b"aXXdefgY") == [(1, 3), (7, 8)]
    assert worker._differences(b"abc", b"abc") == []


@pytest.mark.attach
@pytest.mark.skipif(why_not() is not None or shutil.which("cc") is None, reason="SKIPPED LOUDLY: no probe, or no cc")
def test_a_smoke_run_measures_each_mode(tmp_path):
    target = tmp_path / "table.json"
    command = [sys.executable, str(BENCH / "overhead.py"), "--smoke", "--seconds", "1", "--json", str(target)]
    done = subprocess.run(
        [*command, "--modes", "nothing,probe_hooks,probe"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = {row["mode"]: row for row in json.loads(target.read_text())}
    assert set(table) == {"nothing", "probe_hooks", "probe"}
    assert set(table["probe_hooks"]) == {"mode", "eager", "graph", "burst"}
    for row in table.values():
        for kind in ("eager", "graph"):
            assert row[kind]["rounds"] >= 5
            assert row[kind]["ci95"][0] <= row[kind]["ratio"] <= row[kind]["ci95"][1]
    assert set(table["probe"]["eager"]) >= {"after", "on_over_control"}


def test_an_unknown_mode_is_refused():
    done = subprocess.run(
        [sys.executable, str(BENCH / "overhead.py"), "--smoke", "--modes", "prob"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--modes: prob is not one of nothing, pause, probe_hooks" in done.stderr
