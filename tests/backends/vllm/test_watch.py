"""The hooks, on modules shaped like vLLM's; the real ones are met in tests/vllm and tests/live."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fake_vllm
from fake_vllm import schedule
from syncfree.backends.vllm import register, watch
from syncfree.profiler.calls import Call, Role, Wait

sys.path.pop(0)

V1, V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    """A socket directory and a process state of the test's own; the real vLLM, where installed, is put back."""
    monkeypatch.setenv("SYNCFREE_SOCKET_DIR", str(tmp_path / "agents"))
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "vllm"}
    monkeypatch.setattr(watch, "_watch", None)
    monkeypatch.setattr(watch, "_off", None)
    from syncfree.profiler.agent import server

    monkeypatch.setattr(server, "_current", None)
    yield
    if server._current is not None:
        server._current.close()
    for name in [n for n in sys.modules if n.split(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.fixture
def runner():
    fake_vllm.install()
    register()
    return sys.modules[V1].GPUModelRunner()


def step(runner, output):
    result = runner.execute_model(output)
    return runner.sample_tokens(None) if result is None else result


class Recorded:
    """Records while the block runs; then `steps`."""

    def __enter__(self):
        self.recorder = watch.current().recorder
        self.session = self.recorder.start("auto")
        return self

    def __exit__(self, *error):
        self.session.close()
        self.session.advance()
        self.recorder.detach(self.session)
        self.steps = self.session.recording.steps


PROMPT = schedule({"a": 5}, new=[("a", 5, 0)])
DECODE = schedule({"a": 1}, cached={"a": 5})


def test_a_step_is_classified_and_divided_into_phases(runner):
    step(runner, PROMPT)
    with Recorded() as recorded:
        assert step(runner, schedule({"b": 8}, new=[("b", 20, 0)])) == "tokens"
        step(runner, schedule({"a": 1, "b": 8}, cached={"a": 5, "b": 8}))
        step(runner, schedule({"a": 1, "b": 4}, cached={"a": 6, "b": 16}))
        step(runner, schedule({"a": 1, "b": 1}, cached={"a": 7, "b": 20}))
        step(runner, schedule({"c": 6}, new=[("c", 38, 32)]))
    found = [(s.batch_class, s.mixed, s.num_reqs, s.num_tokens) for s in recorded.steps]
    assert found == [
        ("causal_prefill", False, 1, 8),
        ("chunked_prefill", True, 2, 9),
        ("chunked_prefill", True, 2, 5),
        ("decode", False, 2, 2),
        ("extend", False, 1, 6),
    ]
    for each in recorded.steps:
        assert [p.name for p in each.phases] == ["build", "build", "forward", "sample", "output", "sample"]


def test_requests_that_arrived_before_the_recording_are_known(runner):
    step(runner, schedule({"a": 4}, new=[("a", 12, 0)]))
    step(runner, schedule({"a": 4}, cached={"a": 4}))
    with Recorded() as recorded:
        step(runner, schedule({"a": 4}, cached={"a": 8}))
        step(runner, schedule({"a": 1}, cached={"a": 12}))
    assert [s.batch_class for s in recorded.steps] == ["chunked_prefill", "decode"]


def test_finished_requests_are_forgotten_while_nobody_records(runner):
    step(runner, PROMPT)
    assert len(watch.current().table) == 1
    step(runner, schedule({}, finished=["a"]))
    assert len(watch.current().table) == 0


def test_a_step_without_tokens_is_no_step(runner):
    step(runner, PROMPT)
    with Recorded() as recorded:
        assert step(runner, schedule({}, finished=["a"])) == "empty"
    assert recorded.steps == []


def test_an_error_of_the_engine_passes_through_and_ends_the_step(runner):
    step(runner, PROMPT)
    with Recorded() as recorded:
        runner.fail = ValueError("the engine's own")
        with pytest.raises(ValueError, match="the engine's own"):
            runner.execute_model(DECODE)
        runner.fail = None
        step(runner, DECODE)
    assert len(recorded.steps) == 2
    assert watch.switched_off() is None


def test_waits_where_vllm_allows_them_are_tagged(runner, monkeypatch):
    step(runner, PROMPT)
    monkeypatch.setattr("syncfree.profiler.agent.recorder.choose", lambda wanted: ([collector], []))
    collector = FakeCollector()
    runner._prepare_inputs = runner.fetch = collector.wait
    with Recorded() as recorded:
        step(runner, DECODE)
    assert [call.allowed_upstream for call in recorded.session.recording.evidence[0].calls] == [False, True]


class FakeCollector:
    name, blind, sees = "fake", "", frozenset({"syncs"})

    def __init__(self):
        self.calls = []

    def start(self):
        pass

    def stop(self):
        pass

    def mark(self, now_ns):
        return None

    def drain(self):
        return self.calls

    def wait(self):
        now, thread = time.perf_counter_ns(), threading.get_native_id()
        self.calls.append(Call(api="hipStreamSynchronize", role=Role.SYNC, wait=Wait.STREAM, ts_ns=now, thread=thread))


def test_output_fetched_by_the_stepping_thread_belongs_to_the_step(runner):
    runner.asynchronous = True
    step(runner, PROMPT)
    with Recorded() as recorded:
        for _ in range(2):
            assert step(runner, DECODE).get_output() == "tokens"
    assert [[p.name for p in s.phases][-1] for s in recorded.steps] == ["output", "output"]


def test_output_fetched_by_another_thread_does_not_touch_the_step(runner):
    runner.asynchronous = True
    step(runner, PROMPT)
    with Recorded() as recorded:
        output = step(runner, DECODE)
        other = threading.Thread(target=output.get_output)
        other.start()
        other.join()
    assert [p.name for p in recorded.steps[0].phases][-1] == "sample"


def test_model_runner_v2_its_forward_context_and_its_decode_length():
    fake_vllm.install()
    register()
    runner = sys.modules[V2].GPUModelRunner()
    step(runner, PROMPT)
    with Recorded() as recorded:
        step(runner, schedule({"a": 3}, cached={"a": 5})).get_output()
        runner.execute_model(schedule({"x": 4}), dummy_run=True)
        runner.execute_model(schedule({"x": 4}), None, True)
    (only,) = recorded.steps
    assert only.batch_class == "decode"  # three tokens of a speculating request
    assert [p.name for p in only.phases] == ["build", "build", "forward", "sample", "output", "sample", "output"]


@pytest.mark.parametrize("module", [V1, V2])
def test_a_worker_can_be_found_before_its_first_request(module, runner, tmp_path):
    from syncfree.profiler.agent import current_agent, sockets

    assert sockets.discover() == []
    assert sys.modules[module].GPUModelRunner().initialize_kv_cache({}) == "cache"
    assert current_agent().ready.wait(30)
    assert [address.pid for address in sockets.discover()] == [os.getpid()]


def test_a_worker_without_an_agent_has_its_cache_all_the_same(runner, caplog, monkeypatch):
    monkeypatch.setattr(watch, "start_agent", lambda runner: 1 / 0)
    with caplog.at_level(logging.WARNING, "syncfree"):
        assert runner.initialize_kv_cache({}) == "cache"
        assert step(runner, PROMPT) == "tokens"
    assert ["ZeroDivisionError" in r.message for r in caplog.records] == [True]


def test_registering_before_and_after_the_import_and_twice_wraps_once(tmp_path):
    register()
    fake_vllm.install()
    register()
    register()
    method = sys.modules[V1].GPUModelRunner.execute_model
    assert method.__wrapped__
    assert not hasattr(method.__wrapped__, "__wrapped__")


def test_a_surprise_in_the_scheduler_output_switches_the_hooks_off_once_and_the_engine_goes_on(runner, caplog):
    step(runner, PROMPT)
    with caplog.at_level(logging.WARNING, "syncfree"), Recorded() as recorded:
        step(runner, DECODE)
        odd = schedule({"a": 1}, cached={"a": 6})
        odd.scheduled_cached_reqs = None
        for _ in range(3):
            assert step(runner, odd) == "tokens"
    assert [s.batch_class for s in recorded.steps] == ["decode"]
    lines = [r.message for r in caplog.records if "switched off" in r.message]
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert watch.current().recorder.disabled == watch.switched_off()


def test_a_surprise_before_anybody_records_switches_the_hooks_off_too(runner, caplog):
    odd = schedule({"a": 1})
    del odd.finished_req_ids
    assert step(runner, odd) == "tokens"
    assert "AttributeError" in watch.switched_off()


def test_a_vllm_without_the_methods_is_left_alone(caplog):
    fake_vllm.install(gpu_model_runner="class GPUModelRunner:\n    def execute_model(self, s):\n        return 'own'\n")
    register()
    runner = sys.modules[V1].GPUModelRunner()
    assert runner.execute_model(PROMPT) == "own"
    assert "GPUModelRunner has no sample_tokens" in caplog.text
    assert watch.current() is None


@pytest.mark.parametrize(("version", "warned"), [("0.26.1", False), ("0.32.0", False), ("0.27.0", True), ("1.0", True)])
def test_an_untested_version_is_warned_about_once_and_tried(version, warned, caplog):
    fake_vllm.install(vllm=f"__version__ = {version!r}\n")
    register()
    runner = sys.modules[V1].GPUModelRunner()
    for _ in range(3):
        step(runner, DECODE)
    assert len([r for r in caplog.records if "tested with vLLM" in r.message]) == int(warned)
    with Recorded() as recorded:
        step(runner, DECODE)
    assert len(recorded.steps) == 1


PROGRAM = """
import json, multiprocessing, os, sys
sys.path.insert(0, {here!r})
import fake_vllm
from fake_vllm import schedule
from syncfree.backends.vllm import register, watch
from syncfree.profiler.calls import Call, Role, Wait

def work(queue):
    register()
    if {v1!r} not in sys.modules:
        fake_vllm.install()
        register()
    runner = sys.modules[{v1!r}].GPUModelRunner()
    def step(output):
        runner.execute_model(output)
        runner.sample_tokens(None)
    step(schedule({{"a": 5}}, new=[("a", 5, 0)]))
    mine = watch.current()
    mine.agent.ready.wait(20)
    session = mine.recorder.start("auto")
    step(schedule({{"a": 1}}, cached={{"a": 5}}))
    session.close(); session.advance()
    queue.put([os.getpid(), mine.pid, mine.agent.error, str(mine.agent.path), mine.agent.path.exists(),
               [s.batch_class for s in session.recording.steps]])

if __name__ == "__main__":
    context = multiprocessing.get_context({way!r})
    queue = context.Queue()
    if {parent_steps!r}:
        work(queue)
        print(json.dumps(queue.get(timeout=30)))
    else:
        register()
    children = [context.Process(target=work, args=(queue,)) for _ in range(2)]
    for child in children: child.start()
    for child in children: print(json.dumps(queue.get(timeout=30)))
    for child in children: child.join(30)
"""


@pytest.mark.parametrize("parent_steps", [False, True])
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_every_worker_process_has_an_agent_of_its_own(way, parent_steps, tmp_path):
    here = str(Path(__file__).parent)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(here=here, v1=V1, way=way, parent_steps=parent_steps))
    environment = {**os.environ, "SYNCFREE_SOCKET_DIR": str(tmp_path / "agents")}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2 + parent_steps, done.stderr
    assert len({row[0] for row in rows}) == len(rows)
    assert list((tmp_path / "agents").iterdir()) == []
    for pid, watched, error, path, exists, classes in rows:
        assert (watched, error, exists, classes) == (pid, None, True, ["decode"])
        assert Path(path).name == f"{pid}-0.sock"
