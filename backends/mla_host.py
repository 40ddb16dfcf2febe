"""What a decode's persistent buffers hold, computed on the host: for batches whose decode lengths are exact.

Upstream makes them on the device, which also works where the host knows bounds only. Where it knows the lengths, a
runtime can write them with its one staged copy instead, and spare the launches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..planner import schedules
from ..planner.batch import Batch
from ..planner.environment import Environment
from ..planner.errors import InexactBatch
from ..planner.lengths import Int32Array
from ..planner.plan import MetadataPlan
from . import mla_decode
from .mla_context import Shards


class DecodeBuffers(NamedTuple):
    """int32 contents of the two indptrs, (rows + 1,) each; `paged_kv_indptr` counts single tokens."""

    qo_indptr: Int32Array
    paged_kv_indptr: Int32Array


def decode_buffers(plan: MetadataPlan, batch: Batch, environment: Environment) -> DecodeBuffers:
    """The indptrs of a planned decode. `batch` has the plan's row order. Raises `InexactBatch` for a bounded row."""
    segment = plan.segment("decode")
    if segment is None:
        return DecodeBuffers(np.zeros(1, np.int32), np.zeros(1, np.int32))
    rows = launched_rows(plan)
    if batch.inexact is not None and batch.inexact[:rows].any():
        row = int(batch.inexact[:rows].argmax())
        raise InexactBatch(f"seq_lens[{row}]: expected an exact length for a decode planned on the host, got a bound")
    longest = int(plan["decode.max_qo_len"].value)
    query_lens, seq_lens = batch.query_lens[:rows], batch.seq_lens[:rows]
    if environment.dcp_world_size > 1:
        shards = Shards(environment.dcp_world_size, environment.dcp_interleave)
        seq_lens = shards.local(seq_lens)[:, environment.dcp_rank]
    if _launches_padding(plan, query_lens, longest):
        # A padding row that stands for a whole draft block attends to itself.
        seq_lens = np.where(query_lens > 0, seq_lens, longest)
        query_lens = np.full(rows, longest, np.int32)
    return DecodeBuffers(_indptr(query_lens), _indptr(seq_lens))


def launched_rows(plan: MetadataPlan) -> int:
    """Rows of the decode launch."""
    extent = plan["decode.paged_kv_indptr"].shape[0]
    assert extent is not None
    return extent - 1


def _launches_padding(plan: MetadataPlan, query_lens: Int32Array, longest: int) -> bool:
    """Whether padding rows are launched as whole blocks: then the segment has tokens for all of them."""
    segment = plan.segment("decode")
    assert segment is not None
    tokens = segment.tokens[1] - segment.tokens[0]
    return longest > 1 and tokens == query_lens.size * longest and bool((query_lens == 0).any())


def _indptr(counts: Int32Array) -> Int32Array:
    out = np.zeros(counts.size + 1, np.int32)
    np.cumsum(counts, out=out[1:])
    return out


def decode_schedule(plan: MetadataPlan, buffers: DecodeBuffers, environment: Environment) -> schedules.WorkSchedule:
    """The six work buffers' contents, bit for bit what `get_mla_metadata_v1` writes from the same lengths."""
    assert plan.heads.decode is not None
    return schedules.mla_decode(
        buffers.qo_indptr,
        buffers.paged_kv_indptr,
        num_heads=plan.heads.decode,
        num_cu=environment.num_cu,
        gfx=environment.gfx,
        q_dtype=mla_decode.query_dtype(environment),
        kv_dtype=environment.kv_dtype,
        max_seqlen_qo=plan["decode.max_qo_len"].value,
        uni_seqlen_qo=plan["decode.uni_seqlen_qo"].value,
    )


def paged_kv_indices(paged_kv_indptr: Int32Array, block_table: Int32Array, block_size: int) -> Int32Array:
    """(tokens,) cache slot of every token of every row: its block, times `block_size`, plus its place in the block.

    `block_table[rows, blocks]`, of which each row uses as many as its length needs.
    """
    lens = np.diff(paged_kv_indptr)
    row = np.repeat(np.arange(lens.size), lens)
    token = np.arange(row.size) - np.repeat(paged_kv_indptr[:-1], lens)
    slots: Int32Array = (block_table[row, token // block_size] * block_size + token % block_size).astype(np.int32)
    return slots
