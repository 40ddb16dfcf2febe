"""Two metadata builders with the same result: one asks the device, one already knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ...planner import BadInput, Batch, Limits, MetadataPlan, Planner
from ...planner.lengths import Int32Array
from ...planner.plan import SegmentPlan
from .backend import BACKEND
from .metadata import Segment, StepMetadata
from .request import Row
from .staging import ALIGNMENT, Staging

Tensor = Any


class Builder(Protocol):
    """Turns the rows of a step into what its kernels read. `batch` holds the lengths of `rows`, in the same order."""

    def build(self, rows: Sequence[Row], batch: Batch) -> StepMetadata: ...


class UnplannedBuilder:
    """Builds metadata the way it is often written: on the device, asking it back for every size.

    Lists go up from pageable memory (each a wait), lengths the scheduler held a moment ago come down again, and fields
    are built that no kernel of the step reads.
    """

    def __init__(self, device: Any, block_size: int) -> None:
        self.device = device
        self.block_size = block_size

    def build(self, rows: Sequence[Row], batch: Batch) -> StepMetadata:
        query_lens = torch.tensor([row.query_len for row in rows], dtype=torch.int32, device=self.device)
        seq_lens = torch.tensor([row.seq_len for row in rows], dtype=torch.int32, device=self.device)
        input_ids = torch.tensor(_input_ids(rows).tolist(), dtype=torch.int32, device=self.device)
        block_table = torch.tensor(_block_table(rows).tolist(), dtype=torch.int32, device=self.device)
        query_start_loc = torch.nn.functional.pad(query_lens.cumsum(0), (1, 0))
        token_to_row = torch.repeat_interleave(query_lens)
        token = torch.arange(len(input_ids), device=self.device)
        positions = token - query_start_loc[token_to_row] + (seq_lens - query_lens)[token_to_row]
        slot_mapping = block_table[token_to_row, positions // self.block_size] * self.block_size
        slot_mapping += positions % self.block_size
        sample_tokens = torch.tensor(_sample_tokens(rows, batch).tolist(), dtype=torch.int32, device=self.device)
        self._build_what_nobody_reads(query_lens, seq_lens)
        return StepMetadata(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            sample_tokens=sample_tokens,
            segments=self._segments(query_lens, seq_lens, query_start_loc, block_table),
        )

    def _segments(
        self, query_lens: Tensor, seq_lens: Tensor, query_start_loc: Tensor, block_table: Tensor
    ) -> list[Segment]:
        starts_cpu = query_start_loc.cpu()
        seq_lens_cpu = seq_lens.cpu()
        query_lens_cpu, starts = starts_cpu.diff(), starts_cpu.tolist()
        long = query_lens_cpu > 1
        fresh = long & (query_lens_cpu == seq_lens_cpu)
        count = len(query_lens_cpu)
        decodes = int(long.int().argmax()) if long.any() else count
        prefill = int(fresh.int().argmax()) if fresh.any() else count
        segments = []
        for name, start, stop in (("decode", 0, decodes), ("extend", decodes, prefill), ("prefill", prefill, count)):
            if start < stop:
                rows = slice(start, stop)
                segments.append(
                    Segment(
                        name=name,
                        tokens=slice(starts[start], starts[stop]),
                        max_query_len=query_lens[rows].max().item(),
                        max_seq_len=seq_lens[rows].max().item(),
                        query_start_loc=query_start_loc[start : stop + 1] - query_start_loc[start],
                        seq_lens=seq_lens[rows],
                        block_table=block_table[rows],
                    )
                )
        return segments

    def _build_what_nobody_reads(self, query_lens: Tensor, seq_lens: Tensor) -> None:
        self.min_query_len = query_lens.min()
        self.context_lens = seq_lens - query_lens
        self.num_actual_kv_tokens = seq_lens.sum()


class PlannedBuilder:
    """Builds metadata from a plan: one packed pinned copy up, nothing down, only what this step's kernels read.

    `limits`: sizes of the engine, `max_row_blocks` the most blocks of one request; the staging block is made for them.
    """

    def __init__(self, device: Any, limits: Limits, max_row_blocks: int) -> None:
        self.block_size = limits.block_size
        self.planner = Planner(BACKEND, limits=limits)
        fields = len(BACKEND.fields) + 2  # and the token ids going in and the tokens sampled from
        rows = limits.max_num_seqs
        capacity = 3 * limits.max_num_batched_tokens + rows * (max_row_blocks + 4) + fields * ALIGNMENT
        self.staging = Staging(device, capacity)

    def build(self, rows: Sequence[Row], batch: Batch) -> StepMetadata:
        plan = self.planner.plan(batch)
        fields = {"input_ids": _input_ids(rows), "sample_tokens": _sample_tokens(rows, batch), **plan.host_arrays()}
        table = _block_table(rows)
        fields["slot_mapping"] = self._slots(table, fields["common.positions"], batch)
        if "common.block_table" in plan:
            fields["block_table"] = table
        uploaded = self.staging.upload(fields)
        return StepMetadata(
            input_ids=uploaded["input_ids"],
            positions=uploaded["common.positions"],
            slot_mapping=uploaded["slot_mapping"],
            sample_tokens=uploaded["sample_tokens"],
            segments=[_planned_segment(segment, plan, uploaded) for segment in plan.segments],
        )

    def _slots(self, table: Int32Array, positions: Int32Array, batch: Batch) -> Int32Array:
        row_of_token = np.repeat(np.arange(len(batch)), batch.query_lens)
        blocks = table[row_of_token, positions // self.block_size]
        slots: Int32Array = blocks * self.block_size + positions % self.block_size
        return slots


def _planned_segment(segment: SegmentPlan, plan: MetadataPlan, uploaded: dict[str, Tensor]) -> Segment:
    """The segment's planned fields by their own names; `block_table` belongs to all rows with a cache to read."""
    prefix = f"{segment.name}."
    own = {name.removeprefix(prefix): field.value for name, field in plan.fields.items() if name.startswith(prefix)}
    own.update({name: uploaded[prefix + name] for name in own if prefix + name in uploaded})
    if segment.name != "prefill":
        own["block_table"] = uploaded["block_table"][slice(*segment.rows)]
    return Segment(name=segment.name, tokens=slice(*segment.tokens), **own)


def _input_ids(rows: Sequence[Row]) -> Int32Array:
    tokens = [token for row in rows for token in row.request.tokens[row.request.computed : row.seq_len]]
    return np.array(tokens, dtype=np.int32)


def _sample_tokens(rows: Sequence[Row], batch: Batch) -> Int32Array:
    """The last token of each row that samples."""
    sampling = np.fromiter((row.samples for row in rows), dtype=np.bool_, count=len(rows))
    return batch.query_start_loc[1:][sampling] - np.int32(1)


def _block_table(rows: Sequence[Row]) -> Int32Array:
    """[R, longest] block numbers, short rows filled up with block 0 (read, then masked)."""
    table = np.zeros((len(rows), max(len(row.request.blocks) for row in rows)), dtype=np.int32)
    for row, line in zip(rows, table, strict=True):
        line[: len(row.request.blocks)] = row.request.blocks
    return table


def make_builder(name: str, device: Any, limits: Limits, max_row_blocks: int) -> Builder:
    """A builder by name, "unplanned" or "planned"."""
    if name == "unplanned":
        return UnplannedBuilder(device, limits.block_size)
    if name == "planned":
        return PlannedBuilder(device, limits, max_row_blocks)
    raise BadInput(f"builder: expected unplanned or planned, got {name!r}")
