"""Memory of the simulated device and pinned host memory: who owns which storage, as the caching allocators would.

Storages are known by the address of their StorageImpl; a weak reference takes them off the books when they die.
"""

from __future__ import annotations

import weakref
from typing import Any

MIB = 1 << 20
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB  # PyTorch's caching allocator: what it asks cudaMalloc for
SMALL_LIMIT, MEDIUM_LIMIT = MIB, 10 * MIB


class Segment:
    """One cudaMalloc. Fragmentation inside a segment is not modelled."""

    def __init__(self, size: int, pool: int) -> None:
        self.size = size
        self.free = size
        self.pool = pool


def _segment_size(nbytes: int) -> tuple[int, int]:
    if nbytes <= SMALL_LIMIT:
        return SMALL_SEGMENT, 0
    if nbytes < MEDIUM_LIMIT:
        return LARGE_SEGMENT, 1
    return -(-nbytes // SMALL_SEGMENT) * SMALL_SEGMENT, 1


class Allocator:
    """The caching allocator of the device: when it would call cudaMalloc and cudaFree."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._live: dict[int, weakref.ref[Any]] = {}
        self._writes: dict[int, int] = {}  # hidden tensors count no versions: autograd never sees them
        self._segments: list[Segment] = []
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0
        self.mallocs = 0

    def track(self, tensor: Any) -> None:
        """Put the storage of a device tensor on the books, if it is not there yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        nbytes = storage.nbytes()
        if not nbytes:
            return
        rounded = -(-nbytes // 512) * 512
        segment = self._place(rounded)
        segment.free -= rounded
        self.allocated += rounded
        self.peak_allocated = max(self.peak_allocated, self.allocated)

        def forget(_: Any) -> None:
            self._live.pop(key, None)
            self._writes.pop(key, None)
            segment.free += rounded
            self.allocated -= rounded

        self._live[key] = weakref.ref(storage, forget)

    def wrote(self, tensor: Any) -> None:
        key = tensor.untyped_storage()._cdata
        if key in self._live:
            self._writes[key] = self._writes.get(key, 0) + 1

    def writes(self, tensor: Any) -> int:
        return self._writes.get(tensor.untyped_storage()._cdata, 0)

    def _place(self, nbytes: int) -> Segment:
        size, pool = _segment_size(nbytes)
        for segment in self._segments:
            if segment.pool == pool and segment.free >= nbytes:
                return segment
        segment = Segment(size, pool)
        self._segments.append(segment)
        self.mallocs += 1
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._runtime.allocate("cudaMalloc")
        return segment

    def empty_cache(self) -> None:
        """Give unused segments back, one cudaFree each."""
        for segment in [s for s in self._segments if s.free == s.size]:
            self._segments.remove(segment)
            self.reserved -= segment.size
            self._runtime.free()


class PinnedMemory:
    """Which CPU storages are pinned."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._known: dict[int, weakref.ref[Any]] = {}
        self._reserved: dict[int, int] = {}  # power-of-two block size -> free blocks
        self._ranges: dict[int, int] = {}  # the same, and memory registered by address: start -> size

    def pin(self, tensor: Any) -> Any:
        """Mark the storage of a CPU tensor as pinned, as if its block came from the caching host allocator."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return tensor
        size = 1 << max(storage.nbytes() - 1, 0).bit_length()
        address = storage.data_ptr()
        if self._reserved.get(size):
            self._reserved[size] -= 1
        else:
            self._runtime.allocate("cudaHostAlloc")

        def forget(_: Any) -> None:
            self._known.pop(key, None)
            self._ranges.pop(address, None)
            self._reserved[size] = self._reserved.get(size, 0) + 1
            self._runtime.pending.pop(key, None)

        self._known[key] = weakref.ref(storage, forget)
        if storage.nbytes():
            self._ranges[address] = storage.nbytes()
        return tensor

    def empty_cache(self) -> None:
        """Give cached blocks back, one cudaFreeHost each."""
        for size, blocks in self._reserved.items():
            for _ in range(blocks):
                self._runtime.free("cudaFreeHost")
            self._reserved[size] = 0

    def register(self, address: int, nbytes: int) -> None:
        """cudaHostRegister: existing memory becomes pinned."""
        self._runtime.allocate("cudaHostRegister")
        self._ranges[address] = nbytes

    def unregister(self, address: int) -> None:
        self._ranges.pop(address, None)
        self._runtime.free("cudaHostUnregister")

    def is_pinned(self, tensor: Any) -> bool:
        if self._known and tensor.untyped_storage()._cdata in self._known:
            return True
        if not self._ranges:
            return False
        address = tensor.data_ptr()  # also through another tensor on the same memory: torch.from_numpy(x.numpy())
        return any(start <= address < start + size for start, size in self._ranges.items())
