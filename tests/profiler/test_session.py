"""Recording: steps, phases, life cycle."""

import threading
import time

import pytest
from syncfree.planner.errors import BadInput, NothingMeasured, Unreachable
from syncfree.profiler import Profiler, Report, report_schema
from syncfree.profiler.calls import Call, Role
from syncfree.profiler.collectors import GROUPS


class Fake:
    """An event collector that the test feeds by hand."""

    name = "fake"
    sees = GROUPS
    blind = "everything the test does not say"

    def __init__(self):
        self.calls, self.running = [], False

    def start(self):
        self.calls, self.running = [], True

    def stop(self):
        self.running = False

    def mark(self, now_ns):
        return None

    def drain(self):
        return self.calls

    def launch(self):
        self.calls.append(
            Call(
                api="cudaLaunchKernel",
                role=Role.LAUNCH,
                ts_ns=time.perf_counter_ns(),
                dur_ns=1,
                thread=threading.get_native_id(),
            )
        )


class Broken(Fake):
    name = "broken"

    def start(self):
        raise Unreachable("collector broken: no device")


def test_phases_nest_and_the_innermost_owns_the_call():
    fake = Fake()
    with Profiler([fake]) as p, p.step("decode"):
        with p.phase("forward"):
            fake.launch()
            with p.phase("build"):
                fake.launch()
                fake.launch()
            fake.launch()
        fake.launch()
    phases = p.report.steps[0].phases
    assert {n: f.launches.kernels for n, f in phases.items()} == {"forward": 2, "build": 2, "other": 1}
    assert p.report.steps[0].launches.kernels == 5


def test_a_step_keeps_what_the_caller_says_of_it():
    with Profiler([Fake()], rank=3) as p, p.step("extend", mixed=True, num_reqs=4, num_tokens=77) as window:
        window.batch_class = "chunked_prefill"
    s = p.report.steps[0]
    assert (s.rank, s.batch_class, s.mixed, s.num_reqs, s.num_tokens) == (3, "chunked_prefill", True, 4, 77)


def test_a_step_that_raises_is_still_recorded():
    with Profiler([Fake()]) as p, pytest.raises(KeyError), p.step("decode"), p.phase("build"):
        raise KeyError("x")
    assert len(p.report.steps) == 1
    assert p.report.steps[0].phases["build"].duration_us >= 0


def test_steps_and_phases_cost_nothing_and_do_nothing_when_not_recording():
    p = Profiler([Fake()])
    with p.step("decode") as window, p.phase("build"):
        assert window is None
    with pytest.raises(NothingMeasured):
        p.report  # noqa: B018


def test_phases_of_another_thread_are_ignored():
    with Profiler([Fake()]) as p, p.step("decode"):
        thread = threading.Thread(target=p.begin_phase, args=("output",))
        thread.start()
        thread.join()
    assert "output" not in p.report.steps[0].phases


def test_beginning_a_step_ends_the_one_before():
    with Profiler([Fake()]) as p:
        p.begin_step("decode")
        p.begin_phase("build")
        p.begin_step("extend")
    assert [s.batch_class for s in p.report.steps] == ["decode", "extend"]


def test_a_recording_can_be_repeated():
    fake = Fake()
    p = Profiler([fake])
    for n in (1, 2):
        with p:
            for _ in range(n):
                with p.step():
                    fake.launch()
        assert len(p.report.steps) == n
        assert p.report.totals.launches.kernels == n


def test_more_steps_than_the_limit_mark_the_report_partial():
    with Profiler([Fake()], max_steps=2) as p:
        for _ in range(5):
            with p.step():
                pass
    assert len(p.report.steps) == 2
    assert p.report.source.partial
    assert "3 steps" in p.report.notes[0].text


def test_if_one_collector_cannot_start_the_others_are_stopped_again():
    fake = Fake()
    with pytest.raises(Unreachable, match="no device"):
        Profiler([fake, Broken()]).start()
    assert not fake.running


def test_an_unknown_collector_is_refused_by_name():
    with pytest.raises(BadInput, match="got 'magic'"):
        Profiler("magic").start()


def test_starting_twice_is_a_mistake():
    p = Profiler([Fake()]).start()
    with pytest.raises(RuntimeError):
        p.start()
    p.stop()


def test_as_a_decorator_each_call_is_a_step():
    fake = Fake()
    p = Profiler([fake])

    @p
    def serve():
        fake.launch()

    serve()
    serve()
    p.stop()
    assert [s.launches.kernels for s in p.report.steps] == [1, 1]


def test_the_report_round_trips_and_fits_its_schema():
    import jsonschema

    fake = Fake()
    with Profiler([fake]) as p, p.step("decode", num_reqs=1), p.phase("build"):
        fake.launch()
    data = p.report.to_json()
    assert Report.from_json(data) == p.report
    import json

    jsonschema.validate(json.loads(data), report_schema(), cls=jsonschema.Draft202012Validator)
    assert json.loads(data)["format"] == "syncfree.report/1"


def test_a_report_that_is_none_names_the_place():
    with pytest.raises(BadInput, match=r"r\.json: .*\$\.steps\[0\]\.rank"):
        Report.from_json(b'{"format": "syncfree.report/1", "steps": [{"rank": "x"}]}', where="r.json")
    with pytest.raises(BadInput):
        Report.from_json(b"\x89PNG", where="r.json")
    with pytest.raises(BadInput, match="format"):  # a trace, say: no report, although every field has a default
        Report.from_json(b'{"traceEvents": []}', where="r.json")
    deep = b'{"format": "syncfree.report/1", "telemetry": ' + b'{"a": ' * 100_000 + b"1" + b"}" * 100_001
    with pytest.raises(BadInput, match="nested too deep"):
        Report.from_json(deep, where="r.json")
