"""What a step keeps so that a budget can leave out warm-up, compilation, capture and other threads."""

from syncfree.profiler.aggregate import Evidence, build_report
from syncfree.profiler.calls import Call, Direction, Frame, Role, Wait
from syncfree.profiler.collectors.base import GROUPS, Counters
from syncfree.profiler.report import Report, SiteStep, Source
from syncfree.profiler.session import Profiler
from syncfree.profiler.windows import PhaseWindow, StepWindow

ME, HELPER = 11, 22
STACK = (Frame("/app/model.py", 7, "forward"),)


def item(ts, thread=ME, stack=STACK):
    return Call(
        api="cudaMemcpyAsync",
        role=Role.COPY,
        direction=Direction.D2H,
        blocking=True,
        ts_ns=ts,
        dur_ns=5,
        nbytes=8,
        thread=thread,
        stack=stack,
    )


def launch(ts, thread=ME, captured=False):
    return Call(api="cudaLaunchKernel", role=Role.LAUNCH, ts_ns=ts, dur_ns=1, thread=thread, captured=captured)


def step(index, phases=(), **about):
    start = index * 1000
    windows = [PhaseWindow(name=n, start_ns=start + a, end_ns=start + b, thread=ME) for n, a, b in phases]
    return StepWindow(
        start_ns=start,
        end_ns=start + 1000,
        thread=ME,
        index=index,
        batch_class="decode",
        phases=windows,
        **about,
    )


def build(steps, calls, **about):
    return build_report(steps, [Evidence(name="fake", calls=calls, sees=GROUPS - {"kernels"}, **about)], Source())


def test_what_another_thread_did_is_kept_apart_by_phase_and_not_judged():
    steps = [step(0, phases=[("build", 0, 500), ("sample", 500, 1000)])]
    calls = [item(10), item(20, HELPER), launch(30, HELPER), item(600, HELPER)]
    report = build(steps, calls)
    (one,) = report.steps
    assert one.syncs.total == 3
    assert {name: figures.syncs.total for name, figures in one.other_threads.items()} == {"build": 1, "sample": 1}
    assert one.other_threads["build"].launches.kernels == 1
    assert report.classes["decode"].syncs_per_step.max == 1


def test_a_counter_collector_tells_only_syncs_of_other_threads():
    window = step(0)
    window.marks["fake"] = (Counters(), Counters(d2h=2, kernels=5))
    report = build([window], [item(10), item(20, HELPER)], marks=True)
    (one,) = report.steps
    assert (one.syncs.total, one.launches.kernels) == (2, 5)
    assert one.other_threads["other"].syncs.total == 1
    assert one.other_threads["other"].launches.kernels is None


def test_a_site_knows_how_often_it_waited_in_each_step_and_in_whose_thread():
    report = build([step(0), step(1), step(2)], [item(10), item(20), item(30, HELPER), item(2010)])
    (site,) = report.sites
    assert site.steps == [SiteStep(0, 0, 3, 1), SiteStep(0, 2, 1, 0)]
    assert site.count == 4


def test_a_capture_and_a_module_load_make_a_step_of_preparation():
    load = Call(api="cuModuleLoadData", role=Role.ALLOC, ts_ns=1010, dur_ns=1, thread=ME)
    report = build([step(0), step(1), step(2), step(3, warmup=True)], [launch(10, captured=True), load, launch(2010)])
    assert [s.warmup_cause for s in report.steps] == ["capture", "compile", "", "warmup"]
    assert [s.warmup for s in report.steps] == [True, True, False, True]
    assert report.classes["decode"].steps == 1


def test_an_explicit_wait_of_another_thread_is_no_sync_of_the_step():
    wait = Call(api="cudaDeviceSynchronize", role=Role.SYNC, wait=Wait.DEVICE, ts_ns=10, dur_ns=9, thread=HELPER)
    report = build([step(0)], [wait])
    assert report.classes["decode"].verdict == "sync-free"
    assert report.steps[0].other_threads["other"].blocked_us == 0.009


def test_the_additions_survive_json():
    report = build([step(0)], [item(10), item(20, HELPER)])
    again = Report.from_json(report.to_json())
    assert again == report


def test_a_step_in_which_dynamo_compiled_is_one_of_preparation():
    import torch

    @torch.compile(backend="eager")
    def double(x):
        return x * 2

    with Profiler(collectors=[]) as profiler:
        for _ in range(3):
            with profiler.step("decode"):
                double(torch.ones(3))
    assert [s.warmup_cause for s in profiler.report.steps] == ["compile", "", ""]
