"""vLLM's TRITON_MLA: decodes by a split-KV Triton kernel that reads pages by row, prefills as all MLA backends.

Compared with `triton_mla.py` and `mla_attention.py` of vLLM 0.26 and 0.32. 0.26 decodes one token a row; 0.32 flattens
blocks of drafts to a row a token. The builder keeps no buffers: decode fields are the engine's own tensors.
"""

from __future__ import annotations

from ..errors import BadInput
from ..planner.backend import Backend, Field, Kernel, Route, Step
from ..planner.environment import Environment, Limits
from ..planner.segments import QueryLens
from . import mla_kernels as kernels
from . import mla_prefill as prefill

# ---------------------------------------------------------------- fields


def _rows(step: Step) -> int:
    start, stop = step["decode"].rows
    return stop - start


def _prefill_rows(step: Step) -> int:
    start, stop = step["prefill"].rows
    return stop - start


FIELDS = (
    Field("common.num_actual_tokens", "host", "int", lambda step: step.batch.num_tokens),
    Field("common.slot_mapping", "device", "int64", shape=lambda step: (step.batch.num_tokens,)),
    Field(
        "common.max_seq_len",
        "host",
        "int",
        lambda step: step.batch.max_seq_len,
        lengths="upper",
        rows=("decode", "prefill"),
        unread="only a decode chooses its number of splits by it",
    ),
    Field(
        "common.causal",
        "host",
        "bool",
        lambda step: step.batch.causal,
        unread="one token a row sees all of its sequence; prefills run causally",
    ),
    Field("decode.block_table", "device", shape=lambda step: (_rows(step), None)),
    Field("decode.seq_lens", "device", shape=lambda step: (_rows(step),)),
    Field(
        "prefill.block_table",
        "device",
        shape=lambda step: (_prefill_rows(step), None),
        unread="a prefill without context reads the new keys and values, not the cache",
    ),
    *prefill.FIELDS,
    *prefill.CHUNK_FIELDS,
)

# ---------------------------------------------------------------- kernels

DECODE_READS = {
    "decode.block_table": "Req_to_tokens",
    "decode.seq_lens": "B_Seqlen",
    "common.max_seq_len": "NUM_KV_SPLITS",
}
SINGLE = Kernel("decode_attention_fwd", DECODE_READS)
BLOCKS = Kernel("decode_attention_fwd (a row a token)", DECODE_READS | {"common.causal": "B_Seqlen of each token"})


def _from_prefill(kernel: Kernel) -> Kernel:
    """The same kernel, its pages named by the prefill's own table."""
    names = {"common.block_table": "prefill.block_table"}
    return Kernel(kernel.name, {names.get(name, name): parameter for name, parameter in kernel.reads.items()})


CONTEXT_032 = (_from_prefill(kernels.GATHER), kernels.CONTEXT, kernels.ACCUMULATE)
CONTEXT_026 = (_from_prefill(kernels.GATHER_026), kernels.CONTEXT_026, kernels.MERGE_026)

# ---------------------------------------------------------------- routes


def _tokens_a_row(step: Step) -> tuple[int, int]:
    """What vLLM 0.32 makes of the decode launch: tokens of every row, and the rest, which it asserts to be 0."""
    start, stop = step["decode"].tokens
    return divmod(stop - start, _rows(step))


def _is_ragged(step: Step) -> bool:
    """Padding rows without padding tokens: vLLM would stop, or take the block for one of another length."""
    if prefill.is_026(step):
        return False
    tokens, rest = _tokens_a_row(step)
    first, last = step["decode"].rows
    return rest > 0 or tokens != int(step.batch.query_lens[first:last].max())


def _takes_blocks(step: Step) -> bool:
    return not prefill.is_026(step) and _tokens_a_row(step)[0] > 1


def _refused_rows(step: Step) -> str:
    start, stop = step["decode"].tokens
    return (
        f"{stop - start} tokens do not fill {_rows(step)} rows of equal length: vLLM {step.environment.vllm} reads the "
        "length of a block from them"
    )


ROUTES = (
    *prefill.NOT_CAUSAL,
    Route("decode", when=_is_ragged, refuse=_refused_rows),
    Route("decode", (BLOCKS,), _takes_blocks),
    Route("decode", (SINGLE,)),
    Route(
        "prefill",
        (kernels.NEW_TOKENS, *CONTEXT_026),
        lambda step: prefill.has_context(step) and prefill.is_026(step),
    ),
    Route("prefill", (kernels.NEW_TOKENS, *CONTEXT_032), prefill.has_context),
    Route("prefill", (kernels.NEW_TOKENS,)),
)

NEVER_READ = {
    "common.num_reqs": "the segments carry their rows",
    "common.max_query_len": "prefill.max_query_len reaches the kernels; a decode's block follows from tokens and rows",
    "common.query_start_loc": "prefill kernels take prefill.query_start_loc, which is made from it; decodes none",
    "common.head_dim": "checked when the layer is made; no kernel takes it from the metadata",
    "decode.dcp_tot_seq_lens": "only decode context parallelism has it",
    **prefill.NEVER_READ,
}


def _query_lens(environment: Environment, limits: Limits) -> QueryLens:
    del limits
    return "single" if environment.release == (0, 26) else "uniform"


def _check(environment: Environment, limits: Limits) -> None:
    if environment.dcp_world_size > 1:
        raise BadInput(
            f"dcp_world_size: expected 1 for triton_mla (shards are left to vLLM), got {environment.dcp_world_size}"
        )
    if limits.num_kv_heads != 1:
        raise BadInput(f"num_kv_heads: expected 1, the latent head of MLA, got {limits.num_kv_heads}")
    if limits.block_size % 16:
        raise BadInput(f"limits.block_size: expected a multiple of 16 for triton_mla, got {limits.block_size}")
    if limits.sliding_window is not None:
        raise BadInput(f"sliding_window: expected none for triton_mla, got {limits.sliding_window}")
    if environment.kv_sharing or environment.attention_sinks:
        name = "kv_sharing" if environment.kv_sharing else "attention_sinks"
        raise BadInput(f"{name}: expected false for triton_mla")


BACKEND = Backend(
    name="triton_mla",
    upstream="TRITON_MLA",
    split="two",
    query_lens=_query_lens,
    routes=ROUTES,
    shared=(Route("all", (kernels.CACHE_WRITE,), entry=kernels.FORWARD),),
    fields=FIELDS,
    never_read=NEVER_READ,
    check=_check,
    padding_cuts=lambda environment: environment.release == (0, 26),
)
