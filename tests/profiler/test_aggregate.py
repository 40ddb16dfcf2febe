"""From windows and calls to figures, classes, verdicts and sites."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syncfree.profiler.aggregate import Evidence, build_report
from syncfree.profiler.calls import Call, Direction, Frame, Role, Wait
from syncfree.profiler.classes import distribution
from syncfree.profiler.collectors.base import GROUPS, Counters
from syncfree.profiler.report import Source
from syncfree.profiler.windows import PhaseWindow, StepWindow

HERE = Frame("/repo/builder.py", 7, "build", "n = lens.max().item()")


def step(start, end, *phases, batch_class="decode", **about):
    windows = [PhaseWindow(name=n, start_ns=a, end_ns=b, thread=1) for n, a, b in phases]
    return StepWindow(start_ns=start, end_ns=end, thread=1, batch_class=batch_class, phases=windows, **about)


def read(ts, thread=1, **more):
    """A blocking device-to-host read."""
    more.setdefault("stack", (HERE,))
    return Call(
        api="hipMemcpyWithStream",
        role=Role.COPY,
        direction=Direction.D2H,
        blocking=True,
        ts_ns=ts,
        dur_ns=5,
        nbytes=4,
        thread=thread,
        **more,
    )


def launch(ts, **more):
    return Call(api="hipLaunchKernel", role=Role.LAUNCH, ts_ns=ts, dur_ns=1, thread=1, **more)


def report(steps, calls, sees=GROUPS, **more):
    return build_report(steps, [Evidence(name="fake", sees=frozenset(sees), calls=calls, **more)], Source())


def test_a_call_belongs_to_the_window_it_starts_in():
    steps = [step(0, 100, ("build", 0, 50), ("forward", 50, 100)), step(100, 200)]
    r = report(steps, [read(0), read(49), launch(50), launch(99), read(100), launch(200)])
    assert r.steps[0].phases["build"].syncs.total == 2
    assert r.steps[0].phases["forward"].launches.kernels == 2
    assert r.steps[0].syncs.total == 2
    assert r.steps[1].syncs.total == 1
    assert r.totals.launches.kernels == 3  # the one after the last step is only in the totals
    assert r.totals.syncs.total == 3


def test_the_verdict_is_about_build_and_forward():
    r = report([step(0, 100, ("build", 0, 20), ("forward", 20, 60), ("output", 60, 100))], [read(70)])
    assert r.steps[0].syncs.total == 1
    assert r.classes["decode"].verdict == "sync-free"
    assert r.classes["decode"].syncs_per_step.max == 0


def test_a_step_without_phases_is_judged_whole():
    assert report([step(0, 100)], [read(5)]).classes["decode"].verdict == "syncs"


def test_a_wait_on_another_thread_is_counted_but_not_judged():
    r = report([step(0, 100, ("forward", 0, 100))], [read(10, thread=2)])
    assert r.steps[0].syncs.total == 1
    assert r.classes["decode"].verdict == "sync-free"


def test_warm_up_steps_are_counted_but_not_judged():
    r = report([step(0, 10, warmup=True), step(10, 20)], [read(5)])
    assert r.classes["decode"].steps == 1
    assert r.classes["decode"].verdict == "sync-free"
    assert r.sites[0].warmup


def test_what_a_collector_cannot_see_is_null_and_never_zero():
    r = report([step(0, 10)], [launch(1)], sees={"launches"})
    assert r.steps[0].launches.kernels == 1
    assert r.steps[0].launches.captured is None
    assert r.steps[0].syncs.total is None
    assert r.steps[0].blocked_us is None
    assert r.classes["decode"].verdict == "unknown"


def test_without_any_collector_everything_is_null_but_the_times():
    r = build_report([step(0, 10_000)], [], Source())
    assert r.steps[0].duration_us == 10
    assert r.steps[0].syncs.total is None
    assert r.classes["decode"].verdict == "unknown"


def test_each_group_of_figures_comes_from_the_first_collector_that_sees_it():
    first = Evidence(name="a", sees=frozenset({"launches"}), calls=[launch(1)])
    second = Evidence(name="b", sees=frozenset({"launches", "syncs"}), calls=[launch(1), launch(2), read(3)])
    r = build_report([step(0, 10)], [first, second], Source())
    assert (r.steps[0].launches.kernels, r.steps[0].syncs.total) == (1, 1)


def test_counter_collectors_are_read_from_their_marks_and_the_rest_is_other():
    window = step(0, 100, ("build", 0, 50))
    window.marks["fake"] = (Counters(kernels=10, d2h=1), Counters(kernels=17, d2h=4))
    window.phases[0].marks["fake"] = (Counters(kernels=10, d2h=1), Counters(kernels=12, d2h=3))
    r = report([window], [], marks=True, totals=Counters(kernels=20, d2h=9))
    assert r.steps[0].launches.kernels == 7
    assert r.steps[0].phases["build"].syncs.d2h == 2
    assert r.steps[0].phases["other"].launches.kernels == 5
    assert r.totals.syncs.d2h == 9


def test_sites_group_by_line_kind_and_phase_and_mark_repetition():
    steps = [step(0, 100, ("build", 0, 100)), step(100, 200, ("build", 100, 200), batch_class="extend")]
    r = report(steps, [read(1), read(2), read(101)])
    [site] = r.sites
    assert (site.file, site.line, site.function, site.kind, site.phase) == (
        "/repo/builder.py",
        7,
        "build",
        "d2h",
        "build",
    )
    assert (site.count, site.per_step, site.repeated) == (3, 1.5, True)
    assert site.classes == {"decode": 2, "extend": 1}
    assert math.isclose(site.blocked_us, 0.015)
    assert site.hint


def test_frames_of_torch_are_not_to_blame():
    inner = Frame("/x/site-packages/torch/_tensor.py", 1, "item")
    [site] = report([step(0, 10)], [read(1, stack=(inner, HERE))]).sites
    assert site.line == 7
    assert site.stack[0].startswith("/x/site-packages/torch/")


def test_captured_launches_do_not_run():
    r = report([step(0, 10)], [launch(1, captured=True), launch(2)])
    assert (r.steps[0].launches.kernels, r.steps[0].launches.captured) == (1, 1)


def test_a_copy_of_unknown_direction_leaves_both_directions_unknown_but_not_the_total():
    blind = Call(api="hipMemcpy", role=Role.COPY, blocking=True, ts_ns=1, dur_ns=1, thread=1)
    r = report([step(0, 10)], [blind])
    assert r.steps[0].syncs.total == 1
    assert r.steps[0].syncs.d2h is None
    assert r.steps[0].copies.d2h is None


def test_a_zero_length_wait_counts_and_blocks_for_no_time():
    wait = Call(api="hipStreamSynchronize", role=Role.SYNC, wait=Wait.STREAM, ts_ns=1, dur_ns=0, thread=1)
    r = report([step(0, 10)], [wait])
    assert (r.steps[0].syncs.stream, r.steps[0].blocked_us) == (1, 0)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=300))
def test_distribution_is_nearest_rank(values):
    d = distribution(values)
    ordered = sorted(values)
    assert d.max == ordered[-1]
    assert d.p50 == ordered[math.ceil(len(values) * 0.5) - 1]
    assert d.p99 == ordered[math.ceil(round(len(values) * 0.99, 9)) - 1]
    assert d.mean == pytest.approx(sum(values) / len(values))


def test_one_unknown_figure_makes_the_distribution_unknown():
    assert distribution([1, None, 2]).max is None
    assert distribution([]).max is None
