"""Copies that wait without a waiting call: `non_blocking=True` promises nothing where the host memory is pageable.

Measured on an H200: a device-to-host copy into memory that is not pinned always waits, and so does one into a pinned
tensor that is a strided view (PyTorch stages it through pageable memory); a host-to-device copy from pageable memory
waits from 4 MiB on, and is staged below. No sync call is made, so neither GPUTrace nor `set_sync_debug_mode` tells.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ...errors import Unreachable
from ..calls import Call, Direction, Role
from ..report import Note
from ..sites import blamed, capture
from ..waiting import StepThread
from .base import Counters

STAGED_BELOW = 4 << 20  # bytes
_METHODS = ("copy_", "to", "cpu", "cuda")
Watcher = Callable[[Call], None]


def silent_wait(target: Any, source: Any, non_blocking: bool) -> Direction | None:
    """The direction in which this copy waits although it was asked not to; None if it does not.

    `target`, `source`: tensors (anything with `device`, `is_pinned()`, `is_contiguous()` and `nbytes`).
    """
    if not non_blocking:
        return None
    to, from_ = target.device.type, source.device.type
    if from_ != "cpu" and to == "cpu" and not (target.is_pinned() and target.is_contiguous()):
        return Direction.D2H
    if from_ == "cpu" and to != "cpu" and source.nbytes >= STAGED_BELOW and not source.is_pinned():
        return Direction.H2D
    return None


class TensorWrappers:
    """Replaces the copying methods of `torch.Tensor` while it is installed, and tells `watcher` of silent waits.

    Others may wrap the same methods (vLLM's sync checker does). Whoever did so after us keeps our wrapper inside its
    own; it then only passes on.
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._ours: dict[str, Any] = {}
        self._inherited: dict[str, bool] = {}
        self._active = False
        self._failed: str | None = None

    def install(self) -> None:
        """Raises `Unreachable` where torch is not loaded."""
        torch = sys.modules.get("torch")
        if torch is None:
            raise Unreachable("transfers: torch is not loaded in this process")
        self._tensor = torch.Tensor
        self._active = True
        for name in _METHODS:
            self._inherited[name] = name not in vars(torch.Tensor)
            self._ours[name] = self._wrapped(name, getattr(torch.Tensor, name))
            setattr(torch.Tensor, name, self._ours[name])

    def remove(self) -> None:
        self._active = False
        for name, wrapper in self._ours.items():
            if vars(self._tensor).get(name) is not wrapper:
                continue
            if self._inherited[name]:
                delattr(self._tensor, name)
            else:
                setattr(self._tensor, name, wrapper.__wrapped__)
        self._ours = {}

    def _wrapped(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def copying(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return method(tensor, *args, **kwargs)
            began = time.perf_counter_ns()
            result = method(tensor, *args, **kwargs)
            try:
                self._look(name, tensor, result, args, kwargs, began)
            except Exception as error:  # noqa: BLE001 - whatever goes wrong here must not reach the host program
                self._active, self._failed = False, f"{type(error).__name__}: {error}"
            return result

        copying.__wrapped__ = method
        return copying

    def _look(self, name: str, tensor: Any, result: Any, args: Any, kwargs: Any, began: int) -> None:
        source = args[0] if name == "copy_" and args else kwargs.get("src") if name == "copy_" else tensor
        if source is None or result.device.type == source.device.type:
            return
        direction = silent_wait(result, source, _non_blocking(name, args, kwargs))
        if direction is None:
            return
        self._watcher(
            Call(
                api=f"Tensor.{name}",
                role=Role.COPY,
                ts_ns=began,
                dur_ns=time.perf_counter_ns() - began,
                thread=threading.get_native_id(),
                direction=direction,
                nbytes=source.nbytes,
                pageable=True,
                blocking=True,
                stack=capture(3),
            )
        )

    @property
    def failed(self) -> str | None:
        """Why it switched itself off; None if it did not."""
        return self._failed


def _non_blocking(name: str, args: Any, kwargs: Any) -> bool:
    if "non_blocking" in kwargs:
        return bool(kwargs["non_blocking"])
    flags = [a for a in args if isinstance(a, bool)]  # to(device, dtype, non_blocking, copy), copy_(src, non_blocking)
    return bool(flags[0]) if flags and name != "cpu" else False


class TransfersCollector:
    """Notes where a copy waits silently. Tells no figure: it sees only copies made through a tensor's own methods."""

    name = "transfers"
    sees: frozenset[str] = frozenset()
    blind = "everything but copies by Tensor.copy_, .to, .cpu and .cuda that wait although non_blocking was asked for"

    def __init__(self) -> None:
        self._step_thread = StepThread()
        self._wrappers = TensorWrappers(self._saw)
        self._found: Counter[tuple[str, str, int]] = Counter()

    @staticmethod
    def available() -> str | None:
        return None if "torch" in sys.modules else "torch is not loaded in this process"

    def start(self) -> None:
        self._wrappers.install()

    def stop(self) -> None:
        self._wrappers.remove()

    def _saw(self, call: Call) -> None:
        frame = blamed(self._step_thread.logical(call.stack))
        if frame is not None:
            self._found[str(call.direction), frame.file, frame.line] += 1

    def mark(self, now_ns: int) -> Counters | None:
        self._step_thread.is_this()
        return None

    def drain(self) -> list[Call]:
        return []

    def notes(self) -> list[Note]:
        said = {
            "d2h": "this copy waits although non_blocking was asked for: its target is not pinned and contiguous",
            "h2d": "this copy waits although non_blocking was asked for: 4 MiB or more from memory that is not pinned",
        }
        notes = [
            Note(kind="blind", text=said[direction], file=file, line=line, count=count)
            for (direction, file, line), count in self._found.items()
        ]
        if self._wrappers.failed:
            notes.append(Note(kind="disabled", text=f"transfers switched itself off: {self._wrappers.failed}"))
        return notes
