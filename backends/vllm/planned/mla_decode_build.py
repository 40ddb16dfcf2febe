"""A decode of ROCM_AITER_MLA: written into vLLM's own buffers from host lengths, or left to vLLM's `_build_decode`."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....errors import BadInput
from ....planner.batch import Batch
from ....planner.environment import Environment
from ....planner.plan import MetadataPlan
from ... import mla_host

QO, KV = "decode.qo_indptr", "decode.paged_kv_indptr"
CHUNK = 1024  # tokens that one program of vLLM's index expansion writes
# What the scheduler of aiter is called with: those before `*` by position. Its oldest form with these is supported.
BY_POSITION = 12
BY_NAME = ("page_size", "kv_granularity", "max_seqlen_qo", "uni_seqlen_qo", "fast_mode", "dtype_q", "dtype_kv")


def check_scheduler() -> None:
    """Refuse an aiter whose `get_mla_metadata_v1` cannot be called as vLLM and we call it. Raises `BadInput`."""
    import aiter

    scheduler = getattr(aiter, "get_mla_metadata_v1", None)
    if scheduler is None:
        raise BadInput("aiter: expected get_mla_metadata_v1, found none")
    try:
        parameters = inspect.signature(scheduler).parameters.values()
    except (TypeError, ValueError):
        return  # a built-in that does not tell
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    names = [p.name for p in parameters]
    missing = [name for name in BY_NAME if name not in names]
    if missing or "kv_last_page_lens" not in names[:BY_POSITION]:
        lacking = missing[0] if missing else "kv_last_page_lens"
        raise BadInput(f"aiter: expected get_mla_metadata_v1 with {lacking}, got ({', '.join(names)})")


class PlannedDecode(NamedTuple):
    """A decode whose lengths the host knows: what goes into the staged copy."""

    rows: int
    full_graphs: bool
    arrays: dict[str, npt.NDArray[np.int32]]

    def build(self, builder: Any, plan: MetadataPlan, common: Any, tensors: dict[str, Any]) -> Any:
        """vLLM's `AiterMLADecodeMetadata`; under full graphs its tensors are the builder's own buffers."""
        module = sys.modules[builder.upstream.__module__]
        rows = self.rows
        qo_indptr, kv_indptr = tensors[QO], tensors[KV]
        if self.full_graphs:
            builder.paged_kv_indptr.copy_(kv_indptr, non_blocking=True)
            builder.qo_indptr.copy_(qo_indptr, non_blocking=True)
            qo_indptr, kv_indptr = builder.qo_indptr[: rows + 1], builder.paged_kv_indptr[: rows + 1]
            builder.paged_kv_indices.fill_(-1)
        block_table = common.block_table_tensor[:rows]
        longest = block_table.shape[1] * builder.kernel_block_size
        module._expand_page_indices_kernel[(rows, max(1, -(-longest // CHUNK)))](
            builder.paged_kv_indices,
            block_table,
            block_table.stride(0),
            block_table.stride(1),
            kv_indptr,
            KERNEL_BLOCK_SIZE=builder.kernel_block_size,
            BLOCK_SIZE=CHUNK,
        )
        last_pages = builder.paged_kv_last_page_len[:rows]
        scheduled = "decode.work_info" in plan
        if scheduled:
            _schedule(builder, plan, qo_indptr, kv_indptr, last_pages)
        route = plan.routes["decode"]
        gluon, verify = route.startswith("mla_gluon"), "verify" in route
        least = plan.fields.get("decode.min_kv_seq_len")
        return module.AiterMLADecodeMetadata(
            block_table=block_table,
            seq_lens=common.seq_lens[:rows],
            dcp_tot_seq_lens=None,
            paged_kv_indptr=kv_indptr,
            paged_kv_indices=builder.paged_kv_indices,
            paged_kv_last_page_len=last_pages,
            qo_indptr=qo_indptr,
            attn_out_dtype=builder.decode_attn_out_dtype,
            max_qo_len=plan["decode.max_qo_len"].value,
            min_kv_seq_len=1 if least is None else least.value,
            use_gluon_decode=gluon and not verify,
            use_gluon_verify=gluon and verify,
            has_persistent_metadata=scheduled,
        )


def _schedule(builder: Any, plan: MetadataPlan, qo_indptr: Any, kv_indptr: Any, last_pages: Any) -> None:
    """aiter's own planner, on the device: one launch, no wait."""
    from aiter import get_mla_metadata_v1

    get_mla_metadata_v1(
        qo_indptr,
        kv_indptr,
        last_pages,
        plan.heads.decode,
        1,
        True,
        builder._mla_work_meta_data,
        builder._mla_work_info_set,
        builder._mla_work_indptr,
        builder._mla_reduce_indptr,
        builder._mla_reduce_final_map,
        builder._mla_reduce_partial_map,
        page_size=1,
        kv_granularity=16,
        max_seqlen_qo=plan["decode.max_qo_len"].value,
        uni_seqlen_qo=plan["decode.uni_seqlen_qo"].value,
        fast_mode=True,
        dtype_q=builder._mla_q_dtype,
        dtype_kv=builder._mla_kv_dtype,
    )


def decode_arrays(builder: Any, plan: MetadataPlan, batch: Batch, environment: Environment) -> PlannedDecode | None:
    """What the host can write of this decode; None where vLLM does: bounded lengths, dropped padding rows, 0.26."""
    segment = plan.segment("decode")
    if segment is None or environment.release < (0, 32):
        return None
    rows = segment.rows[1] - segment.rows[0]
    if mla_host.launched_rows(plan) != rows:
        return None
    if batch.inexact is not None and batch.inexact[:rows].any():
        return None
    buffers = mla_host.decode_buffers(plan, batch, environment)
    if not environment.full_graphs:
        return PlannedDecode(rows, False, {QO: buffers.qo_indptr, KV: buffers.paged_kv_indptr})
    size = builder.qo_indptr.numel()
    arrays = {QO: _padded(buffers.qo_indptr, size), KV: _padded(buffers.paged_kv_indptr, size)}
    return PlannedDecode(rows, True, arrays)


def _padded(values: npt.NDArray[np.int32], size: int) -> npt.NDArray[np.int32]:
    """`values`, then its last element up to `size`: empty rows for a graph that launches more."""
    out = np.full(size, values[-1], dtype=np.int32)
    out[: values.size] = values
    return out


def upstream_decode(builder: Any, common: Any, rows: int, tokens: int) -> Any:
    """vLLM's own decode, into its own buffers."""
    builder._decode_causal = True
    arguments = {
        "block_table_tensor": common.block_table_tensor[:rows],
        "seq_lens_device": common.seq_lens[:rows],
        "max_seq_len": common.max_seq_len,
        "query_start_loc_cpu": common.query_start_loc_cpu[: rows + 1],
        "query_start_loc_device": common.query_start_loc[: rows + 1],
        "num_decode_tokens": tokens,
        "max_query_len": min(common.max_query_len, builder.reorder_batch_threshold),
        "dcp_tot_seq_lens_device": None,
    }
    known = _parameters(builder.upstream)
    return builder._build_decode(**{name: value for name, value in arguments.items() if name in known})


@functools.cache
def _parameters(upstream: Any) -> frozenset[str]:
    return frozenset(inspect.signature(upstream._build_decode).parameters)
