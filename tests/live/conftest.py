"""A real vLLM server with the plugin in it: one start serves all tests of this folder."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

LIVE = Path(__file__).parent.parent / "live_server"
START_SECONDS = 600  # about 60 on two idle cores


class VllmServer:
    """`serve.sh` in a process group of its own, and what is needed to talk to it."""

    def __init__(self, model, folder, plugins):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder = folder
        self.log = folder / f"server-{self.port}.log"
        self.agents = folder / f"agents-{self.port}"
        environment = {
            **os.environ,
            "VENV": sys.prefix,
            "VLLM_PLUGINS": plugins,
            "SYNCFREE_SOCKET_DIR": str(self.agents),
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", str(LIVE / "serve.sh"), str(model), str(self.port)],
                env=environment,
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_until_ready(self):
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                if urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).status == 200:
                    return self
            time.sleep(0.5)
        tail = self.log.read_text(errors="replace")[-3000:]
        self.kill()
        raise RuntimeError(f"the server did not start:\n{tail}")

    def load(self, *arguments):
        """`load.py` against this server, as a process."""
        return subprocess.Popen(
            [sys.executable, str(LIVE / "load.py"), str(self.port), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_requests(self):
        """Until it has answered one more than so far: a client needs a while to start."""
        before = self.answered()
        until = time.monotonic() + 120
        while self.answered() == before and time.monotonic() < until:
            time.sleep(0.2)
        assert self.answered() > before

    def answered(self):
        """Requests for text so far, by its log."""
        return self.log.read_text(errors="replace").count("POST /v1/completions")

    @contextlib.contextmanager
    def busy(self):
        """Under load of long answers for as long as the block takes."""
        load = self.load("--kinds", "decode", "--requests", "100000", "--parallel", "4", "--seconds", "600")
        try:
            yield
        finally:
            load.kill()
            load.communicate()

    def profile(self, *arguments):
        """`syncfree profile` looking for this server's agents, as a process."""
        return subprocess.Popen(
            [sys.executable, "-m", "syncfree.cli", "profile", *arguments],
            env={**os.environ, "SYNCFREE_SOCKET_DIR": str(self.agents)},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kill(self):
        """End the server and the engine and worker processes below it, whatever state they are in."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="session")
def start_server(tmp_path_factory):
    """Starts servers; all are ended with the test run."""
    folder = tmp_path_factory.mktemp("live")
    model = folder / "llama"
    maker = [sys.executable, str(LIVE / "make_tiny_model.py"), "llama", str(model)]
    subprocess.run(maker, check=True, capture_output=True)
    servers = []

    def start(plugins):
        servers.append(VllmServer(model, folder, plugins))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def server(start_server):
    """A server with the plugin."""
    return start_server("syncfree").wait_until_ready()
