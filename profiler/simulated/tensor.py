"""The tensor of the simulated device: a wrapper that says "cuda:0" and keeps its data in a hidden CPU tensor.

To C++ the device is PrivateUse1, the one that a Python process can register a guard for; Python code sees `cuda`.
"""

from __future__ import annotations

from typing import Any

import torch

from .recorder import RECORDER

BACKEND = "syncsim"
DEVICE = torch.device("cuda", 0)  # what Python code sees
CPU = torch.device("cpu")
Tensor = Any

_make_wrapper = torch.Tensor._make_wrapper_subclass
_set_data = torch.Tensor.data.__set__


class State:
    """What the process has open: the runtime of the present (or last) context."""

    runtime: Any = None
    allocator: Any = None
    pinned: Any = None
    cpp_device: Any = None  # torch.device("syncsim", 0) once registered


STATE = State()


class SimTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor on the simulated device. `_host`: the CPU tensor that holds its data."""

    _host: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from .dispatch import run

        return run(func, args, kwargs or {})

    # What Python code asks of a CUDA tensor.

    @property
    def device(self) -> Any:
        return DEVICE

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return int(self._host.data_ptr())

    def untyped_storage(self) -> Any:
        return self._host.untyped_storage()

    def tolist(self) -> Any:
        from .copies import read_back

        return read_back(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def cuda(self, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
        return self.to(DEVICE if device is None else device, non_blocking=non_blocking)

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            name = self._host.type()
            return name.replace("torch.", "torch.cuda.", 1)
        name = dtype if isinstance(dtype, str) else getattr(dtype, "__module__", "torch.cuda")
        stays = isinstance(dtype, torch.dtype) or name.startswith("torch.cuda")
        return self.to(self.device if stays else CPU, legacy_dtype(dtype), non_blocking=non_blocking)

    def as_subclass(self, cls: Any) -> Any:
        if issubclass(type(self), cls):
            return self
        raise NotImplementedError(f"simulated device: tensor subclasses are not supported: {cls.__qualname__}")

    def record_stream(self, stream: Any) -> None:
        return None

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        text = str(torch._tensor_str._str(self, tensor_contents=tensor_contents))
        parameter = text.startswith("Parameter(")
        if parameter:
            text = text.removeprefix("Parameter(")[:-1]
        name = type(self).__name__
        if text.startswith(f"{name}("):
            shift = len(name) - len("tensor")
            text = "tensor(" + text[len(name) + 1 :].replace("\n" + " " * shift, "\n")
        return f"Parameter containing:\n{text}" if parameter else text

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        copied = wrap(self._host.clone())
        copied.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True
        memo[id(self)] = copied
        return copied

    def __copy__(self) -> Any:
        return wrap(self._host)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuilt, (self.detach().cpu(), self.requires_grad)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise BufferError("simulated device: there is no device memory that another library could use (DLPack)")

    def __dlpack_device__(self) -> Any:
        raise BufferError("simulated device: there is no device memory that another library could use (DLPack)")

    @property
    def __cuda_array_interface__(self) -> Any:
        raise AttributeError("simulated device: there is no device memory that another library could use")


def rebuilt(host: Tensor, requires_grad: bool) -> Tensor:
    """A pickled device tensor; on the CPU where no simulated device is open, or where it is loaded to the CPU."""
    tensor = host.to(DEVICE) if RECORDER.device_open and not RECORDER.thread.loads_to_cpu else host
    return tensor.requires_grad_(requires_grad)


def legacy_dtype(kind: Any) -> Any:
    """The dtype that `Tensor.type(kind)` asks for."""
    if isinstance(kind, torch.dtype):
        return kind
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
    return torch.empty(0).type(name.replace("torch.cuda.", "torch.", 1)).dtype


def wrap(host: Tensor) -> Tensor:
    """A device tensor over the CPU tensor `host`, whose memory becomes device memory."""
    if host.layout is not torch.strided:
        raise NotImplementedError(f"simulated device: expected a strided tensor, got layout {host.layout}")
    wrapper = _make_wrapper(
        SimTensor,
        host.size(),
        strides=host.stride(),
        storage_offset=host.storage_offset(),
        dtype=host.dtype,
        device=STATE.cpp_device,
    )
    wrapper._host = host
    return wrapper


def refresh(wrapper: Tensor) -> None:
    """Bring a wrapper's shape up to date after its hidden tensor was resized or transposed in place."""
    host = wrapper._host
    if wrapper.size() != host.size() or wrapper.stride() != host.stride():
        with torch.no_grad():
            _set_data(wrapper, wrap(host))


def on_device(value: Any) -> bool:
    """Whether `value` (a torch.device) means the simulated device."""
    return value is not None and value.type in ("cuda", BACKEND)
