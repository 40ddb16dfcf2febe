"""vLLM's real `TritonMLAMetadataBuilder` on CPU tensors, its `__init__` included; vLLM 0.26 and 0.32."""

from types import SimpleNamespace

import mla_builder
import msgspec
import torch
from syncfree.planner import Environment, Limits
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.mla import triton_mla as upstream

common_upstream = mla_builder.common_upstream
RELEASE = ".".join(__import__("vllm").__version__.split(".")[:2])
THRESHOLDS = (1,) if RELEASE == "0.26" else (1, 2, 3, 4)


def _environment(**about):
    return Environment(vllm=RELEASE, **about)


# 0.26 gives every row with context the same share of the workspace: at least a block each.
LEAST = 1 if RELEASE == "0.32" else 128
SETTINGS = {
    "bf16": (_environment(kv_dtype="bf16"), Limits(workspace_tokens=2048)),
    "fp8 cache, eager": (
        _environment(full_graphs=False),
        Limits(workspace_tokens=max(1024, 64 * LEAST), block_size=64),
    ),
    "fp16, small workspace": (
        _environment(dtype="fp16", kv_dtype="fp16"),
        Limits(workspace_tokens=max(544, 32 * LEAST), num_heads=128, block_size=32),
    ),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class PrefillBackend:
    """Stands for FlashAttention's: it keeps what it is handed."""

    def clone(self):
        return PrefillBackend()

    def prepare_metadata(self, metadata):
        self._prefill_metadata = metadata


def install(monkeypatch):
    """What needs a device or a whole model."""
    monkeypatch.setattr(common_upstream, "torch", mla_builder.TorchWithoutPinning())
    monkeypatch.setattr(common_upstream, "PIN_MEMORY", False, raising=False)
    without_a_model(monkeypatch)


def without_a_model(monkeypatch):
    """The builder's `__init__` asks the layers of a whole model."""
    for name in ("get_num_attention_heads_from_layers", "get_mla_dims"):
        if hasattr(common_upstream, name):
            monkeypatch.setattr(common_upstream, name, lambda *about: None)


def config_of(limits, environment, threshold):
    """The parts of a `VllmConfig` that the builder reads."""
    layer = SimpleNamespace(
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        prefill_backend=PrefillBackend(),
    )
    mode = CUDAGraphMode.FULL_AND_PIECEWISE if environment.full_graphs else CUDAGraphMode.NONE
    drafts = SimpleNamespace(num_speculative_tokens=threshold - 1, parallel_drafting=False, method="mtp")
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=DTYPES[environment.dtype],
            max_model_len=8192,
            get_num_attention_heads=lambda parallel: limits.num_heads,
            get_head_size=lambda: 576,
        ),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1, decode_context_parallel_size=1, cp_kv_cache_interleave_size=1
        ),
        cache_config=SimpleNamespace(
            cache_dtype="fp8" if environment.kv_dtype == "fp8" else "auto", block_size=limits.block_size
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": layer}, cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2, 4, 8]
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=100_000, async_scheduling=False
        ),
        attention_config=SimpleNamespace(use_prefill_query_quantization=False),
        speculative_config=None if threshold == 1 else drafts,
    )


def make_builder(limits, environment, threshold, *, synchronous=True, cls=upstream.TritonMLAMetadataBuilder):
    """A builder as vLLM's `__init__` leaves it, its workspace as small as `limits` say."""
    config = config_of(limits, environment, threshold)
    config.scheduler_config.async_scheduling = not synchronous
    size = common_upstream.MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size
    common_upstream.MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size = staticmethod(
        lambda config: limits.workspace_tokens
    )
    try:
        builder = cls(SimpleNamespace(block_size=limits.block_size), ["layer"], config, torch.device("cpu"))
    finally:
        common_upstream.MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size = staticmethod(size)
    assert builder.reorder_batch_threshold == threshold
    return builder


def limits_for(limits, rows):
    """These limits for so many rows of any length."""
    return msgspec.structs.replace(limits, max_num_seqs=rows, max_num_batched_tokens=100_000)
