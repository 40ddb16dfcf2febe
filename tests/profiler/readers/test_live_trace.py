"""The trace that a real vLLM server writes while it serves (tests/live_server, Python stacks off)."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from syncfree.profiler.readers import nothing_measured, read_traces

HERE = Path(__file__).resolve().parents[2] / "live_server"
START_LIMIT = 300  # seconds; 50 to 70 on two idle cores

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def post(port, path):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", method="POST")
    with urllib.request.urlopen(request, timeout=120):
        pass


def wait_until_up(port, server, log):
    for _ in range(START_LIMIT * 2):
        if server.poll() is not None:
            pytest.fail(f"the server ended: {log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server is not up after {START_LIMIT} s")


@pytest.fixture(scope="module", params=["short", "detailed"])
def traced(request, tmp_path_factory):
    """A folder with the traces of a load with decodes and chunked prompts."""
    vllm = pytest.importorskip("vllm")
    assert vllm
    folder = tmp_path_factory.mktemp("live")
    subprocess.run([sys.executable, HERE / "make_tiny_model.py", "llama", folder / "model"], check=True, timeout=60)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"VENV": sys.prefix, "TRACE_DIR": str(folder / "traces"), "VLLM_PLUGINS": "none"}
    environment["VLLM_CUSTOM_SCOPES_FOR_PROFILING"] = "1"
    detailed = ["--profiler-config.detailed_trace_annotation", "true"] if request.param == "detailed" else []
    log = folder / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            ["bash", HERE / "serve.sh", folder / "model", str(port), *detailed],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_until_up(port, server, log)
            post(port, "start_profile")
            subprocess.run([sys.executable, HERE / "load.py", str(port)], check=True, timeout=300)
            post(port, "stop_profile")
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)
    yield request.param, folder / "traces"
    shutil.rmtree(folder, ignore_errors=True)


def annotations(folder):
    import gzip

    (path,) = folder.glob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("execute_")]


def test_every_step_of_the_server_is_there_with_what_its_name_tells(traced):
    kind, folder = traced
    report = read_traces([folder])
    told = annotations(folder)
    assert len(report.steps) == len(told) > 100
    assert nothing_measured(report) is None
    assert report.source.engine == "vllm 0.32.0"
    assert report.source.ranks == [0]
    by_start = sorted(told, key=lambda e: e["ts"])
    for step, event in zip(report.steps, by_start, strict=True):
        requests = [int(n) for n in re.findall(r"(?:context|generation)_(\d+)", event["name"])]
        assert (step.name, step.duration_us, step.num_reqs) == (event["name"], event["dur"], sum(requests))
        assert "forward" in step.phases or step.num_reqs == 0
    classes = Counter(step.batch_class for step in report.steps)
    assert classes["decode"] > 50
    if kind == "detailed":
        assert {"causal_prefill", "chunked_prefill"} <= classes.keys()
    else:
        assert classes["unknown"] > 10  # prompts whose context the short name does not tell


def test_a_server_without_a_device_has_unknown_figures_and_not_zeros(traced):
    report = read_traces([traced[1]])
    assert report.totals.launches.kernels is None
    assert all(step.syncs.total is None and step.host_ops > 10 for step in report.steps if step.num_reqs)
    assert {figures.verdict for figures in report.classes.values()} == {"unknown"}
