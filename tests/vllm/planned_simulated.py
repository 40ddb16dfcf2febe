"""vLLM's builders with everything they keep on the simulated device; its one Triton kernel runs on the hidden data."""

import fa_builder
import mla_builder
import numpy as np
import planned_builders as builders
import torch
from syncfree.backends.mla_host import paged_kv_indices
from vllm.v1.attention.backend import CommonAttentionMetadata

BLOCKS = 256


class ExpandIndices:
    """vLLM's `_expand_page_indices_kernel`: one launch, and the indices it would write."""

    def __getitem__(self, grid):
        def run(indices, block_table, row_stride, *rest, **constants):
            del row_stride
            indptr = rest[0] if isinstance(rest[0], torch.Tensor) else rest[1]  # 0.26 passes one stride, 0.32 two
            builders.AITER.card.launch(indices)
            hidden = (builders.AITER.card.on_host(tensor) for tensor in (indices, block_table, indptr))
            out, table, starts = (None if tensor is None else tensor.numpy() for tensor in hidden)
            if out is None:
                return
            assert grid[0] == starts.size - 1
            slots = paged_kv_indices(starts, table, constants["KERNEL_BLOCK_SIZE"])
            out[: slots.size] = slots

        return run


def install(monkeypatch, environment):
    """Stand-ins for what only an AMD card has. Inside `simulated_device()`."""
    builders.put_in_aiter(monkeypatch, environment.gfx, environment.num_cu)
    builders.triton_mla_builder.without_a_model(monkeypatch)
    monkeypatch.setattr(mla_builder.upstream, "_expand_page_indices_kernel", ExpandIndices())
    monkeypatch.setattr(
        mla_builder.upstream, "_gluon_mla_decode_supported", lambda: environment.gfx == "gfx950", raising=False
    )
    monkeypatch.setattr(fa_builder.upstream.rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: False)


def builder(make, limits, environment, threshold, device):
    """One of vLLM's builders, its buffers on `device`, its staging pinned."""
    made = make(limits, environment, threshold)
    for name in ("extend_workspace", "chunked_prefill_workspace"):
        if hasattr(made, name):  # of full size, one element of memory
            setattr(made, name, torch.zeros(1).expand(getattr(made, name).shape))
    made.paged_kv_indices = torch.zeros(1 << 16, dtype=torch.int32)
    builders.move(made, device)
    if hasattr(made, "_fp8_ps_staging"):
        outputs = tuple(getattr(made, f"fp8_ps_{name}") for name in builders.PREFILL_WORK)
        made._fp8_ps_device_outputs = outputs
        made._fp8_ps_staging = [
            tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in outputs) for _ in range(2)
        ]
        made._fp8_ps_staging_free = [torch.cuda.Event(), torch.cuda.Event()]
    return made


def metadata(batch, device):
    """The `CommonAttentionMetadata` of a batch, as a model runner on a GPU hands it over."""
    starts, seq_lens = torch.tensor(batch.query_start_loc), torch.tensor(batch.seq_lens)
    table = np.random.default_rng(0).permutation(len(batch) * BLOCKS).astype(np.int32).reshape(len(batch), BLOCKS)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(device),
        num_reqs=len(batch),
        num_actual_tokens=batch.num_tokens,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        block_table_tensor=torch.from_numpy(table).to(device),
        slot_mapping=torch.zeros(batch.num_tokens, dtype=torch.int64, device=device),
        is_prefilling=torch.tensor(batch.is_prefilling),
        seq_lens_cpu_upper_bound=seq_lens,
    )


def same_decode_buffers(theirs, ours, plan, unplanned, served):
    """What kernels read by address: indptrs to their ends, the indices of every token, the schedule."""
    full = ours._attached.environment.full_graphs
    for name in ("qo_indptr", "paged_kv_indptr") if full else ():
        a, b = getattr(theirs, name), getattr(ours, name)
        assert torch.equal(builders.values(a), builders.values(b)), name
        assert getattr(served.decode, name).data_ptr() == b.data_ptr()
    tokens = int(builders.values(served.decode.paged_kv_indptr)[-1])
    indices = [builders.values(made.decode.paged_kv_indices)[:tokens] for made in (unplanned, served)]
    assert torch.equal(*indices)
    assert unplanned.decode.use_gluon_verify == served.decode.use_gluon_verify
    if "decode.work_info" in plan:
        for name in builders.WORK[1:]:
            assert torch.equal(builders.values(getattr(unplanned, name)), builders.values(getattr(served, name))), name
