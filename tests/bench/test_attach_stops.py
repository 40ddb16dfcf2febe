"""The bench of what attaching does to a process: its summary, and the clocks in its target."""

import os
import shutil
import signal
import sys
import time

import pytest


@pytest.fixture(scope="module")
def program(load):
    return load("attach_stops.py")


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
        until = time.monotonic() + 60
        while min(late.values()) < 200 and time.monotonic() < until:  # a step or a thread's turn may still be to come
            time.sleep(0.05)
            late = {name: max(value, late[name]) for name, value in target.ask().items()}
        assert min(late.values()) > 200
    finally:
        target.end()
