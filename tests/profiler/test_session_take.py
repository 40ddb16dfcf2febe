"""Taking parts of a recording that goes on: nothing lost, nothing twice."""

import threading
import time

import pytest
from syncfree.profiler import Profiler
from syncfree.profiler.calls import Call, Role, Wait
from syncfree.profiler.collectors.base import Counters


class Counting:
    """A rolling collector of the counting kind; `wait` is a sync."""

    name, blind = "counting", ""
    sees = frozenset({"syncs", "blocked"})
    rolling = True

    def __init__(self):
        self.count = 0
        self.calls = []

    def start(self):
        pass

    def stop(self):
        pass

    def mark(self, now_ns):
        return Counters(stream=self.count)

    def drain(self):
        calls, self.calls = self.calls, []
        return calls

    def wait(self):
        self.count += 1
        now, thread = time.perf_counter_ns(), threading.get_native_id()
        self.calls.append(
            Call(api="cuStreamSynchronize", role=Role.SYNC, wait=Wait.STREAM, ts_ns=now, dur_ns=1, thread=thread)
        )


@pytest.fixture
def collector():
    return Counting()


@pytest.fixture
def profiler(collector):
    return Profiler([collector])


def run(profiler, collector, waits):
    for count in waits:
        with profiler.step("decode"), profiler.phase("forward"):
            for _ in range(count):
                collector.wait()


def figures(recording):
    report = recording.build()
    assert report.totals.syncs.total >= sum(step.syncs.total for step in report.steps)
    assert sum(site.count for site in report.sites) == sum(step.syncs.total for step in report.steps)
    return [(step.index, step.syncs.total) for step in report.steps], report.totals.syncs.total


def test_parts_and_the_rest_are_the_whole(profiler, collector):
    profiler.start()
    run(profiler, collector, [1, 2, 3])
    first, seen_first = figures(profiler.take())
    run(profiler, collector, [0, 4])
    second, seen_second = figures(profiler.take())
    run(profiler, collector, [5])
    profiler.halt()
    rest, seen_rest = figures(profiler.collect())
    assert first == [(0, 1), (1, 2)]  # the last one stays: its output may still be fetched
    assert second == [(2, 3), (3, 0)]
    assert rest == [(4, 4), (5, 5)]
    assert (seen_first, seen_second, seen_rest) == (3, 3, 9)


def test_the_last_step_can_be_gone_on_with_after_a_part_was_taken(profiler, collector):
    profiler.start()
    run(profiler, collector, [1, 1])
    profiler.take()
    profiler.reopen_step()
    with profiler.phase("output"):
        collector.wait()
    profiler.end_step()
    profiler.halt()
    report = profiler.collect().build()
    assert [(step.index, step.syncs.total, list(step.phases)) for step in report.steps] == [
        (1, 2, ["forward", "output"])
    ]


def test_taking_twice_without_a_step_gives_nothing(profiler, collector):
    profiler.start()
    run(profiler, collector, [1])
    assert profiler.take().steps == []
    assert profiler.take().steps == []
    profiler.halt()
    assert figures(profiler.collect()) == ([(0, 1)], 1)


def test_calls_of_the_open_step_wait_for_it(profiler, collector):
    profiler.start()
    run(profiler, collector, [1, 1])
    profiler.begin_step("extend")
    collector.wait()
    part = profiler.take().build()
    assert [site.count for site in part.sites] == [1]
    profiler.end_step()
    profiler.halt()
    rest = profiler.collect().build()
    assert [(step.batch_class, step.syncs.total) for step in rest.steps] == [("decode", 1), ("extend", 1)]
    assert sum(site.count for site in rest.sites) == 2


def test_only_collectors_that_hand_over_while_they_run_can_be_taken_from(collector):
    assert Profiler([collector]).start().rolling
    other = Counting()
    other.rolling = False
    assert not Profiler([collector, other]).start().rolling
