"""Which of our MLA decode kernels (`triton_mla`) serves a batch, declared as a backend: `syncfree_mla`.

Two routes, chosen by the lengths: fixed splits where requests are alike, the persistent kernel where a few are long.
The data of `mla_decode_times`, by which it is chosen, are of one H200. Lengths may be bounds: a choice is slower at
worst, never wrong. A captured graph keeps the route, and the number of splits, that it was captured with.

On a device without a gfx name take `gfx950`, whose bf16 schedules fold no heads, and its count of multiprocessors as
`num_cu`. Not vLLM's TRITON_MLA, whose kernels are others.
"""

from __future__ import annotations

from ..errors import BadInput
from ..planner import schedules
from ..planner.backend import Backend, Field, Kernel, Route, Shape, Step
from ..planner.environment import Environment, Limits
from . import mla_decode_times as times

INDEX_READS = {"decode.qo_indptr": "qo_indptr", "decode.page_list": "page_list"}
POOL_READS = {"decode.pool_out": "pool_out", "decode.pool_lse": "pool_lse"}
SCHEDULER = Kernel(
    "scan_tiles + emit_works",
    {"decode.qo_indptr": "qo_indptr", "decode.kv_indptr": "kv_indptr"},
)
PERSISTENT = Kernel(
    "persistent_decode",
    INDEX_READS
    | POOL_READS
    | {
        "decode.work_metadata_ptrs": "work_metadata_ptrs",
        "decode.work_indptr": "found through work_metadata_ptrs",
        "decode.work_info": "found through work_metadata_ptrs",
    },
)
REDUCE = Kernel(
    "reduce_partials",
    POOL_READS | {f"decode.{name}": name for name in ("reduce_indptr", "reduce_final_map", "reduce_partial_map")},
)
FIXED = Kernel(
    "fixed_split_decode",
    INDEX_READS | POOL_READS | {"decode.kv_indptr": "kv_indptr", "decode.num_splits": "grid"},
)
MERGE = Kernel("reduce_splits", POOL_READS | {"decode.num_splits": "SPLITS"})


def whole(step: Step) -> times.Shape:
    """The decode launch of this step, a request's rows undivided."""
    longest = step["decode"].max_query_len(step.batch)
    lens = step.batch.seq_lens[step.rows("decode")]
    return times.Shape(lens, longest, step.limits.num_heads, step.environment.num_cu)


def scheduled(step: Step) -> times.Shape:
    """The same as a schedule has it: heads folded into requests, query rows cut into tiles, by the packing rule."""
    undivided, environment = step.once(whole), step.environment
    rule = schedules.packing_rule(
        len(undivided.kv_lens),
        num_heads=undivided.heads,
        num_cu=undivided.num_cu,
        gfx=environment.gfx,
        q_dtype=environment.dtype,
        kv_dtype=environment.kv_dtype,
        max_seqlen_qo=undivided.query_len,
        uni_seqlen_qo=undivided.query_len,
    )
    return undivided._replace(
        query_len=-(-undivided.query_len // rule.tiles_per_request),
        heads=undivided.heads // rule.fold,
        copies=rule.fold * rule.tiles_per_request,
    )


def choice(step: Step) -> times.Choice:
    """The kernel that should take least time on this step's lengths."""
    return times.choose(step.once(whole), step.once(scheduled))


def _work_shapes(step: Step) -> dict[str, tuple[int, ...]]:
    environment, limits = step.environment, step.limits
    threshold = step.batch.decode_threshold
    return schedules.mla_decode_shapes(
        min(limits.max_num_seqs, limits.max_num_batched_tokens),
        threshold,
        limits.num_heads,
        environment.dtype,
        environment.kv_dtype,
        gfx=environment.gfx,
        num_cu=step.once(scheduled).workgroups,
    )


def _pool_rows(step: Step) -> int:
    """Rows of partial results: of every piece of a schedule, or of every split of every query row."""
    picked = step.once(choice)
    if picked.persistent:
        return int(_work_shapes(step)["reduce_partial_map"][0]) * step.once(scheduled).query_len
    tokens = step["decode"].tokens
    return picked.splits * (tokens[1] - tokens[0])


def _launched_heads(step: Step) -> int:
    return step.once(scheduled if step.once(choice).persistent else whole).heads


def _work(name: str) -> Field:
    return Field(
        f"decode.{name}",
        "persistent",
        "uint64" if name == "work_metadata_ptrs" else "int32",
        shape=lambda step: (2,) if name == "work_metadata_ptrs" else _work_shapes(step)[name],
        lengths="upper",
        unread="requests are alike: fixed splits take less time than following a schedule",
    )


def _indptr(step: Step) -> Shape:
    return (len(step.once(whole).kv_lens) + 1,)


FIELDS = (
    Field("decode.qo_indptr", "device", shape=_indptr),
    Field("decode.kv_indptr", "device", shape=_indptr),
    Field("decode.page_list", "device", shape=lambda step: (None,)),
    Field(
        "decode.num_splits",
        "host",
        "int",
        lambda step: step.once(choice).splits,
        lengths="upper",
        unread="some requests are long: following a schedule takes less time than fixed splits",
    ),
    Field(
        "decode.pool_out",
        "persistent",
        "float32",
        shape=lambda step: (_pool_rows(step), _launched_heads(step), None),
        lengths="upper",
    ),
    Field(
        "decode.pool_lse",
        "persistent",
        "float32",
        shape=lambda step: (_pool_rows(step), _launched_heads(step)),
        lengths="upper",
    ),
    *(_work(name) for name in ("work_metadata_ptrs", "work_indptr", "work_info")),
    *(_work(name) for name in ("reduce_indptr", "reduce_final_map", "reduce_partial_map")),
)


def _check(environment: Environment, limits: Limits) -> None:
    if environment.kv_dtype == "fp8":
        raise BadInput("kv_dtype: expected bf16 or fp16 for syncfree_mla, whose kernels apply no scale, got fp8")
    if limits.num_heads % 16:
        raise BadInput(f"limits.num_heads: expected a multiple of 16 for syncfree_mla, got {limits.num_heads}")


BACKEND = Backend(
    name="syncfree_mla",
    upstream="none: our own kernels",
    split="two",
    query_lens="uniform",
    routes=(
        Route("decode", (SCHEDULER, PERSISTENT, REDUCE), lambda step: step.once(choice).persistent),
        Route("decode", (FIXED, MERGE)),
        Route("prefill", refuse="these kernels decode only"),
    ),
    fields=FIELDS,
    check=_check,
    routes_by_length=True,
)
