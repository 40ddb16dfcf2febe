"""The three cases from the field, before and after by upstream's released files, and ours: the benchmark's smoke run.

Upstream's MLA files of other releases fit vLLM 0.26 only, so the program runs on that release's Python, in a process of
its own, on the simulated device.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).resolve().parent))
from released import released_tree

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "bench" / "cases.py"
# Waits of a build, by what a step holds. 0.27.1's FP8 prefill metadata: five blocking copies and one `.item()`.
SYNCS = {
    ("case1", "before"): {"decode": 0, "causal": 6, "chunked": 6},
    ("case1", "after"): {"decode": 0, "causal": 6, "chunked": 0},
    ("case1", "after, guard off"): {"decode": 0, "causal": 6, "chunked": 6},
    ("case1", "ours"): {"decode": 0, "causal": 0, "chunked": 0},
    ("case2", "before"): {"decode": 1, "causal": 1, "chunked": 1},
    ("case2", "after"): {"decode": 0, "causal": 1, "chunked": 1},
    ("case2", "ours"): {"decode": 0, "causal": 0, "chunked": 0},
}
BUFFERS = 6


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    try:
        tree = released_tree("0.26.0")
    except OSError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("cases")
    done = subprocess.run(
        [sys.executable, str(CASES), "--smoke", "--out", str(folder)],
        env={**os.environ, "PYTHONPATH": str(tree), "VLLM_LOGGING_LEVEL": "ERROR"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=1400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def told(out):
    return json.loads((out / "cases.json").read_text())


def variants(told, case):
    return (told[case]["serving"] if case == "case2" else told[case])["variants"]


@pytest.mark.parametrize(("case", "variant"), SYNCS)
def test_waits_of_a_build_by_release_and_kind_of_step(told, case, variant):
    counts = variants(told, case)[variant]["counts"]["by_kind"]
    assert {kind: found["syncs"] for kind, found in counts.items()} == SYNCS[case, variant]


@pytest.mark.parametrize("case", ["case1", "case2"])
def test_ours_copies_once_a_step_at_most(told, case):
    for found in variants(told, case)["ours"]["counts"]["by_kind"].values():
        assert found["h2d"] <= 1
        assert found["d2h"] == 0


def test_steady_decode_waits_before_the_mend_only(told):
    found = told["case2"]["steady"]["variants"]
    syncs = {name: variant["counts"]["by_kind"]["decode"]["syncs"] for name, variant in found.items()}
    assert syncs == {"before": 1, "after": 0, "ours": 0}
    assert found["before"]["counts"]["sites"] == ["rocm_aiter_fa.py:523"]


@pytest.mark.parametrize("case", ["case1", "case2"])
def test_all_builders_give_the_same_tokens_and_wrong_metadata_others(told, case):
    tokens = {variant["tokens_sha256"] for variant in variants(told, case).values()}
    assert len(tokens) == 1
    control = (told["case2"]["serving"] if case == "case2" else told["case1"])["control"]
    assert control["noticed"]
    assert control["tokens_sha256"] not in tokens


def test_as_many_drafts_are_accepted_whoever_built_the_metadata(told):
    accepted = {variant["acceptance"] for variant in told["case1"]["variants"].values()}
    assert len(accepted) == 1
    assert 0 < accepted.pop() < 1


def test_every_request_is_served(told):
    for case in ("case1", "case2"):
        for variant in variants(told, case).values():
            assert variant["requests"] == 5
            assert variant["ttft_ms"]["p99"] >= variant["ttft_ms"]["median"] > 0


def test_which_release_fills_the_six_work_buffers(told):
    found = told["case3"]["builders"]
    filled = {
        name: {rows: len(row["filled"]) for rows, row in its.items() if rows != "what"} for name, its in found.items()
    }
    assert filled["before"] == {"8 rows": 0, "64 rows": 0}
    assert filled["after"] == {"8 rows": BUFFERS, "64 rows": BUFFERS}
    assert found["after"]["8 rows"]["launches"] == found["before"]["8 rows"]["launches"] + 1
    routes = {rows: row["route"] for rows, row in found["ours"].items() if rows != "what"}
    assert "persistent" in routes["8 rows"]
    assert "split KV" in routes["64 rows"]  # aiter's own gate: from 32 rows on nobody reads them


def test_the_route_s_choice_over_the_recorded_shapes(told):
    assert told["case3"]["replayed"].endswith("mla_times.json")
    assert len(told["case3"]["kernels"]) == 72
    assert told["case3"]["misses"] == []


def test_table_and_plot_come_from_the_results(out, told, tmp_path):
    page = (out / "cases.md").read_text()
    assert "Smoke run" in page
    saved = told["case2"]["steady"]["variants"]
    difference = saved["before"]["step_ms"]["decode"] - saved["after"]["step_ms"]["decode"]
    assert f"{difference:+.3f}" in page
    drawn = ElementTree.parse(out / "cases.svg").getroot()
    assert any(f"{difference:+.3f} ms" == (element.text or "") for element in drawn.iter())
    (tmp_path / "cases.json").write_bytes((out / "cases.json").read_bytes())
    again = [sys.executable, str(CASES), "--report", str(tmp_path / "cases.json")]
    subprocess.run(again, check=True, capture_output=True, timeout=300)
    assert (tmp_path / "cases.md").read_text() == page


def test_a_run_without_a_gpu_says_so(tmp_path):
    done = subprocess.run([sys.executable, str(CASES)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "no GPU here: --smoke" in done.stderr
