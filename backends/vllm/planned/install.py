"""Where the planned builders are put: behind `get_builder_cls` of vLLM's attention backends."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NamedTuple

from ..imports import Hook
from .mode import Mode, mode_from_environment


class Target(NamedTuple):
    """One attention backend of vLLM: its class, its builder's, and our adapter as "module:class" in this package."""

    backend: str
    builder: str
    adapter: str


BUILDERS: dict[str, Target] = {
    "vllm.v1.attention.backends.rocm_aiter_fa": Target(
        "AiterFlashAttentionBackend", "AiterFlashAttentionMetadataBuilder", "fa:FlashAttention"
    ),
    "vllm.v1.attention.backends.mla.rocm_aiter_mla": Target(
        "AiterMLABackend", "AiterMLAMetadataBuilder", "mla:LatentAttention"
    ),
    "vllm.v1.attention.backends.mla.triton_mla": Target(
        "TritonMLABackend", "TritonMLAMetadataBuilder", "triton_mla:TritonLatentAttention"
    ),
    "vllm.v1.attention.backends.triton_attn": Target(
        "TritonAttentionBackend", "TritonAttentionMetadataBuilder", "triton:TritonAttention"
    ),
    "vllm.v1.attention.backends.cpu_attn": Target(
        "CPUAttentionBackend", "CPUAttentionMetadataBuilder", "cpu:CpuAttention"
    ),
}


def planned_builder(module: Any, target: Target) -> type:
    """The planned subclass of a module's builder."""
    from .builder import planned_class

    place, _, name = target.adapter.partition(":")
    adapter = getattr(importlib.import_module(f".{place}", __package__), name)()
    return planned_class(getattr(module, target.builder), adapter)


def _hook(target: Target, mode: Mode) -> Hook:
    def hook(module: ModuleType) -> None:
        from .builder import PlannedBuilder
        from .tally import TALLY

        if TALLY.mode != mode:
            TALLY.clear(mode)
        backend = getattr(module, target.backend)
        if issubclass(backend.get_builder_cls(), PlannedBuilder):
            return
        planned = planned_builder(module, target)
        backend.get_builder_cls = staticmethod(lambda: planned)

    return hook


def install() -> dict[str, Hook]:
    """The hooks by module for this process's mode, none where it is off. Loads nothing of vLLM, nor the planner."""
    mode = mode_from_environment()
    return {} if mode == "off" else {name: _hook(target, mode) for name, target in BUILDERS.items()}
