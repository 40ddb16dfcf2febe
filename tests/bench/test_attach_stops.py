"""The bench of what attaching does to a process: its summary, and the clocks in its target."""

import importlib.util
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "bench" / "attach_stops.py"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("attach_stops_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_first_visit_is_told_apart(program):
    told = {"arriving": {"stood_ms": [9.0, 1.0, 3.0, 2.0]}}
    assert program.summary(told) == {"arriving": {"stood_ms": {"first": 9.0, "p50": 2.0, "max": 3.0}}}


@pytest.mark.skipif(shutil.which("cc") is None, reason="SKIPPED LOUDLY: no C compiler (cc) here for the clock")
def test_a_process_that_stands_still_is_late_by_all_clocks(program, tmp_path):
    pytest.importorskip("torch")
    target = program.Target(sys.executable, tmp_path)
    try:
        target.ask()
        os.kill(target.pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(target.pid, signal.SIGCONT)
        late = target.ask()
        assert set(late) == {"stood_ms", "python_ms", "step_ms"}
        while late["step_ms"] < 200:  # its step may still be running
            late = {name: max(value, late[name]) for name, value in target.ask().items()}
        assert min(late.values()) > 200
    finally:
        target.end()
