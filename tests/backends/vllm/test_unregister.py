"""Hooks that came into a serving process, and go again."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fake_vllm
from fake_vllm import schedule
from syncfree.backends.vllm import imports, register, unregister, watch
from syncfree.backends.vllm.targets import hooked
from syncfree.profiler.agent import server

sys.path.pop(0)

V1, V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"


@pytest.fixture(autouse=True)
def fake(tmp_path, monkeypatch):
    monkeypatch.setenv("SYNCFREE_SOCKET_DIR", str(tmp_path / "agents"))
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "vllm"}
    waiting, imports._finder.waiting = imports._finder.waiting, {}
    monkeypatch.setattr(watch, "_watch", None)
    monkeypatch.setattr(watch, "_off", None)
    monkeypatch.setattr(server, "_current", None)
    fake_vllm.install()
    yield
    server.retire_agent()
    imports._finder.waiting = waiting
    for name in [n for n in sys.modules if n.split(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(kept)


def state():
    """Every function of the fake engine, by module, class and name."""
    found = {}
    for name in (V1, V2, "vllm.v1.worker.gpu.attn_utils", "vllm.v1.worker.gpu.async_utils"):
        module = sys.modules[name]
        for owner in (module, *(c for c in vars(module).values() if isinstance(c, type))):
            found.update({(name, owner.__name__, k): v for k, v in vars(owner).items() if callable(v)})
    return found


def test_every_original_is_put_back():
    before = state()
    assert register(attached=True)
    assert hooked()
    assert state() != before
    unregister()
    assert state() == before
    assert not imports.waiting()


def test_hooks_of_a_plugin_are_left_to_it():
    register(attached=True)
    assert not register(attached=True)


def test_requests_that_ran_before_are_known():
    runner = sys.modules[V1].GPUModelRunner()
    runner.requests = {"a": type("Request", (), {"num_prompt_tokens": 12})()}
    register(attached=True)
    runner.execute_model(schedule({"a": 4}, cached={"a": 4}))
    assert watch.current().table["a"] == 12


def test_the_second_visit_begins_anew():
    runner = sys.modules[V1].GPUModelRunner()
    register(attached=True)
    runner.execute_model(schedule({"a": 5}, new=[("a", 5, 0)]))
    runner.sample_tokens(None)
    unregister()
    server.retire_agent()
    assert watch.current() is None
    register(attached=True)
    runner.execute_model(schedule({"a": 1}, cached={"a": 5}))
    assert "a" not in watch.current().table


def test_a_retired_agent_leaves_no_socket_and_no_thread(tmp_path):
    import threading

    agent = server.ensure_agent()
    assert agent.ready.wait(10)
    server.retire_agent()
    assert list((tmp_path / "agents").iterdir()) == []
    assert "syncfree-agent" not in {thread.name for thread in threading.enumerate()}
    assert server.ensure_agent() is not agent
