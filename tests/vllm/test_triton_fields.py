"""Triton plans against vLLM's real builder, its `__init__` included, field by field."""

from types import SimpleNamespace

import numpy as np
import pytest
from syncfree.backends.triton import BACKEND
from syncfree.planner import Batch, Environment, Limits, Planner

torch = pytest.importorskip("torch")
upstream = pytest.importorskip("vllm.v1.attention.backends.triton_attn")
backend = pytest.importorskip("vllm.v1.attention.backend")

pytestmark = pytest.mark.vllm

SETTINGS = [
    (Environment(full_graphs=graphs), Limits(num_heads=heads, num_kv_heads=kv, head_size=size, max_num_seqs=seqs))
    for graphs in (True, False)
    for heads, kv, size in ((16, 1, 128), (16, 2, 80), (24, 3, 64), (32, 8, 256), (64, 64, 128))
    for seqs in (4, 256)
]


@pytest.fixture(params=range(len(SETTINGS)))
def builder(request, monkeypatch):
    environment, limits = SETTINGS[request.param]
    monkeypatch.setattr(upstream, "get_num_attention_heads_from_layers", lambda config, names: None)
    mode = "FULL_AND_PIECEWISE" if environment.full_graphs else "PIECEWISE"
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: limits.num_heads,
            get_num_kv_heads=lambda parallel: limits.num_kv_heads,
            get_head_size=lambda: limits.head_size,
            rswa_window=None,
        ),
        parallel_config=None,
        compilation_config=SimpleNamespace(
            cudagraph_mode=getattr(upstream.CUDAGraphMode, mode),
            cudagraph_capture_sizes=list(limits.captured_sizes),
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=limits.max_num_seqs),
    )
    spec = SimpleNamespace(block_size=limits.block_size)
    made = upstream.TritonAttentionMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
    return made, Planner(BACKEND, environment, limits)


def test_planned_fields_are_what_upstream_builds(builder):
    upstream_builder, planner = builder
    rng = np.random.default_rng(2)
    kernels = set()
    for _ in range(150):
        rows = int(rng.integers(1, min(160, planner.limits.max_num_seqs + 1)))
        query = np.ones(rows, dtype=int) if rng.random() < 0.5 else rng.integers(1, 30, rows)
        computed = rng.integers(0, 500, rows)
        causal = rng.random() < 0.8
        batch = Batch.from_lengths(query, query + computed, num_tokens=int(query.sum()) + 3, causal=causal)
        starts = torch.tensor(batch.query_start_loc)
        common = backend.CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(batch.seq_lens),
            num_reqs=rows,
            num_actual_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            block_table_tensor=torch.zeros(rows, 4, dtype=torch.int32),
            slot_mapping=torch.zeros(batch.num_tokens, dtype=torch.int64),
            causal=causal,
        )
        metadata = upstream_builder.build(0, common)
        plan = planner.plan(batch)
        kernels.add(plan.routes["all"])
        for name, planned in plan.fields.items():
            real = getattr(metadata, name.removeprefix("common."))
            if planned.source == "host":
                assert (name, planned.value) == (name, real)
            else:
                expected = tuple(real.shape)
                assert len(planned.shape) == len(expected), name
                assert all(a in (None, b) for a, b in zip(planned.shape, expected, strict=True)), name
        assert plan.cost.syncs == plan.cost.h2d_copies == plan.cost.h2d_bytes == 0
        split = batch.max_query_len == 1 and rows <= metadata.seq_threshold_3D
        assert ("common.softmax_segm_output" in plan.fields) == split
    assert kernels == {"unified_attention_2d", "unified_attention_3d"}
