"""The decode planner: runs on the device, one launch; its schedule is written where the lengths can be read."""

import numpy as np
import torch
from syncfree.planner import BadInput, schedules

from .card import CALLS, CARD, check, check_int32, launch, on_host
from .dtypes import NAMES


def get_mla_metadata_info_v1(
    batch_size,
    max_seqlen_qo,
    num_head_qo,
    q_dtype,
    kv_dtype,
    is_sparse,
    fast_mode=True,
    num_kv_splits=32,
    intra_batch_mode=False,
    max_split_per_batch=-1,
):
    """((size, dtype), ...) of the six buffers."""
    shapes = schedules.mla_decode_shapes(
        batch_size,
        max_seqlen_qo,
        num_head_qo,
        NAMES[q_dtype],
        NAMES[kv_dtype],
        gfx=CARD.gfx,
        num_cu=CARD.num_cu,
        is_sparse=is_sparse,
        fast_mode=fast_mode,
        num_kv_splits=num_kv_splits,
        intra_batch_mode=intra_batch_mode,
        max_split_per_batch=max_split_per_batch,
    )
    order = ("work_metadata_ptrs", "work_indptr", "work_info", "reduce_indptr", "reduce_final_map")
    types = (torch.uint64, torch.int32, torch.int32, torch.int32, torch.int32, torch.int32)
    names = (*order, "reduce_partial_map")
    return tuple((shapes[name], dtype) for name, dtype in zip(names, types, strict=True))


def get_mla_metadata_v1(
    seqlens_qo_indptr,
    seqlens_kv_indptr,
    kv_last_page_lens,
    num_heads_per_head_k,
    num_heads_k,
    is_causal,
    work_metadata_ptrs,
    work_info_set,
    work_indptr,
    reduce_indptr,
    reduce_final_map,
    reduce_partial_map,
    page_size=1,
    kv_granularity=16,
    max_seqlen_qo=-1,
    uni_seqlen_qo=-1,
    fast_mode=True,
    topk=-1,
    max_split_per_batch=-1,
    intra_batch_mode=False,
    dtype_q=None,
    dtype_kv=None,
):
    """Fill the six buffers; the schedule is left out where the lengths lie on a real device."""
    CALLS["get_mla_metadata_v1"] += 1
    batch = seqlens_kv_indptr.numel() - 1
    check_int32("seqlens_qo_indptr", seqlens_qo_indptr, batch + 1)
    check_int32("seqlens_kv_indptr", seqlens_kv_indptr, 2)
    check_int32("kv_last_page_lens", kv_last_page_lens, batch)
    check(num_heads_k == 1, f"num_heads_k: expected 1, got {num_heads_k}")
    check(num_heads_per_head_k % 16 == 0 or num_heads_per_head_k in (8,), f"heads: got {num_heads_per_head_k}")
    outputs = (work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map)
    check_int32("work_indptr", work_indptr, CARD.num_cu + 1)
    for name, tensor in zip(("work_info_set", "reduce_indptr", "reduce_final_map"), outputs[1:4], strict=True):
        check_int32(name, tensor, 1)
    launch(work_indptr)
    qo, kv = on_host(seqlens_qo_indptr), on_host(seqlens_kv_indptr)
    if qo is None or kv is None:
        return
    try:
        plan = schedules.mla_decode(
            qo.numpy(),
            kv.numpy(),
            num_heads=num_heads_per_head_k,
            num_cu=CARD.num_cu,
            gfx=CARD.gfx,
            q_dtype=NAMES[dtype_q or "bf16"],  # what aiter takes where none is named
            kv_dtype=NAMES[dtype_kv or "bf16"],
            max_seqlen_qo=max_seqlen_qo,
            uni_seqlen_qo=uni_seqlen_qo,
            kv_granularity=kv_granularity,
            page_size=page_size,
            is_causal=is_causal,
            max_split_per_batch=max_split_per_batch,
        )
    except BadInput:
        CALLS["undefined"] += 1  # aiter does not refuse what its result is undefined for
        return
    made = (plan.work_indptr, plan.work_info, plan.reduce_indptr, plan.reduce_final_map, plan.reduce_partial_map)
    for tensor, values in zip(outputs, made, strict=True):
        check(tensor.numel() >= values.size, f"a buffer of {tensor.numel()} elements is too small for {values.size}")
        on_host(tensor).view(-1)[: values.size] = torch.from_numpy(np.array(values).reshape(-1))
