"""Errors inside a backward pass, brought out alive.

While an error of an operator or of a hook passes through the C++ autograd engine, the engine puts its stream back, and
for that asks the device's guard, a Python object, for its type: a call made with Python's error indicator set fails, in
C++ code that must not throw, and the process ends. So the guard takes the error out of the indicator, and the function
that runs the engine raises it once the engine is done.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

_running = [0]  # backward passes under way; a list, because reading one needs no lookup that could fail
_errors: dict[int, BaseException] = {}  # by thread
_parts = (ctypes.py_object(), ctypes.py_object(), ctypes.py_object())  # type, value, traceback
_places = tuple(ctypes.byref(part) for part in _parts)
_fetch = ctypes.pythonapi.PyErr_Fetch
_run = torch.autograd.graph._engine_run_backward


def device_type(
    kind: Any = torch._C._autograd.DeviceType.PrivateUse1,
    running: list[int] = _running,
    fetch: Any = _fetch,
    places: Any = _places,
) -> Any:
    """The type of the device, whatever error is under way.

    It is called with the error indicator set: only local names, and no call that returns with the indicator still set.
    """
    if running[0]:
        fetch(*places)
        _keep()
    return kind


def _keep() -> None:
    """Put aside what was fetched, and give up its references."""
    kind, value, traceback = _parts
    if not kind:
        return
    api = ctypes.pythonapi
    api.PyErr_NormalizeException(*_places)
    raised = value.value
    if traceback:
        raised = raised.with_traceback(traceback.value)
    _errors[threading.get_ident()] = raised
    for part in _parts:
        if part:
            api.Py_DecRef(part)


def run_backward(*args: Any, **kwargs: Any) -> Any:
    """torch's own runner of the engine; an error that the guard took aside is raised here."""
    _running[0] += 1
    try:
        return _run(*args, **kwargs)
    except SystemError as lost:
        raised = _errors.get(threading.get_ident())
        raise (lost if raised is None else raised) from None
    finally:
        _running[0] -= 1
        _errors.pop(threading.get_ident(), None)


def guard() -> Any:
    """What torch asks about the device of a tensor."""
    return type("Guard", (torch._C._acc.DeviceGuard,), {"type_": staticmethod(device_type)})()


def install(patches: Any) -> None:
    for module in (torch.autograd, torch.autograd.graph):
        patches.set(module, "_engine_run_backward", run_backward)
