"""The operators with a rule of their own, by name; what is not here is one kernel or a view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..calls import Direction
from . import costs, indexing
from . import host_reads as reads
from .copies import copy_, device_to_device, local_scalar, set_, to_copy
from .dispatch import as_one, generic, operator
from .tensor import STATE, wrap


def clone_first(func: Any, args: Any, kwargs: Any) -> Any:
    """Out of place, but the kernel writes into a clone."""
    device_to_device(args[0]._host, args[0]._host.clone())
    return generic(operator(func), func, args, kwargs)


def topk(func: Any, args: Any, kwargs: Any) -> Any:
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    length, launches = costs.TOPK_LONG
    if args[0].dim() == 0 or args[0].shape[dim] < length:
        return generic(operator(func), func, args, kwargs, costs.TOPK_SHORT)
    STATE.runtime.memset(2)
    return generic(operator(func), func, args, kwargs, launches)


def sort(func: Any, args: Any, kwargs: Any) -> Any:
    one_row = sum(size > 1 for size in args[0].shape) <= 1
    for _ in range(3 if one_row else 2):
        STATE.runtime.copy(Direction.D2D, args[0].numel() * args[0].element_size(), wait=False)
    return generic(operator(func), func, args, kwargs, 2 if one_row else 3)


def multinomial(func: Any, args: Any, kwargs: Any) -> Any:
    samples = args[1]
    replacement = args[2] if len(args) > 2 else kwargs.get("replacement", False)
    if replacement and samples > 1:
        for _ in range(2):
            STATE.runtime.copy(Direction.D2D, args[0].numel() * args[0].element_size(), wait=False)
        return generic(operator(func), func, args, kwargs, 3)
    return generic(operator(func), func, args, kwargs, 14 + (samples > 1) - (args[0].dim() == 1))


def scan(func: Any, args: Any, kwargs: Any) -> Any:
    """Two kernels over one long row, one over many rows; one more where the sum is of another dtype."""
    source, dtype = args[0], kwargs.get("dtype")
    widened = torch.int64 if not (source.is_floating_point() or source.is_complex()) else source.dtype
    cast = (dtype or widened) != source.dtype
    return generic(operator(func), func, args, kwargs, reads.scan_launches(source) + cast)


def with_device_calls(func: Any, args: Any, kwargs: Any) -> Any:
    """Operators that also set or copy device memory."""
    op = operator(func)
    STATE.runtime.memset(costs.MEMSETS.get(op.name, 0))
    for _ in range(costs.DEVICE_COPIES.get(op.name, 0)):
        STATE.runtime.copy(Direction.D2D, args[0].numel() * args[0].element_size(), wait=False)
    return generic(op, func, args, kwargs)


def pack_padded(func: Any, args: Any, kwargs: Any) -> Any:
    """Lengths come from, and batch sizes stay on, the host."""
    packed, sizes = func(args[0]._host, *args[1:], **kwargs)
    STATE.runtime.launch(operator(func).launches)
    STATE.allocator.track(packed)
    return wrap(packed), sizes


def fused(func: Any, args: Any, kwargs: Any) -> Any:
    """One kernel, though C++ would take the function apart for a device it does not know."""
    return as_one(func, args, kwargs, 1)


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
    "index": indexing.index,
    "nonzero": indexing.nonzero,
    "masked_select": indexing.masked_select,
    "where": indexing.where,
    "repeat_interleave": reads.repeat_interleave,
    "bincount": reads.bincount,
    "isin": reads.isin,
    "equal": reads.equal,
    "histc": reads.histc,
    "normal": reads.normal,
    "_linalg_check_errors": reads.check_errors,
    "topk": topk,
    "sort": sort,
    "multinomial": multinomial,
    "is_pinned": is_pinned,
    "_pin_memory": pin_memory,
    "record_stream": record_stream,
    "_pack_padded_sequence": pack_padded,
    "one_hot": reads.one_hot,
    "segment_reduce": reads.segment_reduce,
    "rms_norm": fused,
    "scaled_dot_product_attention": fused,
    **dict.fromkeys(("_unique", "_unique2", "unique_consecutive"), reads.unique),
    **dict.fromkeys(("unique_dim", "unique_dim_consecutive"), reads.unique_rows),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), indexing.index_put),
    **dict.fromkeys(("linspace", "logspace"), reads.tensor_bounds),
    **dict.fromkeys(("histogram", "histogramdd", "_histogramdd_bin_edges", "_histogramdd_from_bin_cts"), not_on_device),
    **dict.fromkeys(sorted(costs.CLONE_FIRST), clone_first),
    **dict.fromkeys(("masked_fill", "masked_fill_", "index_fill", "index_fill_"), indexing.value_operand),
    **dict.fromkeys(sorted(costs.SCAN), scan),
    **dict.fromkeys(sorted({*costs.MEMSETS, *costs.DEVICE_COPIES}), with_device_calls),
    **dict.fromkeys(sorted(costs.WAITS), reads.with_waits),
    "_linalg_eigh": reads.eigh,
    "mode": reads.mode,
    "fill_": indexing.fill,
}
SPECIAL["index_put"] = indexing.index_put

# C++ takes these apart for a device it does not know; for CUDA they are kernels of their own.
WHOLE = frozenset({"one_hot", "rms_norm", "scaled_dot_product_attention"})

# Operators that take a CPU tensor with dimensions beside device tensors.
ALLOW_CPU = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "copy_", "_to_copy", "_ctc_loss"})
