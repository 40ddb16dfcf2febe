"""Graph capture and replay: the operators of a capture are kept and run again, on the same memory, at each replay."""

from __future__ import annotations

from typing import Any

import torch

from .tensor import STATE, Tensor


class Capture:
    """What one capture recorded. Work in a capture does not run: what it wrote is put back when it ends."""

    def __init__(self) -> None:
        self.kernels = 0
        self.steps: list[tuple[Any, Any, Any, Any]] = []
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._own: set[int] = set()  # storages made inside
        self._keep: list[Any] = []

    def before_write(self, host: Tensor) -> None:
        """Keep the content of memory that existed before the capture."""
        storage = host.untyped_storage()
        key = storage._cdata
        if key in self._own or key in self._saved:
            return
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._saved[key] = (flat, flat.clone())

    def record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """One operator; `result`: what it returned where that is new memory, which a replay fills again."""
        if result is not None:
            for tensor in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self._own.add(tensor.untyped_storage()._cdata)
                    self._keep.append(tensor)
        self.steps.append((func, args, dict(kwargs), result))

    def end(self) -> None:
        for memory, content in self._saved.values():
            memory.copy_(content)
        self._saved.clear()

    def replay(self) -> None:
        """Run everything again, without recording: a graph launch is one call."""
        for func, args, kwargs, result in self.steps:
            again = func(*args, **kwargs)
            if result is None:
                continue
            if isinstance(result, torch.Tensor):
                result.copy_(again)
            elif isinstance(result, (list, tuple)):
                for into, source in zip(result, again, strict=True):
                    if isinstance(into, torch.Tensor):
                        into.copy_(source)


class CUDAGraph:
    """torch.cuda.CUDAGraph of the simulated device."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: Capture | None = None
        self._stream: Any = None
        self._ready = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **options: Any) -> None:
        runtime = STATE.runtime
        stream = runtime.current
        if stream is runtime.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream (simulated device)")
        if stream.capture is not None or self._capture is not None:
            raise RuntimeError("simulated device: a capture is under way, or this graph already holds one")
        runtime.launch(2)  # seed and offset of the generator, filled before capture begins
        runtime.other("cudaStreamBeginCapture")
        self._capture = Capture()
        self._stream = stream
        stream.capture = self._capture
        runtime.captures += 1

    def capture_end(self) -> None:
        if self._capture is None or self._stream is None:
            raise RuntimeError("simulated device: capture_end() without capture_begin()")
        runtime = STATE.runtime
        for stream in runtime.streams:
            if stream.capture is self._capture:
                stream.capture = None
        runtime.captures -= 1
        runtime.other("cudaStreamEndCapture")
        runtime.other("cudaGraphInstantiateWithFlags")
        self._capture.end()
        self._stream, self._ready = None, True

    def instantiate(self) -> None:
        return None

    def replay(self) -> None:
        if self._capture is None or not self._ready:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        STATE.runtime.graph_launch(self._capture.kernels)
        # Two kernels fill the generator's state before each launch, inside the graph's own launch call.
        self._capture.replay()

    def reset(self) -> None:
        self._capture, self._ready = None, False

    def pool(self) -> tuple[int, int]:
        return (0, id(self))

    def register_generator_state(self, generator: Any) -> None:
        return None

    def enable_debug_mode(self) -> None:
        return None

    def raw_cuda_graph(self) -> int:
        raise NotImplementedError("simulated device: CUDAGraph.raw_cuda_graph()")

    def debug_dump(self, debug_path: str) -> None:
        raise NotImplementedError("simulated device: CUDAGraph.debug_dump()")


def graph_pool_handle() -> tuple[int, int]:
    return (0, id(object()))


class graph:
    """torch.cuda.graph: drains the device, empties the cache, captures on a stream of its own."""

    _stream: Any = None

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global", **_: Any
    ) -> None:
        from .cuda_api import Stream, StreamContext

        self._graph = cuda_graph
        self._pool = pool
        self._side = StreamContext(stream if stream is not None else Stream())

    def __enter__(self) -> None:
        STATE.runtime.synchronize_device()
        STATE.allocator.empty_cache()
        self._side.__enter__()
        self._graph.capture_begin(pool=self._pool)

    def __exit__(self, *exc: object) -> None:
        try:
            self._graph.capture_end()
        finally:
            self._side.__exit__(*exc)
