"""vLLM's real `AiterMLAMetadataBuilder` on CPU tensors: its `build`, without its `__init__`, above a stand-in `aiter`.

The modules' `torch` is a proxy that drops `pin_memory`, which a machine without a device refuses.
"""

import importlib.machinery
import sys
import types
from collections import defaultdict
from types import SimpleNamespace

import torch
from syncfree.backends import mla_decode
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention import mla_attention as common_upstream
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import rocm_aiter_mla as upstream
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

MOST_ROWS = 1100
WORK = ("work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")


class TorchWithoutPinning:
    """The torch that the builder's modules see."""

    def __init__(self):
        for name in ("zeros", "empty", "tensor"):
            setattr(self, name, self._unpinned(getattr(torch, name)))

    @staticmethod
    def _unpinned(function):
        def call(*args, **kwargs):
            kwargs.pop("pin_memory", None)
            return function(*args, **kwargs)

        return call

    def __getattr__(self, name):
        return getattr(torch, name)


class Grid:
    """A Triton kernel that remembers that it was launched."""

    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.calls["expand"].append((grid, args))


class Free:
    """A staging slot's event."""

    def synchronize(self):
        pass

    record = synchronize


def install(monkeypatch, environment, schedule):
    """Stand-ins for what needs a device; returns the calls that reached aiter.

    `schedule(qo_indptr, kv_indptr, context_lens, num_heads)` fills the FP8 prefill's staging buffers.
    """
    calls = defaultdict(list)
    aiter = types.ModuleType("aiter")
    aiter.__path__ = []
    aiter.__spec__ = importlib.machinery.ModuleSpec("aiter", None, is_package=True)
    aiter.get_mla_metadata_v1 = lambda *args, **kwargs: calls["decode"].append((args, kwargs))

    def get_ps_metadata_v1(qo, kv, context, gqa_ratio, heads, _ptrs, *buffers, **rules):
        calls["prefill"].append((qo, kv, context, gqa_ratio, heads, rules))
        for buffer, values in zip(buffers, schedule(qo, kv, context, heads), strict=True):
            buffer[: len(values)] = torch.from_numpy(values)
            if buffer is buffers[2]:
                buffer[len(values) :] = int(values[-1])

    aiter.get_ps_metadata_v1 = get_ps_metadata_v1
    monkeypatch.setitem(sys.modules, "aiter", aiter)
    monkeypatch.setattr(upstream, "_expand_page_indices_kernel", Grid(calls))
    monkeypatch.setattr(upstream, "torch", TorchWithoutPinning())
    monkeypatch.setattr(common_upstream, "torch", TorchWithoutPinning())
    monkeypatch.setattr(common_upstream, "PIN_MEMORY", False)
    monkeypatch.setattr(upstream, "_gluon_mla_decode_supported", lambda: environment.gfx == "gfx950")
    monkeypatch.setattr(upstream.envs, "VLLM_ROCM_AITER_MLA_ASM_PADDING", environment.mla_small_heads, raising=False)
    return calls


def _fp8_buffers(limits, environment, rows):
    padded = getattr(upstream.AiterMLAHelper, "get_fp8_prefill_num_heads", int)  # 0.26 pads none
    heads = padded(limits.num_heads)
    fits = environment.gfx == "gfx950" and environment.kv_dtype == "fp8"
    tokens = 64 * rows // 256 + rows if fits else 1
    works = (tokens + environment.num_cu) * heads if fits else 1
    sizes = (environment.num_cu + 1, (works, 8), tokens, (tokens, 2), 2 * environment.num_cu + tokens)
    return tuple(torch.zeros(size, dtype=torch.int32) for size in sizes)


def make_builder(limits, environment, threshold, rows=MOST_ROWS):
    """A builder with the attributes that its `__init__` would derive from these settings, for so many rows."""
    builder = object.__new__(upstream.AiterMLAMetadataBuilder)
    ranks, full = environment.dcp_world_size, environment.full_graphs
    heads = limits.num_heads * ranks
    outputs = _fp8_buffers(limits, environment, rows)
    shards = ranks * environment.dcp_interleave
    fp8 = environment.kv_dtype == "fp8"
    attributes = {
        "device": torch.device("cpu"),
        "reorder_batch_threshold": threshold,
        "_mtp_decode_qlen": threshold,
        "dcp_world_size": ranks,
        "dcp_rank": environment.dcp_rank,
        "dcp_local_block_size": environment.dcp_interleave,
        "dcp_virtual_block_size": shards,
        "cp_kv_cache_interleave_size": environment.dcp_interleave,
        "dcp_manager": None,
        "use_pcp": False,
        "non_causal_multi_token_decode": False,
        "aot_schedule": False,
        "page_size": limits.block_size,
        "kernel_block_size": limits.block_size,
        "metadata_cls": upstream.AiterMLAMetadata,
        "num_heads": limits.num_heads,
        "_decode_num_heads": heads,
        "_num_attention_heads": upstream.AiterMLAHelper.get_actual_mla_num_heads(heads),
        "_kv_cache_dtype_str": "fp8" if fp8 else "auto",
        "_kv_cache_bytes": environment.kv_cache_bytes,
        "_graph_seq_lens": torch.zeros(rows, dtype=torch.int32) if full else None,
        "paged_kv_last_page_len": torch.ones(rows, dtype=torch.int32),
        "paged_kv_indices": torch.zeros(16, dtype=torch.int32),
        "paged_kv_indptr": torch.zeros(rows + 1, dtype=torch.int32),
        "qo_indptr": torch.zeros(rows + 1, dtype=torch.int32),
        "_supports_segmented_dcp_verify": False,
        "_asm_dcp_verify": False,
        "_asm_dcp_verify_heads": 0,
        "_mla_max_split_per_batch": 0,
        "_dcp_verify_buffers": None,
        "_g_kv_indptr_buf": None,
        "_mla_q_dtype": mla_decode.query_dtype(environment),
        "_mla_kv_dtype": environment.kv_dtype,
        "decode_attn_out_dtype": torch.bfloat16,
        "q_data_type": torch.bfloat16,
        "chunked_prefill_workspace_size": limits.workspace_tokens,
        "chunked_prefill_workspace": torch.empty(
            limits.workspace_tokens + (limits.workspace_tokens // ranks if ranks > 1 else 0), 576, device="meta"
        ),
        "_prefill_backend": SimpleNamespace(prepare_metadata=lambda metadata: None),
        "_fp8_prefill_enabled": environment.gfx == "gfx950" and fp8 and environment.dtype == "bf16",
        "fp8_ps_work_metadata": torch.zeros(2, dtype=torch.int64),
        **dict(
            zip(
                ("fp8_ps_work_indptr", "fp8_ps_work_info", "fp8_ps_reduce_indptr"),
                outputs[:3],
                strict=True,
            )
        ),
        "fp8_ps_reduce_final_map": outputs[3],
        "fp8_ps_reduce_partial_map": outputs[4],
        "_fp8_ps_device_outputs": outputs,
        "_fp8_ps_staging": [_fp8_buffers(limits, environment, rows) for _ in range(2)],
        "_fp8_ps_staging_free": [Free(), Free()],
        "_fp8_ps_slot": 0,
        "compilation_config": SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL if full else CUDAGraphMode.NONE),
        "model_config": SimpleNamespace(dtype=torch.bfloat16, get_head_size=lambda: 576),
    }
    attributes |= {f"_mla_{name}": torch.zeros(8) for name in WORK}
    for name, value in attributes.items():
        setattr(builder, name, value)
    return builder


def metadata_of(batch, environment):
    """The `CommonAttentionMetadata` of a batch."""
    starts = torch.tensor(batch.query_start_loc)
    seq_lens = torch.tensor(batch.seq_lens)
    ranks = environment.dcp_world_size
    shard = (ranks, environment.dcp_rank, environment.dcp_interleave)
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
        dcp_local_seq_lens=get_dcp_local_seq_lens(seq_lens, *shard) if ranks > 1 else None,
    )


CHUNK_LISTS = {
    "request_slice": lambda chunk: [chunk.request_slice.start, chunk.request_slice.stop],
    "token_slice": lambda chunk: [chunk.token_slice.start, chunk.token_slice.stop],
    "local_context_lens_allranks": lambda chunk: chunk.local_context_lens_allranks,
    "padded_local_seq_lens": lambda chunk: chunk.padded_local_seq_lens,
    "local_starts": lambda chunk: chunk.local_starts,
}


def chunk_field(context, name):
    """The upstream value of `prefill.chunked_context.<name>`: 0.32 keeps one object a chunk, a plan keeps columns."""
    if name == "num_chunks":
        return len(context.chunks)
    if name == "empty_token_slices":
        return [[part.start, part.stop] for part in context.empty_token_slices]
    if name == "workspace":
        return context.workspace
    if name in CHUNK_LISTS:
        return [CHUNK_LISTS[name](chunk) for chunk in context.chunks]
    column = [getattr(chunk, name) for chunk in context.chunks]
    return torch.cat(column) if isinstance(column[0], torch.Tensor) else column


def upstream_field(metadata, name):
    """The upstream value of a planned field; None where upstream keeps it under no name."""
    part, _, rest = name.partition(".")
    if part == "common":
        return getattr(metadata, rest, None)
    if part == "decode":
        work = {"work_metadata_ptrs": "work_meta_data", "work_info": "work_info_set"}.get(rest, rest)
        return getattr(metadata, work) if work in WORK else getattr(metadata.decode, rest, None)
    if rest.startswith("chunked_context."):
        return chunk_field(metadata.prefill.chunked_context, rest.partition(".")[2])
    if rest.startswith("fp8_ps."):
        last = {"work_info": "work_info_set"}.get(rest.partition(".")[2], rest.partition(".")[2])
        return getattr(metadata, f"fp8_prefill_{last}")
    return getattr(metadata.prefill, rest)
