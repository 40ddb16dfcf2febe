"""A device that needs no device: PyTorch code for a GPU runs on the CPU, and every host call it would make is counted.

    with simulated_device() as device, Profiler() as p:
        x = torch.ones(8, device=device)      # device "cuda" and x.cuda() mean the same device
        with p.step():
            x.sum().item()                    # one d2h sync, with this line

What waits follows what was measured on a GPU (CUDA, torch 2.11): see `copies.py` and `costs.py`. Importing this package
loads no torch; `simulated_device()` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .recorder import RECORDER

__all__ = ["is_active", "simulated_device"]


def is_active() -> bool:
    """Whether a simulated device is open in this process."""
    return RECORDER.device_open


@contextmanager
def simulated_device() -> Iterator[Any]:
    """Open the simulated device of this process; yields its `torch.device`.

    Inside, that device, the strings "cuda" and "cuda:0", `Tensor.cuda()` and the `torch.cuda` calls an engine makes all
    mean the simulated device, on this thread and on threads started inside; everything is restored on leaving. Results
    are those of the CPU kernels. One at a time: nesting raises `RuntimeError`. Needs torch >= 2.11 (`Unreachable`).
    """
    from .device import opened

    with opened() as device:
        yield device
