"""The model's forward as captured graphs, one a layout of a step, so that the device and not the host bounds a step.

Launched eagerly, 32 layers take the host longer than the device, and a builder that waits costs nothing: the device was
idle anyway. Engines capture their forwards for that reason. What a builder makes reaches a graph through buffers of its
own, which a step fills; all graphs share one pool of memory, since they never run side by side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from serving import Inputs, Model


class Layout(NamedTuple):
    """What a graph is captured for: everything the host decides of a step but its lengths of decode rows."""

    decode_rows: int
    decode_tokens: int
    prefills: tuple[tuple[int, int], ...]  # (query tokens, tokens of context) of every prefill row
    wanted: int


def layout_of(inputs: Inputs, wanted: Any) -> Layout:
    prefills = tuple((row.query, row.computed) for row in inputs.rows if not row.decode)
    return Layout(inputs.decode_rows, inputs.decode_tokens, prefills, len(wanted))


class Forwards:
    """`model.forward`, replayed. Every layout is captured when it first comes: let a first run pass before timing."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._captured: dict[Layout, _Captured] = {}
        self._pool: Any = None

    def __call__(self, tokens: Any, inputs: Inputs, paging: Any, context: Any, wanted: Any) -> Any:
        layout = layout_of(inputs, wanted)
        captured = self._captured.get(layout)
        if captured is None:
            captured = _Captured(self.model, tokens, inputs, paging, context, wanted, self._pool)
            self._captured[layout] = captured
            self._pool = captured.graph.pool()
        return captured(tokens, inputs.places, paging, context, wanted)


class _Captured:
    """One graph and the buffers that it reads and writes: they live as long as it, or a replay reads freed memory."""

    def __init__(
        self, model: Any, tokens: Any, inputs: Inputs, paging: Any, context: Any, wanted: Any, pool: Any
    ) -> None:
        s, device = model.sizes, model.device
        self.tokens, self.places, self.wanted = tokens.clone(), inputs.places.clone(), wanted.clone()
        self.paging, self.context = None, None if context is None else context.clone()
        if paging is not None:
            qo, kv, pages = paging
            room = torch.zeros(s.concurrency * s.room, dtype=pages.dtype, device=device)
            room[: len(pages)] = pages[: len(room)]
            self.paging = (qo.clone(), kv.clone(), room)
        self._inputs = inputs._replace(places=self.places)
        self.following = self._forward(model)  # kernels are compiled and libraries started before the capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.following.copy_(self._forward(model))

    def _forward(self, model: Any) -> Any:
        return model.forward(self.tokens, self._inputs, self.paging, self.context, self.wanted)

    def __call__(self, tokens: Any, places: Any, paging: Any, context: Any, wanted: Any) -> Any:
        self.tokens.copy_(tokens)
        self.places.copy_(places)
        self.wanted.copy_(wanted)
        if self.paging is not None:
            qo, kv, room = self.paging
            qo.copy_(paging[0])
            kv.copy_(paging[1])
            pages = paging[2][: len(room)]
            room[: len(pages)].copy_(pages)
        if self.context is not None:
            self.context.copy_(context)
        self.graph.replay()
        return self.following
