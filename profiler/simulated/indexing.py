"""Indexing: what masks, CPU indices and values known to the host cost before the one kernel can run."""

from __future__ import annotations

from typing import Any

import torch

from ..calls import Direction
from . import costs
from .copies import device_to_device, read_back, read_size
from .dispatch import generic, operator
from .tensor import STATE, SimTensor, Tensor

_MASKS = (torch.bool, torch.uint8)
_TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, {} and {}! ({})"


def upload_operand(value: Tensor) -> None:
    """A CPU operand that the operator itself moves to the device: `.to(device)`, which waits."""
    if value.numel():
        pageable = not (STATE.pinned.is_pinned(value) and value.is_contiguous())
        nbytes = value.numel() * value.element_size()
        STATE.runtime.copy(Direction.H2D, nbytes, pageable=pageable, wait=True)


def _nonzero_calls(mask: Tensor) -> None:
    """The kernels of nonzero, and its count brought back to the host."""
    if mask.numel():
        STATE.runtime.launch(costs.NONZERO + (costs.NONZERO_DIMS if mask.dim() > 1 else 0))
    else:
        STATE.runtime.launch(costs.NONZERO_EMPTY)
    read_size()


def _indices(indices: Any) -> None:
    """Record what masks and CPU indices cost before the index kernel can run."""
    for index in indices:
        if index is None:
            continue
        if type(index) is SimTensor:
            if index.dtype in _MASKS:
                _nonzero_calls(index._host)
        elif index.dtype in _MASKS:
            places = index.nonzero()
            if places.numel():  # the places of a CPU mask go up through pinned memory, without a wait
                STATE.runtime.copy(Direction.H2D, places.numel() * 8, pageable=False, wait=False)
        else:
            upload_operand(index)
        if index.dtype is torch.int32 and index.numel():
            STATE.runtime.launch()  # index kernels take int64


def index(func: Any, args: Any, kwargs: Any) -> Any:
    """aten::index: one kernel, after masks and CPU indices have been made device indices."""
    op = operator(func)
    if type(args[0]) is not SimTensor:
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    _indices(args[1])
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
        return _put_on_host(func, args, kwargs)
    if op.name == "index_put":
        device_to_device(into._host, into._host.clone())
    if _is_masked_fill(into, indices, value, accumulate):
        return generic(op, func, args, kwargs)
    if type(value) is not SimTensor:
        if value.dim():
            raise RuntimeError(_TWO_DEVICES.format("cuda:0", "cpu", op.name))
        upload_operand(value)
    _indices(indices)
    return generic(op, func, args, kwargs, costs.SORTED_INDEX_PUT if accumulate else 1)


def _put_on_host(func: Any, args: Any, kwargs: Any) -> Any:
    """A device scalar put into a CPU tensor comes to the host first."""
    into, indices, value = args[:3]
    if any(type(i) is SimTensor for i in indices) or value.dim():
        raise RuntimeError(_TWO_DEVICES.format("cpu", "cuda:0", func._schema.name))
    return func(into, indices, read_back(value), *args[3:], **kwargs)


def nonzero(func: Any, args: Any, kwargs: Any) -> Any:
    _nonzero_calls(args[0]._host)
    return generic(operator(func), func, args, kwargs, 0)


def masked_select(func: Any, args: Any, kwargs: Any) -> Any:
    """Broadcast, nonzero, index."""
    source, mask = args[:2]
    if type(mask) is SimTensor:
        if mask.shape != source.shape and source.dim():
            STATE.runtime.launch()
            _nonzero_calls(torch.broadcast_tensors(source._host, mask._host)[1])
        else:
            _nonzero_calls(mask._host)
    return generic(operator(func), func, args, kwargs)


def value_operand(func: Any, args: Any, kwargs: Any) -> Any:
    """masked_fill and index_fill with a tensor as value: the value is read on the host, then passed to the kernel."""
    op = operator(func)
    value = args[-1] if "value" not in kwargs else kwargs["value"]
    if op.name in costs.CLONE_FIRST:
        device_to_device(args[0]._host, args[0]._host.clone())
    if type(value) is SimTensor:
        STATE.runtime.copy(Direction.D2H, value._host.element_size(), pageable=False, wait=True)
    return generic(op, func, args, kwargs)


def fill(func: Any, args: Any, kwargs: Any) -> Any:
    """fill_ with a tensor: a device value filled into a CPU tensor is read first."""
    into, value = args
    if type(into) is SimTensor:
        return generic(operator(func), func, args, kwargs)
    read_size(value.element_size())
    return func(into, value._host)


def where(func: Any, args: Any, kwargs: Any) -> Any:
    """CPU scalars among the operands are moved to the device first, each with a wait."""
    for operand in args:
        if isinstance(operand, torch.Tensor) and type(operand) is not SimTensor and operand.dim() == 0:
            upload_operand(operand)
    return generic(operator(func), func, args, kwargs)
