"""Helper threads: a thread started inside the context gets the device too, and its waits a line of the user's.

A wait on a thread with no frame of the user's (`Thread(target=event.synchronize)`, `pool.submit(x.item)`) is put on the
line that joins the thread or takes the result, because that is where the user's own thread stands still; until then, on
the line that started it.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable
from typing import Any

from .. import sites
from ..calls import Call, Frame
from .recorder import RECORDER

_start = threading.Thread.start
_join = threading.Thread.join
_submit = concurrent.futures.ThreadPoolExecutor.submit
_result = concurrent.futures.Future.result
_exception = concurrent.futures.Future.exception
_ORPHANS = "_syncfree_orphans"


def _helped(function: Callable[..., Any], origin: tuple[Frame, ...], orphans: list[Call]) -> Callable[..., Any]:
    """`function`, to be run on another thread: with the device, and with its calls traced back to `origin`."""

    @functools.wraps(function)
    def with_device(*args: Any, **kwargs: Any) -> Any:
        thread = RECORDER.thread
        before = thread.origin, thread.orphans
        thread.origin, thread.orphans = origin, orphans
        try:
            if thread.has_device or not RECORDER.device_open:
                return function(*args, **kwargs)
            from .modes import modes

            with modes():
                return function(*args, **kwargs)
        finally:
            thread.origin, thread.orphans = before

    return with_device


def _started(thread: threading.Thread) -> None:
    """threading.Thread.start inside the context."""
    orphans: list[Call] = []
    thread.run = _helped(thread.run, sites.capture(skip=2), orphans)  # type: ignore[method-assign]
    setattr(thread, _ORPHANS, orphans)
    _start(thread)


def _joined(thread: threading.Thread, timeout: float | None = None) -> None:
    """threading.Thread.join inside the context."""
    _join(thread, timeout)
    if not thread.is_alive():
        _adopt(thread, sites.capture(skip=2))


def _submitted(pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """ThreadPoolExecutor.submit inside the context; the pool may be older."""
    orphans: list[Call] = []
    future = _submit(pool, _helped(function, sites.capture(skip=2), orphans), *args, **kwargs)
    setattr(future, _ORPHANS, orphans)
    return future


def _answered(future: Any, timeout: float | None = None) -> Any:
    """Future.result inside the context."""
    try:
        return _result(future, timeout)
    finally:
        _adopt(future, sites.capture(skip=2))


def _excepted(future: Any, timeout: float | None = None) -> Any:
    """Future.exception inside the context."""
    try:
        return _exception(future, timeout)
    finally:
        _adopt(future, sites.capture(skip=2))


def _adopt(waited_for: Any, stack: tuple[Frame, ...]) -> None:
    """Put calls of a thread without user frames on the line that waited for it."""
    orphans: list[Call] = getattr(waited_for, _ORPHANS, [])
    if not orphans or not any(sites.is_foreign(frame.file) for frame in stack):
        return
    for call in orphans:
        own = tuple(frame for frame in call.stack if not sites.is_foreign(frame.file))
        call.stack = (*own, *stack)
    orphans.clear()


def install(patches: Any) -> None:
    patches.set(threading.Thread, "start", _started)
    patches.set(threading.Thread, "join", _joined)
    patches.set(concurrent.futures.ThreadPoolExecutor, "submit", _submitted)
    patches.set(concurrent.futures.Future, "result", _answered)
    patches.set(concurrent.futures.Future, "exception", _excepted)
