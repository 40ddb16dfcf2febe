"""vLLM's ROCM_AITER_FA: three segments, chunked context for extends. Compared with `rocm_aiter_fa.py` of vLLM 0.32.

Lengths come from the host only: upstream copies `seq_lens` back for every batch with an extend or a prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import BadInput
from ..planner import rows as passes
from ..planner.backend import Backend, Field, LengthUse, Maker, Route, Shape, Source, Step
from ..planner.environment import Environment, Limits
from ..planner.lengths import Int32Array
from . import fa_kernels as kernels
from .fa_context import CONTEXT_TOKENS, context_chunks, windows


def _query_start_loc(segment: str) -> Maker:
    """(rows + 1,) int32 of the segment, starting at 0."""

    def value(step: Step) -> Int32Array:
        rows = step.rows(segment)
        starts = step.batch.query_start_loc[rows.start : rows.stop + 1]
        rebased: Int32Array = starts - starts[0]
        return rebased

    return value


def _max_query_len(segment: str) -> Maker:
    return lambda step: step[segment].max_query_len(step.batch)


def _max_seq_len(segment: str) -> Maker:
    return lambda step: step[segment].max_seq_len(step.batch)


def _new_rows(step: Step) -> slice:
    """Rows of extend and prefill together: what KV sharing fetches the new tokens of."""
    first = step.segments.get("extend") or step.segments["prefill"]
    return slice(first.rows[0], len(step.batch))


def _shared_query_start_loc(step: Step) -> Int32Array:
    starts = step.batch.query_start_loc[_new_rows(step).start :]
    rebased: Int32Array = starts - starts[0]
    return rebased


def _shared_token_to_batch(step: Step) -> Int32Array:
    starts = _shared_query_start_loc(step)
    return passes.token_to_row(starts, int(starts[-1]))


def _shared_seq_starts(step: Step) -> Int32Array:
    return step.batch.computed_lens[_new_rows(step)].copy()


# ---------------------------------------------------------------- conditions


def _windowed(step: Step) -> bool:
    return step.limits.sliding_window is not None


def _both_layer_types(step: Step) -> bool:
    return _windowed(step) and step.limits.full_attention_layers


def _multi_token(step: Step) -> bool:
    return step["decode"].max_query_len(step.batch) > 1


def _takes_unified(step: Step) -> bool:
    """The paged kernels take neither a window, nor sinks, nor several tokens a row."""
    return _windowed(step) or step.environment.attention_sinks or _multi_token(step)


def _fp8_shuffle(step: Step) -> bool:
    return step.environment.shuffle_kv and step.environment.kv_dtype == "fp8"


def _shares(step: Step) -> bool:
    return step.environment.kv_sharing and ("extend" in step or "prefill" in step)


# ---------------------------------------------------------------- reasons for leaving out

NO_WINDOW = "no layer of this builder has a sliding window"
FROM_CACHE = "a prefill without context reads the new keys and values, not the cache"
WINDOW_ONLY = (
    "every layer has a sliding window: the extend gathers the window (extend.swa) and returns before the chunks"
)


def _decode_only(what: str) -> Maker:
    def reason(step: Step) -> str:
        if "decode" not in step:
            return f"no decode rows in this batch: prefill and extend take {what} from their own fields"
        return f"the decode kernel of this route does not take {what}"

    return reason


def _scale_unread(step: Step) -> str:
    if not step.environment.shuffle_kv:
        return "outside the shuffle KV layout kernels take the layer's own scale"
    if step.environment.kv_dtype != "fp8":
        return "the KV cache is not quantised: no kernel dequantises with it"
    return FROM_CACHE


def _sharing_unread(step: Step) -> str:
    if not step.environment.kv_sharing:
        return "no layer of this builder reads another layer's cache"
    return "no extend or prefill rows in this batch: decode kernels read the shared cache in place"


# ---------------------------------------------------------------- fields


def _cache_dtype(environment: Environment) -> str:
    return environment.dtype


def _kv_rows(tokens: Callable[[Step], int]) -> Callable[[Step], Shape]:
    """A buffer of keys and values: (2, tokens, KV heads, head size)."""
    return lambda step: (2, tokens(step), step.limits.num_kv_heads, step.limits.head_size)


def _scale_shape(step: Step) -> Shape:
    limits, cache = step.limits, step.environment.kv_cache_bytes
    block_bytes = 2 * limits.block_size * limits.num_kv_heads * limits.head_size
    return (None if cache is None else cache // block_bytes, limits.num_kv_heads, limits.block_size)


def _common(name: str, source: Source, dtype: str, **rest: Any) -> Field:
    return Field(f"common.{name}", source, dtype, **rest)


COMMON_FIELDS = (
    _common("num_actual_tokens", "host", "int", value=lambda step: step.batch.num_tokens),
    _common(
        "max_seq_len",
        "host",
        "int",
        value=lambda step: step.batch.max_seq_len,
        lengths="upper",
        unread=_decode_only("max_seq_len"),
    ),
    _common(
        "causal",
        "host",
        "bool",
        value=lambda step: step.batch.causal,
        unread="the kernels of this route take no causal flag",
    ),
    _common("seq_lens", "device", "int32", shape=lambda step: (len(step.batch),), unread=_decode_only("seq_lens")),
    _common("block_table", "device", "int32", shape=lambda step: (len(step.batch), None), unread=FROM_CACHE),
    _common("slot_mapping", "device", "int64", shape=lambda step: (step.batch.num_tokens,)),
    _common(
        "query_start_loc",
        "device",
        "int32",
        shape=lambda step: (len(step.batch) + 1,),
        unread=_decode_only("query_start_loc"),
    ),
    _common("k_scale", "persistent", "float32", shape=_scale_shape, unread=_scale_unread),
    _common("v_scale", "persistent", "float32", shape=_scale_shape, unread=_scale_unread),
)

SEGMENT_FIELDS = (
    Field("decode.max_query_len", "host", "int", _max_query_len("decode")),
    Field("prefill.max_query_len", "host", "int", _max_query_len("prefill")),
    Field("prefill.max_seq_len", "host", "int", _max_seq_len("prefill"), lengths="exact"),
    Field("prefill.query_start_loc", "host", "int32", _query_start_loc("prefill")),
    Field("extend.max_query_len", "host", "int", _max_query_len("extend")),
    Field("extend.max_seq_len", "host", "int", _max_seq_len("extend"), lengths="exact"),
    Field("extend.query_start_loc", "host", "int32", _query_start_loc("extend")),
)


def _chunk_field(name: str, dtype: str, value: Maker) -> Field:
    return Field(f"extend.chunk_context.{name}", "host", dtype, value, lengths="exact", unread=WINDOW_ONLY)


CHUNK_FIELDS = (
    Field(
        "extend.chunk_context.workspace",
        "persistent",
        _cache_dtype,
        shape=_kv_rows(lambda step: CONTEXT_TOKENS),
        unread=WINDOW_ONLY,
    ),
    _chunk_field("cu_seq_lens_chunk", "int32", lambda step: step.once(context_chunks).cu_seq_lens),
    _chunk_field("chunk_starts", "int32", lambda step: step.once(context_chunks).starts),
    _chunk_field("token_to_batch", "int32", lambda step: step.once(context_chunks).token_to_batch),
    _chunk_field("max_seq_lens", "list[int]", lambda step: step.once(context_chunks).max_seq_lens),
    _chunk_field("num_chunks", "int", lambda step: len(step.once(context_chunks).totals)),
    _chunk_field("total_token_per_batch", "list[int]", lambda step: step.once(context_chunks).totals),
)


def _window_field(name: str, dtype: str, value: Maker) -> Field:
    return Field(f"extend.swa.{name}", "host", dtype, value, lengths="exact", unread=NO_WINDOW)


WINDOW_FIELDS = (
    Field(
        "extend.swa.workspace",
        "persistent",
        _cache_dtype,
        shape=_kv_rows(lambda step: step.once(windows).total_tokens),
        lengths="exact",
        unread=NO_WINDOW,
    ),
    _window_field("cu_seqlens", "int32", lambda step: step.once(windows).cu_seqlens),
    _window_field("seq_starts", "int32", lambda step: step.once(windows).seq_starts),
    _window_field("token_to_batch", "int32", lambda step: step.once(windows).token_to_batch),
    _window_field("max_seqlens", "int", lambda step: step.once(windows).max_seqlens),
    _window_field("total_tokens", "int", lambda step: step.once(windows).total_tokens),
)


def _sharing_field(name: str, value: Maker, lengths: LengthUse) -> Field:
    rows = ("extend", "prefill")
    return Field(f"kv_sharing.{name}", "host", "int32", value, lengths=lengths, rows=rows, unread=_sharing_unread)


SHARING_FIELDS = (
    Field(
        "kv_sharing.workspace",
        "persistent",
        _cache_dtype,
        shape=_kv_rows(lambda step: step.limits.max_num_batched_tokens),
        unread=_sharing_unread,
    ),
    _sharing_field("query_start_loc", _shared_query_start_loc, "none"),
    _sharing_field("token_to_batch", _shared_token_to_batch, "none"),
    _sharing_field("seq_starts", _shared_seq_starts, "exact"),
)

# ---------------------------------------------------------------- routes

CAUSAL_BY_ROW = "a causal flag that differs by row lies on the device, and this kernel takes one on the host"

ROUTES = (
    Route(
        "decode",
        when=lambda step: step.environment.shuffle_kv and _takes_unified(step),
        refuse="no decode kernel reads the shuffle KV layout with a sliding window, sinks or several tokens a row",
    ),
    Route(
        "decode",
        when=lambda step: step.batch.causal is None and _takes_unified(step),
        refuse=CAUSAL_BY_ROW,
    ),
    Route(
        "decode",
        (kernels.WITH_KVCACHE,),
        lambda step: not step.batch.causal and _takes_unified(step),
        kernels.DECODE_CHOICE,
    ),
    Route(
        "decode",
        (kernels.UNIFIED, kernels.PAGED_ATTENTION),
        lambda step: _both_layer_types(step) and not step.environment.attention_sinks and not _multi_token(step),
        kernels.DECODE_CHOICE,
    ),
    Route("decode", (kernels.UNIFIED,), _takes_unified, kernels.DECODE_CHOICE),
    Route("decode", (kernels.PAGED_SHUFFLE_FP8,), _fp8_shuffle, kernels.DECODE_CHOICE),
    Route("decode", (kernels.PAGED_SHUFFLE,), lambda step: step.environment.shuffle_kv, kernels.DECODE_CHOICE),
    Route("decode", (kernels.PAGED_ATTENTION,), None, kernels.DECODE_CHOICE),
    Route(
        "extend",
        when=lambda step: step.environment.shuffle_kv and _windowed(step),
        refuse="the gather of a sliding window reads the NHD layout only, not the shuffle KV layout",
    ),
    Route("extend", (*kernels.WINDOWED, *kernels.CHUNKED), _both_layer_types, kernels.EXTEND_FORWARD),
    Route("extend", kernels.WINDOWED, _windowed, kernels.EXTEND_FORWARD),
    Route(
        "extend",
        (kernels.EXTEND_NEW, kernels.CONTEXT_GATHER_FP8_SHUFFLE, kernels.CONTEXT, kernels.MERGE),
        _fp8_shuffle,
        kernels.EXTEND_FORWARD,
    ),
    Route("extend", kernels.CHUNKED, None, kernels.EXTEND_FORWARD),
    Route("prefill", when=lambda step: step.batch.causal is None, refuse=CAUSAL_BY_ROW),
    Route("prefill", (kernels.PREFILL,)),
)

NEVER_READ = {
    "decode.min_query_len": "no decode kernel takes a shortest query; computing it cost a reduction every step",
    "decode.max_seq_len": "decode kernels take the batch's common.max_seq_len",
    "decode.query_start_loc": "decode rows come first: kernels slice common.query_start_loc",
    "prefill.min_query_len": "flash_attn_varlen_func is called with min_seqlen_q = 1",
    "extend.min_query_len": "flash_attn_varlen_func is called with min_seqlen_q = 1",
    "extend.swa_seqlens": "only its running sum (extend.swa.cu_seqlens) and its maximum reach a kernel",
    "extend.chunk_context.seq_tot": "duplicates total_token_per_batch",
    "extend.chunk_context.seq_lens": "chunk lengths reach the kernels through cu_seq_lens_chunk and max_seq_lens",
    "common.num_actual_kv_tokens": "no kernel takes a count of KV tokens; summing it on the device forced a sync",
    "common.max_query_len": "each segment carries its own max_query_len",
    "common.num_prefill_tokens": "what is left of num_actual_tokens after decode and extend tokens",
    "common.common_prefix_len": "this backend has no cascade attention",
    "common.total_tokens": "total_token_per_batch and swa.total_tokens say how much each gather moves",
}


def _check(environment: Environment, limits: Limits) -> None:
    if not environment.gfx.startswith(("gfx94", "gfx95")):
        raise BadInput(f"environment.gfx: expected gfx942 or gfx950 for aiter_fa, got {environment.gfx}")
    if limits.head_size not in (64, 128, 256):
        raise BadInput(f"limits.head_size: expected 64, 128 or 256 for aiter_fa, got {limits.head_size}")
    if limits.block_size % 16:
        raise BadInput(f"limits.block_size: expected a multiple of 16 for aiter_fa, got {limits.block_size}")
    if limits.num_heads % limits.num_kv_heads:
        raise BadInput(
            f"limits.num_heads: expected a multiple of num_kv_heads = {limits.num_kv_heads}, got {limits.num_heads}"
        )
    if limits.max_num_seqs > CONTEXT_TOKENS:
        raise BadInput(f"limits.max_num_seqs: expected <= {CONTEXT_TOKENS} for aiter_fa, got {limits.max_num_seqs}")


BACKEND = Backend(
    name="aiter_fa",
    upstream="ROCM_AITER_FA",
    split="three",
    routes=ROUTES,
    shared=(
        Route("all", (kernels.CACHE_WRITE,), entry=kernels.FORWARD),
        Route("kv_sharing", (kernels.SHARED_GATHER,), _shares),
    ),
    fields=(*COMMON_FIELDS, *SEGMENT_FIELDS, *CHUNK_FIELDS, *WINDOW_FIELDS, *SHARING_FIELDS),
    never_read=NEVER_READ,
    check=_check,
)
