"""Copies between the host and the simulated device: which calls PyTorch's CUDA backend makes for them.

The rules, measured: a blocking copy is cudaMemcpyAsync and a wait for the stream; `non_blocking` leaves the wait out,
yet a download into pageable memory blocks all the same. What cannot be copied as one piece (another dtype, other
strides) goes through a temporary: for `non_blocking` the conversion is the device's, else the host's, and a temporary
on the host is pageable. `.to("cpu", non_blocking=True)` makes a pinned destination.
"""

from __future__ import annotations

from typing import Any

import torch

from ..calls import Direction
from .tensor import BACKEND, CPU, STATE, SimTensor, Tensor, on_device, refresh, wrap

_H2D, _D2H, _D2D = Direction.H2D, Direction.D2H, Direction.D2D


def _same_layout(left: Tensor, right: Tensor) -> bool:
    """Whether one memcpy can do it: same shape, and both dense with the same order of dimensions."""
    if left.shape != right.shape:
        return False
    if left.is_contiguous() and right.is_contiguous():
        return True
    strides = [(a, b) for a, b, n in zip(left.stride(), right.stride(), left.shape, strict=True) if n != 1]
    return all(a == b for a, b in strides) and _is_dense(left)


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _gathers(source: Tensor, shape: Any) -> bool:
    """Whether `source.expand(shape).contiguous()` has to move anything."""
    return source.shape != shape or not source.is_contiguous()


def device_to_device(into: Tensor, source: Tensor) -> None:
    """Record the copy of one hidden tensor to another; a memcpy where one can do it, else a kernel."""
    if not into.numel():
        return
    if into.dtype == source.dtype and _same_layout(into, source):
        if into.data_ptr() != source.data_ptr():
            STATE.runtime.copy(_D2D, into.numel() * into.element_size(), wait=False)
    else:
        STATE.runtime.launch()


def upload(into: Tensor, source: Tensor, non_blocking: bool) -> None:
    """Record the copy of a CPU tensor into a device tensor (both given as CPU tensors)."""
    if not into.numel():
        return
    runtime, numel = STATE.runtime, into.numel()
    pageable = not STATE.pinned.is_pinned(source)
    if into.dtype == source.dtype and _same_layout(into, source):
        runtime.copy(_H2D, numel * into.element_size(), pageable=pageable, wait=not non_blocking)
        return
    same_dtype = into.dtype == source.dtype
    gathered = _gathers(source, into.shape)
    if non_blocking:
        temporary = not (into.is_contiguous() and same_dtype)
        runtime.copy(_H2D, numel * source.element_size(), pageable=pageable or gathered, wait=False)
    else:
        temporary = not into.is_contiguous()
        staged = pageable or gathered or not same_dtype
        runtime.copy(_H2D, numel * into.element_size(), pageable=staged, wait=True)
    if temporary:
        runtime.launch()


def download(into: Tensor, source: Tensor, non_blocking: bool, value: Any = None) -> None:
    """Record the copy of a device tensor into a CPU tensor (both given as CPU tensors)."""
    if not into.numel():
        return
    runtime, numel = STATE.runtime, into.numel()
    pinned = STATE.pinned.is_pinned(into)
    same_dtype = into.dtype == source.dtype
    nbytes = numel * (into if non_blocking else source).element_size()
    if same_dtype and _same_layout(into, source):
        staged = False
    elif non_blocking:
        converts = not same_dtype
        gathers = source.shape != into.shape or not (source.is_contiguous() or (converts and not _is_dense(source)))
        runtime.launch(int(converts) + int(gathers))
        staged = not into.is_contiguous()
    else:
        runtime.launch(int(_gathers(source, into.shape)))
        staged = not (into.is_contiguous() and same_dtype)
    key = into.untyped_storage()._cdata if pinned and not staged and non_blocking else None
    runtime.copy(_D2H, nbytes, pageable=staged or not pinned, wait=not non_blocking, into=key, value=value)


def copy_(func: Any, args: Any, kwargs: Any) -> Any:
    """aten::copy_ in any direction."""
    into, source = args[0], args[1]
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if into is source:
        return into
    host_into = into._host if type(into) is SimTensor else into
    host_source = source._host if type(source) is SimTensor else source
    if type(into) is not SimTensor:
        host_into.copy_(host_source)
        download(host_into, host_source, non_blocking, value_of(host_source))
    elif type(source) is not SimTensor:
        upload(host_into, host_source, non_blocking)
        _capturable(host_into, host_source)
    else:
        device_to_device(host_into, host_source)
        _capturable(host_into, host_source)
    return into


def _capturable(into: Tensor, source: Tensor) -> None:
    capture = STATE.runtime.current.capture
    if capture is not None:
        capture.before_write(into)
        capture.record(torch.Tensor.copy_, (into, source), {}, None)
    into.copy_(source)
    STATE.allocator.wrote(into)


def to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """aten::_to_copy: a new tensor of another dtype, device or memory format."""
    source = args[0]
    host = source._host if type(source) is SimTensor else source
    device = kwargs.get("device")
    non_blocking = bool(kwargs.get("non_blocking", False))
    options = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking")}
    if device is not None and device.type not in ("cpu", "cuda", BACKEND):
        return func(host, **options, device=device)
    result = func(host, **options, device=CPU)
    to_device = on_device(device) if device is not None else type(source) is SimTensor
    if not to_device:
        if non_blocking or kwargs.get("pin_memory"):
            STATE.pinned.pin(result)
        download(result, host, non_blocking, value_of(host))
        return result
    STATE.allocator.track(result)
    if type(source) is SimTensor:
        device_to_device(result, host)
    else:
        upload(result, host, non_blocking)
    capture = STATE.runtime.current.capture
    if capture is not None:
        capture.record(func, (host,), {**options, "device": CPU}, result)
    return wrap(result)


def local_scalar(func: Any, args: Any, kwargs: Any) -> Any:
    """aten::_local_scalar_dense: `.item()` and all that ends in it. Torch reads through its own pinned word."""
    host = args[0]._host
    STATE.runtime.copy(_D2H, host.element_size(), pageable=False, wait=True, value=value_of(host))
    return func(host)


def read_scalar(host: Tensor) -> None:
    """Record the `.item()` that an operator does inside."""
    STATE.runtime.copy(_D2H, host.element_size(), pageable=False, wait=True)


def read_size(nbytes: int = 8) -> None:
    """Record that an operator brings a size (or a flag) back to the host."""
    STATE.runtime.copy(_D2H, nbytes, pageable=False, wait=True)


def read_back(tensor: Tensor) -> Tensor:
    """A CPU copy of a device tensor, as `.cpu()` makes it."""
    host = tensor._host.detach()
    result = host.clone()
    download(result, host, False, value_of(host))
    return result


def value_of(host: Tensor) -> tuple[int, int, int]:
    """What tells one value of a tensor from another: its storage, place and number of writes."""
    return (host.untyped_storage()._cdata, host.storage_offset(), STATE.allocator.writes(host))


def set_(func: Any, args: Any, kwargs: Any) -> Any:
    """aten::set_ between tensors of one device."""
    hosts = [a._host if type(a) is SimTensor else a for a in args]
    func(*hosts, **kwargs)
    refresh(args[0])
    return args[0]
