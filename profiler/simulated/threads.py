"""Helper threads: a thread started inside the context gets the device too, and its waits a line of the user's.

A wait on a thread with no frame of the user's (`Thread(target=event.synchronize)`) is put on the line that joins the
thread, because that is where the user's own thread stands still; until it is joined, on the line that started it.
"""

from __future__ import annotations

import threading
from typing import Any

from .. import sites
from ..calls import Call, Frame
from .recorder import RECORDER

_start = threading.Thread.start
_join = threading.Thread.join


def _started(thread: threading.Thread) -> None:
    """threading.Thread.start inside the context."""
    run = thread.run
    origin = sites.capture(skip=2)
    orphans: list[Call] = []

    def with_device() -> None:
        from .dispatch import modes

        RECORDER.thread.origin, RECORDER.thread.orphans = origin, orphans
        if not RECORDER.device_open:
            run()
            return
        with modes():
            run()

    thread.run = with_device  # type: ignore[method-assign]
    thread._syncfree_orphans = orphans  # type: ignore[attr-defined]
    _start(thread)


def _joined(thread: threading.Thread, timeout: float | None = None) -> None:
    """threading.Thread.join inside the context."""
    _join(thread, timeout)
    orphans: list[Call] = getattr(thread, "_syncfree_orphans", [])
    if orphans and not thread.is_alive():
        adopt(orphans, sites.capture(skip=2))


def adopt(orphans: list[Call], stack: tuple[Frame, ...]) -> None:
    """Put calls of a thread without user frames on the line that waited for it."""
    for call in orphans:
        own = tuple(frame for frame in call.stack if not sites.is_foreign(frame.file))
        call.stack = (*own, *stack)
    orphans.clear()


def install(patches: Any) -> None:
    patches.set(threading.Thread, "start", _started)
    patches.set(threading.Thread, "join", _joined)
