"""Kernels of AITER FA and what each reads: metadata field -> its own parameter."""

from __future__ import annotations

from ..planner.backend import Kernel

SCALES = {"common.k_scale": "k_scales", "common.v_scale": "v_scales"}

FORWARD = Kernel("forward", {"common.num_actual_tokens": "query, key, value, output"})
CACHE_WRITE = Kernel("reshape_and_cache_flash", {"common.slot_mapping": "slot_mapping"})
SHARED_GATHER = Kernel(
    "cp_mha_gather_cache",
    {
        "common.block_table": "block_tables",
        "kv_sharing.workspace": "key, value",
        "kv_sharing.query_start_loc": "cu_seqlens_kv",
        "kv_sharing.token_to_batch": "token_to_batch",
        "kv_sharing.seq_starts": "seq_starts",
    },
)

DECODE_CHOICE = Kernel("forward", {"decode.max_query_len": "choice of the decode kernel"})
PAGED_ATTENTION = Kernel(
    "paged_attention_v1",
    {
        "common.block_table": "block_tables",
        "common.query_start_loc": "query_start_loc",
        "common.seq_lens": "context_lens",
        "common.max_seq_len": "max_context_len",
    },
)
PAGED_SHUFFLE_READS = {
    "common.block_table": "block_tables",
    "common.seq_lens": "context_lens",
    "common.max_seq_len": "max_seq_len",
}
PAGED_SHUFFLE = Kernel("paged_attention_common", PAGED_SHUFFLE_READS)
PAGED_SHUFFLE_FP8 = Kernel(
    "paged_attention_common", PAGED_SHUFFLE_READS | {"common.k_scale": "K_QScale", "common.v_scale": "V_QScale"}
)
UNIFIED = Kernel(
    "unified_attention",
    {
        "common.query_start_loc": "cu_seqlens_q",
        "common.seq_lens": "seqused_k",
        "common.block_table": "block_table",
        "common.max_seq_len": "max_seqlen_k",
        "common.causal": "choice against flash_attn_with_kvcache",
        "decode.max_query_len": "max_seqlen_q",
    },
)
WITH_KVCACHE = Kernel(
    "flash_attn_with_kvcache",
    {
        "common.seq_lens": "cache_seqlens",
        "common.block_table": "page_table",
        "common.causal": "causal",
        "decode.max_query_len": "shape of q",
    },
)

PREFILL = Kernel(
    "flash_attn_varlen_func",
    {
        "prefill.query_start_loc": "cu_seqlens_q, cu_seqlens_k",
        "prefill.max_query_len": "max_seqlen_q",
        "prefill.max_seq_len": "max_seqlen_k",
        "common.causal": "causal",
    },
)

EXTEND_FORWARD = Kernel("extend_forward", {"extend.max_seq_len": "max_seqlen_k"})
EXTEND_NEW = Kernel(
    "flash_attn_varlen_func",
    {"extend.query_start_loc": "cu_seqlens_q, cu_seqlens_k", "extend.max_query_len": "max_seqlen_q, max_seqlen_k"},
)
CONTEXT_GATHER_READS = {
    "common.block_table": "block_tables",
    "extend.chunk_context.workspace": "key, value",
    "extend.chunk_context.cu_seq_lens_chunk": "cu_seqlens_kv",
    "extend.chunk_context.chunk_starts": "seq_starts",
    "extend.chunk_context.token_to_batch": "token_to_batch",
    "extend.chunk_context.total_token_per_batch": "total_tokens",
    "extend.chunk_context.num_chunks": "number of rounds",
}
CONTEXT_GATHER = Kernel("cp_mha_gather_cache", CONTEXT_GATHER_READS)
CONTEXT_GATHER_FP8_SHUFFLE = Kernel("cp_mha_gather_cache", CONTEXT_GATHER_READS | SCALES)
CONTEXT = Kernel(
    "flash_attn_varlen_func",
    {
        "extend.query_start_loc": "cu_seqlens_q",
        "extend.max_query_len": "max_seqlen_q",
        "extend.chunk_context.cu_seq_lens_chunk": "cu_seqlens_k",
        "extend.chunk_context.max_seq_lens": "max_seqlen_k",
    },
)
MERGE = Kernel("merge_attn_states")
WINDOW_GATHER = Kernel(
    "cp_mha_gather_cache",
    {
        "common.block_table": "block_tables",
        "extend.swa.workspace": "key, value",
        "extend.swa.cu_seqlens": "cu_seqlens_kv",
        "extend.swa.seq_starts": "seq_starts",
        "extend.swa.token_to_batch": "token_to_batch",
        "extend.swa.total_tokens": "total_tokens",
    },
)
WINDOW = Kernel(
    "flash_attn_varlen_func",
    {
        "extend.query_start_loc": "cu_seqlens_q",
        "extend.max_query_len": "max_seqlen_q",
        "extend.swa.cu_seqlens": "cu_seqlens_k",
        "extend.swa.max_seqlens": "max_seqlen_k",
    },
)
CHUNKED = (EXTEND_NEW, CONTEXT_GATHER, CONTEXT, MERGE)
CHUNKED_FP8_SHUFFLE = (EXTEND_NEW, CONTEXT_GATHER_FP8_SHUFFLE, CONTEXT, MERGE)
WINDOWED = (WINDOW_GATHER, WINDOW)
