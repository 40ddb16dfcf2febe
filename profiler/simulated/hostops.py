"""CPU operators that matter to the device: pinning, and reads of memory that a copy may still be writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .dispatch import Operator
from .tensor import STATE, SimTensor, Tensor


def _is_pinned(func: Any, args: Any, kwargs: Any) -> bool:
    return bool(STATE.pinned.is_pinned(args[0]))


def _pin_memory(func: Any, args: Any, kwargs: Any) -> Tensor:
    STATE.runtime.other("cudaPointerGetAttributes")
    return STATE.pinned.pin(args[0].clone(memory_format=torch.contiguous_format))


_SPOKEN = {"_local_scalar_dense": "item", "_to_copy": "to"}
CPU_SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    torch.ops.aten.is_pinned.default: _is_pinned,
    torch.ops.aten._pin_memory.default: _pin_memory,
}


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if type(value) is not SimTensor:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def check_reads(op: Operator, args: Any, kwargs: Any) -> None:
    """A hazard for every CPU operand that an unfinished asynchronous copy writes; views only name memory."""
    if op.view or op.launches == 0:
        return
    for tensor in _tensors((*args, *kwargs.values())):
        STATE.runtime.host_reads(tensor.untyped_storage()._cdata, _SPOKEN.get(op.name, op.name))


def check_access(tensor: Tensor, how: str) -> None:
    """The same for reads that are no operator: `.numpy()`, `.tolist()`."""
    if STATE.runtime.pending and type(tensor) is not SimTensor:
        STATE.runtime.host_reads(tensor.untyped_storage()._cdata, how)
