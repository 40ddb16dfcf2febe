"""The planning service as a process: clients of all kinds, rubbish, restarts, signals; nothing is left behind."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq
from syncfree.backends.attention import attention_backend
from syncfree.backends.service import PlanClient, Service, client, default_path, protocol
from syncfree.planner import BadInput, Batch, InexactBatch, Planner, UnorderedBatch
from syncfree.planner.errors import Unreachable
from syncfree.profiler.agent import sockets

CLIENT = Path(__file__).with_name("service_client.py")
BATCH = Batch.from_lengths([1, 1, 40], [9, 70, 90])
STRANGER = 54321


class Process:
    """`syncfree serve`, and the path that it printed."""

    def __init__(self, *arguments):
        command = [sys.executable, "-m", "syncfree.cli", "serve", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.line = self.process.stdout.readline().strip()
        self.path = Path(self.line.removeprefix("ipc://"))

    def end(self, how=signal.SIGTERM):
        """Exit code, what else it printed, and what it wrote to stderr."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "sockets"
    monkeypatch.setenv("SYNCFREE_SOCKET_DIR", str(folder))
    return folder


@pytest.fixture
def serve(folder):
    """Starts services as processes; they are ended with the test."""
    started = []

    def start(*arguments):
        started.append(Process(*arguments))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        if not one.process.stdout.closed:
            one.process.communicate()


@pytest.fixture
def service(folder):
    """A service on a thread of this process."""
    with Service() as service:
        thread = threading.Thread(target=service.run)
        thread.start()
        yield service
        service.stop()
        thread.join(30)
    assert list(folder.iterdir()) == []


def here(backend="aiter_fa", batch=BATCH):
    return Planner(attention_backend(backend)).plan(batch).to_bytes()


def dealer(context, path):
    """A client of ZeroMQ alone."""
    made = context.socket(zmq.DEALER)
    made.linger = 0
    made.connect(f"ipc://{path}")
    return made


# ------------------------------------------------------------------------ serving


def test_a_plan_over_the_socket_is_the_one_planned_here(service):
    with PlanClient() as client:
        for backend in ("aiter_fa", "aiter_mla", "triton"):
            assert client.plan_bytes(backend, BATCH) == here(backend)
        assert client.plan("aiter_fa", BATCH)["extend.chunk_context.num_chunks"].value == 1
        assert client.server.plan == "syncfree.plan/1"
        assert client.health().plans == 4


def test_errors_of_planning_arrive_as_what_they_are(service):
    with PlanClient() as client:
        with pytest.raises(UnorderedBatch, match=r"rows\[2\]"):
            client.plan("aiter_fa", Batch.from_lengths([1, 10, 50], [9, 10, 70]))
        with pytest.raises(InexactBatch, match=r"seq_lens\[1\]: expected an exact length"):
            client.plan("aiter_fa", Batch.from_lengths([1, 10], [9, 70], seq_lens_lower=[9, 60]))
        with pytest.raises(BadInput, match="backend: expected one of aiter_fa"):
            client.plan("magic", BATCH)
        with pytest.raises(BadInput, match="expected at most 16384 rows, got 16385"):
            client.plan("triton", Batch.from_lengths([1] * 16385, [1] * 16385))
        assert client.plan_bytes("aiter_fa", BATCH) == here()


def test_eight_clients_at_once_get_their_own_plans(serve):
    server = serve()
    clients = [subprocess.Popen([sys.executable, str(CLIENT), str(server.path), "100", str(n)]) for n in range(8)]
    assert [one.wait(timeout=240) for one in clients] == [0] * 8
    with PlanClient() as client:
        health = client.health()
    assert (health.plans, health.refused, health.undelivered) == (800, 0, 0)
    assert server.end() == (0, "", "")


def test_many_requests_open_at_once_are_all_answered_in_order(service):
    context = zmq.Context()
    with contextlib.closing(dealer(context, service.path)) as mine:
        mine.send(msgspec.msgpack.encode({"type": "hello", "id": 0, "protocol": 1}))
        assert mine.poll(10_000)
        mine.recv()
        health = {"type": "health"}
        sent = received = 0
        while received < 4000:
            while sent < min(4000, received + protocol.IN_FLIGHT):
                mine.send(msgspec.msgpack.encode({**health, "id": sent}))
                sent += 1
            assert mine.poll(10_000), f"reply {received} of {sent} is missing"
            assert msgspec.msgpack.decode(mine.recv())["id"] == received
            received += 1
    context.term()


# ------------------------------------------------------------- clients that misbehave


def test_rubbish_oversized_and_vanishing_clients_disturb_nobody(service):
    context = zmq.Context()
    with PlanClient() as client:
        client.plan_bytes("triton", BATCH)
        for number in range(30):
            with contextlib.closing(dealer(context, service.path)) as rude:
                rude.send([b"\xc1", b"", b"\x81\xa4type\xa4plan", os.urandom(200)][number % 4])
                rude.send(bytes(protocol.MAX_REQUEST_BYTES + 1))
                rude.send_multipart([b"two", b"frames"])
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(str(service.path))
                raw.sendall(os.urandom(100))
            assert client.plan_bytes("triton", BATCH) == here("triton")
        assert client.health().undelivered >= 0
    context.term()


def test_a_request_over_the_limit_is_refused_before_it_is_sent(service, monkeypatch):
    monkeypatch.setattr(client, "MAX_REQUEST_BYTES", 100)
    with PlanClient() as mine:
        with pytest.raises(BadInput, match="request: expected at most 100 bytes"):
            mine.plan("triton", BATCH)
        monkeypatch.undo()
        assert mine.plan_bytes("triton", BATCH) == here("triton")


def test_a_client_that_never_reads_loses_its_own_replies_only(service):
    context = zmq.Context()
    with contextlib.closing(context.socket(zmq.DEALER)) as deaf, PlanClient() as client:
        deaf.linger = 0
        deaf.rcvhwm = 1
        deaf.sndhwm = 5000
        deaf.connect(f"ipc://{service.path}")
        deaf.send(msgspec.msgpack.encode({"type": "hello", "id": 0, "protocol": 1}))
        request = {"type": "plan", "backend": "aiter_fa", "query_lens": [2] * 64, "seq_lens": [9000] * 64}
        for number in range(60):
            deaf.send(msgspec.msgpack.encode({**request, "id": number}))
        deadline = time.monotonic() + 60
        while client.health().undelivered == 0 and time.monotonic() < deadline:
            assert client.plan_bytes("triton", BATCH) == here("triton")
        assert client.health().undelivered > 0
    context.term()


# --------------------------------------------------------------------- coming and going


def test_a_client_goes_on_with_the_next_server(serve):
    first = serve()
    with PlanClient(reconnect_s=60) as client:
        assert client.plan_bytes("triton", BATCH) == here("triton")
        pid = client.server.pid
        assert first.end()[0] == 0
        second = serve()
        assert client.plan_bytes("triton", BATCH) == here("triton")
        assert client.server.pid == second.process.pid != pid


def test_a_request_that_a_killed_server_took_is_asked_again(serve):
    first = serve()
    with PlanClient(timeout_s=60, reconnect_s=60) as client:
        client.plan_bytes("triton", BATCH)
        first.process.send_signal(signal.SIGSTOP)
        answers = []
        asking = threading.Thread(target=lambda: answers.append(client.plan_bytes("aiter_fa", BATCH)))
        asking.start()
        time.sleep(0.3)
        first.end(signal.SIGKILL)
        assert first.path.exists()  # what a killed server leaves is taken over by the next one
        serve()
        asking.join(60)
        assert answers == [here()]


def test_a_server_that_was_replaced_while_its_client_waits_is_noticed(serve, folder):
    """The path answers all the time, but not the one who was asked."""
    first = serve()
    with PlanClient(timeout_s=60, reconnect_s=60) as client:
        client.plan_bytes("triton", BATCH)
        first.process.send_signal(signal.SIGSTOP)
        answers = []
        asking = threading.Thread(target=lambda: answers.append(client.plan_bytes("aiter_fa", BATCH)))
        asking.start()
        moved = first.path.with_name("moved")
        first.path.rename(moved)
        first.path.with_name("plan.sock.lock").unlink()
        serve()
        asking.join(60)
        assert answers == [here()]
        first.process.send_signal(signal.SIGCONT)
        first.end(signal.SIGKILL)


def test_nothing_there_is_told_at_once(folder):
    with PlanClient() as client, pytest.raises(Unreachable, match="no such socket: is `syncfree serve` running"):
        client.plan("triton", BATCH)


def test_a_server_that_stands_still_is_unreachable_after_the_time_out(serve):
    server = serve()
    with PlanClient(timeout_s=0.5) as client:
        client.plan("triton", BATCH)
        server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(Unreachable, match="no answer within"):
            client.plan("triton", BATCH)
        server.process.send_signal(signal.SIGCONT)
        client.timeout_s = 60
        assert client.plan_bytes("aiter_fa", BATCH) == here()


def test_what_answers_but_is_no_planning_service_is_refused(folder):
    folder.mkdir(mode=0o700)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{default_path()}")

    def answer():
        frames = router.recv_multipart()
        router.send_multipart([frames[0], b"\xc1 what?"])

    thread = threading.Thread(target=answer)
    thread.start()
    with PlanClient() as client, pytest.raises(Unreachable, match="is not a syncfree planning service"):
        client.plan("triton", BATCH)
    thread.join()
    router.close(linger=0)
    context.term()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_nothing_left_behind(serve, folder, how):
    server = serve()
    assert server.line == f"ipc://{folder / 'plan.sock'}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    with PlanClient() as client:
        client.plan("triton", BATCH)
        assert server.end(how) == (0, "", "")
    assert list(folder.iterdir()) == []


def test_a_signal_just_when_a_client_leaves_is_not_lost(serve):
    for _ in range(4):
        server = serve()
        with PlanClient() as client:
            client.plan("triton", BATCH)
        assert server.end() == (0, "", "")


def test_idle_for_too_long_it_ends_by_itself(serve, folder):
    server = serve("--idle", "0.3")
    assert server.process.wait(timeout=60) == 0
    assert list(folder.iterdir()) == []


def test_health_and_stop_from_the_command_line(serve, folder):
    server = serve()
    command = [sys.executable, "-m", "syncfree.cli", "serve"]
    health = subprocess.run([*command, "--health"], capture_output=True, text=True, timeout=120, check=True)
    assert msgspec.json.decode(health.stdout)["pid"] == server.process.pid
    subprocess.run([*command, "--stop"], timeout=120, check=True)
    assert server.process.wait(timeout=60) == 0
    assert list(folder.iterdir()) == []
    gone = subprocess.run([*command, "--health"], capture_output=True, text=True, timeout=120, check=False)
    assert gone.returncode == 3
    assert len(gone.stderr.splitlines()) == 1


# ----------------------------------------------------------------- whose socket it is


def test_a_second_server_on_the_path_is_refused_and_the_first_goes_on(service):
    with pytest.raises(Unreachable, match="a live server"):
        Service().open()
    with PlanClient() as client:
        assert client.plan_bytes("triton", BATCH) == here("triton")


def test_a_file_in_the_way_stays(folder):
    folder.mkdir(mode=0o700)
    (folder / "plan.sock").write_text("mine")
    with pytest.raises(Unreachable, match="got a regular file"):
        Service().open()
    assert (folder / "plan.sock").read_text() == "mine"
    assert [p.name for p in folder.iterdir()] == ["plan.sock"]


def test_a_service_is_no_agent_and_profilers_pass_it_by(service):
    assert sockets.discover() == []
    assert service.path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")
def test_another_user_cannot_reach_it(serve, folder):
    server = serve()
    for open_to_all in (folder, server.path):  # even past the modes, the kernel's word on who connects decides
        open_to_all.chmod(0o777)
    program = (
        "import os, sys, zmq\n"
        f"os.setuid({STRANGER})\n"
        "s = zmq.Context().socket(zmq.DEALER); s.linger = 0\n"
        "s.connect('ipc://' + sys.argv[1]); s.send(sys.argv[2].encode())\n"
        "print(s.poll(1500))\n"
    )
    hello = msgspec.msgpack.encode({"type": "hello", "id": 1, "protocol": 1}).decode("latin1")
    for parent in folder.parents:
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    told = subprocess.run(
        [sys.executable, "-c", program, str(server.path), hello],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.stdout.strip() == "0", told.stderr
    with PlanClient() as client:
        assert client.plan_bytes("triton", BATCH) == here("triton")
