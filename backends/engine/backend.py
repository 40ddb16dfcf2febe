"""The engine's attention as the planner sees it: three segments, and what each one's kernel reads."""

from __future__ import annotations

import numpy as np

from ...planner.backend import Backend, Field, Kernel, Maker, Route, Step
from ...planner.lengths import Int32Array


def positions(step: Step) -> Int32Array:
    """(tokens,) int32: where in its sequence each token stands."""
    batch = step.batch
    before = batch.computed_lens - batch.query_start_loc[:-1]
    found: Int32Array = np.repeat(before, batch.query_lens) + np.arange(batch.query_start_loc[-1], dtype=np.int32)
    return found


def _query_start_loc(segment: str) -> Maker:
    """(rows + 1,) int32 of the segment, from 0."""

    def value(step: Step) -> Int32Array:
        rows = step.rows(segment)
        starts = step.batch.query_start_loc[rows.start : rows.stop + 1]
        rebased: Int32Array = starts - starts[0]
        return rebased

    return value


def _seq_lens(segment: str) -> Maker:
    return lambda step: step.batch.seq_lens[step.rows(segment)]


def _max_query_len(segment: str) -> Maker:
    return lambda step: step[segment].max_query_len(step.batch)


def _max_seq_len(segment: str) -> Maker:
    return lambda step: step[segment].max_seq_len(step.batch)


FIELDS = (
    Field("common.positions", "host", value=positions, lengths="exact"),
    Field("common.slot_mapping", "device", shape=lambda step: (step.batch.num_tokens,)),
    Field(
        "common.block_table",
        "device",
        shape=lambda step: (len(step.batch), None),
        unread="a prefill without context reads its fresh keys and values, not the cache",
    ),
    Field("decode.seq_lens", "host", value=_seq_lens("decode"), lengths="exact"),
    Field("decode.max_seq_len", "host", "int", _max_seq_len("decode"), lengths="upper"),
    Field("extend.query_start_loc", "host", value=_query_start_loc("extend")),
    Field("extend.max_query_len", "host", "int", _max_query_len("extend")),
    Field("extend.seq_lens", "host", value=_seq_lens("extend"), lengths="exact"),
    Field("extend.max_seq_len", "host", "int", _max_seq_len("extend"), lengths="upper"),
    Field("prefill.query_start_loc", "host", value=_query_start_loc("prefill")),
    Field("prefill.max_query_len", "host", "int", _max_query_len("prefill")),
)

DECODE = Kernel(
    "decode_attention",
    {"common.block_table": "block_table", "decode.seq_lens": "seq_lens", "decode.max_seq_len": "max_seq_len"},
)
EXTEND = Kernel(
    "extend_attention",
    {
        "common.block_table": "block_table",
        "extend.query_start_loc": "padding",
        "extend.max_query_len": "padding",
        "extend.seq_lens": "seq_lens",
        "extend.max_seq_len": "max_seq_len",
    },
)
PREFILL = Kernel("causal_attention", {"prefill.query_start_loc": "padding", "prefill.max_query_len": "padding"})
ROTATE = Kernel("rotate", {"common.positions": "rotation"})
WRITE = Kernel("LayerCache.write", {"common.slot_mapping": "slot_mapping"})

BACKEND = Backend(
    name="engine",
    upstream="the embedded engine",
    split="three",
    routes=(Route("decode", (DECODE,)), Route("extend", (EXTEND,)), Route("prefill", (PREFILL,))),
    shared=(Route("all", (ROTATE, WRITE)),),
    fields=FIELDS,
    never_read={
        "decode.query_start_loc": "a decode row is one token",
        "decode.max_query_len": "a decode row is one token",
        "prefill.seq_lens": "without context a sequence is as long as its query",
        "prefill.max_seq_len": "without context a sequence is as long as its query",
        "common.context_lens": "kernels take sequence and query lengths",
        "common.min_query_len": "no kernel takes it",
        "common.num_actual_kv_tokens": "no kernel takes it",
    },
)
