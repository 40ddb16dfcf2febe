"""Which decode kernel of AITER MLA serves a step: head counts, query lengths and gates of vLLM and aiter."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..planner import schedules
from ..planner.backend import Step
from ..planner.environment import Environment, Limits
from ..planner.errors import BadInput
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


def _gluon_allowed(step: Step) -> bool:
    """vLLM 0.32's small-head kernel: gfx950, KV not FP8, and a cache that keeps its bounds mask."""
    environment = step.environment
    size = environment.kv_cache_bytes
    return (
        environment.release >= (0, 32)
        and gathered_heads(environment, step.limits) < HEADS_PER_KERNEL
        and environment.gfx == "gfx950"
        and environment.kv_dtype != "fp8"
        and environment.mla_small_heads != "asm"
        and (size is None or size <= GLUON_MAX_CACHE_BYTES)
    )


def gluon_decode(step: Step) -> bool:
    """One token a row; other counts than divisors of 16 only where Gluon was asked for."""
    divides = HEADS_PER_KERNEL % gathered_heads(step.environment, step.limits) == 0
    return (
        step.once(decode_rows).max_qo_len == 1
        and _gluon_allowed(step)
        and (divides or step.environment.mla_small_heads == "gluon")
    )


def gluon_verify(step: Step) -> bool:
    """A block of drafts a row, causal, without DCP."""
    return step.once(decode_rows).max_qo_len > 1 and step.environment.dcp_world_size == 1 and _gluon_allowed(step)


def launched_heads(step: Step) -> int:
    """Query heads the decode kernel is launched with."""
    heads = gathered_heads(step.environment, step.limits)
    return heads if step.once(gluon_decode) or step.once(gluon_verify) else padded_heads(heads)


def is_gated(step: Step) -> bool:
    """Whether aiter leaves the persistent kernel it was asked for: gfx950, bf16, 16 heads, one token, many rows."""
    environment, rows = step.environment, step.once(decode_rows)
    version, most = environment.aiter_version, environment.mla_persistent_max_batch
    return (
        environment.gfx == "gfx950"
        and environment.dtype == environment.kv_dtype == "bf16"
        and launched_heads(step) == HEADS_PER_KERNEL
        and rows.max_qo_len == 1
        and 0 < most <= rows.launched
        and (version is None or version >= GATE_SINCE)
    )


def lacks_persistent_kernel(step: Step) -> bool:
    """16 launched heads with a cache that is not FP8 and more than four tokens a row."""
    return (
        step.environment.kv_dtype != "fp8"
        and launched_heads(step) == HEADS_PER_KERNEL
        and step.once(decode_rows).max_qo_len > MAX_BF16_PERSISTENT_QUERY
    )


def is_unscheduled(step: Step) -> bool:
    """Whether vLLM itself asks for no schedule: 0.26 past one token a row, both past the longest draft block."""
    longest = step.once(decode_rows).max_qo_len
    most = 1 if step.environment.release == (0, 26) else step.batch.decode_threshold
    return not 1 <= longest <= most


def work_shapes(step: Step) -> dict[str, tuple[int, ...]]:
    """Shapes of the six work buffers, for as many rows as the scheduler ever launches."""
    environment, limits = step.environment, step.limits
    longest = 1 if environment.release == (0, 26) else step.batch.decode_threshold
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
