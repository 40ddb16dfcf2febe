"""`syncfree profile --url` on a real vLLM server that has the endpoint plugin, and by the traces of that server."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from syncfree.backends.vllm.traced import profile_traced
from syncfree.errors import Unreachable

pytest.importorskip("vllm")

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

CLASSES = {"decode", "extend", "chunked_prefill", "causal_prefill"}
TOKEN = "only for this test"


@pytest.fixture(scope="module")
def served(start_server, tmp_path_factory):
    """A server with the plugin, a token and a profiler of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SYNCFREE_TOKEN", TOKEN)
        patch.setenv("TRACE_DIR", str(tmp_path_factory.mktemp("traces")))
        server = start_server("syncfree").wait_until_ready()
    yield server
    server.kill()


def profile(server, *arguments, token=TOKEN):
    command = [sys.executable, "-m", "syncfree.cli", "profile", "--url", f"http://127.0.0.1:{server.port}", *arguments]
    environment = {**os.environ, "SYNCFREE_TOKEN": token, "SYNCFREE_SOCKET_DIR": str(server.folder / "elsewhere")}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_all_four_classes_are_seen_and_no_request_fails(served):
    path = served.folder / "url.json"
    load = served.load("--seconds", "100", "--requests", "60")
    done = profile(served, "--seconds", "10", "--json", str(path))
    out, _ = load.communicate(timeout=300)
    assert (done.returncode, load.returncode) == (0, 0), done.stderr + out
    data = json.loads(path.read_text())
    assert {name for name, figures in data["classes"].items() if figures["steps"]} == CLASSES


def test_the_wrong_token_is_exit_3_in_one_line(served):
    done = profile(served, "--seconds", "1", token="another")
    assert (done.returncode, done.stdout) == (3, "")
    assert len(done.stderr.strip().splitlines()) == 1
    assert TOKEN not in done.stderr


def test_the_route_is_not_in_the_servers_schema(served):
    schema = json.load(urllib.request.urlopen(f"http://127.0.0.1:{served.port}/openapi.json", timeout=30))
    assert not [path for path in schema["paths"] if "syncfree" in path]


def test_an_oversized_body_is_refused(served):
    request = urllib.request.Request(
        f"http://127.0.0.1:{served.port}/syncfree/exchange", data=bytes(2 << 20), method="POST"
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code == 413


def test_its_own_traces_are_read_where_there_is_no_endpoint(served):
    url = f"http://127.0.0.1:{served.port}"
    with served.busy():
        report = profile_traced(url, steps=10)
    assert report.steps
    assert [note for note in report.notes if note.kind == "attach"]
    with pytest.raises(Unreachable):
        profile_traced("http://127.0.0.1:1", seconds=1)
