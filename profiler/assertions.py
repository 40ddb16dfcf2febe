"""Assertions for tests: a block that must not wait for the device, and the profiler a test is given."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, NoReturn

from ..errors import BadInput, NothingMeasured
from .budget import EXEMPTIONS, FIGURES, STATS, WHOLE_STEP, Allow, Budget, ClassBudget, parse_site
from .gate import Gate, check, shown_path
from .report import Report
from .session import Collectors, Profiler
from .windows import StepWindow

# A test's body is run once: what it compiles or captures inside is what it asserts about.
BODY_EXEMPT = frozenset({"other_threads"})
HOW_TO_MEASURE = (
    "run on a GPU, take the `sync_device` fixture, or wrap the code in "
    "`with syncfree.profiler.simulated_device() as device:`"
)


class SyncBudgetExceeded(AssertionError):
    """A block or test did more than it may; `gate` tells what."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate.text())
        self.gate = gate


class SyncHazard(UserWarning):
    """No sync, but a race: the host read an asynchronous copy before anything proved it complete."""


class assert_sync_free(ContextDecorator):
    """Fails if the block waits for the device: `with assert_sync_free(): ...`; a decorator too.

    Without arguments: no sync of any kind by this thread. `limits`: other figures by name (`launches=60`, `d2h=1`,
    `blocked_us=50`). `allow`: sites that do not count, as "file.py:function". `exempt`: see `budget.EXEMPTIONS`.
    Entering gives the `Profiler`: the block is one step, or as many as it opens itself, with phases if it likes.

    Raises `SyncBudgetExceeded` (an AssertionError) with the lines to blame, `NothingMeasured` where no collector could
    see a device (under pytest as `--syncfree-missing` says), `BadInput` for an unknown figure. Warns (`SyncHazard`)
    where the block is free of syncs only because the host reads a copy without waiting for it.
    """

    def __init__(
        self,
        *,
        syncs: float | None = 0,
        batch_class: str = "block",
        phases: str | Sequence[str] = WHOLE_STEP,
        allow: Iterable[str] = (),
        exempt: Iterable[str] = BODY_EXEMPT,
        collectors: Collectors = "auto",
        **limits: float,
    ) -> None:
        if syncs is not None:
            limits = {"syncs": syncs, **limits}
        settings = {"phases": phases, "exempt": exempt, "batch_class": "*"}
        self._budget = Budget(
            classes=(class_budget("assert_sync_free", limits, **settings),),
            allow=tuple(
                Allow(site=parse_site(site, f"assert_sync_free: allow[{i}]"), reason="allowed by the test")
                for i, site in enumerate(allow)
            ),
        )
        self._class = batch_class
        self._collectors = collectors
        self._open: list[Profiler] = []  # a decorated function may call itself

    def __enter__(self) -> Profiler:
        plugin = _plugin()
        chosen = plugin.collectors() if plugin is not None and self._collectors == "auto" else self._collectors
        profiler = Profiler(chosen, kind="test")
        profiler.start()
        profiler.begin_step(batch_class=self._class, name="assert_sync_free")
        self._open.append(profiler)
        return profiler

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        profiler = self._open.pop()
        report = profiler.stop() if profiler.recording else profiler.report
        plugin = _plugin()
        if plugin is not None:
            plugin.collect(report)
        if error is None:
            warn_of_hazards(report)
            enforce(check(report, self._budget))


def class_budget(where: str, limits: dict[str, Any], **settings: Any) -> ClassBudget:
    """A budget from keyword arguments of a test. Raises `BadInput` that names the argument."""
    for name, limit in limits.items():
        if name not in FIGURES:
            raise BadInput(f"{where}: {name}: unknown figure (expected one of {', '.join(FIGURES)})")
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
            raise BadInput(f"{where}: {name}: expected a number >= 0, got {limit!r}")
    if not limits:
        raise BadInput(f"{where}: expected a limit such as syncs=0, got none")
    if settings.get("stat", "max") not in STATS:
        raise BadInput(f"{where}: stat: expected one of {', '.join(STATS)}, got {settings['stat']!r}")
    batch_class = settings.get("batch_class")
    if not isinstance(batch_class, str):
        raise BadInput(f"{where}: batch_class: expected a name such as 'decode', got {batch_class!r}")
    exempt = _names(settings.get("exempt", ()), f"{where}: exempt")
    for name in exempt:
        if name not in EXEMPTIONS:
            raise BadInput(f"{where}: exempt: expected some of {', '.join(EXEMPTIONS)}, got {name!r}")
    if settings.get("phases") is not None:
        settings["phases"] = _names(settings["phases"], f"{where}: phase")
    settings["exempt"] = frozenset(exempt)
    return ClassBudget(limits=limits, where=where, **settings)


def _names(value: Any, where: str) -> tuple[str, ...]:
    """One name or several."""
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else ()
    if not isinstance(value, Iterable) or not all(isinstance(name, str) for name in names):
        raise BadInput(f"{where}: expected a name or a list of names, got {value!r}")
    return names


def enforce(gate: Gate) -> None:
    """Raise what a gate says: `SyncBudgetExceeded`, or what the missing-measurement policy is."""
    __tracebackhide__ = True
    if gate.exit_code == 1:
        raise SyncBudgetExceeded(gate)
    if gate.unmeasured:
        missing("\n".join(judgement.line() for judgement in gate.unmeasured))


def warn_of_hazards(report: Report) -> None:
    """One `SyncHazard` warning for each race that a collector saw."""
    for note in report.notes:
        if note.kind == "hazard":
            where = f"{shown_path(note.file)}:{note.line}: " if note.file else ""
            warnings.warn(f"{where}{note.text}", SyncHazard, stacklevel=3)


def missing(text: str) -> NoReturn:
    """Nothing could be measured: never a pass. A skip only where pytest was told `--syncfree-missing=skip`."""
    __tracebackhide__ = True
    plugin = _plugin()
    if plugin is not None:
        plugin.skip_if_missing_may(f"syncfree: {text}")
    advice = f"to mend: {HOW_TO_MEASURE}"
    if plugin is not None:
        advice += "; or skip such tests with --syncfree-missing=skip"
    raise NothingMeasured(f"{text}\n{advice}")


def _plugin() -> Any:
    """The pytest plugin, where one is running."""
    plugin = sys.modules.get("syncfree.profiler.pytest_plugin")
    return plugin if plugin is not None and plugin.is_running() else None


class TestProfiler(Profiler):
    """What a test gets as `sync_profiler`: the whole body is one step, until the test opens steps of its own.

    It starts by itself. "auto" is decided anew at the first step, so that a test may open its device inside.
    """

    __test__ = False

    def __init__(self, collectors: Collectors = "auto") -> None:
        super().__init__(collectors, kind="test")
        self.body_only = True  # no step but the body's own so far
        self._on_simulated = False

    def begin_body(self, batch_class: str, name: str) -> None:
        """Start, and open the step that stands for the whole test body."""
        self._on_simulated = _simulated_active()
        super().start()
        super().begin_step(batch_class=batch_class, name=name)

    def start(self) -> TestProfiler:
        """Begin a recording of the test's own; what the body did so far is left out."""
        if self.recording and self.body_only:
            self._leave_body()
            self.halt()
        self.body_only = False
        super().start()
        return self

    def begin_step(self, batch_class: str = "unknown", **about: Any) -> StepWindow | None:
        """As `Profiler.begin_step`; the first one ends the step that stood for the body, which then never was."""
        if self.recording and self.body_only:
            self._leave_body()
            self.body_only = False
            if not self._collectors or _simulated_active() != self._on_simulated:
                self.halt()
                super().start()
        return super().begin_step(batch_class, **about)

    def _leave_body(self) -> None:
        self._step = None
        self._open_phases.clear()

    def finish(self) -> Report:
        """The report, whoever ended the recording."""
        return self.stop() if self.recording else self.report


def _simulated_active() -> bool:
    simulated = sys.modules.get("syncfree.profiler.simulated")
    return simulated is not None and bool(simulated.is_active())
