import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from syncfree.profiler.probe.permission import why_not

HERE = Path(__file__).parent
DOUBLES = HERE.parents[1] / "doubles"


def heed_interrupts():
    """A shell lets what it starts in the background ignore Ctrl-C, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Engine:
    """A process of `engine.py`: a server that knows nothing of syncfree."""

    def __init__(self, *arguments, name=None, environment=None):
        command = [sys.executable, str(HERE / "engine.py"), *arguments]
        if name is not None:  # as engines rename their processes; Python then does not find its environment by itself
            command = ["bash", "-c", 'exec -a "$0" "$@"', name, *command]
            environment = {**(environment or {}), "PYTHONPATH": sysconfig.get_paths()["purelib"]}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
        )
        self.pid = self.process.pid
        assert self.process.stdout.readline() == "ready\n"

    def told(self):
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def stop(self, how=signal.SIGKILL):
        if not self.process.stdout.closed:
            self.process.send_signal(how)
            self.process.communicate()


@pytest.fixture(scope="session", autouse=True)
def needs_probe():
    reason = why_not()
    if reason is not None:
        pytest.skip(f"SKIPPED LOUDLY: nothing can be attached to here: {reason}")


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory):
    """Path of a libcuda.so.1 that does nothing."""
    target = tmp_path_factory.mktemp("fake_cuda") / "libcuda.so.1"
    source = DOUBLES / "fake_cuda.c"
    flags = ["-O1", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    try:
        subprocess.run(["cc", *flags, "-o", str(target), str(source)], check=True)
    except FileNotFoundError:
        pytest.skip("SKIPPED LOUDLY: no C compiler (cc) here, so the fake driver cannot be built")
    return target


@pytest.fixture(scope="session")
def agents(tmp_path_factory):
    """The socket directory of all targets; the client looks elsewhere, so that it must be told by the target."""
    folder = tmp_path_factory.mktemp("agents")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="session")
def engine(fake_cuda, agents):
    """A stepping server with a driver; one for all tests that leave it alive."""
    pytest.importorskip("torch")
    running = Engine("--driver", str(fake_cuda), "--seconds", "900", environment={"SYNCFREE_SOCKET_DIR": str(agents)})
    yield running
    running.stop()


@pytest.fixture
def start(fake_cuda, agents):
    """Starts servers that end with the test."""
    pytest.importorskip("torch")
    started = []

    def go(*arguments, environment=None, **keywords):
        environment = {"SYNCFREE_SOCKET_DIR": str(agents), **(environment or {})}
        started.append(Engine(*arguments, environment=environment, **keywords))
        return started[-1]

    yield go
    for each in started:
        each.stop()


@pytest.fixture
def profile(tmp_path):
    """`syncfree profile` as a process of its own."""

    def run(*arguments, **keywords):
        return subprocess.Popen(
            [sys.executable, "-m", "syncfree.cli", "profile", *arguments],
            env={**os.environ, "SYNCFREE_SOCKET_DIR": str(tmp_path / "elsewhere")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_interrupts,
            **keywords,
        )

    return run
