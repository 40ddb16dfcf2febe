"""Everything a step needs on the device, in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Tensor = Any
ALIGNMENT = 4  # elements: every field starts at a multiple of 16 bytes


class Staging:
    """A ring of pinned host blocks and one device block, allocated once; int32.

    The device block is written by a copy on the forward's own stream, so the next step's copy cannot overtake the
    kernels that still read this one. A host block is written again only after its copy has completed; having to wait
    for that is counted in `forced_waits`. On the CPU there is nothing to copy and nothing to wait for.
    """

    def __init__(self, device: Any, capacity: int, slots: int = 3) -> None:
        self.on_cpu = torch.device(device).type == "cpu"
        pinned = not self.on_cpu
        self._blocks = [torch.empty(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(slots)]
        self._views: list[NDArray[np.int32]] = [block.numpy() for block in self._blocks]
        self._copied: list[Any] = [None] * slots
        self._device_block = torch.empty(capacity, dtype=torch.int32, device=device)
        self._next = 0
        self.forced_waits = 0

    def upload(self, fields: Mapping[str, NDArray[np.int32]]) -> dict[str, Tensor]:
        """Device views of `fields`, valid until the next upload."""
        slot = self._next
        self._next = (slot + 1) % len(self._blocks)
        self._await(slot)
        host, start = self._views[slot], 0
        places: list[tuple[str, int, tuple[int, ...]]] = []
        for name, array in fields.items():
            host[start : start + array.size] = array.reshape(-1)
            places.append((name, start, array.shape))
            start += -(-array.size // ALIGNMENT) * ALIGNMENT
        self._device_block[:start].copy_(self._blocks[slot][:start], non_blocking=True)
        self._record(slot)
        return {
            name: self._device_block[begin : begin + int(np.prod(shape))].view(shape) for name, begin, shape in places
        }

    def _await(self, slot: int) -> None:
        event = self._copied[slot]
        if event is not None and not event.query():
            self.forced_waits += 1
            event.synchronize()

    def _record(self, slot: int) -> None:
        if self.on_cpu:
            return
        if self._copied[slot] is None:
            self._copied[slot] = torch.cuda.Event()
        self._copied[slot].record()
