"""What a planned builder learns from vLLM's configuration; the planned Triton builder by vLLM's own `__init__`."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from syncfree.backends.vllm.planned.builder import planned_class
from syncfree.backends.vllm.planned.triton import TritonAttention
from syncfree.planner import BadInput, Batch, Environment

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent))
import fa_builder  # noqa: E402
import planned_builders as builders  # noqa: E402
from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.v1.attention.backends import rocm_aiter_fa, triton_attn  # noqa: E402

pytestmark = pytest.mark.vllm


def config_of(**changes):
    """The parts of a `VllmConfig` that builders read."""
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        rswa_window=None,
        get_num_attention_heads=lambda parallel: 16,
        get_num_kv_heads=lambda parallel: 2,
        get_head_size=lambda: 128,
    )
    sizes = {"cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    parts = {
        "model_config": model,
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "compilation_config": SimpleNamespace(**sizes),
        "scheduler_config": SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=4096, async_scheduling=False),
        "speculative_config": None,
    }
    return SimpleNamespace(**(parts | changes))


def flash_attention(monkeypatch, config, windows):
    layers = {}
    for number, window in enumerate(windows):
        impl = object.__new__(rocm_aiter_fa.AiterFlashAttentionImpl)
        impl.sliding_window, impl.sinks = (-1, -1) if window is None else (window - 1, 0), None
        impl.num_kv_heads, impl.head_size = 2, 128
        layers[f"layer{number}"] = SimpleNamespace(impl=impl, kv_sharing_target_layer_name=None)
    for module in (rocm_aiter_fa, sys.modules["vllm.config"]):
        monkeypatch.setattr(module, "get_layers_from_vllm_config", lambda *args: layers)
    spec = SimpleNamespace(block_size=16)
    planned = planned_class(rocm_aiter_fa.AiterFlashAttentionMetadataBuilder, builders.FlashAttention(), TALLY)
    return planned(spec, list(layers), config, torch.device("cpu"))


TALLY = builders.tally_of("on")


@pytest.mark.parametrize(
    ("windows", "window", "beside_full"), [([None], None, False), ([64, 64], 64, False), ([64, None], 64, True)]
)
def test_flash_attention_reads_its_layers_and_configuration(windows, window, beside_full, monkeypatch):
    builders.put_in_aiter(monkeypatch)
    fp8 = SimpleNamespace(cache_dtype="fp8_e4m3")
    builder = flash_attention(monkeypatch, config_of(cache_config=fp8), windows)
    environment, limits = builder.adapter.settings(builder)
    assert (environment.vllm, environment.dtype, environment.kv_dtype) == ("0.32", "bf16", "fp8")
    assert environment.full_graphs
    assert (limits.num_heads, limits.num_kv_heads, limits.head_size, limits.block_size) == (16, 2, 128, 16)
    assert (limits.sliding_window, limits.full_attention_layers) == (window, beside_full)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.graph_sizes) == (64, 4096, (1, 2, 4, 8, 16))


def test_a_builder_attaches_by_itself_at_its_first_build(monkeypatch):
    builders.put_in_aiter(monkeypatch)
    monkeypatch.setattr(fa_builder.upstream, "torch", fa_builder.TorchWithoutPinning())
    TALLY.clear("on")
    builder = flash_attention(monkeypatch, config_of(), [None])
    common = fa_builder.metadata_of(Batch.from_lengths([1, 16, 8], [50, 90, 8], is_prefilling=[False, True, True]))
    made = builder.build(0, common)
    assert (TALLY.planned, dict(TALLY.fallbacks)) == (1, {})
    assert (made.num_decodes, made.num_extends, made.num_prefills) == (1, 1, 1)


@pytest.mark.parametrize("dtype", ["fp8_inc", "nvfp4"])
def test_an_unknown_cache_type_leaves_the_builder_to_vllm(dtype, monkeypatch, caplog):
    builders.put_in_aiter(monkeypatch)
    TALLY.clear("on")
    config = config_of(cache_config=SimpleNamespace(cache_dtype=dtype))
    builder = flash_attention(monkeypatch, config, [None])
    monkeypatch.setattr(fa_builder.upstream, "torch", fa_builder.TorchWithoutPinning())
    for _ in range(2):
        assert builder.build(0, fa_builder.metadata_of(Batch.from_lengths([1], [50], is_prefilling=[False])))
    assert TALLY.planned == 0
    assert len(caplog.records) == 1
    assert f"cache_dtype: expected auto, bfloat16, float16 or fp8, got {dtype}" in caplog.text


def latent(**changes):
    attributes = {
        "vllm_config": config_of(),
        "num_heads": 16,
        "_num_attention_heads": 16,
        "page_size": 64,
        "chunked_prefill_workspace_size": 1024,
        "_kv_cache_bytes": 1 << 30,
        "_prefill_backend": SimpleNamespace(),
    }
    return SimpleNamespace(**(attributes | changes))


def test_latent_attention_reads_its_configuration(monkeypatch):
    builders.put_in_aiter(monkeypatch)
    monkeypatch.setenv("AITER_MLA_DECODE_PERSISTENT_MAX_BATCH", "48")
    adapter = builders.LatentAttention()
    environment, limits = adapter.settings(latent())
    assert (environment.mla_persistent_max_batch, environment.kv_cache_bytes) == (48, 1 << 30)
    assert (limits.num_heads, limits.num_kv_heads, limits.block_size, limits.workspace_tokens) == (16, 1, 64, 1024)
    adapter.prepare(latent(), environment)


class TrtllmRaggedPrefill:
    pass


@pytest.mark.parametrize(
    ("builder", "environment", "said"),
    [
        (latent(), Environment(dcp_world_size=2), "decode_context_parallel_size: expected 1"),
        (latent(num_heads=24, _num_attention_heads=24), Environment(), "num_heads: expected 24 launched"),
        (latent(_prefill_backend=TrtllmRaggedPrefill()), Environment(), "prefill backend: expected one that reads no"),
    ],
)
def test_latent_attention_declines_what_it_cannot_serve(builder, environment, said, monkeypatch):
    builders.put_in_aiter(monkeypatch)
    with pytest.raises(BadInput, match=said):
        builders.LatentAttention().prepare(builder, environment)


@pytest.mark.parametrize("mode", ["shadow", "on"])
def test_the_planned_triton_builder_makes_what_vllm_makes(mode, monkeypatch):
    monkeypatch.setattr(triton_attn, "get_num_attention_heads_from_layers", lambda config, names: None)
    tally = builders.tally_of(mode)
    spec, device = SimpleNamespace(block_size=16), torch.device("cpu")
    cls = triton_attn.TritonAttentionMetadataBuilder
    theirs = cls(spec, ["layer"], config_of(), device)
    ours = planned_class(cls, TritonAttention(), tally)(spec, ["layer"], config_of(), device)
    ours.softmax_segm_output, ours.softmax_segm_max = theirs.softmax_segm_output, theirs.softmax_segm_max
    ours.softmax_segm_expsum = theirs.softmax_segm_expsum
    rng = np.random.default_rng(3)
    for _ in range(200):
        rows = int(rng.integers(1, 64))
        query = np.ones(rows, int) if rng.random() < 0.5 else rng.integers(1, 30, rows)
        computed = rng.integers(0, 500, rows)
        common = fa_builder.metadata_of(Batch.from_lengths(query, query + computed, is_prefilling=computed == 0))
        a, b = vars(theirs.build(0, common)), vars(ours.build(0, common))
        assert {name: value for name, value in b.items() if value is not a[name] and value != a[name]} == {}
    assert (tally.planned, tally.compared) == ((200, 0) if mode == "on" else (0, 200))
    assert (tally.mismatches, tally.first_mismatch, dict(tally.fallbacks)) == (0, None, {})
