"""Operators with a rule of their own: those that read device data on the host, and those fed from host data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..calls import Direction
from . import costs
from .copies import copy_, device_to_device, local_scalar, read_size, set_, to_copy
from .dispatch import generic, operator
from .tensor import STATE, SimTensor, Tensor, wrap

_MASKS = (torch.bool, torch.uint8)


def _launch(count: int) -> None:
    STATE.runtime.launch(count)


def _upload_operand(value: Tensor) -> None:
    """A CPU operand that the operator itself moves to the device: `.to(device)`, which waits."""
    if value.numel():
        pageable = not (STATE.pinned.is_pinned(value) and value.is_contiguous())
        nbytes = value.numel() * value.element_size()
        STATE.runtime.copy(Direction.H2D, nbytes, pageable=pageable, wait=True)


def _nonzero_calls(mask: Tensor) -> None:
    """The kernels of nonzero, and its count brought back to the host."""
    if mask.numel():
        _launch(costs.NONZERO)
        read_size()


def _indices(func: Any, indices: Any) -> list[Any]:
    """Hidden index tensors; records what masks and CPU indices cost before the index kernel can run."""
    hosts: list[Any] = []
    for index in indices:
        if index is None:
            hosts.append(None)
        elif type(index) is SimTensor:
            if index.dtype in _MASKS:
                _nonzero_calls(index._host)
            hosts.append(index._host)
        else:
            if index.dtype in _MASKS:
                for column in index.nonzero().unbind(1):
                    _upload_operand(column)
            else:
                _upload_operand(index)
            hosts.append(index)
    return hosts


def index(func: Any, args: Any, kwargs: Any) -> Any:
    """aten::index: one kernel, after masks and CPU indices have been made device indices."""
    op = operator(func)
    if type(args[0]) is not SimTensor:
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    _indices(func, args[1])
    return generic(op, func, args, kwargs)


def _is_masked_fill(into: Tensor, indices: Any, value: Tensor, accumulate: bool) -> bool:
    """Whether index_put is a masked_fill: one mask on the device, and one value known to the host."""
    if accumulate or type(value) is SimTensor or value.numel() != 1:
        return False
    given = [i for i in indices if i is not None]
    return len(given) == 1 and type(given[0]) is SimTensor and given[0].dtype in _MASKS


def index_put(func: Any, args: Any, kwargs: Any) -> Any:
    """aten::index_put, index_put_ and _index_put_impl_."""
    op = operator(func)
    into, indices, value = args[:3]
    accumulate = bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    if type(into) is not SimTensor:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cpu and cuda:0!"
        )
    if op.name == "index_put":
        device_to_device(into._host, into._host)
    if _is_masked_fill(into, indices, value, accumulate):
        return generic(op, func, args, kwargs)
    if type(value) is not SimTensor:
        if value.dim():
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"(simulated device: {op.name})"
            )
        _upload_operand(value)
    _indices(func, indices)
    return generic(op, func, args, kwargs, costs.SORTED_INDEX_PUT if accumulate else 1)


def nonzero(func: Any, args: Any, kwargs: Any) -> Any:
    _nonzero_calls(args[0]._host)
    return generic(operator(func), func, args, kwargs, 0)


def masked_select(func: Any, args: Any, kwargs: Any) -> Any:
    """Broadcast, nonzero, index."""
    mask = args[1]
    if type(mask) is SimTensor:
        _nonzero_calls(mask._host)
    return generic(operator(func), func, args, kwargs)


def repeat_interleave(func: Any, args: Any, kwargs: Any) -> Any:
    """The overload that takes repeats: without `output_size` it checks them and reads their sum."""
    output_size = kwargs.get("output_size", args[1] if len(args) > 1 else None)
    if args[0].numel():
        _launch(_scan_launches(args[0]))
        if output_size is None:
            _launch(2)
            read_size(1)
            read_size()
    return generic(operator(func), func, args, kwargs)


def bincount(func: Any, args: Any, kwargs: Any) -> Any:
    """Reads the minimum (must not be negative) and the maximum (the number of bins)."""
    host = args[0]._host
    if host.numel():
        _launch(1)
        read_size(host.element_size())
        _launch(1)
        STATE.runtime.copy(Direction.D2H, host.element_size(), pageable=True, wait=True)
    weighted = (len(args) > 1 and args[1] is not None) or kwargs.get("weights") is not None
    return generic(operator(func), func, args, kwargs, 3 if weighted else 2)


def unique(func: Any, args: Any, kwargs: Any) -> Any:
    """Sort, then the number of distinct values comes back to the host."""
    op = operator(func)
    host = args[0]._host
    extra = sum(1 for a in args[2:] if a is True) + sum(1 for v in kwargs.values() if v is True)
    if host.numel():
        if "dim" in op.name:  # sorts by comparing rows; the sort waits for the stream itself
            _launch(2)
            STATE.runtime.stream_wait()
        _launch((2 if op.name == "unique_consecutive" else 3) + extra)
        read_size()
    return generic(op, func, args, kwargs, 0)


def equal(func: Any, args: Any, kwargs: Any) -> Any:
    """torch.equal: compares on the device and reads the verdict, unless shapes or storage tell it."""
    left, right = args
    if type(left) is not SimTensor or type(right) is not SimTensor:
        raise RuntimeError("Cannot compare two tensors on different devices. Got: cuda:0 and cpu")
    a, b = left._host, right._host
    if a.shape != b.shape:
        return False
    same = a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype
    if a.numel() and not same:
        _launch(2)
        read_size(1)
    return func(a, b)


def value_operand(func: Any, args: Any, kwargs: Any) -> Any:
    """masked_fill and index_fill with a tensor as value: the value is read on the host, then passed to the kernel."""
    op = operator(func)
    value = args[-1] if "value" not in kwargs else kwargs["value"]
    if op.name in costs.CLONE_FIRST:
        device_to_device(args[0]._host, args[0]._host)
    if type(value) is SimTensor:
        STATE.runtime.copy(Direction.D2H, value._host.element_size(), pageable=False, wait=True)
    return generic(op, func, args, kwargs)


def clone_first(func: Any, args: Any, kwargs: Any) -> Any:
    device_to_device(args[0]._host, args[0]._host)
    return generic(operator(func), func, args, kwargs)


def where(func: Any, args: Any, kwargs: Any) -> Any:
    """CPU scalars among the operands are moved to the device first, each with a wait."""
    for operand in args:
        if isinstance(operand, torch.Tensor) and type(operand) is not SimTensor and operand.dim() == 0:
            _upload_operand(operand)
    return generic(operator(func), func, args, kwargs)


def histc(func: Any, args: Any, kwargs: Any) -> Any:
    """Without bounds the data's minimum and maximum are read."""
    host = args[0]._host
    low = kwargs.get("min", args[2] if len(args) > 2 else 0)
    high = kwargs.get("max", args[3] if len(args) > 3 else 0)
    if host.numel() and low == high:
        for _ in range(2):
            _launch(1)
            STATE.runtime.copy(Direction.D2H, host.element_size(), pageable=True, wait=True)
    return generic(operator(func), func, args, kwargs)


def normal(func: Any, args: Any, kwargs: Any) -> Any:
    """A tensor of standard deviations is checked on the host: none may be negative."""
    std = args[1] if len(args) > 1 else kwargs.get("std")
    if type(std) is SimTensor and std.numel():
        _launch(2)
        read_size(1)
    return generic(operator(func), func, args, kwargs, 3)


def tensor_bounds(func: Any, args: Any, kwargs: Any) -> Any:
    """linspace and logspace with tensors as bounds read them."""
    for bound in args[:2]:
        if type(bound) is SimTensor:
            read_size(bound.element_size())
    return generic(operator(func), func, args, kwargs)


def check_errors(func: Any, args: Any, kwargs: Any) -> Any:
    """linalg functions that raise on a singular matrix read the device's error codes."""
    _launch(1)
    read_size(1)
    return func(args[0]._host, *args[1:], **kwargs)


def topk(func: Any, args: Any, kwargs: Any) -> Any:
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    long_rows = args[0].dim() > 0 and args[0].shape[dim] >= costs.TOPK_LONG_ROW
    if long_rows:
        STATE.runtime.memset(2)
    return generic(operator(func), func, args, kwargs, costs.TOPK_MULTI_BLOCK if long_rows else None)


def _scan_launches(tensor: Any) -> int:
    return 2 if sum(size > 1 for size in tensor.shape) <= 1 else 1


def scan(func: Any, args: Any, kwargs: Any) -> Any:
    return generic(operator(func), func, args, kwargs, _scan_launches(args[0]))


def with_extras(func: Any, args: Any, kwargs: Any) -> Any:
    """Operators that also set or copy device memory."""
    op = operator(func)
    STATE.runtime.memset(costs.MEMSETS.get(op.name, 0))
    for _ in range(costs.DEVICE_COPIES.get(op.name, 0)):
        STATE.runtime.copy(Direction.D2D, args[0].numel() * args[0].element_size(), wait=False)
    return generic(op, func, args, kwargs)


def clone(func: Any, args: Any, kwargs: Any) -> Any:
    host = args[0]._host
    result = func(host, **kwargs)
    capture = STATE.runtime.current.capture
    if capture is not None:
        capture.record(func, (host,), kwargs, result)
    STATE.allocator.track(result)
    device_to_device(result, host)
    return wrap(result)


def is_pinned(func: Any, args: Any, kwargs: Any) -> bool:
    return False


def pin_memory(func: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(f"cannot pin '{args[0].type()}' only dense CPU tensors can be pinned")


def record_stream(func: Any, args: Any, kwargs: Any) -> None:
    return None


def not_on_device(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name
    raise NotImplementedError(f"Could not run '{name}' with arguments from the 'CUDA' backend (simulated device)")


Rule = Callable[[Any, Any, Any], Any]
SPECIAL: dict[str, Rule] = {
    "copy_": copy_,
    "_to_copy": to_copy,
    "_local_scalar_dense": local_scalar,
    "set_": set_,
    "clone": clone,
    "index": index,
    "index_put": index_put,
    "index_put_": index_put,
    "_index_put_impl_": index_put,
    "nonzero": nonzero,
    "masked_select": masked_select,
    "repeat_interleave": repeat_interleave,
    "bincount": bincount,
    **dict.fromkeys(("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"), unique),
    "equal": equal,
    **dict.fromkeys(sorted(costs.CLONE_FIRST), clone_first),
    **dict.fromkeys(("masked_fill", "masked_fill_", "index_fill", "index_fill_"), value_operand),
    "where": where,
    "histc": histc,
    "normal": normal,
    **dict.fromkeys(("linspace", "logspace"), tensor_bounds),
    "_linalg_check_errors": check_errors,
    "topk": topk,
    **dict.fromkeys(sorted(costs.SCAN), scan),
    **dict.fromkeys(sorted({*costs.MEMSETS, *costs.DEVICE_COPIES}), with_extras),
    "is_pinned": is_pinned,
    "_pin_memory": pin_memory,
    "record_stream": record_stream,
    **dict.fromkeys(("histogram", "histogramdd", "_histogramdd_bin_edges", "_histogramdd_from_bin_cts"), not_on_device),
}
SPECIAL["index_put"] = index_put

# Operators that take a CPU tensor with dimensions beside device tensors.
ALLOW_CPU = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "copy_", "_to_copy", "_pack_padded_sequence", "_ctc_loss"}
)
