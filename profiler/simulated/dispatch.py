"""Runs an operator of the simulated device on the CPU and records what it would have asked of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import costs
from .recorder import RECORDER
from .tensor import CPU, STATE, SimTensor, Tensor, on_device, refresh, wrap

_COLLECTIVE = (
    "{} counts as one launch, as it would with NCCL or RCCL; Gloo stages device tensors through the host and waits, "
    "which is not counted"
)
Special = Callable[[Any, Any, Any], Any]
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
# Where an operator written in Python may have its body; on a device, the first that is there is the one that runs.
_PYTHON_BODIES = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CPU")
_PLAIN = frozenset({int, float, bool, type(None), torch.dtype, str, complex, torch.Size})


class Operator:
    """What is known of one aten operator: from its schema, and from `costs`."""

    __slots__ = (
        "allows_cpu",
        "collective",
        "composite",
        "custom",
        "launches",
        "mutated",
        "mutates",
        "name",
        "reshapes",
        "returns_self",
        "special",
        "view",
    )

    def __init__(self, func: Any) -> None:
        from .operators import ALLOW_CPU, SPECIAL, WHOLE

        schema = func._schema
        self.name: str = schema.name.removeprefix("aten::")
        self.collective = func.namespace in ("c10d", "_c10d_functional")
        self.custom = not func.namespace.startswith(("aten", "prim"))
        self.special: Special | None = SPECIAL.get(self.name)
        returns = [r.alias_info for r in schema.returns]
        self.mutated = [
            (index if not a.kwarg_only else a.name)
            for index, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        self.mutates = bool(self.mutated)
        self.view = any(r is not None and not r.is_write for r in returns)
        self.returns_self = self.mutated[:1] == [0] and len(self.mutated) == 1 and len(returns) == 1
        tags = getattr(func, "tags", ())
        self.reshapes = torch.Tag.inplace_view in tags or any(isinstance(m, str) for m in self.mutated)
        self.reshapes = self.reshapes or self.name in ("resize_", "resize_as_", "_resize_output_", "set_")
        free = self.view or self.name in costs.FREE
        self.launches = 0 if free else costs.LAUNCHES.get(self.name.removesuffix("_"), 1)
        # What takes a device makes new memory, and only the shape of its operands matters.
        self.allows_cpu = self.name in ALLOW_CPU or any(a.name == "device" for a in schema.arguments)
        # Inference mode hands over composite operators whole; they must be taken apart to see what they do.
        self.composite = self.name not in WHOLE and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        )


_OPERATORS: dict[Any, Operator] = {}


def operator(func: Any) -> Operator:
    found = _OPERATORS.get(func)
    if found is None:
        found = _OPERATORS[func] = Operator(func)
    return found


def _foreign(value: Tensor, op: Operator) -> Tensor:
    """A CPU tensor among device tensors: a scalar passes as a kernel argument, anything else is an error."""
    if value.device.type not in ("cpu", "meta"):
        raise RuntimeError(
            f"simulated device: {op.name}: expected tensors of the CPU or of this device, got one on {value.device}"
        )
    if (
        value.device.type == "cpu"
        and (value.dim() or op.name.removesuffix("_") in costs.ONE_DEVICE)
        and not op.allows_cpu
    ):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"(simulated device: {op.name})"
        )
    return value


def unwrap(value: Any, op: Operator) -> Any:
    """`value` with hidden CPU tensors in place of device tensors, and the CPU in place of the device."""
    kind = type(value)
    if kind is SimTensor:
        return value._host
    if kind in _PLAIN:
        return value
    if kind is list or kind is tuple:
        return [unwrap(item, op) for item in value]
    if isinstance(value, torch.Tensor):
        return _foreign(value, op)
    if kind is torch.device and on_device(value):
        return CPU
    return value


def decompose(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a composite operator as the operators it is made of."""
    return func._op_dk(_COMPOSITE, *args, **kwargs)


def python_body(func: Any) -> str | None:
    """The dispatch key at which a custom operator is a Python function (`torch.library`) that a device may take."""
    namespace, name = func._schema.name.split("::")
    overload = func._schema.overload_name
    registered = f"{namespace}/{name}.{overload}" if overload else f"{namespace}/{name}"
    return next((key for key in _PYTHON_BODIES if f"{registered}/{key}" in torch.library._impls), None)


def run_python_body(func: Any, key: str, args: Any, kwargs: Any) -> Any:
    """Run a Python function on the tensors themselves: what it does on the device is to be seen. Both modes are on."""
    return func.redispatch(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)), *args, **kwargs)


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operator that has a device tensor among its arguments or makes one."""
    op = _OPERATORS.get(func) or operator(func)
    if op.composite:
        return decompose(func, args, kwargs)
    if op.special is not None:
        return op.special(func, args, kwargs)
    if op.collective and op.launches:
        RECORDER.note("blind", _COLLECTIVE.format(op.name), RECORDER.stack())
    return generic(op, func, args, kwargs)


def generic(op: Operator, func: Any, args: Any, kwargs: Any, launches: int | None = None) -> Any:
    """Run on the CPU, wrap what comes out; `launches`: how many kernels, where the operator alone does not tell."""
    to_cpu = False
    if kwargs:
        device = kwargs.get("device")
        to_cpu = device is not None and not on_device(device)
        if kwargs.get("pin_memory"):
            return _pinned(op, func, args, kwargs, to_cpu)
    host_args = [unwrap(a, op) for a in args]
    host_kwargs = {k: unwrap(v, op) for k, v in kwargs.items()} if kwargs else kwargs
    runtime = STATE.runtime
    capture = runtime.current.capture
    if capture is not None and op.mutates:
        for host in _mutated(op, host_args, host_kwargs):
            capture.before_write(host)
    try:
        result = func(*host_args, **host_kwargs)
    except NotImplementedError as error:
        name = func._schema.name
        raise NotImplementedError(f"simulated device: {name} cannot be computed on the CPU: {error}") from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):
            raise torch.OutOfMemoryError(f"CUDA out of memory (simulated device: {error})") from error
        raise
    if capture is not None and not op.view:
        capture.record(func, host_args, host_kwargs, None if op.mutates else result)
    if op.mutates:
        return _after_write(op, args, kwargs, host_args, host_kwargs, result, launches)
    if to_cpu:
        return result
    if op.view:
        return _wrap_views(result, args[0])
    outputs = _wrap_new(result)
    count = op.launches if launches is None else launches
    if count and _has_elements(result):
        runtime.launch(count)
    return outputs


def as_one(func: Any, args: Any, kwargs: Any, launches: int) -> Any:
    """Run any function of device tensors on the CPU, as so many kernels; its results are new tensors."""
    host_args = [a._host if type(a) is SimTensor else a for a in args]
    host_kwargs = {k: v._host if type(v) is SimTensor else v for k, v in kwargs.items()}
    result = func(*host_args, **host_kwargs)
    capture = STATE.runtime.current.capture
    if capture is not None:
        capture.record(func, host_args, host_kwargs, result)
    if _has_elements(result):
        STATE.runtime.launch(launches)
    return _wrap_new(result)


def _pinned(op: Operator, func: Any, args: Any, kwargs: Any, to_cpu: bool) -> Any:
    if not to_cpu:
        raise RuntimeError("Only dense CPU tensors can be pinned")
    return STATE.pinned.pin(generic(op, func, args, {**kwargs, "pin_memory": False}))


def _mutated(op: Operator, args: Any, kwargs: Any) -> list[Any]:
    found: list[Any] = []
    for place in op.mutated:
        value = kwargs.get(place) if isinstance(place, str) else (args[place] if place < len(args) else None)
        found.extend(value if isinstance(value, (list, tuple)) else [value])
    return [value for value in found if isinstance(value, torch.Tensor)]


def _after_write(
    op: Operator, args: Any, kwargs: Any, host_args: Any, host_kwargs: Any, result: Any, launches: int | None
) -> Any:
    written = _mutated(op, args, kwargs)
    hosts = _mutated(op, host_args, host_kwargs)
    count = op.launches if launches is None else launches
    if count and any(host.numel() for host in hosts):
        STATE.runtime.launch(count)
    for wrapper, host in zip(written, hosts, strict=True):
        STATE.allocator.wrote(host)
        if op.reshapes and type(wrapper) is SimTensor:
            STATE.allocator.track(host)
            refresh(wrapper)
    if op.returns_self:
        return args[0]
    known = {id(host): wrapper for wrapper, host in zip(written, hosts, strict=True)}
    return _wrap_new(result, known)


def _wrap_views(result: Any, source: Any) -> Any:
    # In inference mode a view of a normal tensor is a normal tensor, and C++ relies on it.
    if torch.is_inference_mode_enabled() and not (isinstance(source, torch.Tensor) and source.is_inference()):
        with torch._C._InferenceMode(False):
            return _wrap_all(result)
    return _wrap_all(result)


def _wrap_all(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return wrap(result)
    return type(result)([wrap(item) for item in result])


def _wrap_new(result: Any, known: dict[int, Any] | None = None) -> Any:
    if isinstance(result, torch.Tensor):
        if known is not None and id(result) in known:
            return known[id(result)]
        wrapped = wrap(result)
        STATE.allocator.track(result)
        return wrapped
    if isinstance(result, (list, tuple)):
        items = [_wrap_new(item, known) for item in result]
        return items if isinstance(result, list) else tuple(items)
    return result


def _has_elements(result: Any) -> bool:
    if isinstance(result, torch.Tensor):
        return bool(result.numel())
    if isinstance(result, (list, tuple)):
        return any(_has_elements(item) for item in result)
    return True
