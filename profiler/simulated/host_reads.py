"""Operators that look at device data on the host by themselves: sizes, bounds, verdicts, error codes."""

from __future__ import annotations

from typing import Any

import torch

from ..calls import Direction
from . import costs
from .copies import read_size
from .dispatch import as_one, generic, operator
from .tensor import STATE, SimTensor


def _launch(count: int) -> None:
    STATE.runtime.launch(count)


def _read_pageable(nbytes: int) -> None:
    STATE.runtime.copy(Direction.D2H, nbytes, pageable=True, wait=True)


def scan_launches(tensor: Any) -> int:
    """Kernels of a cumulative sum: two over one long row, one over many rows."""
    return 2 if sum(size > 1 for size in tensor.shape) <= 1 else 1


def repeat_interleave(func: Any, args: Any, kwargs: Any) -> Any:
    """The overload that takes repeats: without `output_size` it checks them and reads their sum."""
    output_size = kwargs.get("output_size", args[1] if len(args) > 1 else None)
    if args[0].numel():
        _launch(scan_launches(args[0]) + (args[0].dtype is not torch.int64))
        if output_size is None:
            _launch(2)
            read_size(1)
            read_size()
    return generic(operator(func), func, args, kwargs)


def bincount(func: Any, args: Any, kwargs: Any) -> Any:
    """Reads the minimum (must not be negative) and the maximum (the number of bins)."""
    host = args[0]._host
    if not host.numel():
        return generic(operator(func), func, args, kwargs, 1)
    _launch(1)
    read_size(host.element_size())
    _launch(1)
    _read_pageable(host.element_size())
    return generic(operator(func), func, args, kwargs)


def unique(func: Any, args: Any, kwargs: Any) -> Any:
    """unique and unique_consecutive of a flat tensor: the number of distinct values comes back to the host."""
    op, host = operator(func), args[0]._host
    inverse = _flag(func, args, kwargs, "return_inverse")
    if _flag(func, args, kwargs, "dim", None) is not None:
        return unique_rows(func, args, kwargs)
    if host.numel():
        if op.name == "unique_consecutive":
            _launch(5 if inverse else 2)
        else:
            _launch(8 if inverse else 2 if host.dtype is torch.bool else 3)
        STATE.runtime.copy(Direction.D2H, 8, pageable=host.dtype is torch.bool, wait=True)
    return generic(op, func, args, kwargs, 0)


def unique_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """unique along a dimension: sorting and selecting rows each wait for the stream, the inverse three times more."""
    op = operator(func)
    inverse = _flag(func, args, kwargs, "return_inverse")
    if args[0].numel():
        waits = (2 if op.name == "unique_dim" else 1) + (3 if inverse else 0)
        for _ in range(waits):
            _launch(2)
            STATE.runtime.stream_wait()
        _launch(1)
        _read_pageable(8)
    return generic(op, func, args, kwargs, 0)


def _flag(func: Any, args: Any, kwargs: Any, name: str, default: Any = False) -> Any:
    """The argument `name`, given by position or by name."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == name:
            return value
    return kwargs.get(name, default)


def isin(func: Any, args: Any, kwargs: Any) -> Any:
    """Few test elements are compared one by one; many are sorted, and the duplicates' places read."""
    op = operator(func)
    elements, tests = args[:2]
    if not (isinstance(elements, torch.Tensor) and isinstance(tests, torch.Tensor) and elements.numel()):
        return generic(op, func, args, kwargs)
    if tests.numel() < 10 * elements.numel() ** 0.145:
        STATE.runtime.copy(Direction.D2D, elements.numel() * elements.element_size(), wait=False)
        return generic(op, func, args, kwargs, 3)
    unique_already = args[2] if len(args) > 2 else kwargs.get("assume_unique", False)
    for _ in range(0 if unique_already else 2):
        _launch(6)
        read_size()
    STATE.runtime.copy(Direction.H2D, 1, pageable=True, wait=True)
    return generic(op, func, args, kwargs, 5)


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


def histc(func: Any, args: Any, kwargs: Any) -> Any:
    """Without bounds the data's minimum and maximum are read."""
    op, host = operator(func), args[0]._host
    low = kwargs.get("min", args[2] if len(args) > 2 else 0)
    high = kwargs.get("max", args[3] if len(args) > 3 else 0)
    if host.numel() and low == high:
        for _ in range(2):
            _launch(1)
            _read_pageable(host.element_size())
    if host.is_floating_point():
        return generic(op, func, args, kwargs)
    # The CPU counts floats only.
    return as_one(lambda source, *rest, **named: func(source.double(), *rest, **named).to(host.dtype), args, kwargs, 2)


def mode(func: Any, args: Any, kwargs: Any) -> Any:
    """Short rows are one kernel; long ones are sorted and reduced by a library that waits again and again."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    if args[0].dim() == 0 or args[0].shape[dim] <= costs.MODE_LONG_ROW:
        return generic(operator(func), func, args, kwargs)
    return with_waits(func, args, kwargs)


def eigh(func: Any, args: Any, kwargs: Any) -> Any:
    """A batch is solved by another routine, with one look at the error codes less."""
    if args[0].dim() > 2:
        return _with(func, args, kwargs, costs.Waits(from_pinned=1))
    return with_waits(func, args, kwargs)


def with_waits(func: Any, args: Any, kwargs: Any) -> Any:
    """Operators of which only the number of calls is known: `costs.WAITS`."""
    return _with(func, args, kwargs, costs.WAITS[operator(func).name])


def _with(func: Any, args: Any, kwargs: Any, waits: costs.Waits) -> Any:
    op, runtime = operator(func), STATE.runtime
    result = generic(op, func, args, kwargs, 0)
    runtime.memset(costs.MEMSETS.get(op.name, 0))
    nbytes = args[0].numel() * args[0].element_size()
    for _ in range(costs.DEVICE_COPIES.get(op.name, 0)):
        runtime.copy(Direction.D2D, nbytes, wait=False)
    _launch(op.launches)
    for _ in range(waits.uploads):
        runtime.copy(Direction.H2D, 8, pageable=True, wait=True)
    for _ in range(waits.stream):
        _launch(1)
        runtime.stream_wait()
    for index in range(waits.from_pinned + waits.from_pageable):
        runtime.copy(Direction.D2H, 8, pageable=index >= waits.from_pinned, wait=True)
    return result


def normal(func: Any, args: Any, kwargs: Any) -> Any:
    """A tensor of standard deviations is checked on the host: none may be negative."""
    std = args[1] if len(args) > 1 else kwargs.get("std")
    if type(std) is not SimTensor or not std.numel():
        return generic(operator(func), func, args, kwargs, 2)
    for _ in range(2):
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
    STATE.runtime.copy(Direction.D2D, 4, wait=False)
    read_size(1)
    return func(args[0]._host, *args[1:], **kwargs)


def segment_reduce(func: Any, args: Any, kwargs: Any) -> Any:
    """Lengths are checked on the host, their minimum and their sum, unless the caller vouches for them (`unsafe`)."""
    lengths = _flag(func, args, kwargs, "lengths", None)
    if lengths is not None and not _flag(func, args, kwargs, "unsafe"):
        _launch(1)
        read_size(lengths.element_size())
        _launch(3)
        read_size(1)
    return generic(operator(func), func, args, kwargs)


def one_hot(func: Any, args: Any, kwargs: Any) -> Any:
    """Without a number of classes the maximum is read."""
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if classes == -1 and args[0].numel():
        _launch(1)
        read_size()
    return as_one(func, args, kwargs, 2)
