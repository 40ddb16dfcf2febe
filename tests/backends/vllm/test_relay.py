"""Messages by URL: a server's endpoint, its workers' mail and the client, with `collective_rpc` as a function call."""

import asyncio
import http.server
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
from syncfree.backends.live import profile_live, watch_live
from syncfree.backends.vllm import mail, traced
from syncfree.backends.vllm.endpoint import Endpoint, Refused
from syncfree.errors import BadInput, Unreachable
from syncfree.profiler.agent import ensure_agent, server
from syncfree.profiler.agent.relay import PATH, Exchange, NoPlugin, Relay
from syncfree.profiler.agent.remote import profile_url

TOKEN = "a token"


class Engine:
    """An engine client whose one worker is this process."""

    def __init__(self):
        self.failure = None

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if self.failure is not None:
            raise self.failure
        assert method == mail.METHOD
        return [mail.exchange(SimpleNamespace(model_runner=None), *args)]


class Server(http.server.BaseHTTPRequestHandler):
    """Serves an `Endpoint` as a web server does."""

    endpoint = None

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        status, answer = 404, b"no such path"
        if self.path == PATH and self.endpoint is not None:
            try:
                status, answer = 200, asyncio.run(self.endpoint.exchange(self.headers["Authorization"] or "", body))
            except Refused as refused:
                status, answer = refused.status, str(refused).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def serve():
    """Starts a server; returns its URL."""
    started = []

    def start(endpoint):
        handler = type("Handler", (Server,), {"endpoint": endpoint})
        started.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=started[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{started[-1].server_port}"

    yield start
    for each in started:
        each.shutdown()
        each.server_close()


@pytest.fixture
def endpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("SYNCFREE_SOCKET_DIR", str(tmp_path / "agents"))
    monkeypatch.setenv("SYNCFREE_TOKEN", TOKEN)
    monkeypatch.setattr(server, "_current", None)
    monkeypatch.setattr(mail, "_office", None)
    made = Endpoint()
    asyncio.run(made.init_state(Engine(), None, None))
    yield made
    if server._current is not None:
        server._current.close()


@pytest.fixture
def url(serve, endpoint):
    return serve(endpoint)


@pytest.fixture
def stepping(endpoint):
    """This process steps until the test ends."""
    done = threading.Event()

    def step():
        while not done.is_set():
            recorder = ensure_agent(engine="test").recorder
            recorder.begin_step("decode", num_reqs=2, num_tokens=2)
            time.sleep(0.002)
            recorder.end_step()

    thread = threading.Thread(target=step)
    thread.start()
    yield
    done.set()
    thread.join()


def test_a_recording_by_url(url, stepping):
    report = profile_url(url, steps=25)
    assert len(report.steps) >= 25
    assert report.classes["decode"].steps == len(report.steps)


def test_a_live_view_by_url_shows_every_step_once_and_lets_go(url, stepping):
    view = watch_live(url=url, interval=0.3)
    steps = [step.index for report in (next(view), next(view), next(view)) for step in report.steps]
    view.close()
    assert steps == list(range(len(steps)))
    assert len(steps) > 10
    assert profile_url(url, steps=3).steps  # nobody records any more


def test_a_live_view_needs_the_endpoint(serve):
    with pytest.raises(Unreachable, match=r"has no syncfree endpoint, which a live view needs: restart it with"):
        next(watch_live(url=serve(None)))


def test_two_clients_at_once_do_not_get_each_others_replies(url, stepping):
    relays = [Relay(url), Relay(url)]
    from syncfree.profiler.agent.relay import RelayedConnection

    connections = [RelayedConnection(relay, relay.workers[0]) for relay in relays]
    session = connections[0].start("auto", None).session
    with pytest.raises(Unreachable, match="busy"):
        connections[1].start("auto", None)
    assert connections[0].status(session).state == "recording"
    connections[0].drop(session)


def test_a_message_for_another_worker_is_not_delivered(endpoint):
    asked = Exchange(client="c" * 16, messages={"elsewhere:1": [b"rubbish"]})
    answer = asyncio.run(endpoint.exchange(f"Bearer {TOKEN}", msgspec.msgpack.encode(asked)))
    assert msgspec.msgpack.decode(answer)["workers"][0]["replies"] == []


@pytest.mark.parametrize("said", ["", "Bearer", "Bearer wrong", f"Bearer {TOKEN}x", TOKEN, "Bearer \xe4"])
def test_a_wrong_token_is_refused(endpoint, said):
    with pytest.raises(Refused) as refused:
        asyncio.run(endpoint.exchange(said, b""))
    assert refused.value.status == 401


def test_without_a_token_nobody_is_let_in(monkeypatch):
    monkeypatch.delenv("SYNCFREE_TOKEN", raising=False)
    with pytest.raises(Refused) as refused:
        asyncio.run(Endpoint().exchange("Bearer ", b""))
    assert refused.value.status == 403


def test_a_server_without_an_engine_says_so(monkeypatch):
    monkeypatch.setenv("SYNCFREE_TOKEN", TOKEN)
    with pytest.raises(Refused) as refused:
        asyncio.run(Endpoint().exchange(f"Bearer {TOKEN}", b""))
    assert refused.value.status == 503


@pytest.mark.parametrize("body", [b"", b"\xc1", b"{}", b"\x91" * 5000, msgspec.msgpack.encode({"client": "short"})])
def test_rubbish_is_refused_in_one_line(endpoint, body):
    with pytest.raises(Refused) as refused:
        asyncio.run(endpoint.exchange(f"Bearer {TOKEN}", body))
    assert refused.value.status == 400
    assert "\n" not in str(refused.value)


def test_workers_that_cannot_be_asked_are_a_reason_for_the_client(url, endpoint):
    endpoint._engine.failure = TimeoutError("RPC call timed out")
    with pytest.raises(Unreachable, match="502 the workers could not be asked: RPC call timed out"):
        Relay(url)


def test_a_body_without_an_end_is_cut_off(endpoint):
    class Request:
        async def stream(self):
            while True:
                yield bytes(1 << 16)

    with pytest.raises(Refused) as refused:
        asyncio.run(endpoint._body(Request()))
    assert refused.value.status == 413


def test_many_clients_do_not_pile_up(endpoint):
    for k in range(20):
        mail.exchange(None, f"client {k:012}", {})
    assert len(mail._office._boxes) <= 8


# ------------------------------------------------------------ without the plugin


def test_a_server_without_endpoint_and_profiler_is_a_reason(serve):
    url = serve(None)
    with pytest.raises(NoPlugin):
        profile_url(url, seconds=1)
    with pytest.raises(Unreachable, match="no syncfree endpoint, and its command line names no trace folder"):
        profile_live(url=url, seconds=1)


def test_nobody_listens():
    with pytest.raises(Unreachable, match="refused"):
        profile_live(url="http://127.0.0.1:1", seconds=1)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://h:x", "http://h:99999"])
def test_a_url_that_is_none(url):
    with pytest.raises(BadInput, match="url: expected http"):
        profile_live(url=url, seconds=1)


def test_another_machine_has_no_trace_folder_here():
    with pytest.raises(Unreachable, match="not on this machine"):
        traced.profile_traced("http://192.0.2.1:8000", seconds=1)


@pytest.mark.parametrize(
    ("arguments", "folder", "with_stack"),
    [
        (["--profiler-config.torch_profiler_dir", "/t"], "/t", True),
        (["--profiler-config.torch-profiler-dir=/t", "--profiler-config.torch_profiler_with_stack=false"], "/t", False),
        (['--profiler-config={"torch_profiler_dir": "/t", "torch_profiler_with_stack": false}'], "/t", False),
        (["--profiler_config", '{"torch_profiler_dir": "/t"}'], "/t", True),
        (["--profiler-config.torch_profiler_with_stack", "False"], None, False),
        (["--model", "x"], None, True),
    ],
)
def test_what_a_command_line_says_of_the_profiler(arguments, folder, with_stack):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    program = "print('up', flush=True); import time; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, env=clean)
    process.stdout.readline()
    try:
        found = traced.profiling_of(traced.read_process(process.pid))
    finally:
        process.kill()
        process.communicate()
    assert (found.folder and str(found.folder), found.with_stack) == (folder, with_stack)


def test_stacks_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(traced, "listening", lambda url: traced.read_process(os.getpid()))
    monkeypatch.setattr(traced, "profiling_of", lambda process: traced.Profiling(tmp_path, True))
    with pytest.raises(Unreachable, match="would record Python stacks"):
        traced.profile_traced("http://127.0.0.1:8000", seconds=1)


def test_the_listener_is_found_by_its_port(serve):
    assert traced.listening(serve(None)).pid == os.getpid()
    assert traced.listening("http://192.0.2.1:80") is None
