"""Two metadata builders with the same result: one asks the device, one already knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...planner.batch import Batch
from ...planner.errors import BadInput
from .metadata import Segment, StepMetadata
from .request import Row
from .staging import ALIGNMENT, Staging


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
        input_ids = torch.tensor(_input_ids(rows), dtype=torch.int32, device=self.device)
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
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            segments=self._segments(query_lens, seq_lens, query_start_loc),
        )

    def _segments(self, query_lens: Any, seq_lens: Any, query_start_loc: Any) -> list[Segment]:
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
                max_query_len = query_lens[rows].max().item()
                max_seq_len = seq_lens[rows].max().item()
                segments.append(Segment(name, rows, slice(starts[start], starts[stop]), max_query_len, max_seq_len))
        return segments

    def _build_what_nobody_reads(self, query_lens: Any, seq_lens: Any) -> None:
        self.min_query_len = query_lens.min()
        self.context_lens = seq_lens - query_lens
        self.num_actual_kv_tokens = seq_lens.sum()


class PlannedBuilder:
    """Builds metadata from the scheduler's own lengths: one packed pinned copy up, nothing down, only what is read."""

    def __init__(self, device: Any, block_size: int, *, max_tokens: int, max_rows: int, max_row_blocks: int) -> None:
        self.block_size = block_size
        fields = 7
        capacity = 3 * max_tokens + max_rows * (3 + max_row_blocks) + 1 + fields * ALIGNMENT
        self.staging = Staging(device, capacity)

    def build(self, rows: Sequence[Row], batch: Batch) -> StepMetadata:
        segments = [
            Segment(cut.name, slice(*cut.rows), slice(*cut.tokens), cut.max_query_len(batch), cut.max_seq_len(batch))
            for cut in batch.segments("three")
        ]
        fields = self._token_fields(rows, batch)
        paged = [segment for segment in segments if segment.name != "prefill"]
        if paged:
            stop = paged[-1].rows.stop
            fields["seq_lens"] = batch.seq_lens[:stop]
            fields["block_table"] = _block_table(rows[:stop])
        if segments[-1].name != "decode":
            fields["query_start_loc"] = batch.query_start_loc
        uploaded = self.staging.upload(fields)
        absent = dict.fromkeys(("query_start_loc", "seq_lens", "block_table"))
        return StepMetadata(segments=segments, **{**absent, **uploaded})

    def _token_fields(self, rows: Sequence[Row], batch: Batch) -> dict[str, Any]:
        starts = batch.query_start_loc
        first = np.repeat(starts[:-1], batch.query_lens)
        positions = np.arange(starts[-1], dtype=np.int32) - first + np.repeat(batch.computed_lens, batch.query_lens)
        row_of_token = np.repeat(np.arange(len(rows)), batch.query_lens)
        blocks = _block_table(rows)[row_of_token, positions // self.block_size]
        return {
            "input_ids": np.array(_input_ids(rows), dtype=np.int32),
            "positions": positions,
            "slot_mapping": blocks * self.block_size + positions % self.block_size,
            "sample_tokens": _sample_tokens(rows, batch),
        }


def _input_ids(rows: Sequence[Row]) -> list[int]:
    return [token for row in rows for token in row.request.tokens[row.request.computed : row.seq_len]]


def _sample_tokens(rows: Sequence[Row], batch: Batch) -> NDArray[np.int32]:
    """The last token of each row that samples."""
    sampling = np.fromiter((row.samples for row in rows), dtype=np.bool_, count=len(rows))
    return batch.query_start_loc[1:][sampling] - np.int32(1)


def _block_table(rows: Sequence[Row]) -> NDArray[np.int32]:
    """[R, longest] block numbers, short rows filled up with block 0 (read, then masked)."""
    table = np.zeros((len(rows), max(len(row.request.blocks) for row in rows)), dtype=np.int32)
    for row, line in zip(rows, table, strict=True):
        line[: len(row.request.blocks)] = row.request.blocks
    return table


def make_builder(
    name: str, device: Any, block_size: int, *, max_tokens: int, max_rows: int, max_row_blocks: int
) -> Builder:
    """A builder by name, "unplanned" or "planned". The limits size the staging block of the planned one."""
    if name == "unplanned":
        return UnplannedBuilder(device, block_size)
    if name == "planned":
        return PlannedBuilder(
            device, block_size, max_tokens=max_tokens, max_rows=max_rows, max_row_blocks=max_row_blocks
        )
    raise BadInput(f"builder: expected unplanned or planned, got {name!r}")
