"""Streams, events and the module functions of torch.cuda and torch.accelerator, as the simulated device has them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

from ..calls import Role
from .calls_in_python import map_device
from .recorder import RECORDER
from .runtime import Stream as RuntimeStream
from .tensor import DEVICE, STATE, SimTensor

NAME = "syncfree simulated device"
TOTAL_MEMORY = 80 << 30
CAPABILITY = (9, 0)


class Stream:
    """torch.cuda.Stream; `_of`: an existing stream of the runtime."""

    def __init__(self, device: Any = None, priority: int = 0, *, _of: RuntimeStream | None = None, **_: Any) -> None:
        map_device(device)
        self._stream = _of if _of is not None else STATE.runtime.new_stream(priority)
        self._contexts: list[RuntimeStream] = []

    device = property(lambda self: DEVICE)
    priority_range = staticmethod(lambda: (0, -5))
    device_index = property(lambda self: 0)
    device_type = property(lambda self: 1)
    stream_id = property(lambda self: self._stream.number)
    cuda_stream = property(lambda self: self._stream.number)
    native_handle = property(lambda self: self._stream.number)
    priority = property(lambda self: self._stream.priority)

    def synchronize(self) -> None:
        STATE.runtime.synchronize_stream(self._stream)

    def query(self) -> bool:
        return bool(STATE.runtime.query("cudaStreamQuery", self._stream.snapshot()))

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def is_capturing(self) -> bool:
        return self._stream.capture is not None

    def __enter__(self) -> Stream:
        self._contexts.append(STATE.runtime.set_current(self._stream))
        return self

    def __exit__(self, *exc: object) -> None:
        STATE.runtime.set_current(self._contexts.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other._stream is self._stream

    def __hash__(self) -> int:
        return hash(id(self._stream))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={DEVICE} cuda_stream={self._stream.number:#x} (simulated)>"


class Event:
    """torch.cuda.Event. An event that was never recorded is complete, and waiting for it makes no call."""

    def __init__(self, *args: Any, enable_timing: bool = False, **_: Any) -> None:
        self._timing = bool(args[0]) if args and isinstance(args[0], bool) else enable_timing
        self._snapshot: dict[int, int] | None = None
        self._capture: Any = None
        self._time = 0

    device = property(lambda self: DEVICE)
    cuda_event = property(lambda self: id(self))
    event_id = property(lambda self: id(self))

    def record(self, stream: Stream | None = None) -> None:
        source = STATE.runtime.current if stream is None else stream._stream
        self._snapshot, self._capture, self._time = source.snapshot(), source.capture, time.perf_counter_ns()
        RECORDER.emit("cudaEventRecordWithFlags", Role.OTHER)

    def wait(self, stream: Stream | None = None) -> None:
        """The stream waits, not the host."""
        if self._snapshot is None:
            return
        target = STATE.runtime.current if stream is None else stream._stream
        for number, position in self._snapshot.items():
            target.clock[number] = max(position, target.clock.get(number, 0))
        if self._capture is not None:
            target.capture = self._capture
        RECORDER.emit("cudaStreamWaitEvent", Role.DEVICE_WAIT)

    def synchronize(self) -> None:
        if self._snapshot is not None:
            STATE.runtime.synchronize_event(self._snapshot, self._capture)

    def query(self) -> bool:
        if self._snapshot is None:
            return True
        return bool(STATE.runtime.query("cudaEventQuery", self._snapshot))

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of host time between the two records: simulated work takes no time of its own."""
        if not (self._timing and end_event._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._snapshot is None or end_event._snapshot is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._time - self._time) / 1e6

    def ipc_handle(self) -> Any:
        raise NotImplementedError("simulated device: events cannot be shared between processes")

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Any:
        raise NotImplementedError("simulated device: events cannot be shared between processes")

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {id(self):#x} (simulated)>"


class StreamContext:
    """torch.cuda.stream(...): work of the block goes to that stream; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *exc: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*exc)


class DeviceContext:
    """torch.cuda.device(...): there is one device, so nothing changes."""

    def __init__(self, device: Any = None) -> None:
        if not isinstance(device, torch.Tensor):
            map_device(device)
        self.idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


class Generator(torch.Generator):  # type: ignore[misc]
    """A generator of the simulated device: a CPU generator by another name."""

    device = property(lambda self: DEVICE)


class _GeneratorKind(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _TORCH_GENERATOR)

    def __call__(cls, device: Any = "cpu") -> Any:
        mapped = map_device(device)
        wants_device = isinstance(mapped, torch.device) and mapped == STATE.cpp_device
        return Generator() if wants_device else _TORCH_GENERATOR(device)


_TORCH_GENERATOR = torch.Generator


class GeneratorFactory(metaclass=_GeneratorKind):
    """Stands for torch.Generator: makes generators of either device."""


_LEGACY_DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


class _LegacyKind(type):
    """torch.cuda.FloatTensor and its like: called with data it uploads it, with sizes it leaves memory empty."""

    dtype: Any

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, SimTensor) and value.dtype is cls.dtype

    def __call__(cls, *data: Any) -> Any:
        if len(data) == 1 and not isinstance(data[0], (int, torch.Size)):
            return torch.tensor(data[0], dtype=cls.dtype, device=DEVICE)
        sizes = data[0] if data and isinstance(data[0], torch.Size) else data or (0,)
        return torch.empty(sizes, dtype=cls.dtype, device=DEVICE)


def legacy_tensor_types() -> dict[str, Any]:
    """Stand-ins for torch.cuda.FloatTensor..."""
    return {
        name: _LegacyKind(name, (), {"dtype": dtype, "__module__": "torch.cuda"})
        for name, dtype in _LEGACY_DTYPES.items()
    }


def synchronize(device: Any = None) -> None:
    map_device(device)
    STATE.runtime.synchronize_device()


def current_stream(device: Any = None) -> Stream:
    map_device(device)
    return Stream(_of=STATE.runtime.current)


def default_stream(device: Any = None) -> Stream:
    return Stream(_of=STATE.runtime.default)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        STATE.runtime.set_current(stream._stream)


def is_current_stream_capturing() -> bool:
    return STATE.runtime.current.capture is not None


def set_device(device: Any) -> None:
    """There is one device; as for CUDA, a negative number changes nothing."""
    if not isinstance(device, int) or device >= 0:
        map_device(device)


def empty_cache() -> None:
    STATE.allocator.empty_cache()


def empty_host_cache() -> None:
    STATE.pinned.empty_cache()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return TOTAL_MEMORY - STATE.allocator.reserved, TOTAL_MEMORY


def memory_allocated(device: Any = None) -> int:
    return int(STATE.allocator.allocated)


def max_memory_allocated(device: Any = None) -> int:
    return int(STATE.allocator.peak_allocated)


def memory_reserved(device: Any = None) -> int:
    return int(STATE.allocator.reserved)


def max_memory_reserved(device: Any = None) -> int:
    return int(STATE.allocator.peak_reserved)


def reset_peak_memory_stats(device: Any = None) -> None:
    STATE.allocator.peak_allocated = STATE.allocator.allocated
    STATE.allocator.peak_reserved = STATE.allocator.reserved


def memory_stats(device: Any = None) -> dict[str, Any]:
    allocator = STATE.allocator
    return {
        "allocated_bytes.all.current": allocator.allocated,
        "allocated_bytes.all.peak": allocator.peak_allocated,
        "reserved_bytes.all.current": allocator.reserved,
        "reserved_bytes.all.peak": allocator.peak_reserved,
        "num_device_alloc": allocator.mallocs,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    return "\n".join(f"{name}: {value}" for name, value in memory_stats().items())


def get_device_properties(device: Any = None) -> Any:
    return SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=TOTAL_MEMORY,
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20,
        is_integrated=0,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
    )


def get_device_name(device: Any = None) -> str:
    return NAME


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return CAPABILITY


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def get_rng_state(device: Any = None) -> Any:
    return torch.default_generator.get_state()


def set_rng_state(new_state: Any, device: Any = None) -> None:
    torch.default_generator.set_state(new_state)


def sleep(cycles: int) -> None:
    """torch.cuda._sleep: a kernel that spins."""
    STATE.runtime.launch()


def constant(value: Any) -> Any:
    """A new function that answers `value` to anything. New each time: Dynamo refuses one function under two names."""
    return lambda *args, **kwargs: value


class SyncDebug:
    """torch.cuda.set_sync_debug_mode: kept and given back; the simulated device counts by itself."""

    mode = 0

    @classmethod
    def set(cls, mode: int | str) -> None:
        cls.mode = {"default": 0, "warn": 1, "error": 2}[mode] if isinstance(mode, str) else int(mode)

    @classmethod
    def get(cls) -> int:
        return cls.mode


def cudart() -> Any:
    """The runtime functions that engines call by themselves; all succeed."""

    def register(address: int, nbytes: int, flags: int = 0) -> int:
        STATE.pinned.register(int(address), int(nbytes))
        return 0

    def unregister(address: int) -> int:
        STATE.pinned.unregister(int(address))
        return 0

    return SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=unregister,
        cudaMemGetInfo=lambda device: mem_get_info(),
        cudaProfilerStart=constant(0),
        cudaProfilerStop=constant(0),
        cudaError=SimpleNamespace(success=0),
    )


def check_error(result: int) -> None:
    if int(result):
        raise RuntimeError(f"CUDA error {int(result)} (simulated device)")


def unsupported(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"simulated device: {name}() is not supported")

    return refuse
