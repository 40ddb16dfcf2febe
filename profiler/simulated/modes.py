"""The two modes of a thread that has the device: one sees operators, the other calls as Python makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .calls_in_python import HANDLERS, map_device
from .dispatch import decompose, operator, python_body, run, run_python_body
from .hostops import CPU_SPECIAL, check_reads
from .recorder import RECORDER
from .tensor import STATE, SimTensor, on_device


class DeviceMode(TorchDispatchMode):  # type: ignore[misc]
    """Takes every operator of a thread: the device's own, and CPU operators for pinned memory and hazards."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the method below, and the first operator imports Dynamo: seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operator(func).custom:
            body = python_body(func)
            if body is not None:
                on_cpu = body == "CPU" or not (SimTensor in types or on_device(kwargs.get("device")))
                with self, NameMode():
                    return run_python_body(func, "CPU" if on_cpu else "CUDA", args, kwargs)
        if operator(func).composite:
            with self:
                return decompose(func, args, kwargs)
        if SimTensor in types:
            return run(func, args, kwargs)
        if kwargs:
            device = kwargs.get("device")
            if on_device(device):
                return run(func, args, kwargs)
        return self._on_cpu(func, args, kwargs)

    def _on_cpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        special = CPU_SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs)
        if STATE.runtime.pending:
            check_reads(operator(func), args, kwargs)
        if kwargs.get("pin_memory"):
            return STATE.pinned.pin(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)


class NameMode(TorchFunctionMode):  # type: ignore[misc]
    """Sees calls as Python makes them: "cuda" becomes the device, and what bypasses operators is handled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        if not kwargs:
            return func(*args)
        device = kwargs.get("device")
        if device is not None:
            kwargs = {**kwargs, "device": map_device(device)}
        return func(*args, **kwargs)


@contextlib.contextmanager
def modes() -> Iterator[None]:
    """Both modes on the calling thread, and the settings of a thread that they need."""
    RECORDER.thread.has_device = True
    lifted = torch._C._only_lift_cpu_tensors()
    # torch.tensor(list, device=...) then makes a CPU tensor first, and its upload is an operator of its own.
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        # Backward would run on a C++ thread of the engine's that outlives Python: the process would abort at its end.
        with torch.autograd.set_multithreading_enabled(False), DeviceMode(), NameMode():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifted)
        RECORDER.thread.has_device = False
