"""`syncfree.report/1`: what every collector and every trace reader ends in.

Objects are always present, only figures may be `null`: unknown is None, never 0. All times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ..errors import BadInput

FORMAT: Literal["syncfree.report/1"] = "syncfree.report/1"
Figure = Annotated[int, msgspec.Meta(ge=0)] | None
Amount = float | None
Verdict = Literal["sync-free", "syncs", "unknown"]


class Syncs(msgspec.Struct, kw_only=True):
    """Host calls that wait for the device, by kind. `maybe` (may have waited) is apart from `total`."""

    total: Figure = None
    d2h: Figure = None
    h2d: Figure = None
    stream: Figure = None
    device: Figure = None
    event: Figure = None
    memset: Figure = None
    maybe: Figure = None


class Copies(msgspec.Struct, kw_only=True):
    d2h: Figure = None
    h2d: Figure = None
    d2d: Figure = None
    d2h_bytes: Figure = None
    h2d_bytes: Figure = None


class Launches(msgspec.Struct, kw_only=True):
    """Launch calls that ran: `kernels` and `graphs` (a graph launch counts once); `captured` did not run."""

    kernels: Figure = None
    graphs: Figure = None
    captured: Figure = None


class PhaseFigures(msgspec.Struct, kw_only=True):
    """Figures of one phase of a step; without `duration_us` where they are another thread's share."""

    syncs: Syncs = msgspec.field(default_factory=Syncs)
    copies: Copies = msgspec.field(default_factory=Copies)
    launches: Launches = msgspec.field(default_factory=Launches)
    blocked_us: Amount = None
    duration_us: Amount = None


class Step(msgspec.Struct, kw_only=True):
    rank: int = 0
    index: int = 0
    batch_class: str = "unknown"
    coarse: bool = False
    mixed: bool | None = None
    num_reqs: Figure = None
    num_tokens: Figure = None
    duration_us: Amount = None
    syncs: Syncs = msgspec.field(default_factory=Syncs)
    copies: Copies = msgspec.field(default_factory=Copies)
    launches: Launches = msgspec.field(default_factory=Launches)
    blocked_us: Amount = None
    host_ops: Figure = None
    phases: dict[str, PhaseFigures] = msgspec.field(default_factory=dict)
    start_us: Amount = None  # in the clock of the rank that recorded it
    name: str | None = None  # the annotation a trace step was found by
    warmup: bool = False  # warm-up, lazy compilation or capture: counted, but no verdict or budget is about it
    warmup_cause: str = ""  # warmup, compile or capture
    other_threads: dict[str, PhaseFigures] = msgspec.field(default_factory=dict)  # by phase: threads that do not step
    launch_lead_us: Amount = None  # how far the host ran ahead of the device at the step's end (where timestamps exist)
    launch_lead_p50_us: Amount = None  # over the launches of the step
    launch_lead_min_us: Amount = None
    device_idle_us: Amount = None  # device time lost while the host waited


class Distribution(msgspec.Struct, kw_only=True):
    mean: Amount = None
    p50: Amount = None
    p99: Amount = None
    max: Amount = None


class ClassFigures(msgspec.Struct, kw_only=True):
    steps: int = 0
    syncs_per_step: Distribution = msgspec.field(default_factory=Distribution)  # build + forward
    launches_per_step: Distribution = msgspec.field(default_factory=Distribution)  # kernels + graphs
    copies_per_step: Distribution = msgspec.field(default_factory=Distribution)
    duration_us: Distribution = msgspec.field(default_factory=Distribution)
    build_us: Distribution = msgspec.field(default_factory=Distribution)
    blocked_us: Distribution = msgspec.field(default_factory=Distribution)
    verdict: Verdict = "unknown"


class SiteStep(msgspec.Struct, array_like=True):
    """How often a site waited in one step, and how many of these were another thread's than the stepping one."""

    rank: int
    index: int
    count: int
    other_threads: int = 0


class Site(msgspec.Struct, kw_only=True):
    """One source line at which the host waited, over all steps."""

    file: str
    line: int
    function: str
    kind: str  # d2h, h2d, stream, device, event, memset, maybe
    phase: str = "other"
    count: int = 0
    per_step: Amount = None  # mean over the steps in which it occurred
    blocked_us: Amount = None
    classes: dict[str, int] = msgspec.field(default_factory=dict)  # count by batch class
    threads: list[str] = msgspec.field(default_factory=list)
    allowed_upstream: bool = False
    stack: list[str] = msgspec.field(default_factory=list)  # "file:line function", innermost first
    source: str = ""  # the source line
    api: str = ""  # the call that waited
    repeated: bool = False  # several times within one step: a per-layer sync of one value is the classic
    same_value: bool = False  # a repeated read of the very same tensor
    hint: str = ""
    warmup: bool = False  # seen in warm-up or capture steps only
    steps: list[SiteStep] = msgspec.field(default_factory=list)  # ascending; what an allow-list is subtracted by
    device_idle_us: Amount = None
    launch_lead_us: Amount = None  # mean over its waits: how far the host was ahead of the device as each began


class Totals(msgspec.Struct, kw_only=True):
    """Everything seen, in and out of steps, a profiler's own last synchronize too."""

    launches: Launches = msgspec.field(default_factory=Launches)
    kernels_run: Figure = None
    syncs: Syncs = msgspec.field(default_factory=Syncs)
    copies: Copies = msgspec.field(default_factory=Copies)
    api: dict[str, int] = msgspec.field(default_factory=dict)


class Source(msgspec.Struct, kw_only=True):
    kind: str = "live"  # live, demo, test, trace
    engine: str | None = None
    device: str | None = None
    torch: str | None = None
    hip: str | None = None
    cuda: str | None = None
    ranks: list[int] = msgspec.field(default_factory=lambda: [0])
    collectors: list[str] = msgspec.field(default_factory=list)
    partial: bool = False
    blind_spots: dict[str, str] = msgspec.field(default_factory=dict)  # collector -> what it cannot see
    files: list[str] = msgspec.field(default_factory=list)  # base names of trace files


class PlannerFigures(msgspec.Struct, kw_only=True):
    mode: str = "off"
    mismatches: Figure = None
    unread: Figure = None
    first_mismatch: str | None = None


class LeadPoint(msgspec.Struct, array_like=True):
    """The launch lead about one moment: from the return of a launch call to the start of its work on the device."""

    rank: int
    time_us: float
    median_us: float
    min_us: float


class GraphLaunches(msgspec.Struct, kw_only=True):
    """Graph launches that ran the same kernels."""

    api: str
    launches: int = 0
    kernels: Figure = None  # of one launch
    names: dict[str, int] = msgspec.field(default_factory=dict)  # the most frequent kernels of one launch


class RunAhead(msgspec.Struct, kw_only=True):
    """How far the host ran ahead of the device, where timestamps of both exist."""

    launch_lead_us: Distribution = msgspec.field(default_factory=Distribution)
    launch_lead_min_us: Amount = None
    device_idle_us: Amount = None  # device time lost to the host's waits, in and out of steps
    series: list[LeadPoint] = msgspec.field(default_factory=list)
    graph_launches: list[GraphLaunches] = msgspec.field(default_factory=list)


class Span(msgspec.Struct, kw_only=True):
    """A phase or a wait on the time axis, for pictures of it; clock as `Step.start_us`."""

    kind: str  # phase or sync
    name: str  # of the phase; of a wait its source line or call
    start_us: float
    duration_us: Amount = None
    rank: int = 0
    step: int | None = None
    detail: str = ""  # of a wait: its kind


class Compared(msgspec.Struct, kw_only=True):
    """One figure as two collectors tell it: sums over the `steps` in which both know it, `differ` of which differ."""

    name: str
    steps: int = 0
    differ: int = 0
    left: int = 0
    right: int = 0


class Comparison(msgspec.Struct, kw_only=True):
    """Two collectors on the same steps of one rank (`profile --verify`)."""

    left: str
    right: str
    rank: int = 0
    figures: list[Compared] = msgspec.field(default_factory=list)
    classes: dict[str, list[Compared]] = msgspec.field(default_factory=dict)  # the same figures, by batch class
    doubt: str = ""  # why one of them may have missed calls: a difference then proves nothing

    @property
    def differ(self) -> int:
        return sum(figure.differ for figure in self.figures)


class Note(msgspec.Struct, kw_only=True):
    kind: str  # hazard, blind, partial, disabled, hint, input...
    text: str
    file: str | None = None
    line: int | None = None
    count: int = 1


class _Marked(msgspec.Struct):
    format: str


class Report(msgspec.Struct, kw_only=True):
    format: Literal["syncfree.report/1"] = FORMAT
    source: Source = msgspec.field(default_factory=Source)
    steps: list[Step] = msgspec.field(default_factory=list)
    classes: dict[str, ClassFigures] = msgspec.field(default_factory=dict)
    sites: list[Site] = msgspec.field(default_factory=list)
    totals: Totals = msgspec.field(default_factory=Totals)
    planner: PlannerFigures = msgspec.field(default_factory=PlannerFigures)
    telemetry: dict[str, Any] = msgspec.field(default_factory=dict)
    run_ahead: RunAhead = msgspec.field(default_factory=RunAhead)
    timeline: list[Span] = msgspec.field(default_factory=list)
    verification: list[Comparison] = msgspec.field(default_factory=list)
    notes: list[Note] = msgspec.field(default_factory=list)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes | str, where: str = "report") -> Report:
        """Decode a report. Raises `BadInput` that names the path of the offending value."""
        try:
            report = msgspec.json.decode(data, type=Report)
            msgspec.json.decode(data, type=_Marked)  # any other document would be taken for an empty report
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"{where}: expected a {FORMAT} document: {error}") from error
        except RecursionError:
            raise BadInput(f"{where}: expected a {FORMAT} document: nested too deep") from None
        return report

    @staticmethod
    def load(path: str | Path) -> Report:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
        return Report.from_json(data, where=str(path))


def add(left: Figure, right: Figure) -> Figure:
    """Sum of two figures; unknown stays unknown."""
    return None if left is None or right is None else left + right


def total(figures: Iterable[Figure]) -> Figure:
    result: Figure = 0
    for figure in figures:
        result = add(result, figure)
    return result


def report_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of `syncfree.report/1`."""
    schema = msgspec.json.schema(Report)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = FORMAT
    return schema
