"""From a batch and a backend's declaration to the minimal plan; sound reuse from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .backend import SEGMENT_NAMES, Backend, Field, Kernel, Route, Step
from .batch import Batch
from .classify import Classification, classify
from .environment import Environment, Limits
from .errors import BadInput, InexactBatch
from .order import refuse_mis_served
from .plan import Cost, FieldPlan, Heads, MetadataPlan, SegmentPlan
from .segments import Segment

_NO_COST = Cost(0, 0, 0, 0, 0)
_SETTINGS: dict[Any, Any] = {}  # equal settings of different planners become one object, so that comparing is free


class Planner:
    """Plans batches for one backend in one environment. Keep one per metadata builder.

    Planners with equal backend, environment and limits share a batch's plan: builders of one step cost one plan. From
    step to step a plan is reused only where every row's kind and every exact input of its fields is unchanged; where
    only sequence lengths moved, the fields that read them are computed again and the rest is kept.
    """

    def __init__(self, backend: Backend, environment: Environment | None = None, limits: Limits | None = None) -> None:
        self.backend = backend
        self.environment = Environment() if environment is None else environment
        self.limits = Limits() if limits is None else limits
        if backend.check is not None:
            backend.check(self.environment, self.limits)
        self._query_lens = backend.query_lens_for(self.environment, self.limits)
        self._padding_cuts = backend.padding_cuts is not None and backend.padding_cuts(self.environment)
        settings = (backend.name, self.environment, self.limits)
        self._settings = _SETTINGS.setdefault(settings, settings)
        self._last: _Kept | None = None

    def plan(self, batch: Batch, *, reorder: bool = False) -> MetadataPlan:
        """The minimal plan of a batch. With `reorder`, rows are first brought into vLLM's V1 order.

        Raises `UnorderedBatch` for an order that would be mis-served, `InexactBatch` where a field needs exact lengths
        on the host of a row known by bounds, `BadInput` where no kernel serves the batch.
        """
        for settings, ordered, plan in batch.plans:
            if settings is self._settings and ordered == reorder:
                return plan
        plan = self._plan(batch, reorder)
        batch.plans.append((self._settings, reorder, plan))
        return plan

    def _plan(self, batch: Batch, reorder: bool) -> MetadataPlan:
        found = classify(batch)
        order = found.order
        if reorder and order is not None:
            batch = batch.take(order)
            found = classify(batch)
        segments = batch.segments(self.backend.split, self._query_lens, padding_cuts=self._padding_cuts)
        shape = (found.codes.tobytes(), batch.query_lens.tobytes(), batch.num_tokens, segments, order, reorder)
        settings = (batch.decode_threshold, batch.short_extends_as_decodes, batch.causal, found.coarse)
        last = self._last
        if last is None or last.shape != shape or last.settings != settings:
            refuse_mis_served(batch, self.backend.split, segments)
            step = Step(batch, {s.name: s for s in segments}, self.environment, self.limits)
            last = _Kept(self._declared(step, found, order, reorder), shape, settings, _lengths(batch))
        elif last.lengths != (lengths := _lengths(batch)):
            step = Step(batch, {s.name: s for s in segments}, self.environment, self.limits)
            last = _Kept(self._refreshed(last.plan, step), shape, settings, lengths)
        self._last = last
        return last.plan

    def _declared(self, step: Step, found: Classification, order: list[int] | None, reorder: bool) -> MetadataPlan:
        """A plan from the declaration alone."""
        routes = {name: _route(self.backend, step, name) for name in step.segments}
        consumers = _consumers(self.backend, step, routes)
        fields, skipped = {}, {}
        for field in self.backend.fields:
            consumer = consumers.get(field.name)
            if consumer is None:
                skipped[field.name] = _reason(field, step)
            else:
                fields[field.name] = _planned(field, step, consumer)
        skipped.update(self.backend.never_read)
        return MetadataPlan(
            backend=self.backend.name,
            batch_class=found.batch_class,
            mixed=found.mixed,
            coarse=found.coarse,
            graph_eligible=found.graph_eligible,
            reordered=reorder and order is not None,
            num_tokens=step.batch.num_tokens,
            routes={name: route.label for name, route in routes.items()},
            heads=Heads() if self.backend.heads is None else Heads(**self.backend.heads(step)),
            rows=found.rows,
            order=order,
            segments=[_segment(step.batch, segment) for segment in step.segments.values()],
            fields=fields,
            skipped=skipped,
            cost=_cost(self.backend, fields),
        )

    def _refreshed(self, plan: MetadataPlan, step: Step) -> MetadataPlan:
        """The same plan for other sequence lengths: only what reads them is computed again."""
        fields = dict(plan.fields)
        moved = False
        for field in self.backend.fields:
            if field.lengths != "none" and field.name in fields:
                fields[field.name] = _planned(field, step, fields[field.name].consumer)
                moved = moved or field.source != "host" or bool(fields[field.name].shape)
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
            _cost(self.backend, fields) if moved else plan.cost,
        )


class _Kept:
    """The last plan of a planner and everything it was computed from."""

    __slots__ = ("lengths", "plan", "settings", "shape")

    def __init__(self, plan: MetadataPlan, shape: Any, settings: Any, lengths: Any) -> None:
        self.plan = plan
        self.shape = shape  # kinds and query lengths of every row, tokens, segments, order
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


def _consumers(backend: Backend, step: Step, routes: Mapping[str, Route]) -> dict[str, str]:
    """Who reads each field on these routes, as `kernel(parameter)`."""
    readers: dict[str, dict[str, None]] = {}
    kernels: list[Kernel] = [kernel for route in routes.values() for kernel in route.readers]
    if step.segments:
        for route in backend.shared:
            if route.when is None or route.when(step):
                kernels.extend(route.readers)
    for kernel in kernels:
        for name, parameter in kernel.reads.items():
            readers.setdefault(name, {})[f"{kernel.name}({parameter})"] = None
    return {name: ", ".join(reader) for name, reader in readers.items()}


def _reason(field: Field, step: Step) -> str:
    if not step.segments:
        return "no rows in this batch"
    if field.part in SEGMENT_NAMES and field.part not in step.segments:
        return f"no {field.part} rows in this batch"
    return field.unread(step) if callable(field.unread) else field.unread


def _planned(field: Field, step: Step, consumer: str) -> FieldPlan:
    source, value = field.source, None
    if field.lengths == "exact" and (row := _inexact_row(field, step)) is not None:
        if not field.from_device:
            batch = step.batch
            assert batch.seq_lens_lower is not None
            raise InexactBatch(
                f"seq_lens[{row}]: expected an exact length, which {field.name} needs on the host, "
                f"got {batch.seq_lens_lower[row]} to {batch.seq_lens[row]}"
            )
        source = "device"
    elif field.value is not None:
        value = field.value(step)
    dtype = field.dtype(step.environment) if callable(field.dtype) else field.dtype
    if isinstance(value, np.ndarray):
        return FieldPlan(source, dtype, value.shape, value, consumer)
    if isinstance(value, list):
        return FieldPlan(source, dtype, (len(value),), value, consumer)
    return FieldPlan(source, dtype, () if field.shape is None else field.shape(step), value, consumer)


def _inexact_row(field: Field, step: Step) -> int | None:
    inexact = step.batch.inexact
    if inexact is None:
        return None
    names = field.rows or ((field.part,) if field.part in SEGMENT_NAMES else tuple(step.segments))
    for name in names:
        if name in step.segments:
            start, stop = step.segments[name].rows
            if inexact[start:stop].any():
                return start + int(inexact[start:stop].argmax())
    return None


def _segment(batch: Batch, segment: Segment) -> SegmentPlan:
    return SegmentPlan(
        segment.name, segment.rows, segment.tokens, segment.max_query_len(batch), segment.max_seq_len(batch)
    )


def _cost(backend: Backend, fields: Mapping[str, FieldPlan]) -> Cost:
    h2d = persistent = 0
    for planned in fields.values():
        if isinstance(planned.value, np.ndarray):
            h2d += planned.value.nbytes
        elif planned.source == "persistent":
            persistent += planned.nbytes
    launches = sum(field.launches for field in backend.fields if field.launches and field.name in fields)
    return Cost(0, 1 if h2d else 0, h2d, launches, persistent) if h2d or persistent or launches else _NO_COST
