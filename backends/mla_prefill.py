"""The prefill segment of every MLA backend of vLLM's: new tokens, and context that is gathered in chunks.

Compared with `mla_attention.py` of vLLM 0.26 and 0.32, which lay chunks out differently.
"""

from __future__ import annotations

from typing import Any

from ..planner.backend import Field, Maker, Route, Step
from .mla_context import EvenChunks, PackedChunks, even_chunks, packed_chunks, prefill_query_start_loc

# ---------------------------------------------------------------- conditions


def is_026(step: Step) -> bool:
    return step.environment.release == (0, 26)


def _continues(step: Step) -> bool:
    """Whether a live row of the prefill segment continues a sequence."""
    rows = step.rows("prefill")
    computed = step.batch.computed_lens[rows]
    return bool(computed.any()) and bool(computed[step.batch.query_lens[rows] > 0].any())


def has_context(step: Step) -> bool:
    return step.once(_continues)


def is_sharded(step: Step) -> bool:
    return step.environment.dcp_world_size > 1


# ---------------------------------------------------------------- fields


def _longest_query(step: Step) -> int:
    """Upstream hands a prefill the longest query of the whole batch, and so do we: kernels need a bound only."""
    return step.batch.max_query_len


FIELDS = (
    Field("prefill.query_start_loc", "host", "int32", lambda step: step.once(prefill_query_start_loc)),
    Field("prefill.max_query_len", "host", "int", _longest_query),
)


def _unread(version: str = "", of_shard: bool = False) -> Maker:
    """For a field of one vLLM version's layout (or of both), of the rank's shard (or of the whole context)."""

    def reason(step: Step) -> str:
        if not has_context(step):
            return "no row of this prefill segment has context"
        if version and not step.environment.vllm.startswith(version):
            return f"vLLM {step.environment.vllm} cuts contexts differently and has no such field"
        if not is_sharded(step):
            return "without decode context parallelism a rank gathers whole contexts"
        if of_shard:
            return "cp_gather_cache takes no map of tokens; only the gather of an FP8 cache does"
        return "under decode context parallelism a rank gathers its shard"

    return reason


def _chunks(step: Step) -> PackedChunks | EvenChunks:
    return even_chunks(step) if is_026(step) else packed_chunks(step)


def chunk_field(name: str, dtype: str, packed: str = "", even: str = "", of_shard: bool = False) -> Field:
    """A field of vLLM 0.32's layout (`packed`), of 0.26's (`even`), or of both."""

    def value(step: Step) -> Any:
        chunks = step.once(_chunks)
        return getattr(chunks, packed if isinstance(chunks, PackedChunks) else even)

    version = "" if packed and even else "0.32" if packed else "0.26"
    return Field(
        f"prefill.chunked_context.{name}",
        "host",
        dtype,
        value,
        lengths="exact",
        unread=_unread(version, of_shard),
    )


def _workspace_rows(step: Step) -> int:
    tokens, ranks = step.limits.workspace_tokens, step.environment.dcp_world_size
    return tokens if ranks == 1 else tokens + tokens // ranks


CHUNK_FIELDS = (
    Field(
        "prefill.chunked_context.workspace",
        "persistent",
        lambda environment: environment.dtype,
        shape=lambda step: (_workspace_rows(step), None),
        unread=_unread(),
    ),
    chunk_field("cu_seq_lens", "int32", "cu_seq_lens", "cu_seq_lens"),
    chunk_field("starts", "int32", "starts", "starts"),
    chunk_field("token_to_seq", "int32", "token_to_seq", "token_to_seq"),
    chunk_field("query_start_loc", "int32", "query_start_loc"),
    chunk_field("num_chunks", "int", "num_chunks"),
    chunk_field("request_slice", "list[list[int]]", "rows"),
    chunk_field("token_slice", "list[list[int]]", "tokens"),
    chunk_field("continuation_token_end", "list[int]", "continuation_token_end"),
    chunk_field("is_continuation", "list[bool]", "is_continuation"),
    chunk_field("num_context_tokens", "list[int]", "num_context_tokens"),
    chunk_field("max_query_len", "list[int]", "max_query_len"),
    chunk_field("max_seq_len", "list[int]", "max_seq_len"),
    chunk_field("empty_token_slices", "list[list[int]]", "empty_tokens"),
    chunk_field("seq_tot", "list[int]", "", "seq_tot"),
    chunk_field("max_seq_lens", "list[int]", "", "max_seq_lens"),
    chunk_field("chunk_total_token", "list[int]", "", "chunk_total_token"),
    chunk_field("has_empty_context", "list[bool]", "", "has_empty_context"),
    chunk_field("prefill_tokens_with_context", "int", "", "prefill_tokens_with_context"),
)


NEVER_READ = {
    "prefill.query_lens_cpu": "only the TRT-LLM prefill backend reads it",
    "prefill.chunked_context.context_lens": "copied to the device by 0.32, read by no kernel",
    "prefill.chunked_context.context_lens_list": "chunk starts and lengths are made from it; no kernel takes it",
    "prefill.chunked_context.seq_lens": "chunk lengths reach the kernels through cu_seq_lens and max_seq_len",
    "prefill.chunked_context.all_rows_active": "only the TRT-LLM prefill backend reads it",
}

# ---------------------------------------------------------------- routes

NOT_CAUSAL = tuple(
    Route(
        segment,
        when=lambda step: step.batch.causal is not True,
        refuse="only causal batches are planned: a drafter's non-causal block is left to vLLM",
    )
    for segment in ("decode", "prefill")
)
