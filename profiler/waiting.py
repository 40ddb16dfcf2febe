"""The line at which the step's own thread waits for a helper thread, for helper threads that have none of their own.

Where a thread's own function is not the user's (`Thread(target=event.synchronize)`, `pool.submit(x.item)`), no frame of
its stack names a line of the program. What does is the stack of the thread that waits for it: the two together are the
stack that the program would have had without the thread. For a collector that cannot run Python: probe/waiter.c.
"""

from __future__ import annotations

import sys
import threading
import time

from . import sites
from .calls import Frame

_FILE = threading.Thread.join.__code__.co_filename
# Where a join, the result of a future or of a pool and a queue end; the first two by release of CPython.
_WAITS = frozenset({"Thread._wait_for_tstate_lock", "Thread.join", "Condition.wait"})
_TURNS, _TURN_SECONDS = 20, 0.00005


class StepThread:
    """The thread that steps, as far as it was said. With the GIL held, all of it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def is_this(self) -> None:
        """The calling thread is the one that steps."""
        self._thread = threading.current_thread()

    def logical(self, stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
        """`stack`, the calling thread's; followed by that of the thread that steps where only that names a line of the
        user's and it waits for another thread. Which one it waits for cannot be told.
        """
        step = self._thread
        if step is None or step.ident == threading.get_ident() or not stack:
            return stack
        if len(stack) >= sites.MAX_DEPTH or any(sites.is_foreign(frame.file) for frame in stack):
            return stack
        waiting = _stack_of(step)
        if _starts_a_thread(waiting):  # this one, perhaps: it is to get to where it waits for it
            for _ in range(_TURNS):
                time.sleep(_TURN_SECONDS)  # with the GIL given up
                waiting = _stack_of(step)
                if _waits(waiting):
                    break
        return (*stack, *waiting)[: sites.MAX_DEPTH] if _waits(waiting) else stack


def _stack_of(thread: threading.Thread) -> tuple[Frame, ...]:
    frame = sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None
    return () if frame is None else sites.stack_of(frame)


def _inside(stack: tuple[Frame, ...]) -> bool:
    return bool(stack) and stack[0].file == _FILE and stack[0].function in _WAITS


def _starts_a_thread(stack: tuple[Frame, ...]) -> bool:
    """Whether it waits for a thread to begin, and not for what that does."""
    return _inside(stack) and any(frame.file == _FILE and frame.function == "Thread.start" for frame in stack)


def _waits(stack: tuple[Frame, ...]) -> bool:
    users = any(sites.is_foreign(frame.file) for frame in stack)
    return _inside(stack) and users and not _starts_a_thread(stack)
