"""Steady decode: the same rows step after step, the whole forward one captured graph, the metadata built outside it.

Step N+1 is built while the graph of step N runs, as an engine with full graphs and asynchronous scheduling does it: a
builder that waits for the device stops the host until step N has ended, and the device idles until the next launch.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
import torch
from serving import Inputs, Model, Reader, Row, StepRecord


class Steady:
    """`sizes.concurrency` rows of one token each over `sizes.prompt` cached tokens. One builder, one graph."""

    def __init__(self, model: Model, builder: Any, reader: Reader, make_common: Any) -> None:
        self.model, self.builder, self.reader, self._make_common = model, builder, reader, make_common
        s, device = model.sizes, model.device
        rows = s.concurrency
        self._lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._places = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slots = torch.arange(rows, dtype=torch.int32, device=device)
        self._starts = np.arange(rows + 1, dtype=np.int32)
        self._starts_d = torch.arange(rows + 1, dtype=torch.int32, device=device)
        blocks = s.room // s.block
        self._table = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks).to(device)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._pinned = [torch.zeros(rows, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self._reset()
        self._graph, self._read_by_graph = self._capture()

    def _reset(self) -> None:
        s = self.model.sizes
        self._lens.fill_(s.prompt + 1)
        self._places.copy_(self._slots.to(torch.int64) * s.room + s.prompt)
        self._tokens.copy_(torch.arange(s.concurrency) % s.vocab)

    def _inputs(self, step: int) -> Inputs:
        s = self.model.sizes
        rows = [Row(slot, 1, s.prompt + step, True, True) for slot in range(s.concurrency)]
        common = self._make_common(rows, self._starts, self._starts_d, self._lens, self._table, self._places)
        return Inputs(rows, self._slots, self._starts_d, self._lens, self._places, common)

    def _capture(self) -> tuple[Any, Any]:
        inputs = self._inputs(0)
        metadata = self.builder.build(0, inputs.common)
        wanted = torch.arange(len(inputs.rows), device=self.model.device)

        def forward() -> None:
            read = self.reader.read(metadata, inputs)
            self._tokens.copy_(self.model.forward(self._tokens, inputs, *read, wanted))
            self._lens.add_(1)
            self._places.add_(1)

        forward()  # kernels are compiled and libraries started before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward()
        return graph, (inputs, metadata, wanted)  # memory that a replay reads: kept, or others would be given it

    def run(self, steps: int, around_build: Any) -> tuple[list[StepRecord], list[list[int]]]:
        """Records and tokens of so many steps from the same start."""
        self._reset()
        torch.cuda.synchronize()
        flight: deque[tuple[int, Any, float]] = deque()
        records: list[StepRecord] = []
        tokens: list[list[int]] = []
        began_run = torch.cuda.Event(enable_timing=True)
        began_run.record()
        for step in range(steps + 1):
            if step < steps:
                inputs = self._inputs(step)
                with around_build("decode"):
                    began = time.perf_counter()
                    self.builder.build(0, inputs.common)
                    build_us = (time.perf_counter() - began) * 1e6
                self._graph.replay()
                self._pinned[step % 2].copy_(self._tokens, non_blocking=True)
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                flight.append((step % 2, event, build_us))
            if len(flight) == 2 or step == steps:
                slot, event, build_us = flight.popleft()
                event.synchronize()
                records.append(StepRecord("decode", build_us, began_run.elapsed_time(event) / 1e3))
                tokens.append(self._pinned[slot].tolist())
        return records, tokens
