"""pytest plugin: budgets on syncs, copies and launches of the code under test.

    @pytest.mark.sync_budget(syncs=0, launches=60)
    def test_decode(sync_profiler, sync_device): ...

Loaded by every pytest run of an environment that has syncfree: it imports nothing but pytest until a test uses it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .assertions import TestProfiler
    from .budget import Budget, ClassBudget
    from .report import Report

MARK = "sync_budget"
_SETTINGS = ("batch_class", "phase", "stat", "exempt")
_PROPERTY = "syncfree_report"


class _Run:
    """The pytest run this process belongs to, and what the running test has measured so far."""

    def __init__(self, config: pytest.Config, outer: _Run | None) -> None:
        self.config = config
        self.outer = outer  # pytester runs pytest within pytest
        self.reports: list[Report] = []
        self.budget: Budget | None = None  # read once, when first needed
        self.test: _MeasuredTest | None = None

    def option(self, name: str) -> str | None:
        """A command line option, else the ini value of the same name."""
        value: str | None = self.config.getoption(f"--syncfree-{name}")
        if value is None and name in ("budget", "missing", "device"):
            value = self.config.getini(f"syncfree_{name}") or None
        return value

    def file_budget(self) -> Budget:
        from .budget import Budget, load_budget

        if self.budget is None:
            path = self.option("budget")
            self.budget = load_budget(self.config.rootpath / path) if path else Budget()
        return self.budget


_run: _Run | None = None


def is_running() -> bool:
    """Whether pytest runs in this process."""
    return _run is not None


def collect(report: Report) -> None:
    """Keep a report for `--syncfree-report`, as one of the running test."""
    if _run is not None:
        _run.reports.append(report)


def skip_if_missing_may(text: str) -> None:
    """Skip the running test if `--syncfree-missing=skip`."""
    if _run is not None and _run.option("missing") == "skip":
        pytest.skip(text)


def collectors() -> str:
    """What `--syncfree-collectors` names; auto otherwise."""
    return (_run.option("collectors") if _run is not None else None) or "auto"


# ------------------------------------------------------------------ pytest hooks


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("syncfree", "syncfree: host-device syncs of the code under test")
    group.addoption(
        "--syncfree-report", metavar="DIR", help="Write one syncfree.report/1 JSON a test that measured something."
    )
    group.addoption(
        "--syncfree-budget", metavar="FILE", help="Budget file (TOML): its allow-list, and limits by batch class."
    )
    group.addoption(
        "--syncfree-missing",
        choices=("fail", "skip"),
        help="A test in which nothing could be measured fails (default) or is skipped. It never passes.",
    )
    group.addoption(
        "--syncfree-device",
        choices=("auto", "cuda", "simulated"),
        help="What `sync_device` is: the GPU where there is one, else the simulated device (auto, default).",
    )
    group.addoption(
        "--syncfree-collectors", metavar="NAMES", help="Collectors to measure with, by name (default: auto)."
    )
    parser.addini("syncfree_budget", "As --syncfree-budget, relative to the root directory.", default="")
    parser.addini("syncfree_missing", "As --syncfree-missing.", default="")
    parser.addini("syncfree_device", "As --syncfree-device.", default="")


def pytest_configure(config: pytest.Config) -> None:
    global _run
    config.addinivalue_line(
        "markers",
        f"{MARK}(syncs=0, launches=60, batch_class='decode', phase='build', stat='max', exempt=[...]): what a step may "
        "cost at most; the whole test is one step unless it opens steps on `sync_profiler`",
    )
    _run = _Run(config, _run)
    for name, allowed in (("missing", ("fail", "skip")), ("device", ("auto", "cuda", "simulated"))):
        value = _run.option(name)
        if value is not None and value not in allowed:
            raise pytest.UsageError(f"syncfree_{name}: expected one of {', '.join(allowed)}, got {value!r}")


def pytest_unconfigure() -> None:
    global _run
    _run = _run.outer if _run is not None else None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, None]:
    outcome = yield
    run = _run
    if run is None or outcome.excinfo is not None:
        return
    run.reports.clear()
    run.test = None
    marks = _marks_of(item)
    profiler = getattr(item, "funcargs", {}).get("sync_profiler")
    if marks or profiler is not None:
        try:
            run.test = _MeasuredTest(run, item, marks, profiler)
        except _syncfree_error() as error:
            outcome.force_exception(_failure(f"syncfree: {error}"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    outcome = yield
    run = _run
    if run is None:
        return
    if run.test is not None:
        error = run.test.end(passed=outcome.excinfo is None)
        if error is not None:
            outcome.force_exception(error)
    if run.reports:
        _write(run, item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    if _run is not None and _run.test is not None:
        _run.test.abandon()
        _run.test = None


@pytest.hookimpl(optionalhook=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    folder = config.getoption("--syncfree-report")
    if not folder:
        return
    reports = [report for group in terminalreporter.stats.values() for report in group]
    files = {value for report in reports for key, value in getattr(report, "user_properties", ()) if key == _PROPERTY}
    terminalreporter.write_sep("-", "syncfree")
    terminalreporter.write_line(f"{len(files)} report{'s' if len(files) != 1 else ''} in {folder}")


# ------------------------------------------------------------------ fixtures


@pytest.fixture
def sync_profiler() -> TestProfiler:
    """A `Profiler` that records while the test runs: `with sync_profiler.step(batch_class="decode"): ...`.

    Without steps of its own the test's body is one step. `sync_profiler.stop()` ends the recording and returns the
    report; it is judged by the test's `sync_budget` marks when the test is over.
    """
    from .assertions import TestProfiler

    return TestProfiler(collectors())


@pytest.fixture
def sync_device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The `torch.device` to test on: the GPU where there is one, else the simulated device, opened for this test."""
    from ..errors import Unreachable
    from .assertions import missing

    try:
        import torch
    except ImportError as error:
        missing(f"sync_device: torch cannot be imported: {error}")
    from . import simulated

    wanted = (_run.option("device") if _run is not None else None) or "auto"
    if simulated.is_active() or wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            missing("sync_device: --syncfree-device=cuda, but torch sees no GPU here")
        yield torch.device("cuda")
        return
    context = simulated.simulated_device()
    try:
        device = context.__enter__()
    except Unreachable as error:
        missing(f"sync_device: {error}")
    try:
        yield device
    finally:
        context.__exit__(None, None, None)


# ------------------------------------------------------------------ one test


class _MeasuredTest:
    """A test that is marked or took the profiler: recorded from the end of its setup on, judged when it has run.

    Raises `BadInput` for a mark or a budget file that cannot be right, `Unreachable` where a collector asked for by
    name cannot work here.
    """

    def __init__(
        self,
        run: _Run,
        item: pytest.Item,
        marks: list[tuple[pytest.Mark, frozenset[str]]],
        profiler: TestProfiler | None,
    ) -> None:
        from .assertions import TestProfiler

        self.run, self.marks = run, marks
        self.profiler = profiler or TestProfiler(collectors())
        for mark, dropped in marks:
            _mark_budget(mark, dropped, body_only=False)
        run.file_budget()
        named = (mark.kwargs.get("batch_class") for mark, _ in marks)
        self.profiler.begin_body(next((name for name in named if name), "test"), item.name)

    def end(self, passed: bool) -> BaseException | None:
        """Stop, and judge if the test passed so far; the failure to raise, if any."""
        from ..errors import NothingMeasured
        from .assertions import SyncBudgetExceeded, SyncHazard, enforce, warn_of_hazards
        from .gate import check

        report = self.profiler.finish()
        collect(report)
        if not passed:
            return None
        try:
            warn_of_hazards(report)
            enforce(check(report, self._budget(self.profiler.body_only)))
        except SyncBudgetExceeded as error:
            return _failure(f"sync budget exceeded\n{error}")
        except SyncHazard as error:  # warnings are errors in this run
            return _failure(f"hazard\n{error}")
        except NothingMeasured as error:
            return _failure(f"nothing measured\n{error}")
        except pytest.skip.Exception as skip:
            return skip
        return None

    def abandon(self) -> None:
        """Stop the collectors of a test that was never run."""
        if self.profiler.recording:
            self.profiler.halt()

    def _budget(self, body_only: bool) -> Budget:
        """The marks' limits, and those of the file for the classes this test stepped through; the file's allow-list."""
        import msgspec

        from .budget import Budget

        classes: list[ClassBudget] = [_mark_budget(mark, dropped, body_only) for mark, dropped in self.marks]
        file = self.run.file_budget()
        if not body_only:
            classes += [msgspec.structs.replace(item, optional=True) for item in file.classes]
        return Budget(classes=tuple(classes), allow=file.allow)


def _marks_of(item: pytest.Item) -> list[tuple[pytest.Mark, frozenset[str]]]:
    """The test's marks, its own first, and which of their limits do not count.

    A mark of the class or module gives way, figure by figure, to a nearer one for the same batch class and phase; marks
    of one place all count.
    """
    result = []
    nearer: set[tuple[str, str]] = set()
    for _, group in groupby(item.iter_markers_with_node(MARK), key=lambda pair: pair[0]):
        here: set[tuple[str, str]] = set()
        for _, mark in group:
            about = repr((mark.kwargs.get("batch_class"), mark.kwargs.get("phase")))
            figures = [name for name in mark.kwargs if name not in _SETTINGS]
            dropped = frozenset(name for name in figures if (about, name) in nearer)
            if not dropped or any(mark.kwargs[name] is not None for name in figures if name not in dropped):
                result.append((mark, dropped))
            here |= {(about, name) for name in figures}
        nearer |= here
    return result


def _mark_budget(mark: pytest.Mark, dropped: frozenset[str], body_only: bool) -> ClassBudget:
    """The limits of one mark, without the `dropped`. Raises `BadInput` for an argument that it does not know."""
    from ..errors import BadInput
    from .assertions import BODY_EXEMPT, class_budget
    from .budget import ANY_CLASS, DEFAULT_EXEMPT

    shown = ", ".join([*map(repr, mark.args), *(f"{key}={value!r}" for key, value in mark.kwargs.items())])
    where = f"@pytest.mark.{MARK}({shown})"
    if mark.args:
        raise BadInput(f"{where}: expected keyword arguments such as syncs=0, got {mark.args[0]!r}")
    settings = {key: value for key, value in mark.kwargs.items() if key in _SETTINGS}
    names = [key for key in mark.kwargs if key not in _SETTINGS and key not in dropped]
    limits = {key: mark.kwargs[key] for key in names if mark.kwargs[key] is not None}
    return class_budget(
        where,
        limits,
        batch_class=settings.get("batch_class") or ANY_CLASS,
        phases=settings.get("phase"),
        stat=settings.get("stat", "max"),
        exempt=settings.get("exempt", BODY_EXEMPT if body_only else DEFAULT_EXEMPT),
    )


def _syncfree_error() -> type[Exception]:
    from ..errors import SyncfreeError

    return SyncfreeError


def _failure(text: str) -> BaseException:
    """A failure whose text is all there is to see: the plugin's own frames say nothing about the test."""
    return pytest.fail.Exception(text, pytrace=False)


def _write(run: _Run, item: pytest.Item) -> None:
    """Write the running test's report if asked to."""
    folder = run.config.getoption("--syncfree-report")
    if not folder:
        return
    from .files import write_whole
    from .merge import merge_reports
    from .report import Note

    report = merge_reports(run.reports)
    notes = {(note.kind, note.text, note.file, note.line): note for note in report.notes}
    report.notes = [Note(kind="test", text=item.nodeid), *notes.values()]
    path = run.config.invocation_params.dir / folder / report_name(item.nodeid)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, report.to_json())
    item.user_properties.append((_PROPERTY, str(path)))


def report_name(nodeid: str) -> str:
    """A file name for a test: readable, unique by a digest where characters had to go, at most 120 characters."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", nodeid.replace("::", "--")).strip("-")
    if name != nodeid.replace("::", "--").replace("/", "-") or len(name) > 100:
        name = f"{name[:100]}-{hashlib.sha256(nodeid.encode()).hexdigest()[:8]}"
    return f"{name}.json"
