"""vLLM's TRITON_ATTN: one kernel for all rows, so nothing is split. Compared with `triton_attn.py` of vLLM 0.32.

The unified kernel runs as 2D, or as 3D with a split softmax where a pure decode is too small to fill the device.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import BadInput
from ..planner.backend import Backend, Field, Kernel, Route, Shape, Step
from ..planner.environment import Environment, Limits

MIN_GRID_2D = 128  # programs that the 2D kernel needs, upstream's MIN_LAUNCH_GRID_SIZE_2D
SOFTMAX_SEGMENTS = 16  # upstream's NUM_PAR_SOFTMAX_SEGMENTS


def seq_threshold_3d(environment: Environment, limits: Limits) -> int:
    """Most rows that the 3D kernel serves: rows times KV heads below the 2D grid, at a captured graph's size."""
    threshold = MIN_GRID_2D // limits.num_kv_heads
    if not environment.full_graphs:
        return threshold
    return min(limits.captured_sizes, key=lambda size: abs(size - threshold))


def _splits_softmax(step: Step) -> bool:
    few = len(step.batch) <= seq_threshold_3d(step.environment, step.limits)
    return few and step.batch.max_query_len <= 1


def _softmax_buffer(*extra: Callable[[Limits], int]) -> Callable[[Step], Shape]:
    def shape(step: Step) -> Shape:
        rows = seq_threshold_3d(step.environment, step.limits)
        return (rows, step.limits.num_heads, SOFTMAX_SEGMENTS, *(extent(step.limits) for extent in extra))

    return shape


def _padded_head(limits: Limits) -> int:
    return 1 << (limits.head_size - 1).bit_length()


NOT_SPLIT = "the 2D kernel keeps its softmax in registers; only a pure decode of few rows is split (3D)"

FIELDS = (
    Field("common.num_actual_tokens", "host", "int", lambda step: step.batch.num_tokens),
    Field("common.max_query_len", "host", "int", lambda step: step.batch.max_query_len),
    Field("common.causal", "host", "bool", lambda step: step.batch.causal, unread="causal by row: common.row_causal"),
    Field("common.row_causal", "device", "bool", shape=lambda step: (len(step.batch),), unread="one flag for all rows"),
    Field("common.query_start_loc", "device", "int32", shape=lambda step: (len(step.batch) + 1,)),
    Field("common.seq_lens", "device", "int32", shape=lambda step: (len(step.batch),)),
    Field("common.block_table", "device", "int32", shape=lambda step: (len(step.batch), None)),
    Field("common.slot_mapping", "device", "int64", shape=lambda step: (step.batch.num_tokens,)),
    Field(
        "common.seq_threshold_3D",
        "host",
        "int",
        lambda step: seq_threshold_3d(step.environment, step.limits),
    ),
    Field("common.num_par_softmax_segments", "host", "int", lambda step: SOFTMAX_SEGMENTS, unread=NOT_SPLIT),
    Field("common.softmax_segm_output", "persistent", "float32", shape=_softmax_buffer(_padded_head), unread=NOT_SPLIT),
    Field("common.softmax_segm_max", "persistent", "float32", shape=_softmax_buffer(), unread=NOT_SPLIT),
    Field("common.softmax_segm_expsum", "persistent", "float32", shape=_softmax_buffer(), unread=NOT_SPLIT),
)

READS = {
    "common.query_start_loc": "cu_seqlens_q",
    "common.seq_lens": "seqused_k",
    "common.block_table": "block_table",
    "common.max_query_len": "max_seqlen_q",
    "common.seq_threshold_3D": "choice of 2D or 3D",
}
SPLIT_READS = {
    "common.num_par_softmax_segments": "grid",
    "common.softmax_segm_output": "segm_output",
    "common.softmax_segm_max": "segm_max",
    "common.softmax_segm_expsum": "segm_expsum",
}
CAUSAL = {"common.causal": "causal"}
BY_ROW = {"common.row_causal": "causal"}


def _unified(split: bool, by_row: bool) -> Route:
    reads = READS | (SPLIT_READS if split else {}) | (BY_ROW if by_row else CAUSAL)
    return Route(
        "all",
        (Kernel(f"unified_attention_{'3d' if split else '2d'}", reads),),
        lambda step: _splits_softmax(step) == split and (step.batch.causal is None) == by_row,
    )


def _check(environment: Environment, limits: Limits) -> None:
    if limits.block_size % 16:
        raise BadInput(f"limits.block_size: expected a multiple of 16 for triton, got {limits.block_size}")
    if limits.head_size < 32:
        raise BadInput(f"limits.head_size: expected >= 32 for triton, got {limits.head_size}")
    if limits.num_heads % limits.num_kv_heads:
        raise BadInput(
            f"limits.num_heads: expected a multiple of num_kv_heads = {limits.num_kv_heads}, got {limits.num_heads}"
        )
    if limits.num_kv_heads > MIN_GRID_2D:
        raise BadInput(f"limits.num_kv_heads: expected <= {MIN_GRID_2D} for triton, got {limits.num_kv_heads}")


BACKEND = Backend(
    name="triton",
    upstream="TRITON_ATTN",
    split="none",
    routes=tuple(_unified(split, by_row) for split in (False, True) for by_row in (False, True)),
    shared=(
        Route(
            "all",
            (Kernel("triton_reshape_and_cache_flash", {"common.slot_mapping": "slot_mapping"}),),
            entry=Kernel("forward", {"common.num_actual_tokens": "query, key, value, output"}),
        ),
    ),
    fields=FIELDS,
    never_read={
        "common.max_seq_len": "the kernel stops at each row's own length and ignores its max_seqlen_k",
        "common.common_prefix_len": "this backend has no cascade attention",
        "common.scheduler_metadata": "nothing is scheduled ahead of time; upstream leaves it empty",
    },
    check=_check,
)
