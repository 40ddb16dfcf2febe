"""Which decode kernel of AITER MLA serves a step: head counts, query lengths and gates of vLLM and aiter."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..errors import BadInput
from ..planner import schedules
from ..planner.backend import Step
from ..planner.environment import Environment, Limits
from ..planner.lengths import Int32Array

HEADS_PER_KERNEL = 16
MAX_PADDED_HEADS = 128  # vLLM 0.32 pads no count above
MAX_BF16_PERSISTENT_QUERY = 4  # longest query of the 16-head bf16 persistent kernel
GLUON_MAX_CACHE_BYTES = 2**31  # past it mla_gluon drops its bounds mask
GATE_SINCE = (0, 1, 18)  # first aiter that leaves the persistent kernel at high concurrency


# ---------------------------------------------------------------- heads


def gathered_heads(environment: Environment, limits: Limits) -> int:
    """Query heads of a decode: under DCP those of all ranks."""
    return limits.num_heads * environment.dcp_world_size


def padded_heads(heads: int) -> int:
    """The launched count: 12 run as 16, 20 as 32. (A build of aiter with native 24-head kernels takes 24 as it is.)"""
    return -(-heads // HEADS_PER_KERNEL) * HEADS_PER_KERNEL


def check_heads(name: str, heads: int, environment: Environment) -> None:
    """Refuse a head count that the backend's own check would refuse after the model has been loaded."""
    if environment.release == (0, 26):
        served = heads % HEADS_PER_KERNEL == 0 or HEADS_PER_KERNEL % heads == 0
        expected = "a multiple or a divisor of 16"
    else:
        served = heads <= MAX_PADDED_HEADS or heads % HEADS_PER_KERNEL == 0
        expected = f"1 to {MAX_PADDED_HEADS} (padded to a multiple of 16) or a larger multiple of 16"
    if not served:
        raise BadInput(f"{name}: expected {expected} for aiter_mla with vLLM {environment.vllm}, got {heads}")


def query_dtype(environment: Environment) -> str:
    """Dtype of the query at the kernel: quantised with the cache."""
    return "fp8" if environment.kv_dtype == "fp8" else environment.dtype


# ---------------------------------------------------------------- shape of the decode segment


class DecodeRows(NamedTuple):
    """What a launch sees of the decode segment."""

    max_qo_len: int
    uni_seqlen_qo: int  # tokens of every launched row, -1 where they differ
    rows: int  # rows of the indptrs
    launched: int  # rows of a full graph that replays this batch


def _padded_query_len(query_lens: Int32Array, longest: int, tokens: int) -> int:
    """Tokens a row where a full graph's padding rows stand for whole draft blocks, else 0.

    The tokens divide evenly, live rows come first, and each has that many. Source: vLLM 0.32,
    `AiterMLAMetadataBuilder._uniform_padded_mtp_qo_len`.
    """
    rows = query_lens.size
    each, rest = divmod(tokens, rows)
    live = int(np.count_nonzero(query_lens))
    if rest or each <= 1 or live == rows or tokens <= int(query_lens.sum()):
        return 0
    if live and (longest != each or bool((query_lens[:live] != each).any())):
        return 0
    return each


def decode_rows(step: Step) -> DecodeRows:
    """Query length and rows of the decode launch.

    Rows of different length are padding beside rows of one length. Upstream asks aiter to read the lengths then, also
    where aiter's result is undefined (folded heads, tiled queries). There the padding rows count as rows of that length
    if their tokens are launched, and are left out if not.
    """
    segment = step["decode"]
    query_lens = step.batch.query_lens[step.rows("decode")]
    rows, tokens = query_lens.size, segment.tokens[1] - segment.tokens[0]
    longest = int(query_lens.max())
    padded = _padded_query_len(query_lens, longest, tokens) if step.environment.release >= (0, 32) else 0
    if padded:
        return DecodeRows(padded, padded, rows, rows)
    if bool((query_lens != longest).any()):
        if _reads_query_lens(step, longest):
            return DecodeRows(longest, -1, rows, rows)
        if tokens < rows * longest:
            rows = int(np.count_nonzero(query_lens))
        return DecodeRows(longest, longest, rows, rows)
    launched = rows
    if step.environment.full_graphs and "prefill" not in step and longest:
        # A graph is captured with as many rows as its tokens make, though the batch may name the live rows only.
        launched = max(rows, tokens // longest)
    return DecodeRows(longest, longest, rows, launched)


def _reads_query_lens(step: Step, longest: int) -> bool:
    """Whether aiter's planner is defined for rows of different query length."""
    environment = step.environment
    return schedules.reads_query_lens(
        num_heads=padded_heads(gathered_heads(environment, step.limits)),
        gfx=environment.gfx,
        q_dtype=query_dtype(environment),
        kv_dtype=environment.kv_dtype,
        max_seqlen_qo=longest,
    )


# ---------------------------------------------------------------- which kernel


class Kernel(Enum):
    """Who serves a decode, and where no schedule is read, why."""

    PERSISTENT = "the persistent kernel follows a schedule"
    GATED = "aiter leaves the persistent kernel from so many rows on"
    LACKING = "no persistent kernel takes so many tokens a row"
    UNSCHEDULED = "vLLM asks for no schedule"
    GLUON = "mla_gluon, one token a row"
    GLUON_VERIFY = "mla_gluon, a block of drafts a row"


def serving(step: Step) -> Kernel:
    """The kernel of this step's decode: what vLLM asks for, and what aiter makes of it."""
    environment, rows = step.environment, step.once(decode_rows)
    heads, longest = gathered_heads(environment, step.limits), rows.max_qo_len
    if heads < HEADS_PER_KERNEL and _gluon_allowed(environment):
        if longest == 1 and (HEADS_PER_KERNEL % heads == 0 or environment.mla_small_heads == "gluon"):
            return Kernel.GLUON
        if longest > 1 and environment.dcp_world_size == 1:
            return Kernel.GLUON_VERIFY
    if not 1 <= longest <= _longest_scheduled(step):
        return Kernel.UNSCHEDULED
    if environment.kv_dtype != "fp8" and padded_heads(heads) == HEADS_PER_KERNEL:
        if longest > MAX_BF16_PERSISTENT_QUERY:
            return Kernel.LACKING
        if longest == 1 and 0 < environment.mla_persistent_max_batch <= rows.launched and _has_gate(environment):
            return Kernel.GATED
    return Kernel.PERSISTENT


def _gluon_allowed(environment: Environment) -> bool:
    """vLLM 0.32's small-head kernel: gfx950, KV not FP8, and a cache that keeps its bounds mask."""
    size = environment.kv_cache_bytes
    return (
        environment.release >= (0, 32)
        and environment.gfx == "gfx950"
        and environment.kv_dtype != "fp8"
        and environment.mla_small_heads != "asm"
        and (size is None or size <= GLUON_MAX_CACHE_BYTES)
    )


def _has_gate(environment: Environment) -> bool:
    """Whether this aiter leaves the persistent kernel it was asked for at high concurrency."""
    version = environment.aiter_version
    is_bf16 = environment.dtype == environment.kv_dtype == "bf16"
    return environment.gfx == "gfx950" and is_bf16 and (version is None or version >= GATE_SINCE)


def _longest_scheduled(step: Step) -> int:
    """Longest block that vLLM asks a schedule for: 0.26 for one token a row, 0.32 for a draft block."""
    return 1 if step.environment.release == (0, 26) else step.batch.decode_threshold


def launched_heads(step: Step) -> int:
    """Query heads the decode kernel is launched with."""
    heads = gathered_heads(step.environment, step.limits)
    return heads if step.once(serving) in (Kernel.GLUON, Kernel.GLUON_VERIFY) else padded_heads(heads)


def work_shapes(step: Step) -> dict[str, tuple[int, ...]]:
    """Shapes of the six work buffers, for as many rows as the scheduler ever launches."""
    return _work_shapes(step.environment, step.limits, _longest_scheduled(step))


@lru_cache(maxsize=64)
def _work_shapes(environment: Environment, limits: Limits, longest: int) -> dict[str, tuple[int, ...]]:
    return schedules.mla_decode_shapes(
        min(limits.max_num_seqs, limits.max_num_batched_tokens),
        longest,
        padded_heads(gathered_heads(environment, limits)),
        query_dtype(environment),
        environment.kv_dtype,
        gfx=environment.gfx,
        num_cu=environment.num_cu,
    )


def min_kv_seq_len(step: Step) -> int:
    """A length that every live row of a verify block has at least.

    Under full graphs the kernel keeps the number it was captured with, so it has to hold for every replay: a row's own
    block is what all of them have, padding rows included. Else it is the least lower bound of the live rows.
    """
    rows = step.once(decode_rows)
    if step.environment.full_graphs and "prefill" not in step:
        return rows.max_qo_len
    part = step.rows("decode")
    lower = step.batch.seq_lens if step.batch.seq_lens_lower is None else step.batch.seq_lens_lower
    live = lower[part][step.batch.query_lens[part] > 0]
    return max(1, int(live.min())) if live.size else rows.max_qo_len
