"""What `simulated_device()` puts in place of torch's own, and how it puts it back exactly."""

from __future__ import annotations

from typing import Any

import torch

from . import cuda_api as api
from . import graphs, threads

_MISSING = object()


class Patches:
    """Attributes replaced, in order; `undo` puts back what was there, and takes away what was not."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        namespace = owner.__dict__
        self._saved.append((owner, name, namespace.get(name, _MISSING)))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._saved:
            owner, name, value = self._saved.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


_UNSUPPORTED = (
    "MemPool",
    "use_mem_pool",
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "change_current_allocator",
    "current_blas_handle",
    "current_solver_handle",
    "host_memory_stats",
    "memory_snapshot",
    "utilization",
    "temperature",
    "power_draw",
    "clock_rate",
    "memory_usage",
    "device_memory_used",
    "get_stream_from_external",
)


def _cuda_module() -> dict[str, Any]:
    return {
        "Stream": api.Stream,
        "ExternalStream": api.unsupported("torch.cuda.ExternalStream"),
        "Event": api.Event,
        "StreamContext": api.StreamContext,
        "stream": lambda stream: api.StreamContext(stream),
        "device": api.DeviceContext,
        "device_of": type("device_of", (api.DeviceContext,), {}),
        "synchronize": api.synchronize,
        "current_stream": api.current_stream,
        "default_stream": api.default_stream,
        "set_stream": api.set_stream,
        "is_current_stream_capturing": api.is_current_stream_capturing,
        "CUDAGraph": graphs.CUDAGraph,
        "graph": graphs.graph,
        "graph_pool_handle": graphs.graph_pool_handle,
        "is_available": api.constant(True),
        "is_initialized": api.constant(True),
        "is_bf16_supported": api.constant(True),
        "_is_in_bad_fork": api.constant(False),
        "init": api.constant(None),
        "_lazy_init": api.constant(None),
        "device_count": api.constant(1),
        "current_device": api.constant(0),
        "set_device": api.set_device,
        "_sleep": api.sleep,
        "get_device_properties": api.get_device_properties,
        "get_device_name": api.get_device_name,
        "get_device_capability": api.get_device_capability,
        "manual_seed": api.manual_seed,
        "manual_seed_all": lambda seed: api.manual_seed(seed),
        "seed": api.constant(None),
        "seed_all": api.constant(None),
        "initial_seed": torch.initial_seed,
        **_random_functions(),
        "get_allocator_backend": api.constant("native"),
        "get_sync_debug_mode": api.SyncDebug.get,
        "set_sync_debug_mode": api.SyncDebug.set,
        "ipc_collect": api.constant(None),
        "cudart": api.cudart,
        "check_error": api.check_error,
        "can_device_access_peer": api.constant(False),
        "is_tf32_supported": api.constant(True),
        "get_arch_list": api.constant([]),
        **{name: api.unsupported(f"torch.cuda.{name}") for name in _UNSUPPORTED},
        **api.legacy_tensor_types(),
        **_memory_functions(),
    }


def _random_functions() -> dict[str, Any]:
    return {
        "get_rng_state": api.get_rng_state,
        "get_rng_state_all": lambda: [api.get_rng_state()],
        "set_rng_state": api.set_rng_state,
        "set_rng_state_all": lambda states: api.set_rng_state(states[0]),
    }


def _memory_functions() -> dict[str, Any]:
    return {
        "empty_cache": api.empty_cache,
        "mem_get_info": api.mem_get_info,
        "memory_allocated": api.memory_allocated,
        "max_memory_allocated": api.max_memory_allocated,
        "memory_reserved": api.memory_reserved,
        "max_memory_reserved": api.max_memory_reserved,
        "memory_stats": api.memory_stats,
        "memory_summary": api.memory_summary,
        "reset_peak_memory_stats": api.reset_peak_memory_stats,
        "reset_accumulated_memory_stats": api.constant(None),
        "reset_peak_host_memory_stats": api.constant(None),
        "get_per_process_memory_fraction": api.constant(1.0),
        "list_gpu_processes": api.unsupported("torch.cuda.list_gpu_processes"),
        "set_per_process_memory_fraction": api.constant(None),
    }


def _accelerator_module() -> dict[str, Any]:
    return {
        "is_available": api.constant(True),
        "device_count": api.constant(1),
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": api.constant(0),
        "current_device_idx": api.constant(0),
        "set_device_index": api.constant(None),
        "set_device_idx": api.constant(None),
        "synchronize": api.synchronize,
        "current_stream": api.current_stream,
        "set_stream": api.set_stream,
        "empty_cache": api.empty_cache,
        "empty_host_cache": api.empty_host_cache,
        "memory_allocated": api.memory_allocated,
        "max_memory_allocated": api.max_memory_allocated,
        "memory_reserved": api.memory_reserved,
        "max_memory_reserved": api.max_memory_reserved,
        "memory_stats": api.memory_stats,
        "reset_peak_memory_stats": api.reset_peak_memory_stats,
        "reset_accumulated_memory_stats": api.constant(None),
        "get_memory_info": api.mem_get_info,
    }


def install(patches: Patches) -> None:
    """Put the simulated device's own in place of torch's."""
    for name, value in _cuda_module().items():
        patches.set(torch.cuda, name, value)
    for name, value in _memory_functions().items():
        patches.set(torch.cuda.memory, name, value)
    for name in ("_record_memory_history", "_snapshot", "_dump_snapshot"):
        patches.set(torch.cuda.memory, name, api.unsupported(f"torch.cuda.memory.{name}"))
    for name, value in _random_functions().items():
        patches.set(torch.cuda.random, name, value)
    for name in ("start", "stop"):
        patches.set(torch.cuda.profiler, name, api.constant(None))
    in_graphs = ("CUDAGraph", "graph", "graph_pool_handle", "is_current_stream_capturing")
    for module, names in ((torch.cuda.streams, ("Stream", "Event")), (torch.cuda.graphs, in_graphs)):
        for name in names:
            patches.set(module, name, _cuda_module()[name])
    for name, value in _accelerator_module().items():
        patches.set(torch.accelerator, name, value)
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        patches.set(torch.cuda.nvtx, name, api.constant(0))
    patches.set(torch, "Event", api.Event)
    patches.set(torch, "Stream", api.Stream)
    patches.set(torch, "Generator", api.GeneratorFactory)
    threads.install(patches)


__all__ = ["Patches", "install"]
