"""An interrupt while workers are being attached to: whoever arrives after it leaves again."""

import contextlib
import signal
import threading
import time

import pytest
from syncfree.profiler.attach import visit
from syncfree.profiler.attach.processes import Process

INSIDE = set()


class Slow:
    """A visit that arrives when it is let in."""

    open_door = threading.Event()

    def __init__(self, process, engines):
        if process.pid == 1:
            time.sleep(0.1)  # while the main thread still waits
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        self.open_door.wait(60)
        self.pid = process.pid
        INSIDE.add(self.pid)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.leave()

    def leave(self):
        INSIDE.remove(self.pid)


@pytest.fixture(autouse=True)
def ctrl_c():
    """A shell ignores it for what it runs in the background, and so would this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_who_arrives_after_the_interrupt_leaves_again(monkeypatch):
    monkeypatch.setattr(visit, "Visit", Slow)
    monkeypatch.setattr(visit, "check", lambda worker: None)
    monkeypatch.setattr(visit, "_AT_ONCE", 2)  # the third is not begun
    workers = [Process(pid, 0, 0, "worker") for pid in (1, 2, 3)]
    threading.Timer(0.5, Slow.open_door.set).start()
    with contextlib.ExitStack() as stack, pytest.raises(KeyboardInterrupt):
        visit._visit_all(stack, workers, {})
    assert Slow.open_door.is_set()
    assert not INSIDE
