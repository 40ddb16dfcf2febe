"""A plan for people (tables) and for programs (`syncfree.plan/1` in JSON)."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec
import numpy as np
import numpy.typing as npt

from .backend import Backend, Source
from .errors import BadInput
from .plan import SCHEMA, Cost, FieldPlan, Heads, MetadataPlan, SegmentPlan
from .plan_input import PlanInput, read_input, read_lists
from .planner import Planner
from .vocabulary import BatchClass, RowKind

if TYPE_CHECKING:
    from rich.console import Group

LONGEST_LIST = 4096  # elements; longer arrays are told by their digest
HEAD = 16


class ArrayDigest(msgspec.Struct, frozen=True):
    """A long array: SHA-256 of its little-endian int32 elements in row-major order, and the first of them."""

    sha256: str
    shape: list[int]
    head: list[int]


class FieldDocument(msgspec.Struct, frozen=True):
    """One planned field in JSON. `value`: nested lists for arrays, `null` for what is on the device already."""

    source: Source
    dtype: str
    shape: list[int | None]
    value: int | bool | list[Any] | ArrayDigest | None
    consumer: str


class PlanDocument(msgspec.Struct, frozen=True):
    """`syncfree.plan/1`."""

    schema: str
    backend: str
    batch_class: BatchClass
    mixed: bool
    coarse: bool
    graph_eligible: bool
    reordered: bool
    num_tokens: int
    routes: dict[str, str]
    heads: Heads
    rows: list[RowKind]
    order: list[int] | None
    segments: list[SegmentPlan]
    fields: dict[str, FieldDocument]
    skipped: dict[str, str]
    cost: Cost


def plan_schema() -> dict[str, Any]:
    """JSON Schema of `syncfree.plan/1`."""
    schema = msgspec.json.schema(PlanDocument)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = SCHEMA
    return schema


def plan_json(plan: MetadataPlan) -> bytes:
    """The plan as `syncfree.plan/1`."""
    names = [name for name in PlanDocument.__struct_fields__ if name not in ("schema", "fields")]
    parts = {name: getattr(plan, name) for name in names}
    fields = {name: _field_document(field) for name, field in plan.fields.items()}
    return msgspec.json.encode(PlanDocument(schema=SCHEMA, fields=fields, **parts))


def _field_document(field: FieldPlan) -> FieldDocument:
    value = field.value
    if isinstance(value, np.ndarray) or (isinstance(value, list) and _elements(value) > LONGEST_LIST):
        array = _as_array(value)
        if array.size > LONGEST_LIST:
            digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
            value = ArrayDigest(digest, list(array.shape), array.reshape(-1)[:HEAD].tolist())
        else:
            value = array.tolist()
    return FieldDocument(field.source, field.dtype, list(field.shape), value, field.consumer)


def _elements(value: list[Any]) -> int:
    return sum(_elements(item) if isinstance(item, list) else 1 for item in value)


def _as_array(value: npt.NDArray[np.int32] | list[Any]) -> npt.NDArray[np.int32]:
    """A list whose parts differ in length, such as the pieces of each chunk, is told as its elements in a row."""
    try:
        return np.asarray(value, dtype="<i4")
    except ValueError:
        return np.fromiter(_flat(value), dtype="<i4")


def _flat(value: Iterable[Any]) -> Iterable[int]:
    for item in value:
        if isinstance(item, list):
            yield from _flat(item)
        else:
            yield item


def run_plan(
    backend: Backend,
    *,
    file: str | Path | None = None,
    lists: Mapping[str, str | None] | None = None,
    settings: Iterable[str] = (),
    reorder: bool = False,
    json: bool = False,
    out: TextIO | None = None,
    **rest: Any,
) -> MetadataPlan:
    """Read a batch, plan it, print the plan: the whole `syncfree plan` command behind its options.

    `file`: JSON input, `-` for standard input; or `lists` and `rest` as in `plan_input.read_lists`. Nothing is printed
    before the plan is complete. Raises `BadInput` (exit 2) with the place in the input.
    """
    given = _given(file, lists or {}, settings, rest)
    plan = Planner(backend, given.environment, given.limits).plan(given.batch, reorder=reorder)
    out = sys.stdout if out is None else out
    if json:
        out.write(plan_json(plan).decode() + "\n")
    else:
        from rich.console import Console

        console = Console(file=out, highlight=False)
        if not console.is_terminal and console.width <= 80:
            console = Console(file=out, highlight=False, width=160)  # a pipe has no width; 80 columns would cut names
        console.print(render_plan(plan))
    return plan


def _given(
    file: str | Path | None, lists: Mapping[str, str | None], settings: Iterable[str], rest: Mapping[str, Any]
) -> PlanInput:
    listed = [name for name, text in lists.items() if text is not None]
    if file is not None:
        clash = [*listed, *(name for name, value in rest.items() if value is not None), *settings]
        if clash:
            raise BadInput(f"plan: expected a file or lists, got a file and {clash[0]}")
        return read_input(_read_file(file))
    if not {"query_lens", "seq_lens"} <= set(listed):
        raise BadInput("plan: expected --query-lens and --seq-lens, or --input FILE (- for standard input)")
    return read_lists(lists, settings, **rest)


def _read_file(file: str | Path) -> bytes:
    if str(file) == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from error


def render_plan(plan: MetadataPlan) -> Group:
    """Tables: segments with their kernels, planned fields, what is left out and why, the cost."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, title_justify="left", title_style="bold", header_style="bold", expand=False)
        for column in columns:
            made.add_column(column, overflow="fold")
        return made

    segments = table("segments", "segment", "rows", "tokens", "max query", "max seq", "kernels")
    for s in plan.segments:
        spans = [f"{start}..{stop}" for start, stop in (s.rows, s.tokens)]
        segments.add_row(s.name, *spans, str(s.max_query_len), str(s.max_seq_len), Text(plan.routes[s.name]))
    fields = table("planned", "field", "source", "shape", "value", "consumer")
    for name, field in plan.fields.items():
        fields.add_row(Text(name), field.source, Text(_shape(field)), Text(_value(field)), Text(field.consumer))
    skipped = table("left out", "field", "why")
    for name, reason in plan.skipped.items():
        skipped.add_row(Text(name), Text(reason))
    return Group(Text(_headline(plan), style="bold"), segments, fields, skipped, Text(_cost(plan.cost)))


def _headline(plan: MetadataPlan) -> str:
    line = f"{plan.backend}: {plan.batch_class}"
    line += " (coarse)" if plan.coarse else ""
    line += ", decode rows beside others" if plan.mixed else ""
    line += ", graph eligible" if plan.graph_eligible else ""
    heads = plan.heads
    for what, count in (("decode", heads.decode), ("FP8 prefill", heads.fp8_prefill)):
        line += f", {what} at {count} heads" if count is not None else ""
    if plan.order is not None:
        line += "; rows brought into the order " if plan.reordered else "; not in vLLM's order, which is "
        line += str(plan.order[:HEAD])[:-1] + (", ...]" if len(plan.order) > HEAD else "]")
    return line


def _cost(cost: Cost) -> str:
    copies = "1 host-to-device copy" if cost.h2d_copies == 1 else f"{cost.h2d_copies} host-to-device copies"
    return (
        f"cost: {cost.syncs} syncs, {copies} ({cost.h2d_bytes:,} bytes), {cost.launches} launches, "
        f"{cost.persistent_bytes:,} bytes of persistent buffers"
    )


def _shape(field: FieldPlan) -> str:
    if not field.shape or (field.source == "host" and isinstance(field.value, list)):
        return field.dtype
    extents = ", ".join("?" if extent is None else str(extent) for extent in field.shape)
    return f"{field.dtype} [{extents}]"


def _value(field: FieldPlan) -> str:
    if field.value is None:
        return ""
    if isinstance(field.value, np.ndarray):
        flat = field.value.reshape(-1)
        return ", ".join(map(str, flat[:8].tolist())) + (", ..." if flat.size > 8 else "")
    if isinstance(field.value, list):
        return ", ".join(map(str, field.value[:8])) + (", ..." if len(field.value) > 8 else "")
    return str(field.value)
