"""Work of ours inside a server: the settings that are changed meanwhile, and how often it rests."""

import gc
import subprocess
import sys
import threading

import pytest
from syncfree.profiler import yielding
from syncfree.profiler.yielding import Pace, gently


@pytest.fixture(autouse=True)
def as_before():
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
    gc.enable()


def settings():
    return sys.getswitchinterval(), gc.isenabled()


def test_waiting_threads_get_the_interpreter_soon_and_all_is_as_before_afterwards():
    before = settings()
    with gently():
        assert sys.getswitchinterval() < before[0]
        assert not gc.isenabled()
    assert settings() == before


def test_a_host_without_garbage_collector_or_with_a_short_interval_keeps_them():
    gc.disable()
    sys.setswitchinterval(1e-5)
    with gently():
        assert sys.getswitchinterval() == pytest.approx(1e-5)
    assert settings() == (pytest.approx(1e-5), False)


def test_two_threads_that_overlap_restore_what_was_before_both():
    before = settings()
    inside, go = threading.Event(), threading.Event()

    def other():
        with gently():
            inside.set()
            go.wait()

    thread = threading.Thread(target=other)
    with gently():
        thread.start()
        inside.wait()
    assert not gc.isenabled(), "the other one is still at work"
    go.set()
    thread.join()
    assert settings() == before


def test_an_error_inside_restores_too():
    before = settings()
    with pytest.raises(KeyError), gently():
        raise KeyError
    assert settings() == before


FORK = """
import gc, os, sys
from syncfree.profiler.yielding import gently
before = sys.getswitchinterval()
with gently():
    child = os.fork()
    if not child:
        os._exit(0 if (sys.getswitchinterval(), gc.isenabled()) == (before, True) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not gc.isenabled()
assert (sys.getswitchinterval(), gc.isenabled()) == (before, True)
"""


def test_a_child_forked_meanwhile_is_as_before():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)


class Clock:
    """`time` as yielding.py uses it; work is told to it."""

    def __init__(self):
        self.worked = 0.0
        self.slept = []

    def thread_time(self):
        return self.worked

    def sleep(self, seconds):
        self.slept.append(seconds)


def test_rests_keep_the_work_to_its_share(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(yielding, "time", clock)
    pace = Pace(share=0.25)
    for work in (0.001, 0.004, 0.0):
        clock.worked += work
        pace.rest()
    assert clock.slept == pytest.approx([0.003, 0.012, 0.0])
    clock.worked += 10
    pace.rest()
    assert clock.slept[-1] < 1, "one long piece is not paid for without an end"


def test_another_thread_never_rests(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(yielding, "time", clock)
    pace = Pace()
    clock.worked += 1
    thread = threading.Thread(target=pace.rest)
    thread.start()
    thread.join()
    assert clock.slept == []
