import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]

def prefill_count(
    qo_indptr: Int32Array,
    kv_indptr: Int32Array,
    context_lens: Int32Array,
    qlen_granularity: int,
    kvlen_granularity: int,
    block_size: int,
    is_causal: bool,
    /,
) -> tuple[int, int] | None: ...
def prefill_pack(
    qo_indptr: Int32Array,
    kv_indptr: Int32Array,
    context_lens: Int32Array,
    workgroups: int,
    qlen_granularity: int,
    kvlen_granularity: int,
    block_size: int,
    is_causal: bool,
    tiles: int,
    block: Int32Array,
    /,
) -> tuple[int, int, int]: ...
def prefill_expand(
    cluster_indptr: Int32Array,
    cluster_info: Int32Array,
    num_clusters: int,
    heads_per_cluster: int,
    qhead_granularity: int,
    work_indptr: Int32Array,
    work_info: Int32Array,
    /,
) -> None: ...
def decode_pack(
    qo_indptr: Int32Array,
    kv_indptr: Int32Array,
    fold: int,
    uni_seqlen_qo: int,
    tiles_per_request: int,
    max_seqlen_qo: int,
    kv_granularity: int,
    overhead: int,
    num_splits: int,
    workgroups: int,
    is_causal: bool,
    parallel: bool,
    block: Int32Array,
    /,
) -> tuple[int, int] | None: ...
