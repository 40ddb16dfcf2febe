"""The prefill planner: runs on the host, and copies to wherever its outputs lie."""

import numpy as np
import torch
from syncfree.planner import schedules

from .card import CALLS, CARD, check, check_int32

NAMES = ("work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")


def get_ps_metadata_info_v1(batch_size, num_head_k, max_qlen, qlen_granularity=256):
    """((size, dtype), ...) of the six buffers."""
    shapes = schedules.ps_prefill_shapes(batch_size, num_head_k, max_qlen, qlen_granularity, CARD.num_cu)
    types = (torch.uint64, *(torch.int32,) * 5)
    sizes = [shapes[name] for name in ("work_metadata_ptrs", *NAMES)]
    return tuple((size if len(size) > 1 else size[0], dtype) for size, dtype in zip(sizes, types, strict=True))


def get_ps_metadata_v1(
    seqlens_qo_indptr,
    pages_kv_indptr,
    context_lens,
    gqa_ratio,
    num_heads_k,
    work_metadata_ptrs,
    work_indptr,
    work_info,
    reduce_indptr,
    reduce_final_map,
    reduce_partial_map,
    qhead_granularity=1,
    qlen_granularity=256,
    kvlen_granularity=16,
    block_size=16,
    is_causal=True,
):
    """Whole buffers are written: zeros behind what is meaningful, in `reduce_indptr` its last entry."""
    CALLS["get_ps_metadata_v1"] += 1
    lengths = {"seqlens_qo_indptr": seqlens_qo_indptr, "pages_kv_indptr": pages_kv_indptr, "context_lens": context_lens}
    for name, tensor in lengths.items():
        check(tensor.device.type == "cpu", f"{name}: expected on the host, got {tensor.device}")
        check_int32(name, tensor, 1)
    check(gqa_ratio == 1, f"gqa_ratio: expected 1, got {gqa_ratio}")
    plan = schedules.ps_prefill(
        *(tensor.numpy() for tensor in lengths.values()),
        num_heads_k=num_heads_k,
        num_cu=CARD.num_cu,
        qhead_granularity=qhead_granularity,
        qlen_granularity=qlen_granularity,
        kvlen_granularity=kvlen_granularity,
        block_size=block_size,
        is_causal=is_causal,
    )
    outputs = (work_indptr, work_info, reduce_indptr, reduce_final_map, reduce_partial_map)
    for name, tensor in zip(NAMES, outputs, strict=True):
        values = getattr(plan, name)
        check_int32(name, tensor, values.size)
        whole = np.zeros(tuple(tensor.shape), np.int32)
        whole.reshape(-1)[: values.size] = values.reshape(-1)
        if name == "reduce_indptr":
            whole[values.size :] = values[-1]
        tensor.copy_(torch.from_numpy(whole))  # blocking, as aiter's hipMemcpy, where the tensor is on the device
