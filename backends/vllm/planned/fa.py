"""vLLM's ROCM_AITER_FA builder: `AiterFlashAttentionMetadata` from a plan."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from ....planner.batch import Batch
from ....planner.environment import Environment, Limits
from ....planner.plan import MetadataPlan
from ... import aiter_fa
from .adapter import Unserved, common_environment, common_limits, field_names
from .staging import Staging

CHUNKS = "extend.chunk_context."
WINDOW = "extend.swa."


class FlashAttention:
    """See `adapter.Adapter`."""

    backend = aiter_fa.BACKEND
    needs_aiter = True
    rules: ClassVar[dict[str, str]] = {}

    def settings(self, builder: Any) -> tuple[Environment, Limits]:
        from vllm._aiter_ops import rocm_aiter_ops

        layers = _layers(builder)
        windows = {getattr(layer.impl, "sliding_window", None) for layer in layers}
        windows = {window for window in windows if window is not None and window[0] != -1}
        sinks = any(getattr(layer.impl, "sinks", None) is not None for layer in layers)
        unwindowed = any(getattr(layer.impl, "sliding_window", None) in (None, (-1, -1)) for layer in layers)
        environment = Environment(
            **common_environment(builder),
            shuffle_kv=bool(rocm_aiter_ops.is_shuffle_kv_cache_enabled()),
            kv_sharing=getattr(builder, "kv_sharing_workspace", None) is not None,
            attention_sinks=sinks,
        )
        limits = Limits(
            **common_limits(builder),
            num_heads=int(builder.num_heads_q),
            num_kv_heads=int(builder.num_heads_kv),
            head_size=int(builder.headdim),
            block_size=int(builder.block_size),
            sliding_window=None if builder.aot_sliding_window is None else int(builder.aot_sliding_window[0]) + 1,
            full_attention_layers=bool(windows) and unwindowed,
        )
        return environment, limits

    def prepare(self, builder: Any, environment: Environment) -> None:
        del builder, environment

    def read(self, metadata: Any, name: str) -> Any:
        part, _, rest = name.partition(".")
        if part == "common":
            return getattr(metadata, rest, None)
        if part == "kv_sharing":
            return getattr(getattr(metadata, "kv_sharing_metadata", None), rest, None)
        if part in ("decode", "prefill"):
            return getattr(getattr(metadata, f"{part}_metadata"), rest, None)
        owner = metadata.extend_metadata
        group, _, last = rest.rpartition(".")
        if group:
            owner = getattr(owner, "chunk_context_metadata", None)
        if group == "swa":
            owner, last = getattr(owner, "swa_metadata", None), f"swa_{last}"
        return getattr(owner, last, None)

    def materialise(
        self, builder: Any, plan: MetadataPlan, batch: Batch, common: Any, staging: Staging, environment: Environment
    ) -> Any:
        if environment.shuffle_kv and environment.kv_dtype == "fp8" and builder.scale.numel() == 1:
            raise Unserved  # vLLM allocates the scales of all blocks in its first build
        module = sys.modules[type(builder).upstream.__module__]
        tensors = staging.upload(plan.host_arrays())
        segments = {s.name: (s.rows[1] - s.rows[0], s.tokens[1] - s.tokens[0]) for s in plan.segments}
        decodes, extends, prefills = (segments.get(name, (0, 0)) for name in ("decode", "extend", "prefill"))
        whole = module.AiterFlashAttentionMetadata
        optional = {"use_cascade": False, "kv_sharing_metadata": _kv_sharing(module, builder, plan, tensors)}
        return whole(
            num_actual_tokens=plan.num_tokens,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            causal=common.causal,
            slot_mapping=common.slot_mapping,
            num_decodes=decodes[0],
            num_decode_tokens=decodes[1],
            num_prefills=prefills[0],
            num_extends=extends[0],
            num_extend_tokens=extends[1],
            decode_metadata=_decode(module, plan) if decodes[0] else None,
            prefill_metadata=_prefill(module, plan, tensors) if prefills[0] else None,
            extend_metadata=_extend(module, builder, plan, tensors) if extends[0] else None,
            k_scale=builder.scale,
            v_scale=builder.scale,
            **{name: value for name, value in optional.items() if name in field_names(whole)},
        )


def _layers(builder: Any) -> list[Any]:
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    layers = get_layers_from_vllm_config(builder.vllm_config, Attention)
    return [layer for name, layer in layers.items() if name in builder.layer_names]


def _decode(module: Any, plan: MetadataPlan) -> Any:
    return module.AiterFlashAttentionDecodeMetadata(max_query_len=plan["decode.max_query_len"].value)


def _prefill(module: Any, plan: MetadataPlan, tensors: dict[str, Any]) -> Any:
    return module.AiterFlashAttentionPrefillMetadata(
        max_query_len=plan["prefill.max_query_len"].value,
        max_seq_len=plan["prefill.max_seq_len"].value,
        query_start_loc=tensors["prefill.query_start_loc"],
    )


def _extend(module: Any, builder: Any, plan: MetadataPlan, tensors: dict[str, Any]) -> Any:
    def value(name: str) -> Any:
        """What no kernel on this route reads (every layer has a window) is left out."""
        found = plan.fields.get(CHUNKS + name)
        return None if found is None else tensors.get(CHUNKS + name, found.value)

    names = ("cu_seq_lens_chunk", "chunk_starts", "token_to_batch", "max_seq_lens", "total_token_per_batch")
    chunks = module.AiterChunkContextMetadata(
        workspace=builder.extend_workspace,
        num_chunks=value("num_chunks") or 0,
        swa_metadata=_window(module, builder, plan, tensors),
        **{name: value(name) for name in names},
    )
    return module.AiterFlashAttentionChunkPrefillMetadata(
        max_query_len=plan["extend.max_query_len"].value,
        max_seq_len=plan["extend.max_seq_len"].value,
        query_start_loc=tensors["extend.query_start_loc"],
        chunk_context_metadata=chunks,
    )


def _window(module: Any, builder: Any, plan: MetadataPlan, tensors: dict[str, Any]) -> Any:
    if WINDOW + "cu_seqlens" not in plan:
        return None
    import torch

    tokens = plan[WINDOW + "total_tokens"].value
    return module.AiterChunkSlidingWindowMetadata(
        swa_cu_seqlens=tensors[WINDOW + "cu_seqlens"],
        swa_seq_starts=tensors[WINDOW + "seq_starts"],
        swa_token_to_batch=tensors[WINDOW + "token_to_batch"],
        swa_max_seqlens=plan[WINDOW + "max_seqlens"].value,
        swa_total_tokens=tokens,
        swa_workspace=torch.empty(
            (2, tokens, builder.num_heads_kv, builder.headdim),
            dtype=builder.vllm_config.model_config.dtype,
            device=builder.device,
        ),
    )


def _kv_sharing(module: Any, builder: Any, plan: MetadataPlan, tensors: dict[str, Any]) -> Any:
    if "kv_sharing.query_start_loc" not in plan:
        return None
    return module.AiterKVSharingMetadata(
        workspace=builder.kv_sharing_workspace,
        query_start_loc=tensors["kv_sharing.query_start_loc"],
        token_to_batch=tensors["kv_sharing.token_to_batch"],
        seq_starts=tensors["kv_sharing.seq_starts"],
    )
