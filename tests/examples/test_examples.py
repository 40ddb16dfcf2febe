"""The examples, run as their first lines say."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from syncfree.profiler import Report
from syncfree.profiler.agent import sockets

pytestmark = pytest.mark.timeout(600)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name, *arguments, **more):
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_builder_is_short_and_does_not_wait():
    assert len((EXAMPLES / "embed_in_a_builder.py").read_text().splitlines()) < 40
    lines = run("embed_in_a_builder.py").splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("True []")  # a pure decode needs no upload, and may replay a graph
    assert lines[1].startswith("False ['extend.")


@pytest.mark.parametrize("ranks", [4])
def test_every_rank_holds_the_bytes_that_rank_0_planned(ranks):
    lines = run("one_plan_many_ranks.py", "--ranks", ranks).splitlines()
    assert len(lines) == 3
    assert all(re.fullmatch(rf"\w+: \d+ fields, \d+ bytes, the same on {ranks} ranks", line) for line in lines)


def test_a_serving_loop_with_marks_is_profiled_from_outside(tmp_path, monkeypatch):
    folder = tmp_path / "agents"
    monkeypatch.setenv("SYNCFREE_SOCKET_DIR", str(folder))
    server = subprocess.Popen([sys.executable, str(EXAMPLES / "engine_to_attach_to.py"), "--seconds", "200"])
    try:
        until = time.monotonic() + 120
        while not sockets.discover() and server.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        report = tmp_path / "r.json"
        command = [sys.executable, "-m", "syncfree.cli", "profile", "--steps", "12", "--json", str(report)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
    finally:
        server.terminate()
        server.wait()
    seen = Report.load(report)
    assert len(seen.steps) == 12
    assert all(step.syncs.total > 0 and step.launches.kernels > 0 for step in seen.steps)
    assert any(Path(site.file).name == "builders.py" and site.phase == "build" for site in seen.sites)
