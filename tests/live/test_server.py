"""`syncfree profile` on a real vLLM server under load. The tests run in this order; the last one ends the server."""

import contextlib
import json
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from syncfree.profiler.agent.connection import Connection

pytest.importorskip("vllm")

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

CLASSES = {"decode", "extend", "chunked_prefill", "causal_prefill"}
PROMPTS = ["hello there", "a b c d e f g h " * 60, "once upon a time " * 10, "x"]


def complete(server, prompt):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "seed": 1}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/completions",
        data=json.dumps({**body, "logprobs": 1}).encode(),
        headers={"Content-Type": "application/json"},
    )
    choice = json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def answers(server):
    """Fixed prompts one after the other: every batch is the same in every run on a fresh server."""
    return [complete(server, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def agent(server):
    """The socket of the server's one worker, there before any request, and the first answers."""
    found = sorted(server.agents.glob("*.sock"))
    first = answers(server)
    assert sorted(server.agents.glob("*.sock")) == found
    assert len(found) == 1
    return found[0], first


@pytest.fixture(scope="module")
def report(server, agent):
    """The report of ten seconds under load, as a user gets it."""
    path = server.folder / "r.json"
    load = server.load("--seconds", "100", "--requests", "60")
    profile = server.profile("--socket", str(agent[0]), "--seconds", "10", "--json", str(path))
    out, err = profile.communicate(timeout=300)
    loaded, _ = load.communicate(timeout=300)
    assert (profile.returncode, load.returncode) == (0, 0), err + loaded
    return json.loads(path.read_text()), out


def test_ten_seconds_under_load_show_steps_of_all_four_classes(report):
    data, screen = report
    assert data["format"] == "syncfree.report/1"
    assert {name for name, figures in data["classes"].items() if figures["steps"]} == CLASSES
    assert all(name in screen for name in CLASSES)


def test_every_step_tells_its_requests_tokens_and_phases(report):
    for step in report[0]["steps"]:
        assert step["num_reqs"] >= 1
        assert step["num_tokens"] >= step["num_reqs"]
        assert {"build", "forward", "sample", "output"} <= set(step["phases"])
        parts = sum(phase["duration_us"] for name, phase in step["phases"].items() if name != "other")
        assert 0 < parts <= step["duration_us"]
        if step["batch_class"] == "decode":
            assert step["num_tokens"] == step["num_reqs"]
        assert step["num_tokens"] <= 256


def test_device_figures_are_null_and_a_note_says_that_the_device_is_the_cpu(report):
    data = report[0]
    assert data["source"]["device"] == "cpu"
    assert data["source"]["engine"].startswith("vllm ")
    for step in data["steps"]:
        assert set(step["syncs"].values()) | set(step["copies"].values()) | set(step["launches"].values()) == {None}
    assert all(figures["verdict"] == "unknown" for figures in data["classes"].values())
    assert any("the CPU" in note["text"] for note in data["notes"])


def test_a_budget_on_a_figure_that_is_not_known_here_is_exit_4(server, agent):
    with server.busy():
        profile = server.profile("--socket", str(agent[0]), "--seconds", "1", "--fail-on", "decode:syncs=0")
        _, err = profile.communicate(timeout=120)
    assert profile.returncode == 4, err


def test_the_server_is_found_without_naming_its_socket(server, agent):
    with server.busy():
        out, err = (profile := server.profile("--steps", "20")).communicate(timeout=120)
    assert profile.returncode == 0, err
    assert "decode" in out


def test_a_server_without_requests_is_exit_4_in_one_line(server, agent):
    time.sleep(1)  # what the load before left is given up by the server
    profile = server.profile("--socket", str(agent[0]), "--seconds", "1")
    _, err = profile.communicate(timeout=120)
    assert profile.returncode == 4
    assert len(err.strip().splitlines()) == 1


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    assert condition()


def test_killing_the_client_in_the_middle_leaves_the_server_serving(server, agent):
    with server.busy():
        victim = server.profile("--socket", str(agent[0]), "--seconds", "300")
        with Connection(agent[0]) as watcher:
            wait_for(lambda: watcher.health().recording)
            victim.kill()
            victim.communicate()
            load = server.load("--requests", "8")
            out, _ = load.communicate(timeout=300)
            assert load.returncode == 0, out
            wait_for(lambda: not watcher.health().recording)  # the lease of the dead client has ended
        profile = server.profile("--socket", str(agent[0]), "--steps", "3")
        _, err = profile.communicate(timeout=120)
    assert profile.returncode == 0, err


def test_the_log_has_no_word_of_trouble_from_the_plugin(server):
    lines = [line for line in server.log.read_text(errors="replace").splitlines() if "syncfree" in line]
    assert not [line for line in lines if "switched off" in line or "Error" in line or "no agent" in line], lines


def test_killing_the_server_is_exit_3_in_one_line(server, agent):
    with server.busy():
        profile = server.profile("--socket", str(agent[0]), "--seconds", "300")
        with Connection(agent[0]) as watcher:
            wait_for(lambda: watcher.health().recording)
        server.kill()
        out, err = profile.communicate(timeout=60)
    assert profile.returncode == 3
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert "the server is gone" in err
    found = server.profile("--seconds", "1")
    assert "no live agent" in found.communicate(timeout=60)[1]
    assert list(server.agents.iterdir()) == []


def test_answers_are_the_same_without_the_plugin(start_server, agent):
    """Both servers are fresh and get the same prompts, one after the other, so that no batch differs."""
    plain = start_server("").wait_until_ready()
    first = answers(plain)
    reset = urllib.request.Request(f"http://127.0.0.1:{plain.port}/reset_prefix_cache", method="POST")
    urllib.request.urlopen(reset, timeout=60).close()
    assert answers(plain) == first, "control: this server's own answers vary"
    assert agent[1] == first
    assert not plain.agents.exists()
    plain.process.send_signal(signal.SIGTERM)
    plain.process.wait(60)


def test_nothing_of_the_servers_is_left_running(server):
    mark = f"SYNCFREE_SOCKET_DIR={server.folder}".encode()

    def left():
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes():
                        found.append(entry.name)
        return found

    wait_for(lambda: not left(), seconds=120)  # engine and worker processes end a moment after their server
