"""The plugin in a real in-process engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",  # the program registers the plugin itself, half-way
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    maker = HERE.parent / "live_server" / "make_tiny_model.py"
    subprocess.run([sys.executable, str(maker), "llama", str(folder / "llama")], check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, str(HERE / "plugin_steps.py"), str(folder / "llama"), "28"],
        env={**os.environ, **ENVIRONMENT, "SYNCFREE_SOCKET_DIR": str(folder / "agents")},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "left": sorted(p.name for p in (folder / "agents").iterdir())}


def test_answers_are_the_same_without_the_plugin_with_it_and_while_it_records(result):
    assert result["without_again"] == result["without"], "control: this engine's own answers vary"
    assert result["loaded"] == result["without"]
    assert result["recording"] == result["without"]
    assert result["steps_of_answers"] >= 4 * 24


def test_every_recorded_step_has_the_requests_tokens_and_context_that_the_builder_saw(result):
    assert result["different"] == []
    assert result["steps"] == result["built"] >= 1000
    assert result["classes"] == ["causal_prefill", "chunked_prefill", "decode", "extend"]


def test_steps_are_divided_into_phases(result):
    assert result["phases"] == [["build", "forward", "sample", "output"]]


def test_device_figures_are_said_to_be_unknown_because_the_device_is_the_cpu(result):
    assert any("this device is the CPU" in text for text in result["notes"])


def test_the_agent_listens_and_leaves_nothing_when_the_engine_ends(result):
    assert result["switched_off"] is None
    assert result["agent"]["listens"]
    assert result["left"] == []
