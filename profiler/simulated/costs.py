"""How many kernels an operator launches, and where it brings something back to the host by itself.

One row an operator, as the CUDA backend of PyTorch 2.11 was measured to do it; neighbours by analogy. What is not
listed launches one kernel. An operator whose output size depends on data copies that size to the host and waits.
"""

from __future__ import annotations

# Launches of operators that are not one kernel. `aten::` names without overload.
LAUNCHES: dict[str, int] = {
    "eye": 2,
    "equal": 2,
    "sort": 2,
    "argsort": 2,
    "topk": 2,
    "kthvalue": 2,
    "median": 2,
    "multinomial": 14,
    "randperm": 3,
    "histc": 2,
    "linalg_inv_ex": 14,
    "linalg_cholesky_ex": 4,
    "_linalg_solve_ex": 15,
    "linalg_lu_factor_ex": 4,
    "linalg_lu": 6,
    "_linalg_svd": 6,
    "_linalg_eigh": 4,
    "linalg_qr": 4,
}
MEMSETS: dict[str, int] = {"linalg_inv_ex": 1, "linalg_cholesky_ex": 2, "_linalg_solve_ex": 1}
DEVICE_COPIES: dict[str, int] = {"linalg_inv_ex": 1, "_linalg_solve_ex": 1, "sort": 3}

# Metadata only: nothing is enqueued. Views are found by their schema.
FREE = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
        "set_",
        "detach_",
        "squeeze_",
        "unsqueeze_",
        "t_",
        "transpose_",
        "as_strided_",
        "_unsafe_view",
        "_reshape_alias",
        "lift",
        "lift_fresh",
        "record_stream",
        "is_pinned",
        "is_same_size",
        "_has_same_storage_numel",
        "_resize_output_",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "unsafe_chunk",
        "_nested_tensor_size",
        "_version",
        "sym_size",
        "sym_stride",
        "sym_numel",
        "sym_storage_offset",
    }
)
# Out of place, but the kernel writes into a clone: a copy on the device before the kernel.
CLONE_FIRST = frozenset(
    {
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "index_add",
        "index_copy",
        "index_fill",
        "index_put",
        "masked_fill",
        "masked_scatter",
        "slice_scatter",
        "select_scatter",
        "put",
    }
)
SCAN = frozenset({"cumsum", "cumsum_", "cumprod", "cumprod_", "logcumsumexp"})  # two kernels over one dimension
TOPK_MULTI_BLOCK = 20  # launches of a top-k over long rows (32,000 measured)
TOPK_LONG_ROW = 4096
SORTED_INDEX_PUT = 12  # index_put with accumulate sorts the indices first
NONZERO = 3
