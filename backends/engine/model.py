"""A tiny decoder-only transformer with random weights and a paged KV cache.

Deterministic: the seed fixes every weight on every device. Grouped-query attention, rotary positions, RMS norm, SwiGLU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

from .attention import KVCache, attend
from .metadata import StepMetadata

Tensor = Any


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 512
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    intermediate_size: int = 128
    max_model_len: int = 1024
    rope_base: float = 1000.0

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        kv = self.num_kv_heads * self.head_size
        return self.num_heads * self.head_size, kv, kv


@dataclass(frozen=True)
class Layer:
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class TinyTransformer:
    """Weights and forward pass. `dtype`: float64 makes a greedy answer independent of how the work was batched."""

    def __init__(self, config: ModelConfig, *, device: Any, dtype: Any = torch.float32, seed: int = 0) -> None:
        self.config = config
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            # Not scaled down with depth: attention must be peaked enough that every cached token matters.
            values = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 1.5 * rows**-0.5
            return values.to(dtype).to(device)

        hidden, wide = config.hidden_size, config.intermediate_size
        self.embedding = weight(config.vocab_size, hidden) * config.vocab_size**0.5
        self.layers = [
            Layer(
                weight(hidden, sum(config.qkv_sizes)),
                weight(config.qkv_sizes[0], hidden),
                weight(hidden, 2 * wide),
                weight(wide, hidden),
            )
            for _ in range(config.num_layers)
        ]
        self.head = weight(hidden, config.vocab_size)
        self.rotation = _rotation_table(config).to(dtype).to(device)

    def forward(self, step: StepMetadata, cache: KVCache) -> Tensor:
        """Logits [S, vocab_size] of the step's sampling rows; keys and values of all its tokens go into `cache`."""
        x = self.embedding[step.input_ids]
        rotation = self.rotation[step.positions]
        for index, layer in enumerate(self.layers):
            q, k, v = (rms_norm(x) @ layer.qkv).split(self.config.qkv_sizes, dim=-1)
            q, k, v = (part.unflatten(-1, (-1, self.config.head_size)) for part in (q, k, v))
            attended = attend(rotate(q, rotation), rotate(k, rotation), v, cache.layers[index], step)
            x = x + attended.flatten(1) @ layer.out
            gate, up = (rms_norm(x) @ layer.gate_up).chunk(2, dim=-1)
            x = x + (silu(gate) * up) @ layer.down
        return rms_norm(x[step.sample_tokens]) @ self.head


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary positions: `x` [T, heads, D], `rotation` [T, 2, D / 2] (cosine, sine)."""
    cosine, sine = rotation[:, None, 0], rotation[:, None, 1]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _rotation_table(config: ModelConfig) -> Tensor:
    half = config.head_size // 2
    frequency = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(config.max_model_len, dtype=torch.float64)[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin()), dim=1)
