"""A driver that does nothing, compiled here, and processes that call it."""

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DOUBLES = HERE.parents[1] / "doubles"
PROBE = HERE.parents[2] / "profiler" / "probe"


def why_no_probe():
    from syncfree.profiler.probe.permission import why_not

    return why_not()


def compiled(source, target, *flags):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("SKIPPED LOUDLY: no C compiler (cc) here, so the fake driver cannot be built")
    subprocess.run([compiler, "-O1", "-g", "-o", str(target), str(source), *flags], check=True)
    return target


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory):
    """Path of a libcuda.so.1 that does nothing."""
    target = tmp_path_factory.mktemp("fake_cuda") / "libcuda.so.1"
    return compiled(DOUBLES / "fake_cuda.c", target, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")


@pytest.fixture(scope="session")
def harness(tmp_path_factory):
    """probe.c behind a few functions, without a target."""
    target = tmp_path_factory.mktemp("harness") / "harness.so"
    return ctypes.CDLL(compiled(DOUBLES / "probe_harness.c", target, "-shared", "-fPIC", f"-I{PROBE}"))


@pytest.fixture
def needs_probe():
    reason = why_no_probe()
    if reason is not None:
        pytest.skip(f"SKIPPED LOUDLY: the probe cannot work here: {reason}")


@pytest.fixture
def run(needs_probe, fake_cuda):
    """Run Python code in a process of its own with the fake driver's path as its argument; returns its output."""

    def run_code(code, *arguments, check=True, timeout=120):
        prelude = "import ctypes, sys, os, time, json\ncuda = ctypes.CDLL(sys.argv[1])\n"
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", prelude + code, str(fake_cuda), *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check:
            assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run_code


def answer(text):
    """What a process has printed last, as JSON."""
    return json.loads(text.strip().splitlines()[-1])


WITHOUT_ATTACHING = ("test_layout.py", "test_rule.py", "test_permission.py")


def pytest_collection_modifyitems(items):
    """What attaches runs apart, after the rest: it stops processes and wants the cores to itself."""
    for item in items:
        if item.path.parent == HERE_OF_PROBE and item.path.name not in WITHOUT_ATTACHING:
            item.add_marker(pytest.mark.attach)


HERE_OF_PROBE = Path(__file__).resolve().parent
