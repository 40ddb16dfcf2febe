"""vLLM's ROCM_AITER_MLA: a decode segment of uniform query length and a prefill segment with chunked context.

Compared with `rocm_aiter_mla.py` and `mla_attention.py` of vLLM 0.32; 0.26 cuts contexts differently and schedules
decodes of one token a row only. Which kernel serves a decode is told in `mla_decode.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import BadInput
from ..planner import schedules
from ..planner.backend import Backend, Field, Maker, Route, Step
from ..planner.environment import Environment, Limits
from . import mla_decode as decode
from . import mla_kernels as kernels
from . import mla_prefill as prefill
from .mla_context import prefill_query_start_loc

FP8_QUERY_TILE = 256  # query rows of one tile of the FP8 prefill kernel
FP8_KV_UNIT = 128

# ---------------------------------------------------------------- values


def fp8_schedule(step: Step) -> schedules.WorkSchedule:
    """The FP8 prefill schedule; new tokens only, so keys are counted like queries."""
    starts = step.once(prefill_query_start_loc)
    return schedules.ps_prefill(
        starts,
        starts,
        np.diff(starts),
        num_heads_k=_fp8_heads(step),
        num_cu=step.environment.num_cu,
        qlen_granularity=FP8_QUERY_TILE,
        kvlen_granularity=FP8_KV_UNIT,
    )


def _fp8_heads(step: Step) -> int:
    heads = step.limits.num_heads
    return heads if prefill.is_026(step) else decode.padded_heads(heads)


def heads(step: Step) -> Mapping[str, int]:
    """Query heads as launched."""
    found = {}
    if "decode" in step:
        found["decode"] = decode.launched_heads(step)
    if "prefill" in step and _takes_fp8(step):
        found["fp8_prefill"] = _fp8_heads(step)
    return found


# ---------------------------------------------------------------- conditions


def _has_fp8_cache(step: Step) -> bool:
    return step.environment.kv_dtype == "fp8"


def _takes_fp8(step: Step) -> bool:
    return step.once(_fp8_refusal) is None


def _fp8_refusal(step: Step) -> str | None:
    """Why the FP8 prefill kernel does not run; None where it does."""
    environment = step.environment
    if environment.gfx != "gfx950":
        return f"the FP8 prefill kernel is built for gfx950 only, not for {environment.gfx}"
    if not _has_fp8_cache(step):
        return "the KV cache is not FP8: the prefill runs flash_attn_varlen_func"
    if environment.dtype != "bf16":
        return f"the FP8 prefill kernel writes bf16 through a raw pointer, the model runs in {environment.dtype}"
    if prefill.has_context(step):
        return "the segment has context: new tokens and context are merged in two passes, neither of them FP8"
    return None


# ---------------------------------------------------------------- reasons


def _work_unread(step: Step) -> str:
    environment, served = step.environment, step.once(decode.serving)
    if served is decode.Kernel.UNSCHEDULED:
        return f"vLLM {environment.vllm} launches decode blocks of this length without a schedule"
    if served is decode.Kernel.LACKING:
        fills = decode.gathered_heads(environment, step.limits) >= decode.HEADS_PER_KERNEL
        return (
            f"no persistent kernel takes 16 heads and more than {decode.MAX_BF16_PERSISTENT_QUERY} bf16 tokens a row: "
            "the split-KV kernel serves them" + (", though vLLM 0.32 fills the buffers" if fills else "")
        )
    if served is decode.Kernel.GATED:
        return (
            f"aiter takes the split-KV kernel from {environment.mla_persistent_max_batch} launched rows on "
            "(AITER_MLA_DECODE_PERSISTENT_MAX_BATCH) for gfx950, bf16, 16 heads and one token a row"
        )
    return "mla_gluon splits the KV by itself; only the assembly kernels follow a schedule"


def _fp8_unread(step: Step) -> str:
    return step.once(_fp8_refusal) or "the FP8 prefill kernel does not run"


def _decode_only(what: str) -> Maker:
    def reason(step: Step) -> str:
        return f"prefill kernels take {what} from their own fields" if "decode" not in step else f"{what} is not read"

    return reason


def _min_kv_unread(step: Step) -> str:
    if step.once(decode.serving) is decode.Kernel.GLUON:
        return "vLLM hands mla_gluon a bound for draft blocks only; one token a row keeps the default of one split"
    return "only mla_gluon chooses its number of splits by a shortest sequence"


# ---------------------------------------------------------------- fields

COMMON_FIELDS = (
    Field("common.num_actual_tokens", "host", "int", lambda step: step.batch.num_tokens),
    Field("common.slot_mapping", "device", "int64", shape=lambda step: (step.batch.num_tokens,)),
    Field(
        "common.seq_lens",
        "device",
        shape=lambda step: (len(step.batch),),
        unread=_decode_only("sequence lengths"),
    ),
    Field(
        "common.block_table",
        "device",
        shape=lambda step: (len(step.batch), None),
        unread="a prefill without context reads the new keys and values, not the cache",
    ),
)


def _decode_field(name: str, source: Any, extra: int | None = 0, launches: int = 0, unread: Any = "") -> Field:
    """A per-row vector of the decode segment with `extra` elements more; `extra` None: a length the engine knows."""

    def shape(step: Step) -> tuple[int | None, ...]:
        return (None if extra is None else step.once(decode.decode_rows).rows + extra,)

    return Field(f"decode.{name}", source, shape=shape, launches=launches, unread=unread)


NO_INDPTR = "mla_gluon takes a whole block of equal queries"

DECODE_FIELDS = (
    _decode_field("qo_indptr", "persistent", 1, launches=1, unread=NO_INDPTR),
    _decode_field("paged_kv_indptr", "persistent", 1, launches=2),
    _decode_field("paged_kv_indices", "persistent", None, launches=1),
    _decode_field(
        "paged_kv_last_page_len", "persistent", unread="mla_gluon walks single tokens, which have no last page"
    ),
    _decode_field("seq_lens", "device", unread="only the merge of decode context parallelism reads the lengths again"),
    Field(
        "decode.max_qo_len",
        "host",
        "int",
        lambda step: step.once(decode.decode_rows).max_qo_len,
    ),
    Field(
        "decode.uni_seqlen_qo",
        "host",
        "int",
        lambda step: step.once(decode.decode_rows).uni_seqlen_qo,
        unread="nothing plans a schedule on this route",
    ),
    Field(
        "decode.min_kv_seq_len",
        "host",
        "int",
        decode.min_kv_seq_len,
        lengths="lower",
        unread=_min_kv_unread,
    ),
)


def _work_field(name: str) -> Field:
    return Field(
        f"decode.{name}",
        "persistent",
        "uint64" if name == "work_metadata_ptrs" else "int32",
        shape=lambda step: step.once(decode.work_shapes)[name],
        unread=_work_unread,
        # One launch of aiter's planner fills all six.
        launches=int(name == "work_info"),
    )


WORK_FIELDS = tuple(_work_field(name) for name in kernels.WORK_BUFFERS)


def _fp8_field(name: str, dtype: str, value: Maker) -> Field:
    return Field(f"prefill.fp8_ps.{name}", "host", dtype, value, unread=_fp8_unread)


def _schedule_field(name: str) -> Field:
    return _fp8_field(name, "int32", lambda step: getattr(step.once(fp8_schedule), name))


FP8_FIELDS = (
    *(_schedule_field(name) for name in kernels.WORK_BUFFERS[1:]),
    _fp8_field("num_partial_tiles", "int", lambda step: step.once(fp8_schedule).num_partials),
    Field(
        "prefill.fp8_ps.kv_indices",
        "persistent",
        # Keys lie in the order of the queries: a constant 0, 1, 2, ... that is filled once.
        shape=lambda step: (int(step.once(prefill_query_start_loc)[-1]),),
        unread=_fp8_unread,
    ),
)


def _shard_field(name: str, dtype: str, packed: str = "", even: str = "") -> Field:
    return prefill.chunk_field(name, dtype, packed, even, of_shard=True)


SHARD_FIELDS = (
    _shard_field("local_context_lens_allranks", "list[list[int]]", "local_lens_allranks", "local_lens_allranks"),
    _shard_field("padded_local_cu_seq_lens", "int32", "local_cu_seq_lens", "local_cu_seq_lens"),
    _shard_field("padded_local_token_to_seq", "int32", "local_token_to_seq", "local_token_to_seq"),
    _shard_field("padded_local_seq_lens", "list[list[int]]", "local_seq_lens"),
    _shard_field("num_local_context_tokens", "list[int]", "num_local_tokens"),
    _shard_field("local_starts", "list[list[int]]", "local_starts"),
    _shard_field("padded_local_chunk_seq_lens", "list[list[int]]", "", "local_chunk_seq_lens"),
    _shard_field("cu_seq_lens_lst", "list[list[int]]", "", "cu_seq_lens_lst"),
    _shard_field("chunk_size", "int", "", "chunk_size"),
)

# ---------------------------------------------------------------- routes


def _refused_block(step: Step) -> str:
    return (
        f"decode context parallelism of blocks of {step.once(decode.decode_rows).max_qo_len} tokens a row is left to "
        "vLLM: its segmented and round-robin kernels are not declared"
    )


REFUSALS = (
    *prefill.NOT_CAUSAL,
    Route(
        "decode",
        when=lambda step: prefill.is_sharded(step) and prefill.is_026(step),
        refuse="vLLM 0.26 has no decode context parallelism for this backend: its decode returns no log-sum-exp",
    ),
    Route(
        "decode",
        when=lambda step: prefill.is_sharded(step) and step.once(decode.decode_rows).max_qo_len > 1,
        refuse=_refused_block,
    ),
)

# One route for every reason to leave the schedule out: what is left out, and why, is kept by route.
DECODE_KERNELS = {
    decode.Kernel.PERSISTENT: (kernels.SCHEDULER, kernels.PERSISTENT),
    decode.Kernel.GATED: (kernels.SPLIT_KV,),
    decode.Kernel.LACKING: (kernels.SPLIT_KV,),
    decode.Kernel.UNSCHEDULED: (kernels.SPLIT_KV,),
    decode.Kernel.GLUON: (kernels.GLUON,),
    decode.Kernel.GLUON_VERIFY: (kernels.GLUON_VERIFY,),
}


def _decode_route(served: decode.Kernel, is_sharded: bool) -> Route:
    """Under decode context parallelism the ranks' results are merged behind the same kernels."""

    def when(step: Step) -> bool:
        return step.once(decode.serving) is served and prefill.is_sharded(step) is is_sharded

    tail = (kernels.COMBINE,) if is_sharded else ()
    return Route("decode", (*DECODE_KERNELS[served], *tail), when, kernels.BUILD_DECODE)


CONTEXT_KERNELS = {
    ("0.32", "whole"): (kernels.GATHER, kernels.CONTEXT, kernels.ACCUMULATE),
    ("0.32", "shard"): (kernels.GATHER_SHARD, kernels.REORDER, kernels.CONTEXT, kernels.ACCUMULATE),
    ("0.32", "fp8 shard"): (kernels.GATHER_FP8_SHARD, kernels.REORDER, kernels.CONTEXT, kernels.ACCUMULATE),
    ("0.26", "whole"): (kernels.GATHER_026, kernels.CONTEXT_026, kernels.MERGE_026),
    ("0.26", "shard"): (kernels.GATHER_SHARD_026, kernels.REORDER_026, kernels.CONTEXT_026, kernels.MERGE_026),
    ("0.26", "fp8 shard"): (kernels.GATHER_FP8_SHARD_026, kernels.REORDER_026, kernels.CONTEXT_026, kernels.MERGE_026),
}


def _context_kind(step: Step) -> tuple[str, str] | None:
    """Which vLLM gathers what of the context; None where there is none."""
    if not prefill.has_context(step):
        return None
    what = "whole" if not prefill.is_sharded(step) else "fp8 shard" if _has_fp8_cache(step) else "shard"
    return ("0.26" if prefill.is_026(step) else "0.32"), what


def _context_route(kind: tuple[str, str]) -> Route:
    return Route("prefill", (kernels.NEW_TOKENS, *CONTEXT_KERNELS[kind]), lambda step: step.once(_context_kind) == kind)


ROUTES = (
    *REFUSALS,
    *(_decode_route(served, is_sharded) for is_sharded in (False, True) for served in DECODE_KERNELS),
    Route("prefill", (kernels.FP8_PREFILL, kernels.FP8_REDUCE), _takes_fp8),
    *(_context_route(kind) for kind in CONTEXT_KERNELS),
    Route("prefill", (kernels.NEW_TOKENS,)),
)

NEVER_READ = {
    "common.num_reqs": "the segments carry their rows",
    "common.max_query_len": "prefill.max_query_len and decode.max_qo_len reach the kernels",
    "common.max_seq_len": "no kernel of this backend takes a longest sequence",
    "common.query_start_loc": "kernels take decode.qo_indptr and prefill.query_start_loc, which are made from it",
    "common.head_dim": "checked when the layer is made; no kernel takes it from the metadata",
    "decode.block_table": "decode kernels take decode.paged_kv_indices, one entry a token",
    **prefill.NEVER_READ,
}


def _check(environment: Environment, limits: Limits) -> None:
    """Refuse, before any batch, what the backend would refuse after the model has been loaded."""
    if environment.gfx not in ("gfx942", "gfx950"):
        raise BadInput(f"gfx: expected gfx942 or gfx950 for aiter_mla, got {environment.gfx}")
    decode.check_heads("num_heads", limits.num_heads, environment)
    if environment.dcp_world_size > 1:
        gathered = decode.gathered_heads(environment, limits)
        decode.check_heads(f"num_heads of {environment.dcp_world_size} ranks", gathered, environment)
    if limits.num_kv_heads != 1:
        raise BadInput(f"num_kv_heads: expected 1, the latent head of MLA, got {limits.num_kv_heads}")
    if limits.sliding_window is not None:
        raise BadInput(f"sliding_window: expected none for aiter_mla, got {limits.sliding_window}")
    if environment.kv_sharing:
        raise BadInput("kv_sharing: expected false, MLA layers do not share caches")
    if environment.attention_sinks:
        raise BadInput("attention_sinks: expected false for aiter_mla")


BACKEND = Backend(
    name="aiter_mla",
    upstream="ROCM_AITER_MLA",
    split="two",
    query_lens="uniform",
    routes=ROUTES,
    shared=(Route("all", (kernels.CACHE_WRITE,), entry=kernels.FORWARD),),
    fields=(
        *COMMON_FIELDS,
        *DECODE_FIELDS,
        *WORK_FIELDS,
        *prefill.FIELDS,
        *FP8_FIELDS,
        *prefill.CHUNK_FIELDS,
        *SHARD_FIELDS,
    ),
    never_read=NEVER_READ,
    check=_check,
    heads=heads,
    padding_cuts=lambda environment: environment.release == (0, 26),
)
