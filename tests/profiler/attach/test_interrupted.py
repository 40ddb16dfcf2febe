"""An interrupt while workers are being attached to: whoever arrives after it leaves again."""

import contextlib
import signal
import threading

import pytest
from syncfree.profiler.attach import visit
from syncfree.profiler.attach.processes import Process


class Slow:
    """A visit that arrives when it is let in."""

    inside = set()
    open_door = threading.Event()

    def __init__(self, process, engines):
        if process.pid == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        self.open_door.wait(60)
        self.pid = process.pid
        self.inside.add(self.pid)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.leave()

    def leave(self):
        self.inside.remove(self.pid)


def test_who_arrives_after_the_interrupt_leaves_again(monkeypatch):
    monkeypatch.setattr(visit, "Visit", Slow)
    monkeypatch.setattr(visit, "check", lambda worker: None)
    monkeypatch.setattr(visit, "_AT_ONCE", 2)  # the third is not begun
    workers = [Process(pid, 0, 0, "worker") for pid in (1, 2, 3)]
    threading.Timer(0.5, Slow.open_door.set).start()
    with contextlib.ExitStack() as stack, pytest.raises(KeyboardInterrupt):
        visit._visit_all(stack, workers, {})
    assert Slow.open_door.is_set()
    assert Slow.inside == set()
