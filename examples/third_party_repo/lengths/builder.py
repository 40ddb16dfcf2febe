"""Metadata of a batch: where each request starts, how long it is, how long the longest is."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass
class Metadata:
    seq_lens: torch.Tensor  # [num_reqs] int32, device
    starts: torch.Tensor  # [num_reqs + 1] int32, device
    max_seq_len: int


def build(seq_lens: list[int], device: torch.device) -> Metadata:
    """From lengths that the scheduler has on the host: packed into pinned memory, one copy, no wait."""
    n = len(seq_lens)
    packed = torch.empty(2 * n + 1, dtype=torch.int32, pin_memory=True)
    packed[:n] = torch.tensor(seq_lens, dtype=torch.int32)
    packed[n] = 0
    torch.cumsum(packed[:n], 0, out=packed[n + 1 :])
    on_device = packed.to(device, non_blocking=True)
    metadata = Metadata(seq_lens=on_device[:n], starts=on_device[n:], max_seq_len=max(seq_lens))
    if os.environ.get("LENGTHS_DEBUG"):
        _debug_dump(metadata)
    return metadata


def build_from_device(seq_lens: torch.Tensor) -> Metadata:
    """The same from lengths on the device: reads them back, and stops the host once for every request."""
    starts = [0]
    for i in range(len(seq_lens)):
        starts.append(starts[-1] + seq_lens[i].item())
    return Metadata(
        seq_lens=seq_lens,
        starts=torch.tensor(starts, dtype=torch.int32, device=seq_lens.device),
        max_seq_len=int(seq_lens.max()),
    )


def _debug_dump(metadata: Metadata) -> None:
    print(metadata.starts.tolist())
