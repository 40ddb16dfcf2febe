import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("stepping_server.py")


class Server:
    """A process of `stepping_server.py`, and the sockets that it printed."""

    def __init__(self, *arguments, sockets=1):
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.paths = [Path(self.process.stdout.readline().strip()) for _ in range(sockets)]
        self.path = self.paths[0]
        self.pid = self.process.pid

    def stop(self, how=signal.SIGKILL):
        """End it, and its children; returns what it wrote to stderr."""
        if self.process.stdout.closed:
            return ""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(how)
        for path in self.paths[1:]:  # children outlive a parent that was killed
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(path.name.split("-")[0]), signal.SIGKILL)
        return self.process.communicate()[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The socket directory of this test, of child processes too."""
    folder = tmp_path / "agents"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("SYNCFREE_SOCKET_DIR", str(folder))
    return folder


@pytest.fixture
def serve(folder):
    """Starts stepping servers; they are ended with the test."""
    servers = []

    def start(*arguments, sockets=1):
        servers.append(Server(*arguments, sockets=sockets))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
