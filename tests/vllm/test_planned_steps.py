"""A real in-process engine under `SYNCFREE_PLANNER`: same tokens in every mode, no mismatch in shadow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

ROUNDS = int(os.environ.get("SYNCFREE_PLANNED_ROUNDS", "1"))  # about 1,180 steps each: 9 make 10,000 of every mode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1_500 * (1 + ROUNDS))]

HERE = Path(__file__).parent
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",  # a tiny model: more threads only wait for each other
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
KINDS = ("chunks", "prefix_hits", "preempted", "resumed")
RUNS = {"off": [], "control": [], "shadow": ["--inspect"], "on": ["--inspect"]}


# Attention that is cached by head, and latent attention by the builder of TRITON_MLA: (blocks of the cache, arguments).
MODELS = {"llama": ("28", []), "mla": ("224", ["--triton-mla"])}


@pytest.fixture(scope="module", params=MODELS)
def engine(request, tmp_path_factory):
    """Runs an engine in a process of its own: `run(mode, *arguments)` -> what it printed."""
    folder = tmp_path_factory.mktemp("planned")
    maker = HERE.parent / "live_server" / "make_tiny_model.py"
    model = folder / request.param
    subprocess.run([sys.executable, str(maker), request.param, str(model)], check=True, capture_output=True)
    blocks, more = MODELS[request.param]

    def run(mode, *arguments):
        agents = folder / "agents"
        done = subprocess.run(
            [sys.executable, str(HERE / "planned_steps.py"), str(model), blocks, *more, *arguments],
            env={**os.environ, **ENVIRONMENT, "SYNCFREE_PLANNER": mode, "SYNCFREE_SOCKET_DIR": str(agents)},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=600 * (1 + ROUNDS),
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    run.model = request.param
    return run


@pytest.fixture(scope="module")
def results(engine):
    modes = {"control": "off"}
    return {
        name: engine(modes.get(name, name), "--rounds", str(ROUNDS), *arguments) for name, arguments in RUNS.items()
    }


def test_tokens_are_the_same_in_every_mode(results):
    assert results["control"]["tokens"] == results["off"]["tokens"], "control: this engine's own answers vary"
    assert results["shadow"]["tokens"] == results["off"]["tokens"]
    assert results["on"]["tokens"] == results["off"]["tokens"]
    assert results["off"]["different_last_tokens"] > 20


def test_tokens_would_change_with_wrong_lengths(engine, results):
    """Else the same tokens would say nothing about the metadata."""
    wrong = engine("on", "--waves", "1", "--wrong-lengths")
    assert wrong["planned"] > 100
    assert wrong["by_wave"][0] != results["off"]["by_wave"][0]


def test_the_steps_have_chunks_prefix_hits_preemptions_and_resumes(engine, results):
    print({name: result["seen"] for name, result in results.items()})
    least = {"llama": 1_112, "mla": 800}[engine.model] * ROUNDS
    for result in results.values():
        assert result["seen"]["steps"] >= least
        assert min(result["seen"].get(name, 0) for name in KINDS) >= 3 * ROUNDS
        assert result["seen"] == results["off"]["seen"], "the modes were served different steps"


def test_shadow_compares_every_step_and_finds_nothing(results):
    shadow = results["shadow"]
    assert shadow["compared"] == shadow["seen"]["steps"]
    assert (shadow["mismatches"], shadow["first_mismatch"], shadow["fallbacks"]) == (0, None, {})
    assert shadow["planned"] == 0


def test_on_serves_every_step(results):
    on = results["on"]
    assert on["planned"] == on["seen"]["steps"]
    assert on["fallbacks"] == {}


def test_off_plans_nothing(results):
    assert (results["off"]["mode"], results["off"]["planned"], results["off"]["compared"]) == ("off", 0, 0)


def test_the_report_of_a_recording_carries_the_planner(results):
    report = results["shadow"]["report"]
    assert (report["mode"], report["mismatches"], report["first_mismatch"]) == ("shadow", 0, None)
    assert report["unread"] >= 2 * report["steps"]
    assert any("filled by vLLM, read by no kernel of the route: " in note for note in report["notes"])
    report = results["on"]["report"]
    assert (report["mode"], report["mismatches"], report["unread"]) == ("on", None, None)
    assert "builds served" in report["notes"][0]


def test_plans_for_the_aiter_builders_on_a_real_schedulers_steps(engine):
    if engine.model != "llama":
        pytest.skip("one model's steps are enough")
    result = engine("shadow", "--aiter")
    for figures in result["aiter"].values():
        assert figures["compared"] > 1_000
        assert (figures["mismatches"], figures["first"], figures["fallbacks"]) == (0, None, {})
