"""vLLM's real `AiterFlashAttentionMetadataBuilder` on CPU tensors: its `build`, without its `__init__`.

The module's `torch` is a proxy that drops `pin_memory`, which a machine without a device refuses.
"""

from types import SimpleNamespace

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import rocm_aiter_fa as upstream


class TorchWithoutPinning:
    """The torch that the builder's module sees."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, *args, **kwargs):
        kwargs.pop("pin_memory", None)
        return torch.zeros(*args, **kwargs)


def make_builder(limits, environment, threshold, blocks=7):
    """A builder with the attributes that its `__init__` would derive from these settings."""
    builder = object.__new__(upstream.AiterFlashAttentionMetadataBuilder)
    heads, size = limits.num_kv_heads, limits.head_size
    builder.reorder_batch_threshold = threshold
    builder.device = torch.device("cpu")
    builder.scale = torch.ones(1)
    builder.num_heads_kv, builder.headdim, builder.block_size = heads, size, limits.block_size
    builder.layer_names = ["layer"]
    builder.extend_workspace = torch.empty(2, upstream._CP_TOKENS_PER_ITER_ROCM, heads, size, device="meta")
    builder.kv_sharing_workspace = (
        torch.empty(2, limits.max_num_batched_tokens, heads, size, device="meta") if environment.kv_sharing else None
    )
    window = limits.sliding_window
    builder.aot_sliding_window = None if window is None else (window - 1, 0)
    builder.vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="fp8" if environment.kv_dtype == "fp8" else "auto"),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": SimpleNamespace(kv_cache=torch.empty(blocks, 1, device="meta"))}
        ),
    )
    return builder


def metadata_of(batch):
    """The `CommonAttentionMetadata` of a batch; its tensors are told apart by identity."""
    starts = torch.tensor(batch.query_start_loc)
    seq_lens = torch.tensor(batch.seq_lens)
    return CommonAttentionMetadata(
        query_start_loc=starts.clone(),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.clone(),
        num_reqs=len(batch),
        num_actual_tokens=batch.num_tokens,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        block_table_tensor=torch.zeros(len(batch), 4, dtype=torch.int32),
        slot_mapping=torch.zeros(batch.num_tokens, dtype=torch.int64),
        is_prefilling=None if batch.is_prefilling is None else torch.tensor(batch.is_prefilling),
        seq_lens_cpu_upper_bound=seq_lens,
    )


def upstream_field(metadata, name):
    """The upstream value of a planned field."""
    part, _, rest = name.partition(".")
    if part == "common":
        return getattr(metadata, rest)
    if part == "kv_sharing":
        return getattr(metadata.kv_sharing_metadata, rest)
    if part in ("decode", "prefill"):
        return getattr(getattr(metadata, f"{part}_metadata"), rest)
    extend = metadata.extend_metadata
    group, _, last = rest.rpartition(".")
    if group == "chunk_context":
        return getattr(extend.chunk_context_metadata, last)
    if group == "swa":
        return getattr(extend.chunk_context_metadata.swa_metadata, f"swa_{last}")
    return getattr(extend, rest)
