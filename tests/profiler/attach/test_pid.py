"""`profile --pid`: a server in which nothing was prepared, and in which nothing stays."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from syncfree.backends.live import ENGINES, watch_live
from syncfree.errors import Unreachable
from syncfree.profiler.agent.client import profile_socket
from syncfree.profiler.attach import bundle
from syncfree.profiler.attach.processes import find_workers, read_process
from syncfree.profiler.attach.visit import Visit, profile_pid
from syncfree.profiler.probe.attach import Attachment

from .conftest import heed_interrupts

pytestmark = pytest.mark.attach

CLASSES = {"decode", "extend", "chunked_prefill", "causal_prefill"}


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    assert condition()


def settled(engine, before):
    """What the server tells once frida's threads in it have ended: they do so a moment after the client is done."""
    wait_for(lambda: engine.told()["tasks"] <= before["tasks"])
    return engine.told()


def finished(process, seconds=120):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


@pytest.fixture
def own_sockets(tmp_path, monkeypatch):
    monkeypatch.setenv("SYNCFREE_SOCKET_DIR", str(tmp_path / "client"))


@pytest.fixture(scope="module")
def report(engine, tmp_path_factory):
    """One recording as a user gets it, and what the server tells of itself before and after."""
    before = engine.told()
    path = tmp_path_factory.mktemp("report") / "r.json"
    command = [sys.executable, "-m", "syncfree.cli", "profile", "--pid", str(engine.pid), "--steps", "40"]
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), before, engine.told()


def test_every_class_is_seen(report):
    assert {name for name, figures in report[0]["classes"].items() if figures["steps"]} == CLASSES


def test_every_step_counts_its_launch_its_copy_and_its_wait_in_the_phase_they_are_made_in(report):
    for step in report[0]["steps"]:
        assert (step["syncs"]["total"], step["launches"]["kernels"], step["copies"]["d2h"]) == (1, 1, 1)
        assert step["phases"]["output"]["syncs"]["total"] == 1
        assert step["phases"]["build"]["syncs"]["total"] == 0


def test_the_wait_is_named_by_its_line(report):
    assert [(site["function"], site["file"].rsplit("/", 1)[-1]) for site in report[0]["sites"]] == [
        ("Server.fetch", "engine.py")
    ]


def test_a_helper_threads_wait_is_named_by_the_line_that_waits_for_the_thread(start, fake_cuda, own_sockets):
    report = profile_pid(start("--driver", str(fake_cuda), "--helper").pid, ENGINES, steps=40, collectors="probe")
    counts = {site.function: site.count for site in report.sites if site.kind == "stream"}
    assert set(counts) <= {"Server.fetch", "_WorkItem.run"}  # now and then the wait ends before it is waited for
    assert counts["Server.fetch"] > 0
    assert not [note.text for note in report.notes if "stacks" in note.text or "have no line" in note.text]


def test_the_report_says_what_attaching_cost(report):
    notes = [note["text"] for note in report[0]["notes"] if note["kind"] == "attach"]
    assert len(notes) == 1
    assert "stood still" in notes[0]


def test_nothing_stays_but_modules(report, agents):
    _, before, after = report
    assert not after["wrapped"]
    assert (after["finders"], after["path"], after["interval"]) == (
        before["finders"],
        before["path"],
        before["interval"],
    )
    assert after["threads"] == before["threads"]
    assert list(agents.iterdir()) == []


ARENA = 64 << 20  # glibc's heaps of threads are aligned to this
VISITS = 5


def mappings(pid):
    """(named mappings by name and rights, how many others): of those without a name, not what glibc keeps for threads.

    It keeps the stacks and the heaps of threads that have ended for those that come; how many there are, and how each
    is cut, depends on which threads ran at the same time.
    """
    named, others, heap = Counter(), 0, range(0)
    guard_end = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(None, 5)
        start, end = (int(x, 16) for x in fields[0].split("-"))
        rights, name = fields[1], fields[5] if len(fields) > 5 else ""
        if name:
            named[name, rights] += name not in ("[heap]", "[stack]")
        elif start in heap or start % ARENA == 0:
            heap = heap if start in heap else range(start, start + ARENA)
        elif rights == "---p" or start == guard_end:  # a thread's stack lies behind a page that nobody may touch
            guard_end = end if rights == "---p" else 0
        else:
            others += 1
    return named, others


def test_nothing_grows_after_the_first_visit(engine, report, own_sockets):
    first, (named, others) = settled(engine, report[1]), mappings(engine.pid)
    for _ in range(VISITS):
        profile_pid(engine.pid, ENGINES, steps=5)
    last = settled(engine, report[1])
    assert (last["fds"], last["tasks"], last["path"]) == (first["fds"], first["tasks"], first["path"])
    now, then = mappings(engine.pid)
    assert now == named  # no library, no memfd
    assert then < others + VISITS  # Python may take another block for objects; one a visit would be ours


def test_what_an_earlier_visit_brought_is_not_brought_again(engine, report, own_sockets, monkeypatch):
    def bring(*_):
        raise AssertionError("modules were brought")

    monkeypatch.setattr(Attachment, "bring", bring)
    assert profile_pid(engine.pid, ENGINES, steps=5).steps
    monkeypatch.setattr(bundle, "build", lambda *_: (b"", "other sources"))
    with pytest.raises(AssertionError, match="were brought"):
        profile_pid(engine.pid, ENGINES, steps=5)


def processors(pid):
    return {int(task.name): os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()}


def test_what_is_brought_leaves_a_bound_servers_processor_alone(start, fake_cuda, own_sockets):
    mine = os.sched_getaffinity(0)
    if len(mine) < 2:
        pytest.skip("needs two processors")
    os.sched_setaffinity(0, {min(mine)})
    try:
        bound = start("--driver", str(fake_cuda))
    finally:
        os.sched_setaffinity(0, mine)
    before = processors(bound.pid)
    assert set(map(frozenset, before.values())) == {frozenset({min(mine)})}
    with Visit(read_process(bound.pid), ENGINES) as visit:
        now = processors(bound.pid)
        assert profile_socket(visit.path, steps=5).steps
    ours = [on for tid, on in now.items() if tid not in before]
    assert ours
    assert all(on == mine for on in ours)
    assert {tid: on for tid, on in now.items() if tid in before} == before


def test_a_second_profiler_is_refused_while_one_is_there(engine, own_sockets):
    with Visit(read_process(engine.pid), ENGINES), pytest.raises(Unreachable, match="has been profiling it"):
        Visit(read_process(engine.pid), ENGINES)
    assert not engine.told()["wrapped"]


def test_a_request_that_ran_before_is_known_by_its_prompt(engine, own_sockets):
    report = profile_pid(engine.pid, ENGINES, steps=10)
    assert report.classes["chunked_prefill"].steps


def test_a_killed_client_leaves_nothing(engine, profile, agents):
    victim = profile("--pid", str(engine.pid), "--seconds", "300")
    wait_for(lambda: engine.told()["wrapped"])
    victim.kill()
    victim.communicate()
    wait_for(lambda: not engine.told()["wrapped"])
    wait_for(lambda: list(agents.iterdir()) == [])
    assert "syncfree-agent" not in engine.told()["threads"]
    code, _, err = finished(profile("--pid", str(engine.pid), "--steps", "5"))
    assert code == 0, err


def test_an_interrupted_client_keeps_what_it_has_and_leaves(engine, profile, tmp_path):
    path = tmp_path / "r.json"
    client = profile("--pid", str(engine.pid), "--seconds", "300", "--json", str(path))
    wait_for(lambda: engine.told()["recording"])
    steps = engine.told()["steps"]
    wait_for(lambda: engine.told()["steps"] > steps)
    client.send_signal(signal.SIGINT)
    code, _, err = finished(client)
    assert code == 0, err
    assert json.loads(path.read_text())["source"]["partial"]
    assert not engine.told()["wrapped"]


def test_a_server_that_dies_is_exit_3_in_one_line(start, profile, fake_cuda):
    engine = start("--driver", str(fake_cuda))
    client = profile("--pid", str(engine.pid), "--seconds", "300")
    wait_for(lambda: engine.told()["wrapped"])
    engine.stop()
    code, out, err = finished(client)
    assert (code, out) == (3, "")
    assert len(err.strip().splitlines()) == 1


def test_a_live_view_counts_every_step_and_leaves_nothing(engine, own_sockets, agents):
    view = watch_live(pids=[engine.pid], interval=0.5)
    reports = [next(view) for _ in range(3)]
    assert engine.told()["wrapped"]
    view.close()
    steps = [step for report in reports for step in report.steps]
    assert [step.index for step in steps] == list(range(len(steps)))
    assert {step.syncs.total for step in steps} == {1}
    attached = [[note for note in report.notes if note.kind == "attach"] for report in reports]
    assert [len(notes) for notes in attached] == [1, 0, 0]
    assert not engine.told()["wrapped"]
    assert list(agents.iterdir()) == []


def test_an_interrupted_live_view_ends_well_and_leaves_nothing(engine, tmp_path, agents):
    command = [sys.executable, "-m", "syncfree.cli", "watch", "--pid", str(engine.pid), "--interval", "0.5"]
    environment = {**os.environ, "SYNCFREE_SOCKET_DIR": str(tmp_path / "elsewhere")}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    client = subprocess.Popen(command, env=environment, preexec_fn=heed_interrupts, **streams)
    shown = [client.stdout.readline() for _ in range(3)]
    assert any("steps in" in line for line in shown)
    client.send_signal(signal.SIGINT)
    code, _, err = finished(client)
    assert (code, err) == (0, "")
    assert not engine.told()["wrapped"]
    assert list(agents.iterdir()) == []


def test_a_process_without_an_engine_gives_totals(start, own_sockets, fake_cuda):
    engine = start("--no-vllm", "--driver", str(fake_cuda))
    report = profile_pid(engine.pid, ENGINES, seconds=2)
    assert report.steps == []
    assert report.totals.launches.kernels > 0
    assert any("no engine that syncfree knows" in note.text for note in report.notes)


def test_without_a_driver_the_steps_are_there_and_the_figures_unknown(start, own_sockets):
    report = profile_pid(start().pid, ENGINES, steps=20)
    assert len(report.steps) >= 20
    assert {step.syncs.total for step in report.steps} == {None}


def test_a_worker_is_found_by_its_name_below_its_server(start):
    engine = start(name="VLLM::Worker_TP0")
    other = subprocess.Popen(["sleep", "60"])
    try:
        found = find_workers(read_process(engine.pid).parent)
        assert [(worker.pid, worker.label) for worker in found] == [(engine.pid, "VLLM::Worker_TP0")]
    finally:
        other.kill()
        other.wait()


# ------------------------------------------------------------------- refusals


def refusal(profile, *arguments, **keywords):
    code, out, err = finished(profile(*arguments, **keywords))
    assert (code, out) == (3, "")
    assert len(err.strip().splitlines()) == 1
    return err


def test_no_such_process(profile):
    assert "process 4194303 does not exist" in refusal(profile, "--pid", "4194303")


def test_no_python(profile):
    target = subprocess.Popen(["sleep", "60"])
    try:
        assert "runs no Python" in refusal(profile, "--pid", str(target.pid))
    finally:
        target.kill()
        target.wait()


def test_python_without_torch(profile):
    target = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"], stdout=-1)
    target.stdout.readline()
    try:
        assert "has not loaded torch" in refusal(profile, "--pid", str(target.pid))
    finally:
        target.kill()
        target.communicate()


STRANGER = """
import os, sys
import syncfree.backends.live, syncfree.profiler.attach.visit  # a stranger may not read them where Python is root's
os.setgroups([]), os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
try:
    syncfree.profiler.attach.visit.profile_pid(int(sys.argv[1]), syncfree.backends.live.ENGINES, seconds=1)
except syncfree.errors.Unreachable as error:
    sys.exit(str(error))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_users_process_for_a_stranger(engine):
    done = subprocess.run([sys.executable, "-c", STRANGER, str(engine.pid)], capture_output=True, text=True)
    assert done.stderr.startswith(f"process {engine.pid} belongs to uid 0, you are uid 65534")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not engine.told()["wrapped"]


@pytest.fixture
def strangers():
    """A folder that everybody may read: pytest's own are closed to others, by every run of it that starts."""
    with tempfile.TemporaryDirectory(prefix="syncfree-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_root_profiles_another_users_process(start, own_sockets, fake_cuda, strangers):
    folder = strangers
    fake_cuda = shutil.copy(fake_cuda, folder)
    where = {"SYNCFREE_SOCKET_DIR": str(folder / "agents"), "HOME": str(folder)}
    (folder / "agents").mkdir(mode=0o700)
    os.chown(folder / "agents", 65534, 65534)
    engine = start("--driver", str(fake_cuda), "--uid", "65534", environment=where)
    report = profile_pid(engine.pid, ENGINES, steps=10)
    assert {step.syncs.total for step in report.steps} == {1}
    assert list((folder / "agents").iterdir()) == []


def test_a_process_under_a_debugger(engine, profile):
    tracer = "import ctypes, sys, time; c = ctypes.CDLL(None); c.ptrace(0x4206, int(sys.argv[1]), None, None);"
    tracer += "print('up', flush=True); time.sleep(60)"
    debugger = subprocess.Popen([sys.executable, "-c", tracer, str(engine.pid)], stdout=subprocess.PIPE)
    debugger.stdout.readline()
    try:
        assert f"is being traced by process {debugger.pid}" in refusal(profile, "--pid", str(engine.pid))
    finally:
        debugger.kill()
        debugger.communicate()


def test_two_targets_are_a_usage_error(profile):
    code, _, err = finished(profile("--pid", "1", "--demo"))
    assert code == 2
    assert "--demo and --pid" in err
