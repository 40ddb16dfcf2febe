"""Where a plan will run (environment) and how much there may be (limits), as data with defaults."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, TypeAlias

import msgspec

from .errors import BadInput
from .lengths import INT32_MAX

Release: TypeAlias = tuple[int, int]

VLLM_RELEASES: tuple[Release, ...] = ((0, 26), (0, 32))  # builders that plans were compared with, field by field
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp8": 1, "int32": 4, "int64": 8, "float32": 4, "bool": 1, "uint8": 1, "uint64": 8}


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hardware, library versions, data types and cache layout: everything a route depends on besides the batch."""

    gfx: str = "gfx950"
    num_cu: int = 256
    vllm: str = "0.32"
    aiter: str | None = None  # None: the newest known
    dtype: Literal["bf16", "fp16"] = "bf16"
    kv_dtype: Literal["bf16", "fp16", "fp8"] = "fp8"
    shuffle_kv: bool = False  # vLLM's VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT
    full_graphs: bool = True
    mla_persistent_max_batch: int = 32  # AITER_MLA_DECODE_PERSISTENT_MAX_BATCH, 0: no gate
    mla_small_heads: Literal["auto", "gluon", "asm"] = "auto"  # VLLM_ROCM_AITER_MLA_ASM_PADDING
    kv_cache_bytes: int | None = None  # of one layer
    kv_sharing: bool = False  # some layers read the cache of an earlier layer
    attention_sinks: bool = False
    dcp_world_size: int = 1  # decode context parallelism
    dcp_rank: int = 0
    dcp_interleave: int = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(r"gfx[0-9a-f]{3,4}", self.gfx):
            raise BadInput(f"gfx: expected a name such as gfx942 or gfx950, got {self.gfx!r}")
        if self.release not in VLLM_RELEASES:
            known = " or ".join(f"{major}.{minor}" for major, minor in VLLM_RELEASES)
            raise BadInput(f"vllm: expected {known}, whose builders these plans were compared with, got {self.vllm!r}")
        if self.aiter is not None:
            read_version("aiter", self.aiter)
        _expect_at_least("num_cu", self.num_cu, 1)
        _expect_at_least("mla_persistent_max_batch", self.mla_persistent_max_batch, 0)
        _expect_at_least("kv_cache_bytes", self.kv_cache_bytes, 0, 2**62)
        _expect_at_least("dcp_world_size", self.dcp_world_size, 1)
        _expect_at_least("dcp_interleave", self.dcp_interleave, 1, INT32_MAX // self.dcp_world_size)
        if not 0 <= self.dcp_rank < self.dcp_world_size:
            raise BadInput(f"dcp_rank: expected 0 to {self.dcp_world_size - 1}, got {self.dcp_rank}")

    @property
    def release(self) -> Release:
        """vLLM's (major, minor)."""
        return read_version("vllm", self.vllm)[:2]

    @property
    def aiter_version(self) -> tuple[int, int, int] | None:
        """aiter's (major, minor, patch); `None` stands for the newest known."""
        return None if self.aiter is None else read_version("aiter", self.aiter)


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes an engine fixes once: heads on this rank, cache blocks, workspaces, the scheduler's caps."""

    num_heads: int = 16
    num_kv_heads: int = 1
    head_size: int = 128
    block_size: int = 16
    workspace_tokens: int = 65536
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    sliding_window: int | None = None  # tokens a query sees, itself included
    full_attention_layers: bool = False  # with a sliding window: the same builder also serves layers without one
    graph_sizes: tuple[int, ...] | None = None  # tokens of the captured graphs; None: vLLM's default sizes

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name not in ("full_attention_layers", "graph_sizes"):
                _expect_at_least(name, getattr(self, name), 1)
        for index, size in enumerate(self.graph_sizes or ()):
            _expect_at_least(f"graph_sizes[{index}]", size, 1)
        if self.graph_sizes == ():
            raise BadInput("graph_sizes: expected at least one size, got none")

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Tokens of the captured graphs. Source of the default: vLLM 0.32, `VllmConfig._set_cudagraph_sizes`."""
        if self.graph_sizes is not None:
            return self.graph_sizes
        most = min(2 * self.max_num_seqs, 512, self.max_num_batched_tokens)
        sizes = {1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16), self.max_num_seqs, self.max_num_batched_tokens}
        return tuple(sorted(size for size in sizes if size <= most))


@lru_cache(maxsize=64)
def read_version(name: str, text: str) -> tuple[int, int, int]:
    """(major, minor, patch) of a version, suffixes such as .dev3 or +rocm7 dropped. Raises `BadInput`."""
    found = re.match(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,6}))?", text)
    if found is None:
        raise BadInput(f"{name}: expected a version such as 0.32, got {text!r}")
    return int(found[1]), int(found[2]), int(found[3] or 0)


def _expect_at_least(name: str, value: int | None, least: int, most: int = INT32_MAX) -> None:
    if value is not None and not least <= value <= most:
        relation = f">= {least}" if value < least else f"<= {most}"
        raise BadInput(f"{name}: expected {relation}, got {value}")
