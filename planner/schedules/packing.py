"""The packing loops behind one interface: a C extension where it was built, else its NumPy twin.

Every function trusts its scalars and checks its arrays: a malformed one makes `*_count` and `decode_pack` return None,
and the caller then looks for the element to blame. Arrays are C-contiguous int32.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from . import _twin

Int32Array = NDArray[np.int32]


class Packing(Protocol):
    """The four loops. Layouts of `block` are contiguous sections in the order named."""

    def prefill_count(
        self,
        qo_indptr: Int32Array,
        kv_indptr: Int32Array,
        context_lens: Int32Array,
        qlen_granularity: int,
        kvlen_granularity: int,
        block_size: int,
        is_causal: bool,
        /,
    ) -> tuple[int, int] | None:
        """(query tiles, KV units) of the batch; None where an array is malformed."""

    def prefill_pack(
        self,
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
    ) -> tuple[int, int, int]:
        """(pieces, reduce groups, partial rows) of one cluster, written into `block`.

        Sections, with T = workgroups and G = min(tiles, T): work_indptr[T + 1], work_info[tiles + T, 8],
        reduce_indptr[G + 1], reduce_final_map[G, 2], reduce_partial_map[2 T].
        """

    def prefill_expand(
        self,
        cluster_indptr: Int32Array,
        cluster_info: Int32Array,
        num_clusters: int,
        heads_per_cluster: int,
        qhead_granularity: int,
        work_indptr: Int32Array,
        work_info: Int32Array,
        /,
    ) -> None:
        """Repeat one cluster's pieces over clusters and heads; ValueError where an output has another size."""

    def decode_pack(
        self,
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
    ) -> tuple[int, int] | None:
        """(works, partial rows), written into `block`; None where an array is malformed or a count leaves int32.

        Sections, with W = workgroups and N = requests * fold * tiles_per_request: work_indptr[W + 1],
        reduce_indptr[N + 1], reduce_final_map[N, 2], reduce_partial_map[N + W], work_info[N + W, 8].
        """


IMPLEMENTATIONS: dict[str, Packing] = {"python": _twin}
try:
    from . import _native
except ImportError:  # built where a compiler was found; everything works without
    pass
else:
    IMPLEMENTATIONS["native"] = _native

active: Packing = IMPLEMENTATIONS.get("native", _twin)
