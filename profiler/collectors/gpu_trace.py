"""PyTorch's own GPUTrace callbacks: the right Python stack for every wait that PyTorch itself makes.

Cannot be switched off again in a process, and costs 1.1 to 1.4 times an eager step from then on: on request only.
Waits of other libraries (CuPy, NCCL, Triton's own) do not pass here; copies that wait without a sync call are added by
the wrappers of `transfers`.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from ...errors import Unreachable
from ..calls import Call, Direction, Frame, Role, Wait
from ..report import Note
from ..sites import capture
from ..waiting import StepThread
from .base import Counters
from .transfers import TensorWrappers

_listening: list[GpuTraceCollector] = []  # GPUTrace keeps its callbacks for ever; they look here
_registered = False
_MODULES = {"device": Wait.DEVICE, "stream": Wait.STREAM, "event": Wait.EVENT}


class GpuTraceCollector:
    """Records every stream, event and device synchronization of PyTorch's, with its stack."""

    name = "gpu_trace"
    sees = frozenset({"syncs"})
    blind = (
        "waits outside PyTorch, whether a copy went to or from the device, launches; "
        "it stays active in this process after the recording, at 1.1 to 1.4 times an eager step"
    )

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._step_thread = StepThread()
        self._wrappers = TensorWrappers(self._silent)
        self._broken: str | None = None

    @staticmethod
    def available() -> str | None:
        """Why it cannot be used here; None if it can."""
        torch = sys.modules.get("torch")
        if torch is None:
            return "torch is not loaded in this process"
        if not hasattr(torch._C, "_activate_gpu_trace"):
            return f"torch {torch.__version__} has no GPUTrace"
        return None if torch.cuda.is_available() else "this process has no device"

    def start(self) -> None:
        """Raises `Unreachable` with the reason where GPUTrace cannot work."""
        reason = self.available()
        if reason is not None:
            raise Unreachable(f"gpu_trace: {reason}")
        _register()
        self._calls = []
        _listening.append(self)
        self._wrappers.install()

    def stop(self) -> None:
        if self in _listening:
            _listening.remove(self)
            self._wrappers.remove()

    def mark(self, now_ns: int) -> Counters | None:
        self._step_thread.is_this()
        return None

    def drain(self) -> list[Call]:
        calls, self._calls = self._calls, []
        return calls

    def notes(self) -> list[Note]:
        reasons = [r for r in (self._broken, self._wrappers.failed) if r]
        return [Note(kind="disabled", text=f"gpu_trace: a callback failed and was switched off: {r}") for r in reasons]

    # ------------------------------------------------------------- callbacks

    def _waits(self, what: str) -> None:
        stack = capture(3)
        explicit = what != "stream" or _asked_for(stack)
        self._calls.append(
            Call(
                api=f"{what} synchronization",
                role=Role.SYNC if explicit else Role.COPY,
                ts_ns=time.perf_counter_ns(),
                thread=threading.get_native_id(),
                wait=_MODULES[what] if explicit else None,
                direction=None,
                blocking=not explicit,
                stack=self._step_thread.logical(stack),
            )
        )

    def _silent(self, call: Call) -> None:
        if call.direction is Direction.D2H:
            call.stack = self._step_thread.logical(call.stack)
            self._calls.append(call)


def _asked_for(stack: tuple[Frame, ...]) -> bool:
    """Whether a stream was synchronized by name; else an operator waits for the copy it made."""
    return bool(stack) and stack[0].function.rpartition(".")[2] in ("synchronize", "wait_stream")


def _register() -> None:
    """Activate GPUTrace, once a process."""
    global _registered
    if _registered:
        return
    import torch
    from torch.cuda import _gpu_trace

    torch._C._activate_gpu_trace()
    for what in _MODULES:
        getattr(_gpu_trace, f"register_callback_for_{what}_synchronization")(_callback(what))
    _registered = True


def _callback(what: str) -> Any:
    def called(*_: Any) -> None:
        for collector in list(_listening):
            try:
                collector._waits(what)
            except Exception as error:  # noqa: BLE001 - whatever goes wrong here must not reach the host program
                collector._broken = f"{type(error).__name__}: {error}"
                collector.stop()

    return called
