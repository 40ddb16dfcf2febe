"""From a batch and a backend's declaration to the minimal plan; sound reuse from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import numpy as np

from .backend import SEGMENT_NAMES, Backend, Field, Maker, Route, Shape, Source, Step, stays_on_host
from .batch import Batch
from .classify import Classification, classify
from .environment import Environment, Limits
from .errors import BadInput, InexactBatch
from .order import refuse_mis_served
from .plan import Cost, FieldPlan, Heads, MetadataPlan, SegmentPlan
from .segments import Segment
from .vocabulary import RowKind

_NO_COST = Cost(0, 0, 0, 0, 0)
_NO_HEADS = Heads()
MOST_SIZES = 64  # remembered a layout: shapes that follow the batch would grow without end


class _Settings:
    """Stands for a backend, environment and limits: planners with equal ones hold the same object."""

    __slots__ = ("__weakref__", "backend")

    def __init__(self, backend: Backend) -> None:
        self.backend = backend  # kept, so that its id stays its own


# Weak: a planning service is asked with ever new limits, and must not keep those that nobody plans with any more.
_SETTINGS: WeakValueDictionary[tuple[int, Environment, Limits], _Settings] = WeakValueDictionary()


class Planner:
    """Plans batches for one backend in one environment. Keep one per metadata builder.

    Planners with equal backend, environment and limits share a batch's plan: builders of one step cost one plan. From
    step to step a plan is reused only where every row's kind and every exact input of its fields is unchanged; where
    only sequence lengths moved, the fields that read them are computed again and the rest is kept.
    """

    def __init__(
        self,
        backend: Backend,
        environment: Environment | None = None,
        limits: Limits | None = None,
        *,
        decode_threshold: int | None = None,
    ) -> None:
        """`decode_threshold`: this builder's own (a draft model's may differ from the target's); default the batch's.

        Raises `BadInput` for an environment or limits that the backend cannot serve.
        """
        if not isinstance(backend, Backend):
            raise BadInput(
                f"backend: expected a Backend, as backends.attention.attention_backend gives, got {backend!r}"
            )
        self.backend = backend
        self.environment = Environment() if environment is None else environment
        self.limits = Limits() if limits is None else limits
        self.decode_threshold = decode_threshold
        if backend.check is not None:
            backend.check(self.environment, self.limits)
        self._query_lens = backend.query_lens_for(self.environment, self.limits)
        self._padding_cuts = backend.padding_cuts is not None and backend.padding_cuts(self.environment)
        self._settings = _SETTINGS.setdefault((id(backend), self.environment, self.limits), _Settings(backend))
        self._last: _Kept | None = None
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self._codes = b""
        self._rows: list[RowKind] = []

    def plan(self, batch: Batch, *, reorder: bool = False) -> MetadataPlan:
        """The minimal plan of a batch. With `reorder`, rows are first brought into vLLM's V1 order.

        Raises `UnorderedBatch` for an order that would be mis-served, `InexactBatch` where a field needs exact lengths
        on the host of a row known by bounds, `BadInput` where no kernel serves the batch.
        """
        if self.decode_threshold is not None:
            batch = batch.at_threshold(self.decode_threshold)
        for settings, ordered, plan in batch.plans:
            if settings is self._settings and ordered == reorder:
                return plan
        plan = self._plan(batch, reorder)
        batch.plans.append((self._settings, reorder, plan))
        return plan

    def _plan(self, batch: Batch, reorder: bool) -> MetadataPlan:
        self._refuse_over_limits(batch)
        found = classify(batch)
        order = found.order
        if reorder and order is not None:
            batch = batch.take(order)
            found = classify(batch)
        segments = batch.segments(self.backend.split, self._query_lens, padding_cuts=self._padding_cuts)
        codes = found.codes.tobytes()
        inputs = (codes, batch.query_lens.tobytes(), batch.num_tokens, segments, order, reorder)
        settings = (batch.decode_threshold, batch.short_extends_as_decodes, batch.causal, found.coarse)
        last = self._last
        if last is None or last.inputs != inputs or last.settings != settings:
            refuse_mis_served(batch, self.backend.split, segments)
            step = Step(batch, {s.name: s for s in segments}, self.environment, self.limits)
            layout = self._layout(step)
            if codes != self._codes:
                self._codes, self._rows = codes, found.rows
            plan = self._declared(step, found, layout, reorder and order is not None, order)
            self._last = _Kept(plan, layout, inputs, settings, _lengths(batch))
        elif last.lengths != (lengths := _lengths(batch)):
            step = Step(batch, {s.name: s for s in segments}, self.environment, self.limits)
            layout = self._layout(step) if self.backend.routes_by_length else last.layout
            if layout is last.layout:
                plan = self._refreshed(last, step)
            else:
                plan = self._declared(step, found, layout, reorder and order is not None, order)
            self._last = _Kept(plan, layout, inputs, settings, lengths)
        assert self._last is not None
        return self._last.plan

    def _refuse_over_limits(self, batch: Batch) -> None:
        """Padding does not count: graphs round up."""
        most = self.limits.max_num_seqs
        if batch.query_lens.size > most and (rows := int(np.count_nonzero(batch.query_lens))) > most:
            raise BadInput(f"query_lens[{most}]: expected at most {most} rows (limits.max_num_seqs), got {rows}")
        most = self.limits.max_num_batched_tokens
        if batch.num_tokens > most and (tokens := int(batch.query_start_loc[-1])) > most:
            row = int((batch.query_start_loc[1:] > most).argmax())
            raise BadInput(
                f"query_lens[{row}]: expected at most {most} tokens in the batch (limits.max_num_batched_tokens), "
                f"got {tokens}"
            )

    def _layout(self, step: Step) -> _Layout:
        """What the routes of this batch decide, computed once for each combination of routes."""
        routes = {name: _route(self.backend, step, name) for name in step.segments}
        shared = [r for r in self.backend.shared if r.when is None or r.when(step)] if routes else []
        key = (*map(id, routes.values()), 0, *map(id, shared))
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = _Layout(self.backend, step, routes, shared)
        return layout

    def _declared(
        self, step: Step, found: Classification, layout: _Layout, reordered: bool, order: list[int] | None
    ) -> MetadataPlan:
        """A plan from the declaration alone."""
        fields: dict[str, FieldPlan] = {}
        _fill(fields, layout.planned, step)
        return MetadataPlan(
            self.backend.name,
            found.batch_class,
            found.mixed,
            found.coarse,
            found.graph_eligible,
            reordered,
            step.batch.num_tokens,
            layout.routes,
            _NO_HEADS if self.backend.heads is None else Heads(**self.backend.heads(step)),
            self._rows,
            order,
            [_segment(step.batch, segment) for segment in step.segments.values()],
            fields,
            layout.skipped,
            _cost(layout, fields),
        )

    def _refreshed(self, last: _Kept, step: Step) -> MetadataPlan:
        """The last plan for other sequence lengths: only what reads them is computed again."""
        plan = last.plan
        fields = dict(plan.fields)
        _fill(fields, last.layout.moving, step)
        segments = [
            SegmentPlan(s.name, s.rows, s.tokens, s.max_query_len, step.segments[s.name].max_seq_len(step.batch))
            for s in plan.segments
        ]
        return MetadataPlan(
            plan.backend,
            plan.batch_class,
            plan.mixed,
            plan.coarse,
            plan.graph_eligible,
            plan.reordered,
            plan.num_tokens,
            plan.routes,
            plan.heads,
            plan.rows,
            plan.order,
            segments,
            fields,
            plan.skipped,
            _cost(last.layout, fields) if last.layout.moving_sizes else plan.cost,
        )


class _Part(NamedTuple):
    """A field that is planned on these routes, taken apart: this is the inner loop."""

    name: str
    source: Source
    dtype: str
    consumer: str
    value: Maker | None
    shape: Callable[[Step], Shape] | None
    exact_in: tuple[str, ...]  # segments whose exact lengths it needs
    from_device: bool


class _Layout:
    """What follows from the routes alone: which fields are planned, who reads them, why the others are left out."""

    __slots__ = ("arrays", "buffers", "launches", "moving", "moving_sizes", "planned", "routes", "sizes", "skipped")

    def __init__(self, backend: Backend, step: Step, routes: Mapping[str, Route], shared: Sequence[Route]) -> None:
        consumers = _consumers((*routes.values(), *shared))
        self.routes = {name: route.label for name, route in routes.items()}
        self.planned: list[_Part] = []
        self.moving: list[_Part] = []
        self.skipped: dict[str, str] = {}
        self.launches = 0
        for field in backend.fields:
            consumer = consumers.get(field.name)
            if consumer is None:
                self.skipped[field.name] = _reason(field, step)
                continue
            part = _part(field, step, consumer)
            self.planned.append(part)
            self.launches += field.launches
            if field.lengths != "none":
                self.moving.append(part)
        self.skipped.update(backend.never_read)
        self.arrays = [p.name for p in self.planned if p.source == "host" and not stays_on_host(p.dtype)]
        self.buffers = [p.name for p in self.planned if p.source == "persistent"]
        self.sizes: dict[tuple[str, Shape], int] = {}  # bytes of the buffers, by name and shape
        self.moving_sizes = any(not stays_on_host(p.dtype) for p in self.moving)


def _part(field: Field, step: Step, consumer: str) -> _Part:
    dtype = field.dtype(step.environment) if callable(field.dtype) else field.dtype
    rows = field.rows or ((field.part,) if field.part in SEGMENT_NAMES else tuple(step.segments))
    exact_in = rows if field.lengths == "exact" else ()
    return _Part(field.name, field.source, dtype, consumer, field.value, field.shape, exact_in, field.from_device)


class _Kept:
    """The last plan of a planner and everything it was computed from."""

    __slots__ = ("inputs", "layout", "lengths", "plan", "settings")

    def __init__(self, plan: MetadataPlan, layout: _Layout, inputs: Any, settings: Any, lengths: Any) -> None:
        self.plan = plan
        self.layout = layout
        self.inputs = inputs  # kinds and query lengths of every row, tokens, segments, order
        self.settings = settings
        self.lengths = lengths


def _lengths(batch: Batch) -> tuple[bytes, bytes | None, int]:
    lower = batch.seq_lens_lower
    return batch.seq_lens.tobytes(), None if lower is None else lower.tobytes(), batch.max_seq_len


def _route(backend: Backend, step: Step, segment: str) -> Route:
    for route in backend.routes:
        if route.segment == segment and (route.when is None or route.when(step)):
            if route.refuse is not None:
                reason = route.refuse(step) if callable(route.refuse) else route.refuse
                raise BadInput(f"{backend.name}: {segment} segment: {reason}")
            return route
    raise BadInput(f"{backend.name}: {segment} segment: no kernel serves it on {step.environment.gfx}")


def _consumers(routes: Sequence[Route]) -> dict[str, str]:
    """Who reads each field on these routes, as `kernel(parameters)`."""
    readers: dict[str, dict[str, dict[str, None]]] = {}
    for route in routes:
        for kernel in route.readers:
            for name, parameters in kernel.reads.items():
                of_kernel = readers.setdefault(name, {}).setdefault(kernel.name, {})
                of_kernel.update(dict.fromkeys(parameters.split(", ")))
    return {
        name: ", ".join(f"{kernel}({', '.join(parameters)})" for kernel, parameters in by_kernel.items())
        for name, by_kernel in readers.items()
    }


def _reason(field: Field, step: Step) -> str:
    if not step.segments:
        return "no rows in this batch"
    if field.part in SEGMENT_NAMES and field.part not in step.segments:
        return f"no {field.part} rows in this batch"
    return field.unread(step) if callable(field.unread) else field.unread


def _fill(fields: dict[str, FieldPlan], parts: Sequence[_Part], step: Step) -> None:
    """Compute these fields."""
    bounded = step.inexact is not None
    for name, source, dtype, consumer, maker, shape, exact_in, from_device in parts:
        value: Any = None
        extents: Shape = ()
        if bounded and exact_in and (row := _inexact_row(exact_in, step)) is not None:
            if not from_device:
                _refuse_inexact(step.batch, row, name)
            source = "device"
        elif maker is not None:
            value = maker(step)
            kind = type(value)
            if kind is np.ndarray:
                value.setflags(write=False)  # later plans may share it
                extents = value.shape
            elif kind is list:
                extents = (len(value),)
        if value is None and shape is not None:
            extents = shape(step)
        fields[name] = FieldPlan(source, dtype, extents, value, consumer)


def _refuse_inexact(batch: Batch, row: int, name: str) -> NoReturn:
    assert batch.seq_lens_lower is not None
    raise InexactBatch(
        f"seq_lens[{row}]: expected an exact length, which {name} needs on the host, "
        f"got {batch.seq_lens_lower[row]} to {batch.seq_lens[row]}"
    )


def _inexact_row(names: Sequence[str], step: Step) -> int | None:
    """The first row known only by bounds in these segments."""
    assert step.inexact is not None
    for name in names:
        if name in step.segments:
            start, stop = step.segments[name].rows
            if step.inexact[start:stop].any():
                return start + int(step.inexact[start:stop].argmax())
    return None


def _segment(batch: Batch, segment: Segment) -> SegmentPlan:
    return SegmentPlan(
        segment.name, segment.rows, segment.tokens, segment.max_query_len(batch), segment.max_seq_len(batch)
    )


def _cost(layout: _Layout, fields: Mapping[str, FieldPlan]) -> Cost:
    h2d = persistent = 0
    for name in layout.arrays:
        if (value := fields[name].value) is not None:
            h2d += value.nbytes
    for name in layout.buffers:
        planned = fields[name]
        size = layout.sizes.get((name, planned.shape))
        if size is None:
            size = planned.nbytes
            if len(layout.sizes) < MOST_SIZES:
                layout.sizes[name, planned.shape] = size
        persistent += size
    if h2d or persistent or layout.launches:
        return Cost(0, 1 if h2d else 0, h2d, layout.launches, persistent)
    return _NO_COST
