"""Kernels of AITER MLA and what each reads: metadata field -> its own parameter. Those of vLLM 0.26 are named so."""

from __future__ import annotations

from ..planner.backend import Kernel

WORK_BUFFERS = (
    "work_metadata_ptrs",
    "work_indptr",
    "work_info",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)

FORWARD = Kernel("forward", {"common.num_actual_tokens": "query, key, output"})
CACHE_WRITE = Kernel("concat_and_cache_mla", {"common.slot_mapping": "slot_mapping"})

BUILD_DECODE = Kernel(
    "_build_decode",
    {
        "common.seq_lens": "running sum into paged_kv_indptr",
        "common.block_table": "block_table of _expand_page_indices_kernel",
        "decode.max_qo_len": "choice of the decode kernel",
    },
)
SCHEDULER = Kernel(
    "get_mla_metadata_v1",
    {
        "decode.qo_indptr": "seqlens_qo_indptr",
        "decode.paged_kv_indptr": "seqlens_kv_indptr",
        "decode.paged_kv_last_page_len": "kv_last_page_lens",
        "decode.max_qo_len": "max_seqlen_qo",
        "decode.uni_seqlen_qo": "uni_seqlen_qo",
    },
)
PAGED_READS = {
    "decode.qo_indptr": "qo_indptr",
    "decode.paged_kv_indptr": "kv_indptr",
    "decode.paged_kv_indices": "kv_indices",
    "decode.paged_kv_last_page_len": "kv_last_page_lens",
    "decode.max_qo_len": "max_seqlen_q",
}
WORK_PARAMETERS = dict(
    zip(WORK_BUFFERS, ("work_meta_data", "work_indptr", "work_info_set", *WORK_BUFFERS[3:]), strict=True)
)
PERSISTENT = Kernel(
    "mla_decode_fwd (persistent)",
    PAGED_READS | {f"decode.{name}": parameter for name, parameter in WORK_PARAMETERS.items()},
)
SPLIT_KV = Kernel("mla_decode_fwd (split KV)", PAGED_READS)
GLUON_READS = {"decode.paged_kv_indices": "page_table", "decode.paged_kv_indptr": "seq_info"}
GLUON = Kernel("mla_gluon", GLUON_READS)
GLUON_VERIFY = Kernel(
    "mla_gluon (verify)",
    GLUON_READS | {"decode.max_qo_len": "query length of a block", "decode.min_kv_seq_len": "min_kv_seq_len"},
)
COMBINE = Kernel("dcp_combine", {"decode.seq_lens": "seq_lens"})

NEW_TOKENS = Kernel(
    "flash_attn_varlen_func",
    {
        "prefill.query_start_loc": "cu_seqlens_q, cu_seqlens_k",
        "prefill.max_query_len": "max_seqlen_q, max_seqlen_k",
    },
)
FP8_PREFILL = Kernel(
    "mla_prefill_ps_asm_fwd",
    {
        "prefill.query_start_loc": "qo_indptr, kv_indptr",
        "prefill.max_query_len": "max_seqlen_q",
        "prefill.fp8_ps.kv_indices": "kv_page_indices",
        "prefill.fp8_ps.work_indptr": "work_indptr",
        "prefill.fp8_ps.work_info": "work_info_set",
    },
)
FP8_REDUCE = Kernel(
    "mla_reduce_v1",
    {
        "prefill.fp8_ps.num_partial_tiles": "rows of partial_output",
        "prefill.fp8_ps.reduce_indptr": "reduce_indptr",
        "prefill.fp8_ps.reduce_final_map": "reduce_final_map",
        "prefill.fp8_ps.reduce_partial_map": "reduce_partial_map",
    },
)


def _chunks(**reads: str) -> dict[str, str]:
    return {f"prefill.chunked_context.{name}": parameter for name, parameter in reads.items()}


FROM_CACHE = {"common.block_table": "block_table"} | _chunks(workspace="dst", starts="seq_starts")
GATHER = Kernel(
    "gather_and_maybe_dequant_cache",
    FROM_CACHE
    | _chunks(
        cu_seq_lens="cu_seq_lens",
        token_to_seq="token_to_seq",
        num_context_tokens="num_tokens",
        request_slice="rows of block_table",
        num_chunks="number of rounds",
    ),
)
CONTEXT = Kernel(
    "flash_attn_varlen_func",
    _chunks(
        query_start_loc="cu_seqlens_q",
        cu_seq_lens="cu_seqlens_k",
        max_query_len="max_seqlen_q",
        max_seq_len="max_seqlen_k",
        token_slice="rows of q",
    ),
)
ACCUMULATE = Kernel(
    "merge_attn_states",
    _chunks(
        token_slice="rows of output",
        is_continuation="choice of merge or copy",
        continuation_token_end="rows of output",
        empty_token_slices="rows of output without context",
    ),
)
SHARD_READS = _chunks(
    padded_local_cu_seq_lens="cu_seq_lens",
    num_local_context_tokens="num_tokens",
    request_slice="rows of block_table",
    num_chunks="number of rounds",
)
GATHER_SHARD = Kernel("cp_gather_cache", FROM_CACHE | SHARD_READS)
GATHER_FP8_SHARD = Kernel(
    "gather_and_maybe_dequant_cache",
    FROM_CACHE | SHARD_READS | _chunks(padded_local_token_to_seq="token_to_seq"),
)
REORDER = Kernel(
    "reorg_kvcache",
    _chunks(
        padded_local_seq_lens="padded_local_chunk_seq_lens_lst",
        local_context_lens_allranks="local_context_lens_allranks",
        local_starts="local_starts",
        num_context_tokens="sum_seq_len",
        max_seq_len="max_seq_len",
    ),
)

GATHER_026 = Kernel(
    "gather_and_maybe_dequant_cache",
    FROM_CACHE
    | _chunks(
        cu_seq_lens="cu_seq_lens",
        token_to_seq="token_to_seq",
        chunk_total_token="num_tokens",
        seq_tot="rows of the workspace, number of rounds",
    ),
)
CONTEXT_026 = Kernel(
    "flash_attn_varlen_func",
    {"prefill.query_start_loc": "cu_seqlens_q", "prefill.max_query_len": "max_seqlen_q"}
    | _chunks(cu_seq_lens="cu_seqlens_k", max_seq_lens="max_seqlen_k"),
)
MERGE_026 = Kernel(
    "merge_attn_states",
    _chunks(
        has_empty_context="choice of mask_empty_context",
        cu_seq_lens="context_start_loc of mask_empty_context",
        prefill_tokens_with_context="prefill_tokens_with_context",
    ),
)
SHARD_026_READS = _chunks(padded_local_cu_seq_lens="cu_seq_lens", seq_tot="rows of the workspace, number of rounds")
GATHER_SHARD_026 = Kernel("cp_gather_cache", FROM_CACHE | SHARD_026_READS)
GATHER_FP8_SHARD_026 = Kernel(
    "gather_and_maybe_dequant_cache",
    FROM_CACHE | SHARD_026_READS | _chunks(padded_local_token_to_seq="token_to_seq"),
)
REORDER_026 = Kernel(
    "reorg_kvcache",
    _chunks(
        padded_local_chunk_seq_lens="padded_local_chunk_seq_lens_lst",
        local_context_lens_allranks="local_context_lens_allranks",
        cu_seq_lens_lst="sum_seq_len",
        max_seq_lens="max_seq_len",
        chunk_size="chunk_size",
    ),
)
