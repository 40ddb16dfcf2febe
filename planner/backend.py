"""How an attention backend declares itself. One file per backend; the planner knows none of them.

A backend names its *fields* (what upstream's metadata holds, where the value comes from, how it is computed) and its
*routes* (which kernels serve a segment, and when). A kernel says which fields it reads, under which of its parameters.
The minimal plan of a batch is the union of what the kernels on its routes read; every other field is left out with the
reason its declaration gives. Nothing here computes on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from . import vocabulary
from .batch import Batch
from .environment import Environment, Limits
from .segments import QueryLens, Segment, Split

Source: TypeAlias = vocabulary.Source
LengthUse: TypeAlias = Literal["none", "exact", "upper", "lower"]
Shape: TypeAlias = vocabulary.Shape

Made = TypeVar("Made")
SEGMENT_NAMES = ("decode", "extend", "prefill", "all")


def stays_on_host(dtype: str) -> bool:
    """Whether values of this type are only called with: scalars ("int", "bool") and lists ("list[...]")."""
    return dtype in ("int", "bool") or dtype.startswith("list[")


class Step:
    """One batch seen by one backend: what fields, routes and reasons are computed from.

    `batch` is in its final order; `segments` holds the non-empty segments by name.
    """

    __slots__ = ("_made", "batch", "environment", "inexact", "limits", "segments")

    def __init__(self, batch: Batch, segments: Mapping[str, Segment], environment: Environment, limits: Limits) -> None:
        self.batch = batch
        self.segments = segments
        self.environment = environment
        self.limits = limits
        self.inexact = batch.inexact
        self._made: dict[Any, Any] = {}

    def once(self, maker: Callable[[Step], Made]) -> Made:
        """`maker(step)`, computed once a step: several fields share one layout."""
        made: Made
        try:
            made = self._made[maker]
        except KeyError:
            made = self._made[maker] = maker(self)
        return made

    def __getitem__(self, name: str) -> Segment:
        return self.segments[name]

    def __contains__(self, name: object) -> bool:
        return name in self.segments

    def rows(self, name: str) -> slice:
        """The rows of a segment as a slice."""
        return slice(*self.segments[name].rows)


Maker: TypeAlias = Callable[[Step], Any]
Reason: TypeAlias = str | Callable[[Step], str]


@dataclass(frozen=True, slots=True)
class Field:
    """One entry of the metadata.

    `name`: with its part in front, `extend.chunk_context.chunk_starts`. `source`: "host", `value` computes it (an int,
    a list of ints that stays on the host, or an int32 array that is copied once with all others); "device", the engine
    has it there already; "persistent", a buffer with a stable address, of `shape`. `dtype`: of one element; "int",
    "bool" and "list[...]" stay on the host. `lengths`: which sequence lengths the value or shape reads: "exact" ones,
    or an "upper" or "lower" bound. Where it needs exact lengths of a row known only by bounds, planning is refused, or
    left to the device if `from_device` says that upstream can compute it there. `rows`: the segments whose lengths it
    reads, default its own part. `unread`: why it is left out although its part has rows; kept for all batches on the
    same routes, so it looks at environment, limits and which segments there are, no further. `launches`: device
    launches that filling it costs.
    """

    name: str
    source: Source
    dtype: str | Callable[[Environment], str] = "int32"
    value: Maker | None = None
    shape: Callable[[Step], Shape] | None = None
    lengths: LengthUse = "none"
    rows: tuple[str, ...] = ()
    from_device: bool = False
    unread: Reason = "no kernel on this route reads it"
    launches: int = 0

    @property
    def part(self) -> str:
        """The first component of the name: a segment's, or a group of fields that belong to the whole batch."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel and what it reads: field name -> its parameters, comma-separated. One object a place of launch."""

    name: str
    reads: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Route:
    """The kernels that serve a segment, in launch order, where `when` holds. The first route that holds is taken.

    `entry`: the backend's own function around the launches, if it reads fields too. `refuse`: instead of kernels, the
    reason why none serves such a batch: planning raises `BadInput`.
    """

    segment: str
    kernels: tuple[Kernel, ...] = ()
    when: Callable[[Step], bool] | None = None
    entry: Kernel | None = None
    refuse: Reason | None = None

    @property
    def label(self) -> str:
        """Kernel names joined, as the plan shows them."""
        return " + ".join(dict.fromkeys(kernel.name for kernel in self.kernels))

    @property
    def readers(self) -> tuple[Kernel, ...]:
        """Everything on the route that reads fields."""
        return self.kernels if self.entry is None else (self.entry, *self.kernels)


@dataclass(frozen=True, slots=True)
class Backend:
    """A whole declaration. `name` is what the command line calls it; `upstream` is vLLM's name for it.

    `query_lens`: what the decode kernel takes, possibly by environment. `shared`: routes of the whole batch, beside
    those of its segments (cache writes); every one that holds is taken, their `segment` is only a title. `never_read`:
    fields that upstream fills, or filled in releases before, and that no kernel on any route reads, with the reason.
    `check`: refuses environments and limits it cannot serve, once, before any batch. `heads`: head counts as launched,
    the fields of `plan.Heads`, given the step. `padding_cuts`: see `Batch.segments`. `routes_by_length`: a route's
    `when` looks at sequence lengths, so that every step chooses anew.
    """

    name: str
    upstream: str
    split: Split
    routes: tuple[Route, ...]
    fields: tuple[Field, ...]
    query_lens: QueryLens | Callable[[Environment, Limits], QueryLens] = "varlen"
    shared: tuple[Route, ...] = ()
    never_read: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Environment, Limits], None] | None = None
    heads: Callable[[Step], Mapping[str, int]] | None = None
    padding_cuts: Callable[[Environment], bool] | None = None
    routes_by_length: bool = False

    def __post_init__(self) -> None:
        """A declaration that cannot be right fails when its file is imported, not at the first batch."""
        names = [f.name for f in self.fields]
        if len(set(names)) != len(names):
            raise TypeError(f"{self.name}: a field is declared twice")
        read = {name for r in (*self.routes, *self.shared) for kernel in r.readers for name in kernel.reads}
        if read - set(names):
            raise TypeError(f"{self.name}: kernels read undeclared fields {sorted(read - set(names))}")
        if set(names) - read:
            raise TypeError(f"{self.name}: no kernel reads {sorted(set(names) - read)}; list them as never_read")
        for f in self.fields:
            if (f.source == "host") != (f.value is not None):
                raise TypeError(f"{self.name}: {f.name}: a host field has a value, others have none")

    def query_lens_for(self, environment: Environment, limits: Limits) -> QueryLens:
        """What the decode kernel takes here."""
        return self.query_lens(environment, limits) if callable(self.query_lens) else self.query_lens
