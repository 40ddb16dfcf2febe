"""Attention of a step, segment by segment: each segment's kernel reads its own fields and no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..reference import Padding, causal_attention, decode_attention, extend_attention, pad_rows
from .metadata import Segment, StepMetadata

Tensor = Any


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, [blocks, block_size, kv_heads, head_size] each."""

    k: Tensor
    v: Tensor

    def write(self, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store the step's fresh tokens; slot = block * block_size + offset."""
        self.k.flatten(0, 1)[slot_mapping] = k
        self.v.flatten(0, 1)[slot_mapping] = v


class KVCache:
    """The paged cache of all layers, allocated once."""

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, heads: int, size: int, *, device: Any, dtype: Any
    ) -> None:
        shape = (num_blocks, block_size, heads, size)
        self.layers = [
            LayerCache(torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype))
            for _ in range(num_layers)
        ]


def attend(q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, step: StepMetadata) -> Tensor:
    """Causal attention of all the step's tokens over context and themselves: [tokens, heads, head_size]."""
    cache.write(k, v, step.slot_mapping)
    parts = []
    for segment in step.segments:
        own = segment.tokens
        parts.append(KERNELS[segment.name](q[own], k[own], v[own], cache, segment))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, segment: Segment) -> Tensor:
    assert segment.max_seq_len is not None
    return decode_attention(q, cache.k, cache.v, segment.block_table, segment.seq_lens, segment.max_seq_len, _scale(q))[
        0
    ]


def _extend(q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, segment: Segment) -> Tensor:
    assert segment.max_seq_len is not None
    return extend_attention(
        q, cache.k, cache.v, segment.block_table, segment.seq_lens, _pad(segment), segment.max_seq_len, _scale(q)
    )[0]


def _prefill(q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, segment: Segment) -> Tensor:
    return causal_attention(q, k, v, _pad(segment), _scale(q))[0]


def _pad(segment: Segment) -> Padding:
    assert segment.max_query_len is not None
    return pad_rows(segment.query_start_loc, segment.max_query_len, segment.tokens.stop - segment.tokens.start)


def _scale(q: Tensor) -> float:
    return float(q.shape[-1] ** -0.5)


KERNELS = {"decode": _decode, "extend": _extend, "prefill": _prefill}
