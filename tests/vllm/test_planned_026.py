"""vLLM 0.26's own AITER builders, planned and unplanned, on the simulated device, by the GPU benchmark's program."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).resolve().parent))
from released import released_tree

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
# (waits, uploads) of vLLM 0.26's own builds. Its FP8 prefill metadata are built for chunked prefills too.
UPSTREAM = {
    ("ROCM_AITER_FA", "decode"): (0, 0),
    ("ROCM_AITER_FA", "extend"): (1, 3),
    ("ROCM_AITER_FA", "prefill"): (1, 0),
    ("ROCM_AITER_FA", "mixed"): (1, 3),
    ("ROCM_AITER_MLA", "decode"): (0, 0),
    ("ROCM_AITER_MLA", "extend"): (6, 8),
    ("ROCM_AITER_MLA", "prefill"): (6, 5),
    ("ROCM_AITER_MLA", "mixed"): (6, 8),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    try:
        tree = released_tree("0.26.0")
    except OSError as error:
        pytest.skip(str(error))
    file = tmp_path_factory.mktemp("builders") / "told.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench/gpu/aiter_builders.py"), "--simulated", "--rows", "8", "--json", str(file)],
        env={**os.environ, "PYTHONPATH": str(tree), "VLLM_LOGGING_LEVEL": "ERROR"},
        cwd=file.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_bytes())


def test_it_is_that_release(told):
    assert told["vllm"].startswith("0.26.")


@pytest.mark.parametrize(("builder", "segment"), UPSTREAM)
def test_planned_builds_are_equal_wait_for_nothing_and_copy_once(told, builder, segment):
    """The program itself compares every planned field."""
    [row] = [r for r in told["results"] if (r["builder"], r["segment"]) == (builder, segment)]
    assert (row["unplanned"]["syncs"], row["unplanned"]["h2d"]) == UPSTREAM[builder, segment]
    assert row["planned"]["syncs"] == 0
    assert row["planned"]["h2d"] <= 1
    assert row["planned"]["launches"] <= row["unplanned"]["launches"]
