"""Two servers of two ranks each, gloo between the ranks; nothing is prepared in any of them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from syncfree.backends.live import ENGINES
from syncfree.profiler.attach.processes import find_workers
from syncfree.profiler.attach.visit import profile_pid

pytestmark = pytest.mark.attach

HERE = Path(__file__).parent

# As engines do: a parent that only keeps its workers; it ends with its standard input.
PARENT = """
import os, subprocess, sys
store, program, *arguments = sys.argv[1:]
ranks = [
    subprocess.Popen(
        ["bash", "-c", 'exec -a "$0" "$@"', f"VLLM::Worker_TP{rank}", sys.executable, program, *arguments]
        + ["--rank", str(rank), "--world", "2", "--store", store],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    for rank in range(2)
]
for rank in ranks:
    rank.stdout.readline()
print("ready", flush=True)
sys.stdin.read()
for rank in ranks:
    rank.kill()
    rank.wait()
"""


@pytest.fixture(scope="module")
def own_sockets(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SYNCFREE_SOCKET_DIR", str(tmp_path_factory.mktemp("client")))
        yield


@pytest.fixture
def servers(fake_cuda, agents, tmp_path):
    """Process ids of two servers; their four workers end with the test."""
    pytest.importorskip("torch")
    started = []
    for number in range(2):
        program = [str(HERE / "engine.py"), "--driver", str(fake_cuda), "--pause", "0.001"]
        command = [sys.executable, "-c", PARENT, str(tmp_path / f"store{number}"), *program]
        environment = {**os.environ, "SYNCFREE_SOCKET_DIR": str(agents), "GLOO_SOCKET_IFNAME": "lo"}
        started.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        )
    for server in started:
        assert server.stdout.readline() == "ready\n"
    yield [server.pid for server in started]
    for server in started:
        server.stdin.close()
        server.wait(30)
        server.stdout.close()


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def left(agents):
    """Agents still there after a while in which they could have left."""
    until = time.monotonic() + 30
    while list(agents.iterdir()) and time.monotonic() < until:
        time.sleep(0.1)
    return list(agents.iterdir())


def test_four_ranks_are_one_report(servers, own_sockets, agents):
    workers = [[w.label for w in find_workers(pid)] for pid in servers]
    assert workers == [["VLLM::Worker_TP0", "VLLM::Worker_TP1"]] * 2
    report = profile_pid(servers, ENGINES, steps=20)
    assert report.source.ranks == [0, 1, 2, 3]
    assert not report.source.partial
    for rank in range(4):
        mine = [step for step in report.steps if step.rank == rank]
        assert len(mine) >= 20
        assert {step.syncs.total for step in mine} == {1}
    told = [note.text for note in report.notes if note.kind == "ranks"]
    assert told == [f"rank {new} here is rank {new % 2} of its own server" for new in range(4)]
    assert report.totals.syncs.total >= sum(step.syncs.total for step in report.steps)
    assert left(agents) == []


def test_a_rank_killed_meanwhile_makes_the_report_partial(servers, own_sockets, agents):
    victim = find_workers(servers[0])[1].pid

    def advance(steps, seconds):
        if steps > 5:
            kill(victim)

    report = profile_pid(servers, ENGINES, seconds=4, progress=advance)
    assert report.source.partial
    assert len({step.rank for step in report.steps}) == 3
    assert [note for note in report.notes if f"(pid {victim})" in note.text]
    for path in agents.iterdir():  # a killed process cannot clean up: the next agent does
        assert path.name.startswith(str(victim))
        path.unlink()
