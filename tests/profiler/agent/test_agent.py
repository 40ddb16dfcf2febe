"""Real processes: a server that steps, profiled, attacked, killed, forked."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec
import pytest
import zmq
from syncfree.planner.errors import NothingMeasured, Unreachable
from syncfree.profiler.agent import Agent, Recorder, connection, protocol, sockets
from syncfree.profiler.agent.client import profile_socket
from syncfree.profiler.agent.connection import Connection

STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")


def test_a_stepping_server_is_profiled_through_its_socket(serve):
    server = serve("--rank", "2")
    seen = []
    report = profile_socket(server.path, steps=40, progress=lambda steps, seconds: seen.append(steps))
    assert len(report.steps) == 40
    assert set(report.classes) == {"decode", "extend", "chunked_prefill", "causal_prefill"}
    assert report.steps[0].rank == 2
    assert report.steps[0].syncs.total is None
    assert list(report.steps[0].phases) == ["build", "forward", "sample"]
    assert report.source.engine == "stepping"
    assert not report.source.partial
    assert seen[-1] >= 40


def test_a_server_is_found_without_naming_its_socket(serve):
    server = serve()
    assert [a.path for a in sockets.discover()] == [server.path]
    assert profile_socket(None, seconds=0.3).steps


def test_nothing_to_find_is_unreachable(folder):
    with pytest.raises(Unreachable, match="no live agent"):
        profile_socket(None, seconds=1)


def test_an_idle_server_measures_nothing_and_is_free_again(folder):
    agent = Agent(Recorder(rank=0), folder / f"{os.getpid()}-0.sock").start()
    assert agent.ready.wait(10)
    assert agent.error is None
    try:
        for _ in range(2):
            with pytest.raises(NothingMeasured, match="no step ended"):
                profile_socket(agent.path, seconds=0.2)
        assert agent.recorder.session is None
    finally:
        agent.close()
    assert list(folder.iterdir()) == []


def test_an_agent_whose_path_is_taken_says_so_and_the_host_goes_on(folder, caplog):
    path = folder / "1-0.sock"
    first = Agent(Recorder(), path).start()
    assert first.ready.wait(10)
    try:
        second = Agent(Recorder(), path).start()
        assert second.ready.wait(10)
        assert "a live server" in second.error
        assert [r.message for r in caplog.records if "no agent in this process" in r.message]
        second.recorder.begin_step("decode")
        second.recorder.end_step()
        with Connection(path) as connection:
            assert connection.health().recording is False
    finally:
        first.close()


def test_health_says_who_and_whether_it_records(serve):
    server = serve()
    with Connection(server.path) as connection:
        health = connection.health()
        assert (health.pid, health.rank, health.engine, health.recording) == (server.pid, 0, "stepping", False)
        session = connection.start().session
        assert connection.health().recording
        connection.drop(session)


def test_two_clients_at_once_the_second_is_refused_in_one_line(serve):
    server = serve()
    with Connection(server.path) as first:
        session = first.start().session
        with pytest.raises(Unreachable) as caught:
            profile_socket(server.path, steps=3)
        assert f"process {os.getpid()} has been recording" in str(caught.value)
        assert "\n" not in str(caught.value)
        first.drop(session)
    assert len(profile_socket(server.path, steps=3).steps) == 3


def test_an_interrupt_ends_the_recording_early_and_keeps_it(serve):
    server = serve()

    def interrupt(steps, seconds):
        if steps >= 5:
            raise KeyboardInterrupt

    report = profile_socket(server.path, seconds=600, progress=interrupt)
    assert len(report.steps) >= 5
    assert report.source.partial
    assert profile_socket(server.path, steps=1).steps


# ----------------------------------------------------------------------- killing


def command(*arguments):
    return [sys.executable, "-m", "syncfree.cli", "profile", *arguments]


def test_a_client_killed_in_the_middle_leaves_the_server_stepping_and_free_for_the_next(serve, monkeypatch):
    server = serve()
    program = (
        "from syncfree.profiler.agent.connection import Connection\n"
        "from pathlib import Path\n"
        "import time\n"
        f"c = Connection(Path({str(server.path)!r}))\n"
        "s = c.start(lease_s=0.5).session\n"
        "print('recording', flush=True)\n"
        "while True: c.status(s); time.sleep(0.05)\n"
    )
    victim = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert victim.stdout.readline() == "recording\n"
    with Connection(server.path) as other:
        assert other.health().recording
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        until = time.monotonic() + 30
        while other.health().recording and time.monotonic() < until:
            time.sleep(0.05)
        assert not other.health().recording
    assert server.process.poll() is None
    assert len(profile_socket(server.path, steps=10).steps) == 10


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_dies_in_the_middle_is_exit_3_with_one_line(serve, how):
    server = serve()
    profiling = subprocess.Popen(
        command("--socket", str(server.path), "--seconds", "300"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with Connection(server.path) as other:
        until = time.monotonic() + 60
        while not other.health().recording and time.monotonic() < until:
            time.sleep(0.05)
        assert other.health().recording
    server.stop(how)
    out, err = profiling.communicate(timeout=30)
    assert profiling.returncode == 3
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert "the server is gone" in err
    assert [p for p in sockets.discover() if p.pid == server.pid] == []
    assert list(server.path.parent.iterdir()) == []  # what it left was removed


def test_a_server_that_stands_still_is_unreachable_after_the_time_out(serve, monkeypatch):
    server = serve()
    server.process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(connection, "HELLO_SECONDS", 0.5)
    try:
        with pytest.raises(Unreachable, match="no answer within"):
            Connection(server.path)
    finally:
        server.process.send_signal(signal.SIGCONT)


def test_something_else_that_listens_is_not_taken_for_an_agent(folder, monkeypatch):
    path = folder / "1-0.sock"
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{path}")

    def answer():
        frames = router.recv_multipart()
        router.send_multipart([frames[0], b"\xff\x00 no agent"])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with pytest.raises(Unreachable, match="what answers is not a syncfree agent"):
            Connection(path)
    finally:
        thread.join()
        router.close(linger=0)
        context.term()


@pytest.mark.parametrize(
    ("prepare", "code", "text"),
    [
        (lambda path: None, 3, "no such socket"),
        (lambda path: path.write_text("x"), 3, "expected a socket, got a regular file"),
        (lambda path: path.symlink_to("/dev/null"), 3, "got a symbolic link"),
    ],
)
def test_the_command_says_in_one_line_why_a_path_is_no_target(folder, prepare, code, text):
    path = folder / "1-0.sock"
    prepare(path)
    done = subprocess.run(command("--socket", str(path)), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_path_that_is_too_long_is_bad_input(folder):
    done = subprocess.run(command("--socket", str(folder / ("a" * 150))), capture_output=True, text=True)
    assert done.returncode == 2
    assert "under 107 bytes" in done.stderr


# ----------------------------------------------------------------------- rubbish


def rubbish(rng):
    """Malformed messages of many kinds: random bytes, wrong types, cut and bent requests, too many frames."""
    good = [
        protocol.Hello(id=1, protocol=protocol.PROTOCOL),
        protocol.Start(id=2, collectors="nonsense"),
        protocol.Status(id=3, session="x"),
        protocol.Fetch(id=4, session="x", section=0, offset=0),
    ]
    kind = rng.randrange(9)
    data = bytearray(protocol.encode(rng.choice(good)))
    if kind == 0:
        return [rng.randbytes(rng.randrange(0, 300))]
    if kind == 1:
        data[rng.randrange(len(data))] = rng.randrange(256)
        return [bytes(data)]
    if kind == 2:
        return [bytes(data[: rng.randrange(len(data))])]
    if kind == 3:
        return [bytes(data) + rng.randbytes(rng.randrange(1, 50))]
    if kind == 4:
        return [rng.randbytes(5) for _ in range(rng.randrange(2, 6))]
    if kind == 5:
        return [b"\x91" * rng.randrange(1, 5000)]  # nested without end
    if kind == 6:
        return [
            msgspec.msgpack.encode({"type": rng.choice(["start", "stop", "hello", "no"]), "id": -1, "steps": 2**60})
        ]
    if kind == 7:
        return [msgspec.msgpack.encode({"type": "start", "id": 1, "collectors": "x" * rng.randrange(201, 9000)})]
    return [b"\xdd\xff\xff\xff\xff", b""][: rng.randrange(1, 3)]  # an array of four thousand million elements


def test_the_desk_answers_ten_thousand_malformed_messages():
    from syncfree.profiler.agent.desk import Desk

    rng = random.Random(1)
    desk = Desk(Recorder())
    for _ in range(10_000):
        reply = protocol.decode_reply(desk.handle(b"c", rubbish(rng)))
        assert isinstance(reply, protocol.Refused | protocol.Welcome)
    assert desk.patience_ms() is None


def test_an_agent_survives_malformed_and_oversized_messages_while_it_records(serve):
    server = serve()
    rng = random.Random(2)
    context = zmq.Context()
    with Connection(server.path) as connection:
        session = connection.start(lease_s=60).session
        for burst in range(40):
            dealer = context.socket(zmq.DEALER)
            dealer.linger = 1000
            dealer.connect(f"ipc://{server.path}")
            for _ in range(50):
                dealer.send_multipart(rubbish(rng))
            if burst % 4 == 0:
                dealer.send(b"x" * (protocol.MAX_REQUEST_BYTES + 1))  # ZeroMQ ends this connection
            dealer.close()
        for _ in range(40):
            raw = socket.socket(socket.AF_UNIX)
            raw.connect(str(server.path))
            raw.sendall(rng.randbytes(rng.randrange(1, 400)))  # not even ZeroMQ
            raw.close()
        before = connection.status(session).steps
        until = time.monotonic() + 30
        while connection.status(session).steps <= before and time.monotonic() < until:
            time.sleep(0.02)
        assert connection.status(session).steps > before
        connection.drop(session)
    context.term()
    assert len(profile_socket(server.path, steps=5).steps) == 5
    assert server.stop() == ""


@as_root
def test_a_stranger_is_not_heard_even_where_modes_let_him_in(serve, folder):
    server = serve()
    folder.chmod(0o755)
    server.path.chmod(0o666)
    for above in folder.parents:
        if above.stat().st_uid == 0 and not above.stat().st_mode & 0o001:
            above.chmod(0o711)
    pid = os.fork()
    if pid == 0:
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"ipc://{server.path}")
        dealer.send(protocol.encode(protocol.Hello(id=1, protocol=protocol.PROTOCOL)))
        os._exit(1 if dealer.poll(1000) else 0)
    assert os.waitpid(pid, 0)[1] == 0
    with Connection(server.path) as connection:
        assert connection.health().pid == server.pid


# ------------------------------------------------------------------ fork and spawn


@pytest.mark.parametrize("way", ["--fork", "--spawn"])
def test_a_child_process_has_an_agent_of_its_own(serve, way):
    server = serve(way, sockets=2)
    pids = [int(path.name.split("-")[0]) for path in server.paths]
    assert pids[0] == server.pid
    assert len(set(pids)) == 2
    for path, pid in zip(server.paths, pids, strict=True):
        with Connection(path) as connection:
            assert connection.about.pid == pid
        assert len(profile_socket(path, steps=5).steps) == 5


def test_a_child_forked_while_its_parent_records_steps_without_a_recording(folder):
    from syncfree.profiler.agent import server as server_module

    program = (
        "import os, sys, time\n"
        "from syncfree.profiler.agent import ensure_agent\n"
        "a = ensure_agent(); a.ready.wait(10)\n"
        "a.recorder.start('auto')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    b = ensure_agent(rank=1); b.ready.wait(10)\n"
        "    b.recorder.begin_step('decode'); b.recorder.end_step()\n"
        "    print(b is not a, b.recorder.session, b.error, b.path.exists(), flush=True)\n"
        "    sys.exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "a.recorder.begin_step('decode'); a.recorder.end_step()\n"
        "print(a.recorder.session.steps, a.path.exists())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["True None None True", "1 True"], done.stderr
    assert done.returncode == 0
    assert list(folder.iterdir()) == []  # both removed their own sockets when they ended
    assert server_module.current_agent() is None


def test_a_server_that_ends_by_itself_leaves_nothing(serve, folder):
    server = serve("--seconds", "0.5")
    server.process.wait(30)
    assert list(folder.iterdir()) == []
