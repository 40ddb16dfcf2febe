"""Classification from the scheduler's output against the builder of a real engine, on every step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@pytest.mark.timeout(900)
def test_every_step_of_a_real_engine_is_read_as_its_builder_sees_it(tmp_path):
    model = tmp_path / "llama"
    maker = HERE.parent / "live_server" / "make_tiny_model.py"
    subprocess.run([sys.executable, str(maker), "llama", str(model)], check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, str(HERE / "live_steps.py"), str(model), "28"],
        env={**os.environ, **ENVIRONMENT},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    seen = result["seen"]
    assert result["differences"] == []
    assert seen["different"] == 0
    assert seen["compared"] == seen["steps"] >= 1000
    assert min(seen["resumed"], seen["prefix_hits"], seen["chunked_rows"]) > 0
    assert set(result["classes"]) == {"decode", "causal_prefill", "extend", "chunked_prefill"}
    assert result["left"] == 1
