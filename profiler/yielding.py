"""Working inside a serving process without keeping its threads waiting. Standard library only.

A thread of ours takes the GIL like any other. What the server notices is how long we hold it at a stretch, each time
that one of its threads gave it away for a moment, and how much of a step's time our work takes in all.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator

_SWITCH_SECONDS = 0.00005
_SHARE = 0.2
_LONGEST_REST = 0.05

_lock = threading.Lock()
_inside = 0
_before = (0.005, True)  # the host's own interval, and whether its garbage collector was on


@contextlib.contextmanager
def gently() -> Iterator[None]:
    """Until the end of the `with`, in any number of threads: who waits for the GIL gets it soon.

    The garbage collector, which would walk the whole heap of a serving process at a stretch, is held off meanwhile.
    """
    global _inside, _before
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = sys.getswitchinterval(), gc.isenabled()
            sys.setswitchinterval(min(_before[0], _SWITCH_SECONDS))
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _inside:  # 0 in a child that this thread has forked meanwhile
                _inside -= 1
                if not _inside:
                    _restore()


def _restore() -> None:
    sys.setswitchinterval(_before[0])
    if _before[1]:
        gc.enable()


def _after_fork() -> None:
    """A child has none of our threads that would do this later."""
    global _lock, _inside
    _lock = threading.Lock()
    if _inside:
        _inside = 0
        _restore()


class Pace:
    """Keeps one thread's work to a share of the time: `rest` between two pieces of it, on the thread that made this."""

    def __init__(self, share: float = _SHARE) -> None:
        self._thread = threading.get_ident()
        self._rests = 1 / share - 1
        self._worked = time.thread_time()

    def rest(self) -> None:
        """Sleep as long as the work since the last rest asks for; nothing on another thread."""
        if threading.get_ident() == self._thread:
            time.sleep(min(_LONGEST_REST, self._rests * (time.thread_time() - self._worked)))
            self._worked = time.thread_time()


os.register_at_fork(after_in_child=_after_fork)
