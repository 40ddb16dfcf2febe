"""vLLM's CPU_ATTN: one kernel for all rows, its lengths in host memory. Compared with `cpu_attn.py` of vLLM 0.32."""

from __future__ import annotations

from ..errors import BadInput
from ..planner.backend import Backend, Field, Kernel, Route, Step
from ..planner.environment import Environment, Limits
from ..planner.lengths import Int32Array


def _seq_lens(step: Step) -> Int32Array:
    return step.batch.seq_lens


def _query_start_loc(step: Step) -> Int32Array:
    return step.batch.query_start_loc


FIELDS = (
    Field("common.num_actual_tokens", "host", "int", lambda step: step.batch.num_tokens),
    Field("common.query_start_loc", "host", "int32", _query_start_loc),
    Field("common.seq_lens", "host", "int32", _seq_lens, lengths="exact", rows=("all",), from_device=True),
    Field("common.causal", "host", "bool", lambda step: step.batch.causal, unread="causal by row: common.row_causal"),
    Field("common.row_causal", "device", "bool", shape=lambda step: (len(step.batch),), unread="one flag for all rows"),
    Field("common.block_table", "device", "int32", shape=lambda step: (len(step.batch), None)),
    Field("common.slot_mapping", "device", "int64", shape=lambda step: (step.batch.num_tokens,)),
    Field("common.scheduler_metadata", "device", "uint8", shape=lambda step: (None,)),
)

READS = {
    "common.query_start_loc": "query_start_loc",
    "common.seq_lens": "seq_lens",
    "common.block_table": "block_table",
    "common.scheduler_metadata": "scheduler_metadata",
}


def _attention(by_row: bool) -> Route:
    reads = READS | ({"common.row_causal": "dynamic_causal"} if by_row else {"common.causal": "causal"})
    return Route(
        "all",
        (Kernel("cpu_attention_with_kv_cache", reads),),
        lambda step: (step.batch.causal is None) == by_row,
    )


def _check(environment: Environment, limits: Limits) -> None:
    del environment
    if limits.block_size % 32:
        raise BadInput(f"limits.block_size: expected a multiple of 32 for cpu_attn, got {limits.block_size}")


BACKEND = Backend(
    name="cpu_attn",
    upstream="CPU_ATTN",
    split="none",
    routes=(_attention(False), _attention(True)),
    shared=(
        Route(
            "all",
            (Kernel("cpu_attn_reshape_and_cache", {"common.slot_mapping": "slot_mapping"}),),
            entry=Kernel("forward", {"common.num_actual_tokens": "query, output"}),
        ),
    ),
    fields=FIELDS,
    never_read={
        "common.max_query_len": "the kernel finds each row's queries by query_start_loc",
        "common.max_seq_len": "the kernel stops at each row's own length",
    },
    check=_check,
)
