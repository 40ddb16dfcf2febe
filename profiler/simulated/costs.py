"""How many kernels an operator launches, and where it brings something back to the host by itself.

One row an operator, as the CUDA backend of PyTorch 2.11 was measured to do it; neighbours by analogy. What is not
listed launches one kernel. An operator whose output size depends on data copies that size to the host and waits.
"""

from __future__ import annotations

from typing import NamedTuple

# Launches of operators that are not one kernel. `aten::` names without overload.
LAUNCHES: dict[str, int] = {
    "allclose": 14,
    "eye": 2,
    "equal": 2,
    "kthvalue": 1,
    "median": 4,
    "randperm": 5,
    "histc": 2,
    "logsumexp": 9,
    "count_nonzero": 3,
    "isinf": 2,
    "nonzero_static": 4,
    "masked_scatter": 4,
    "slice_scatter": 0,
    "select_scatter": 0,
    "block_diag": 3,
    "quantile": 14,
    "bincount": 2,
    "_pack_padded_sequence": 3,
    "constant_pad_nd": 1,
    "linalg_inv_ex": 14,
    "cholesky": 5,  # linalg_cholesky_ex and a look at its error code
    "linalg_cholesky_ex": 4,
    "_linalg_solve_ex": 15,
    "linalg_lu_factor_ex": 7,
    "_linalg_det": 14,
    "_linalg_slogdet": 14,
    "_linalg_svd": 6,
    "_linalg_eigh": 23,
    "linalg_qr": 16,
    "linalg_pinv": 16,
    "linalg_lstsq": 14,
    "linalg_solve_triangular": 4,
    "cholesky_solve": 6,
    "cholesky_inverse": 8,
    "linalg_lu_solve": 6,
    "linalg_lu": 15,
    "linalg_eig": 35,
    "linalg_eigvals": 35,
    "linalg_matrix_exp": 18,
    "native_group_norm": 2,
    "dot": 2,
    "nanmedian": 9,
}
MEMSETS: dict[str, int] = {
    "linalg_inv_ex": 1,
    "cholesky": 2,
    "linalg_cholesky_ex": 2,
    "_linalg_solve_ex": 1,
    "_linalg_eigh": 1,
    "linalg_lu_factor_ex": 1,
    "_linalg_det": 1,
    "_linalg_slogdet": 1,
}
DEVICE_COPIES: dict[str, int] = {
    "constant_pad_nd": 1,
    "_linalg_svd": 1,
    "_linalg_eigh": 1,
    "linalg_pinv": 1,
    "linalg_lstsq": 1,
    "_linalg_det": 1,
    "_linalg_slogdet": 1,
    "slice_scatter": 2,
    "select_scatter": 2,
    "baddbmm": 1,
    "addbmm": 1,
}


class Waits(NamedTuple):
    """Waits inside an operator: reads into pinned and pageable host memory, blocking uploads, bare stream waits."""

    from_pinned: int = 0
    from_pageable: int = 0
    uploads: int = 0
    stream: int = 0


# Decompositions look at their error codes; some algorithms run partly on the host.
WAITS: dict[str, Waits] = {
    "allclose": Waits(from_pinned=1),
    "_linalg_svd": Waits(from_pinned=1, from_pageable=1),
    "_linalg_eigh": Waits(from_pinned=1, from_pageable=1),
    "linalg_pinv": Waits(from_pinned=1, from_pageable=1),
    "linalg_lstsq": Waits(from_pinned=1),
    "linalg_eig": Waits(from_pinned=14, uploads=4, stream=9),
    "linalg_eigvals": Waits(from_pinned=14, uploads=4, stream=9),
    "linalg_matrix_exp": Waits(from_pageable=1, uploads=2),
    "mode": Waits(from_pageable=6, uploads=2, stream=5),
    "cholesky": Waits(from_pinned=1),
}

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
        "_c10d_functional::wait_tensor",
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
        "put",
    }
)
SCAN = frozenset({"cumsum", "cumsum_", "cumprod", "cumprod_", "logcumsumexp"})
TOPK_LONG = (4096, 20)  # a top-k over rows of this length and more takes so many launches
TOPK_SHORT = 2
MODE_LONG_ROW = 2048
SORTED_INDEX_PUT = 12  # index_put with accumulate sorts the indices first
NONZERO, NONZERO_EMPTY, NONZERO_DIMS = 3, 2, 1  # kernels; of an empty tensor; more for several dimensions
# Operators with a device check of their own: not even a CPU scalar may be among the operands.
ONE_DEVICE = frozenset(
    {
        "clamp",
        "clamp_min",
        "clamp_max",
        "cat",
        "stack",
        "index_select",
        "gather",
        "embedding",
        "mm",
        "bmm",
        "addmm",
    }
)
