"""What a wait cost the device, and how far ahead the host was."""

from syncfree.profiler.readers import read_traces


def wait(kineto, ts, dur):
    return kineto.call("cudaStreamSynchronize", ts, dur)


def launch(kineto, correlation, ts, start, dur):
    return kineto.call("cudaLaunchKernel", ts, 2, correlation).kernel(start, dur, correlation)


def idle(kineto):
    report = read_traces([kineto.write()])
    return [step.device_idle_us for step in report.steps], report.run_ahead.device_idle_us


def test_the_gap_from_when_the_device_drained_to_its_next_work(kineto):
    kineto.step("ProfilerStep#0", 0, 100)
    launch(kineto, 1, 0, 5, 20)
    wait(kineto, 10, 18)  # returns at 28, the device drained at 25
    launch(kineto, 2, 40, 45, 10)
    assert idle(kineto) == ([20.0], 20.0)


def test_a_wait_that_began_when_the_device_was_idle_already_pays_from_there(kineto):
    kineto.step("ProfilerStep#0", 0, 100)
    launch(kineto, 1, 0, 5, 5)
    wait(kineto, 30, 2)
    launch(kineto, 2, 40, 45, 10)
    assert idle(kineto) == ([15.0], 15.0)


def test_waits_in_one_gap_share_it(kineto):
    kineto.step("ProfilerStep#0", 0, 31).step("ProfilerStep#1", 31, 100)
    launch(kineto, 1, 0, 5, 5)
    wait(kineto, 8, 4)
    wait(kineto, 32, 1)
    launch(kineto, 2, 40, 45, 10)
    assert idle(kineto) == ([22.0, 13.0], 35.0)


def test_a_wait_that_ended_while_another_stream_was_busy_cost_nothing(kineto):
    kineto.step("ProfilerStep#0", 0, 100)
    launch(kineto, 1, 0, 5, 5)
    launch(kineto, 2, 3, 6, 60)
    wait(kineto, 10, 5)
    launch(kineto, 3, 40, 70, 10)
    assert idle(kineto) == ([0.0], 0.0)


def test_nothing_is_said_behind_the_last_work_or_without_device_records(kineto):
    kineto.step("ProfilerStep#0", 0, 100)
    wait(kineto, 10, 5)
    assert idle(kineto) == ([None], None)
    launch(kineto, 1, 0, 5, 5)
    assert idle(kineto) == ([0.0], 0.0)


def test_the_lead_is_from_the_return_of_a_call_to_the_start_of_its_work(kineto):
    kineto.step("ProfilerStep#0", 0, 30).step("ProfilerStep#1", 30, 30).step("ProfilerStep#2", 60, 30)
    launch(kineto, 1, 0, 5, 1)  # 3
    launch(kineto, 2, 10, 50, 1)  # 38
    launch(kineto, 3, 20, 21, 1)  # began before the call returned: 0
    launch(kineto, 4, 40, 62, 1)  # 20
    kineto.call("cudaLaunchKernel", 70, 2, 5)  # no record
    report = read_traces([kineto.write()])
    leads = [(s.launch_lead_us, s.launch_lead_p50_us, s.launch_lead_min_us) for s in report.steps]
    assert leads == [(0.0, 3.0, 0.0), (20.0, 20.0, 20.0), (None, None, None)]
    assert (report.run_ahead.launch_lead_us.p50, report.run_ahead.launch_lead_min_us) == (3.0, 0.0)
    assert [point.time_us for point in report.run_ahead.series] == [0, 10, 20, 40]


def test_the_series_stays_small(kineto):
    for i in range(3000):
        launch(kineto, i + 1, 10 * i, 10 * i + 7, 1)
    series = read_traces([kineto.write()]).run_ahead.series
    assert 300 < len(series) <= 400
    assert {(point.median_us, point.min_us) for point in series} == {(5.0, 5.0)}


def test_kernels_belong_to_the_step_of_their_launch(kineto):
    kineto.step("ProfilerStep#0", 0, 10)
    kineto.call("hipGraphLaunch", 5, 2, 1)
    for i in range(4):
        kineto.kernel(100 + i, 1, 1, name="a<b>" if i else "c")
    report = read_traces([kineto.write()])
    (group,) = report.run_ahead.graph_launches
    assert (group.launches, group.kernels, group.names) == (1, 4, {"a<b>": 3, "c": 1})
    assert report.steps[0].launch_lead_us == 93.0


def test_spans_of_waits_and_phases_for_pictures(kineto):
    kineto.step("execute_context_0(0)_generation_1(1)", 0, 100).step("gpu_model_runner: forward", 10, 50)
    wait(kineto, 20, 5)
    wait(kineto, 200, 5)
    timeline = read_traces([kineto.write()]).timeline
    assert [(s.kind, s.name, s.start_us, s.duration_us, s.step) for s in timeline] == [
        ("phase", "forward", 10, 50, 0),
        ("sync", "cudaStreamSynchronize", 20, 5, 0),
        ("sync", "cudaStreamSynchronize", 200, 5, None),
    ]
    report = read_traces([kineto.write()], timeline=1)
    assert len(report.timeline) == 1
    assert any("2 more are left out" in note.text for note in report.notes)


def leads(kineto):
    report = read_traces([kineto.write()])
    return {site.function: site.launch_lead_us for site in report.sites}


def test_the_lead_at_a_wait_is_how_long_the_device_needs_to_come_to_the_last_launch(kineto):
    kineto.step("ProfilerStep#0", 0, 200)
    launch(kineto, 1, 0, 5, 40)
    launch(kineto, 2, 3, 45, 10)
    wait(kineto, 10, 45)  # the device begins the last work 35 us later
    launch(kineto, 3, 70, 75, 5)
    wait(kineto, 90, 5)  # the queue is empty: 0
    launch(kineto, 4, 120, 150, 5)  # launched after both
    assert leads(kineto) == {"cudaStreamSynchronize": 17.5}


def test_a_wait_before_any_launch_has_no_lead_and_without_device_records_it_is_unknown(kineto):
    kineto.step("ProfilerStep#0", 0, 100)
    wait(kineto, 1, 5)
    assert leads(kineto) == {"cudaStreamSynchronize": None}
    launch(kineto, 1, 10, 15, 5)
    assert leads(kineto) == {"cudaStreamSynchronize": 0.0}


def test_a_capture_and_copies_are_no_launches_to_be_ahead_of(kineto):
    kineto.step("ProfilerStep#0", 0, 200)
    launch(kineto, 1, 0, 5, 10)
    kineto.call("cudaLaunchKernel", 20, 2, 7)  # recorded: it has no work of its own
    wait(kineto, 30, 5)
    launch(kineto, 2, 60, 65, 5)
    assert leads(kineto) == {"cudaStreamSynchronize": 0.0}


def test_a_live_recording_tells_the_same_as_the_file(kineto):
    from syncfree.profiler.aggregate import Evidence
    from syncfree.profiler.collectors.kineto import KinetoCollector
    from syncfree.profiler.readers.kineto import read_kineto
    from syncfree.profiler.readers.steps import RangeFilter
    from syncfree.profiler.recording import Recording
    from syncfree.profiler.windows import StepWindow

    kineto.step("ProfilerStep#0", 0, 60).step("ProfilerStep#1", 60, 60)
    launch(kineto, 1, 0, 5, 20)
    wait(kineto, 10, 18)
    launch(kineto, 2, 40, 45, 10)
    launch(kineto, 3, 70, 90, 10)
    wait(kineto, 75, 30)
    launch(kineto, 4, 110, 115, 1)
    path = kineto.write()
    of_file = read_traces([path])
    [trace, *_] = read_kineto(path, RangeFilter("ProfilerStep*"))
    windows = [StepWindow(start_ns=r.start_ns, end_ns=r.end_ns, index=k) for k, r in enumerate(trace.ranges)]
    live = Recording(steps=windows, evidence=[Evidence(name="kineto", calls=KinetoCollector()._read(trace))]).build()
    assert [s.device_idle_us for s in live.steps] == [s.device_idle_us for s in of_file.steps] == [20.0, 15.0]
    for name in ("launch_lead_us", "launch_lead_p50_us", "launch_lead_min_us"):
        assert [getattr(s, name) for s in live.steps] == [getattr(s, name) for s in of_file.steps]
    assert live.run_ahead == of_file.run_ahead
    assert live.run_ahead.device_idle_us == 35.0
    assert {s.launch_lead_us for s in live.sites} == {s.launch_lead_us for s in of_file.sites} == {7.5}
