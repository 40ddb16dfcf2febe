"""Python-level calls that need a hand before they become operators: device names, host data, reads without operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .host_reads import one_hot
from .hostops import check_access
from .operators import fused
from .tensor import BACKEND, STATE, SimTensor, legacy_dtype, on_device

_Handler = Callable[[Any, Any, Any], Any]


def map_device(device: Any) -> Any:
    """The device that C++ is told for what Python said: "cuda", 0, torch.device("cuda:0") are the simulated one."""
    if device is None:
        return None
    if isinstance(device, int) and not isinstance(device, bool):
        device = torch.device("cuda", device)
    elif isinstance(device, str):
        if not device.startswith(("cuda", BACKEND)):
            return device
        device = torch.device(device)
    if not isinstance(device, torch.device) or device.type not in ("cuda", BACKEND):
        return device
    if device.index not in (None, 0):
        raise RuntimeError(f"CUDA error: invalid device ordinal (simulated device: there is one, cuda:0; got {device})")
    return STATE.cpp_device


def _map_all(args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    mapped = [map_device(a) if isinstance(a, (str, torch.device)) else a for a in args]
    if "device" in kwargs:
        kwargs = {**kwargs, "device": map_device(kwargs["device"])}
    return mapped, kwargs


def _with_devices(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = _map_all(args, kwargs)
    return func(*args, **kwargs)


def _to(func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) > 1 and type(args[1]) is int:
        args = (args[0], map_device(args[1]), *args[2:])
    return _with_devices(func, args, kwargs)


def _cuda(func: Any, args: Any, kwargs: Any) -> Any:
    options = dict(zip(("device", "non_blocking", "memory_format"), args[1:], strict=False)) | kwargs
    device = map_device(options.pop("device", None)) or STATE.cpp_device
    options = {k: v for k, v in options.items() if v is not None}
    return args[0].to(device, **options)


def _holds_device_tensor(data: Any) -> bool:
    if type(data) is SimTensor:
        return True
    return isinstance(data, (list, tuple)) and any(_holds_device_tensor(item) for item in data)


def _on_host(data: Any) -> Any:
    """Nested host data in place of device scalars; each is read with a wait of its own."""
    if type(data) is SimTensor:
        return data.item() if data.dim() == 0 else data.tolist()
    if isinstance(data, (list, tuple)):
        return [_on_host(item) for item in data]
    return data


def _device_by_default() -> bool:
    """Whether `torch.set_default_device` or `with torch.device(...)` makes the simulated device the default."""
    contexts = [m for m in _get_current_function_mode_stack() if isinstance(m, DeviceContext)]
    return bool(contexts) and on_device(contexts[0].device)


def _from_data(func: Any, args: Any, kwargs: Any) -> Any:
    """torch.tensor, as_tensor, asarray, new_tensor: host data becomes a CPU tensor, then a blocking upload."""
    place = 1 if func is torch.Tensor.new_tensor else 0
    if place == 0 and kwargs.get("device") is None and _device_by_default():
        kwargs = {**kwargs, "device": STATE.cpp_device}
    args, kwargs = _map_all(args, dict(kwargs))
    if len(args) > place and isinstance(args[place], (list, tuple)) and _holds_device_tensor(args[place]):
        args[place] = _on_host(args[place])
    if not kwargs.pop("pin_memory", False):
        return func(*args, **kwargs)
    return STATE.pinned.pin(func(*args, **kwargs))


def _setitem(func: Any, args: Any, kwargs: Any) -> Any:
    """A Python number assigned into a device tensor is a CPU scalar first, as for CUDA."""
    into, index, value = args
    if type(into) is SimTensor and isinstance(value, (int, float, bool, complex)):
        value = torch.tensor(value, dtype=into.dtype)
    return func(into, index, value)


def _set_data(func: Any, args: Any, kwargs: Any) -> Any:
    """`x.data = y`: the hidden tensor goes along."""
    into, value = args
    if (type(into) is SimTensor) != (type(value) is SimTensor):
        raise NotImplementedError(
            "simulated device: assigning `.data` cannot move a tensor between CPU and device; make a new Parameter"
        )
    func(into, value)
    if type(into) is SimTensor:
        into._host = value._host


def _host_access(func: Any, args: Any, kwargs: Any) -> Any:
    check_access(args[0], func.__name__)
    return func(*args, **kwargs)


def _type(func: Any, args: Any, kwargs: Any) -> Any:
    wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
    name = wanted if isinstance(wanted, str) else getattr(wanted, "__module__", "")
    if isinstance(name, str) and name.startswith("torch.cuda"):
        return args[0].to(STATE.cpp_device, legacy_dtype(wanted))
    return func(*args, **kwargs)


def _one_kernel(rule: _Handler) -> _Handler:
    """Functions that C++ takes apart for a device it does not know, but not for CUDA."""

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        if not tensors or any(type(t) is not SimTensor for t in tensors):
            return func(*args, **kwargs)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return func(*args, **kwargs)
        return rule(func, args, kwargs)

    return handle


_T = torch.Tensor
HANDLERS: dict[Any, _Handler] = {
    _T.to: _to,
    _T.cuda: _cuda,
    _T.type: _type,
    _T.__setitem__: _setitem,
    _T.numpy: _host_access,
    _T.tolist: _host_access,
    _T.__array__: _host_access,
    _T.__repr__: _host_access,
    _T.__format__: _host_access,
    _T.__deepcopy__: _host_access,
    _T.__reduce_ex__: _host_access,
    _T.data.__set__: _set_data,
    _T.new_tensor: _from_data,
    torch.tensor: _from_data,
    torch.as_tensor: _from_data,
    torch.asarray: _from_data,
    torch._C._nn._parse_to: _with_devices,
    torch.nn.functional.scaled_dot_product_attention: _one_kernel(fused),
    torch.rms_norm: _one_kernel(fused),
    torch.nn.functional.rms_norm: _one_kernel(fused),
    torch._C._nn.one_hot: _one_kernel(one_hot),
}
