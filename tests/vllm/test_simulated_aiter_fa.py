"""vLLM's own AITER FA builder, of three releases, on the simulated device: where each copies lengths to the host."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from syncfree.profiler import Profiler, simulated_device

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).resolve().parent))
from released import module_from, released_file  # noqa: E402

pytestmark = pytest.mark.vllm

FILE = "vllm/v1/attention/backends/rocm_aiter_fa.py"
# .cpu() syncs of a build, by release. 0.20.2 copies `seq_lens` on every batch, later releases not on pure decode.
EXPECTED = {
    "0.20.2": {"decode": 1, "extend": 1, "prefill": 1},
    "0.22.1": {"decode": 0, "extend": 1, "prefill": 1},
    "0.32": {"decode": 0, "extend": 1, "prefill": 1},
}
BATCHES = {
    "decode": ([1, 1, 1, 1], [50, 60, 70, 80]),
    "extend": ([16, 16, 16, 16], [66, 76, 86, 96]),
    "prefill": ([64, 64, 64], [64, 64, 64]),
}


def builders_module(version):
    if version == "0.32":
        import vllm.v1.attention.backends.rocm_aiter_fa as installed

        return installed
    return module_from(released_file(version, FILE), f"rocm_aiter_fa_{version.replace('.', '_')}")


def make_builder(module, device):
    """A builder with the attributes its `__init__` would set for a small model."""
    builder = object.__new__(module.AiterFlashAttentionMetadataBuilder)
    builder.reorder_batch_threshold = 1
    builder.device = device
    builder.scale = torch.ones(1, device=device)
    builder.kv_sharing_workspace = builder.aot_sliding_window = None
    builder.num_heads_kv, builder.headdim, builder.block_size = 8, 128, 16
    builder.total_tokens = 0
    builder.layer_names = ["layer"]
    builder.extend_workspace = torch.empty(2, 8, 8, 128, device=device)
    builder.vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto"), model_config=SimpleNamespace(dtype=torch.bfloat16)
    )
    return builder


def metadata(query_lens, seq_lens, device):
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(device),
        num_reqs=len(query_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.zeros(len(query_lens), 64, dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64, device=device),
        is_prefilling=torch.tensor([False] * len(query_lens)),
        seq_lens_cpu_upper_bound=lens,
    )


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("version", EXPECTED)
def test_lengths_copied_to_the_host_by_release_and_kind(version, kind):
    module = builders_module(version)
    with simulated_device() as device:
        builder, common = make_builder(module, device), metadata(*BATCHES[kind], device)
        with Profiler() as profiler, profiler.step(batch_class=kind), profiler.phase("build"):
            built = builder.build(0, common)
    [step] = profiler.report.steps
    assert (built.num_decodes > 0, built.num_extends > 0, built.num_prefills > 0) == tuple(k == kind for k in BATCHES)
    assert step.syncs.total == step.syncs.d2h == EXPECTED[version][kind]
    for site in profiler.report.sites:
        assert Path(site.file) == Path(module.__file__)
        assert "seq_lens.cpu()" in Path(site.file).read_text().splitlines()[site.line - 1]
        assert (site.function, site.phase) == ("AiterFlashAttentionMetadataBuilder.build", "build")
    assert not [note for note in profiler.report.notes if note.kind == "hazard"]
