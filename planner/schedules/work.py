"""What a schedule is: work items for a grid of workgroups, and the merge lists for tiles that were split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import packing

Int32Array = NDArray[np.int32]

WORK_COLUMNS = 8


@dataclass(frozen=True, slots=True, eq=False)
class ClusterSchedule:
    """The part of a prefill schedule that all heads share: one cluster's pieces, without a head.

    A grid of `num_clusters * len(work_indptr - 1)` workgroups runs it once per head: head `h` of `heads_per_cluster`
    in cluster `c` is head `c * heads_per_cluster + h`, and works on q heads `head * qhead_granularity` onwards.
    """

    num_clusters: int
    heads_per_cluster: int
    qhead_granularity: int
    work_indptr: Int32Array
    """[workgroups per cluster + 1] pieces before each workgroup."""
    work_info: Int32Array
    """[pieces, 8]; column 7 is 0, the head range goes there."""

    @property
    def num_workgroups(self) -> int:
        return self.num_clusters * (len(self.work_indptr) - 1)

    @property
    def num_works(self) -> int:
        return self.num_clusters * self.heads_per_cluster * len(self.work_info)

    def expand(self, work_indptr: Int32Array, work_info: Int32Array) -> None:
        """Write the whole grid's schedule into `work_indptr[num_workgroups + 1]` and `work_info[num_works, 8]`.

        Both are C-contiguous int32, and may be slices of a staging buffer; ValueError where one does not fit.
        """
        packing.active.prefill_expand(
            self.work_indptr,
            self.work_info,
            self.num_clusters,
            self.heads_per_cluster,
            self.qhead_granularity,
            work_indptr,
            work_info,
        )


class WorkSchedule:
    """Work items of a grid of workgroups, and how split tiles are merged; meaningful prefixes, all int32.

    - `work_indptr[workgroups + 1]`: workgroup `g` runs rows `work_indptr[g]` to `work_indptr[g + 1]` of `work_info`.
    - `work_info[n, 8]`: request; row in the pool of partial results or -1; first query row, its end; first KV page,
      its end; KV tokens of the request behind that end; q heads (first | end << 16; 0 for decode).
    - `reduce_indptr`, `reduce_final_map[m, 2]`, `reduce_partial_map`: group `j` merges the pool rows
      `reduce_partial_map[reduce_indptr[j]:reduce_indptr[j + 1]]` into output rows `reduce_final_map[j]`.

    A prefill schedule carries `cluster`, and `work_indptr` and `work_info` are made from it when first read: a caller
    that expands on the device, or straight into a staging buffer, never pays for `num_heads_k` copies of one plan.
    """

    __slots__ = ("_expanded", "cluster", "reduce_final_map", "reduce_indptr", "reduce_partial_map")

    def __init__(
        self,
        work: tuple[Int32Array, Int32Array] | ClusterSchedule,
        reduce_indptr: Int32Array,
        reduce_final_map: Int32Array,
        reduce_partial_map: Int32Array,
    ) -> None:
        self.cluster: ClusterSchedule | None = None
        self._expanded: tuple[Int32Array, Int32Array] | None = None
        if isinstance(work, ClusterSchedule):
            self.cluster = work
        else:
            self._expanded = work
        self.reduce_indptr = reduce_indptr
        self.reduce_final_map = reduce_final_map
        self.reduce_partial_map = reduce_partial_map

    @property
    def work_indptr(self) -> Int32Array:
        return self._whole()[0]

    @property
    def work_info(self) -> Int32Array:
        return self._whole()[1]

    @property
    def num_works(self) -> int:
        return self.cluster.num_works if self.cluster is not None else len(self.work_info)

    @property
    def num_partials(self) -> int:
        return len(self.reduce_partial_map)

    def _whole(self) -> tuple[Int32Array, Int32Array]:
        if self._expanded is None:
            assert self.cluster is not None
            work_indptr = np.empty(self.cluster.num_workgroups + 1, np.int32)
            work_info = np.empty((self.cluster.num_works, WORK_COLUMNS), np.int32)
            self.cluster.expand(work_indptr, work_info)
            self._expanded = work_indptr, work_info
        return self._expanded

    def __repr__(self) -> str:
        return f"WorkSchedule(works={self.num_works}, partials={self.num_partials})"
