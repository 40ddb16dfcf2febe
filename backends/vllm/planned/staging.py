"""One packed block a build, one asynchronous copy; the fields on the device are views of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .tally import Tally

SLOTS = 4  # builds whose copies may be under way
FIRST_ELEMENTS = 1 << 16  # int32; doubled when a batch needs more, which after warm-up none does
ALIGNMENT = 16  # int32 elements: a kernel compiled for aligned pointers meets aligned pointers


class _Slot:
    """A pinned block on the host, its twin on the device, and the event after the last copy."""

    def __init__(self, torch: Any, elements: int, device: Any) -> None:
        pinned = device.type != "cpu"
        self.host = torch.empty(elements, dtype=torch.int32, pin_memory=pinned)
        self.array: npt.NDArray[np.int32] = self.host.numpy()
        self.device = torch.empty(elements, dtype=torch.int32, device=device) if pinned else self.host
        self.copied: Any = torch.cuda.Event() if pinned else None
        self.used = False


class Staging:
    """A ring of blocks for one builder.

    A block on the host is written again after its copy's event has completed: queried first, and a wait that has to be
    forced is counted. A block on the device is written again by a later copy on the same stream, behind the kernels
    that read it; a builder that changes streams gets a ring for each.
    """

    def __init__(self, device: Any, tally: Tally) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._tally = tally
        self._rings: dict[Any, list[_Slot]] = {}
        self._turn = 0

    def upload(self, arrays: Mapping[str, npt.NDArray[np.int32]]) -> dict[str, Any]:
        """Copy int32 arrays to the device in one go; returns tensors of their shapes by name."""
        if not arrays:
            return {}
        sizes: list[int] = []
        for array in arrays.values():
            sizes.append(-(-array.size // ALIGNMENT) * ALIGNMENT)
        total = sum(sizes)
        slot = self._slot(total)
        place = 0
        for array, size in zip(arrays.values(), sizes, strict=True):
            slot.array[place : place + array.size] = array.reshape(-1)
            place += size
        if slot.copied is not None:
            slot.device[:total].copy_(slot.host[:total], non_blocking=True)
            slot.copied.record()
            slot.used = True
        views: dict[str, Any] = {}
        place = 0
        for (name, array), size in zip(arrays.items(), sizes, strict=True):
            part = slot.device[place : place + array.size]
            views[name] = part if array.ndim == 1 else part.view(array.shape)
            place += size
        return views

    def _slot(self, total: int) -> _Slot:
        stream = None if self._device.type == "cpu" else self._torch.cuda.current_stream().cuda_stream
        ring = self._rings.get(stream)
        if ring is None:
            ring = self._rings[stream] = [self._fresh(FIRST_ELEMENTS) for _ in range(SLOTS)]
        self._turn = (self._turn + 1) % SLOTS
        slot = ring[self._turn]
        if slot.host.numel() < total:
            # The allocator keeps the old block until its copy has completed.
            slot = ring[self._turn] = self._fresh(1 << math.ceil(math.log2(total)))
        elif slot.used and not slot.copied.query():
            self._tally.forced_waits += 1
            slot.copied.synchronize()
        return slot

    def _fresh(self, elements: int) -> _Slot:
        return _Slot(self._torch, elements, self._device)
