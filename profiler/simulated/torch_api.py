"""Functions of torch itself that need a stand-in: loading to the device, compiling, autocast."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack
from torch.utils._pytree import tree_map_only

from .calls_in_python import map_device
from .recorder import RECORDER
from .tensor import DEVICE, STATE, SimTensor, rebuilt

_load = torch.load
_enter_autocast = torch.amp.autocast_mode.autocast.__enter__
_EAGER = "torch.compile: run operator by operator on the simulated device; launches are those of eager code"


def _to_device(place: Any) -> bool:
    return isinstance(place, (str, torch.device)) and map_device(place) == STATE.cpp_device


def _stays_on_cpu(map_location: Any) -> bool:
    """Whether torch.load with this `map_location` leaves what was saved from the device on the CPU."""
    if isinstance(map_location, dict):
        map_location = map_location.get(str(DEVICE))
    return map_location is not None and not _to_device(map_location)


def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """torch.load; with the device as `map_location`, tensors are loaded to the CPU and uploaded."""
    everything = _to_device(map_location)
    RECORDER.thread.loads_to_cpu = everything or _stays_on_cpu(map_location)
    try:
        with torch.serialization.safe_globals([rebuilt]):
            loaded = _load(f, "cpu" if everything else map_location, *args, **kwargs)
    finally:
        RECORDER.thread.loads_to_cpu = False
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), loaded) if everything else loaded


def compile_(model: Any = None, **options: Any) -> Any:
    """torch.compile: the function itself. What a compiler would fuse is not known here."""
    if model is None:
        return compile_
    RECORDER.note("blind", _EAGER, RECORDER.stack())
    return model


def enter_autocast(self: Any) -> Any:
    """autocast: refused where it would change dtypes, since nothing would be cast."""
    if self._enabled and self.device in ("cuda", "syncsim"):
        raise NotImplementedError("simulated device: torch.autocast('cuda') is not supported; cast explicitly")
    return _enter_autocast(self)


def _refuse_dlpack(export: Callable[..., Any]) -> Callable[..., Any]:
    def to_dlpack(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) is SimTensor:
            tensor.__dlpack__()
        return export(tensor, *args, **kwargs)

    return to_dlpack


def _refuse_nested(make: Callable[..., Any]) -> Callable[..., Any]:
    def nested(*args: Any, **kwargs: Any) -> Any:
        if _to_device(kwargs.get("device")) or any(type(t) is SimTensor for t in args[:1] and args[0]):
            raise NotImplementedError("simulated device: nested tensors are not supported")
        return make(*args, **kwargs)

    return nested


def install(patches: Any) -> Callable[[], None]:
    """Put the stand-ins in place; returns what undoes the rest."""
    patches.set(torch, "load", load)
    patches.set(torch, "compile", compile_)
    for owner in (torch, torch.utils.dlpack):
        patches.set(owner, "to_dlpack", _refuse_dlpack(owner.to_dlpack))
    for name in ("nested_tensor", "as_nested_tensor"):
        patches.set(torch.nested, name, _refuse_nested(getattr(torch.nested, name)))
    patches.set(torch.amp.autocast_mode.autocast, "__enter__", enter_autocast)
    if "torch._dynamo" not in sys.modules:
        return lambda: None
    stance = torch.compiler.set_stance("force_eager")  # for what was compiled before the context
    return lambda: stance.__exit__(None, None, None)
