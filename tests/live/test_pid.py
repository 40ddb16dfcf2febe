"""`syncfree profile --pid` on a real vLLM server that has nothing of ours in it."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from syncfree.profiler.attach.processes import find_workers
from syncfree.profiler.probe.permission import why_not

pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.attach,
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_not() is not None, reason=f"SKIPPED LOUDLY: nothing can be attached to: {why_not()}"),
]

CLASSES = {"decode", "extend", "chunked_prefill", "causal_prefill"}
ATTACHES = 3


@pytest.fixture(scope="module")
def plain(start_server):
    """A server without the plugin."""
    server = start_server("").wait_until_ready()
    yield server
    server.kill()


def profile(server, *arguments):
    command = [sys.executable, "-m", "syncfree.cli", "profile", "--pid", str(server.process.pid), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=server.folder)


def size(pid):
    proc = Path(f"/proc/{pid}")
    return {"fds": len(list((proc / "fd").iterdir())), "threads": len(list((proc / "task").iterdir()))}


class Load(threading.Thread):
    """Requests of all kinds, other ones each time, for as long as somebody wants to record them."""

    def __init__(self, server):
        super().__init__()
        self.server = server
        self.over = threading.Event()
        self.failed = []

    def run(self):
        seed = 0
        while not self.over.is_set():
            seed += 1
            some = ("--kinds", "mixed", "--requests", "60", "--parallel", "6", "--seconds", "300", "--seed", str(seed))
            client = self.server.load(*some)
            out, err = client.communicate()
            if client.returncode:
                self.failed.append(out + err)


@pytest.fixture(scope="module")
def attached(plain):
    """One recording under load, and how the load did."""
    path = plain.folder / "pid.json"
    load = Load(plain)
    load.start()
    try:
        plain.wait_for_requests()
        done = profile(plain, "--steps", "1000", "--json", str(path))
    finally:
        load.over.set()
        load.join()
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), load.failed


def test_the_worker_is_found_below_the_server(plain):
    assert [worker.label for worker in find_workers(plain.process.pid)] == ["VLLM::Worker"]


def test_all_four_classes_and_every_phase_are_seen(attached):
    data = attached[0]
    assert {name for name, figures in data["classes"].items() if figures["steps"]} == CLASSES
    assert data["source"]["engine"].startswith("vllm ")
    for step in data["steps"]:
        assert {"build", "forward", "sample", "output"} <= set(step["phases"])


def test_no_request_fails(attached):
    assert attached[1] == []


def test_nothing_grows_and_nothing_stays(plain, attached):
    worker = find_workers(plain.process.pid)[0].pid
    before = size(worker)
    with plain.busy():
        for _ in range(ATTACHES):
            done = profile(plain, "--steps", "10")
            assert done.returncode == 0, done.stderr
    until = time.monotonic() + 30
    while size(worker) != before and time.monotonic() < until:
        time.sleep(0.1)
    assert size(worker) == before
    assert not list(plain.agents.glob("*"))
    log = plain.log.read_text(errors="replace")
    assert not [line for line in log.splitlines() if "syncfree:" in line]


def test_a_server_killed_meanwhile_is_exit_3_in_one_line(plain, attached):
    with plain.busy():
        command = [sys.executable, "-m", "syncfree.cli", "profile", "--pid", str(plain.process.pid), "--seconds", "300"]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
        until = time.monotonic() + 120
        while not list(plain.agents.glob("*.sock")) and time.monotonic() < until:
            time.sleep(0.1)
        plain.kill()
        out, err = client.communicate(timeout=60)
    assert (client.returncode, out) == (3, "")
    assert len(err.strip().splitlines()) == 1
