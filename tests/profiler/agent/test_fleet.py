"""Several ranks at once, and live views."""

import os
import signal
import time

import pytest
from syncfree.planner.errors import BadInput, Unreachable
from syncfree.profiler.agent import Agent, Recorder
from syncfree.profiler.agent.client import profile_socket, watch_socket
from syncfree.profiler.agent.connection import Connection


def ranks_of(report):
    return sorted({step.rank for step in report.steps})


def recording(path):
    with Connection(path) as connection:
        return connection.health().recording


def test_ranks_are_found_recorded_together_and_merged(serve):
    for rank in ("0", "1", "2"):
        serve("--rank", rank)
    report = profile_socket(None, steps=30)
    assert report.source.ranks == [0, 1, 2]
    assert not report.source.partial
    for rank in (0, 1, 2):
        assert len([step for step in report.steps if step.rank == rank]) == 30
    assert sum(figures.steps for figures in report.classes.values()) == 90


def test_ranks_of_two_servers_with_the_same_number_are_told_apart(serve):
    paths = [serve().path, serve().path]
    report = profile_socket(paths, steps=10)
    assert ranks_of(report) == [0, 1]
    assert [note.text for note in report.notes if note.kind == "ranks"] == [
        "rank 0 here is rank 0 of its own server",
        "rank 1 here is rank 0 of its own server",
    ]


def test_the_same_socket_named_twice_is_one_rank(serve):
    path = serve().path
    assert len(profile_socket([path, path], steps=5).steps) == 5


def test_a_rank_that_dies_in_the_middle_makes_the_report_partial(serve):
    living, dying = serve("--rank", "0"), serve("--rank", "1")

    def kill(steps, seconds):
        if steps >= 10 and dying.process.poll() is None:
            dying.stop(signal.SIGKILL)

    report = profile_socket([living.path, dying.path], seconds=1.5, progress=kill)
    assert ranks_of(report) == [0]
    assert report.source.partial
    (note,) = [note.text for note in report.notes if note.kind == "partial"]
    assert note.startswith(f"rank 1 (pid {dying.pid}) was lost while recording")
    assert not recording(living.path)


def test_when_every_rank_dies_the_target_is_unreachable(serve):
    servers = [serve("--rank", "0"), serve("--rank", "1")]

    def kill(steps, seconds):
        if steps >= 5:
            for server in servers:
                server.stop(signal.SIGKILL)

    with pytest.raises(Unreachable, match="the server is gone"):
        profile_socket([server.path for server in servers], seconds=60, progress=kill)


def test_a_named_rank_that_is_busy_is_refused_and_nothing_is_left_recording(serve):
    free, busy = serve("--rank", "0"), serve("--rank", "1")
    with Connection(busy.path) as other:
        session = other.start().session
        with pytest.raises(Unreachable, match="has been recording"):
            profile_socket([free.path, busy.path], seconds=5)
        assert not recording(free.path)
        other.drop(session)


def test_a_found_rank_that_is_busy_is_left_out_and_the_report_is_partial(serve):
    serve("--rank", "0")
    busy = serve("--rank", "1")
    with Connection(busy.path) as other:
        session = other.start().session
        report = profile_socket(None, steps=10)
        other.drop(session)
    assert ranks_of(report) == [0]
    assert report.source.partial
    assert any("left out" in note.text and "has been recording" in note.text for note in report.notes)


def test_no_paths_at_all_is_bad_input():
    with pytest.raises(BadInput, match="at least one path"):
        profile_socket([], seconds=1)


# --------------------------------------------------------------------- live views


def test_a_live_view_shows_every_step_once(serve):
    server = serve()
    seen = []
    view = watch_socket(server.path, interval=0.2)
    for report in view:
        seen += [step.index for step in report.steps]
        assert report.source.engine == "stepping"
        if len(seen) > 150:
            break
    view.close()
    assert seen == list(range(len(seen)))
    assert not recording(server.path)


def test_a_live_view_of_an_idle_server_goes_on_without_steps(folder):
    agent = Agent(Recorder(), folder / f"{os.getpid()}-0.sock").start()
    assert agent.ready.wait(10)
    try:
        view = watch_socket(agent.path, interval=0.05)
        assert [next(view).steps for _ in range(3)] == [[], [], []]
        agent.recorder.begin_step("decode")
        agent.recorder.end_step()
        agent.recorder.begin_step("extend")
        agent.recorder.end_step()
        assert [step.batch_class for step in next(view).steps] == ["decode"]  # the last one's output may still come
        view.close()
    finally:
        agent.close()


def test_a_live_view_ends_when_the_server_does(serve):
    server = serve()
    view = watch_socket(server.path, interval=0.1)
    next(view)
    server.stop(signal.SIGKILL)
    with pytest.raises(Unreachable):
        for _ in view:
            pass


def test_a_live_view_keeps_its_lease_between_two_reports(serve, monkeypatch):
    from syncfree.profiler.agent import connection

    server = serve()
    monkeypatch.setattr(connection.Connection.start, "__defaults__", ("auto", None, 2.0))
    view = watch_socket(server.path, interval=4.0)
    report = next(view)
    assert report.steps
    view.close()


def test_a_live_view_merges_ranks(serve):
    for rank in ("0", "1"):
        serve("--rank", rank)
    view = watch_socket(None, interval=0.3)
    next(view)
    assert ranks_of(next(view)) == [0, 1]
    view.close()


def test_a_collector_that_hands_over_at_the_end_only_is_recorded_interval_by_interval(folder, monkeypatch):
    class AtTheEnd:
        name, blind, sees = "end", "", frozenset()

        def start(self):
            starts.append(time.monotonic())

        def stop(self):
            pass

        def mark(self, now_ns):
            return None

        def drain(self):
            return []

    starts = []
    monkeypatch.setattr("syncfree.profiler.agent.recorder.choose", lambda wanted: ([AtTheEnd()], []))
    agent = Agent(Recorder(), folder / f"{os.getpid()}-0.sock").start()
    assert agent.ready.wait(10)
    try:
        view = watch_socket(agent.path, interval=0.05)
        for number in range(1, 4):
            next(view)
            assert len(starts) == number + 1
        view.close()
    finally:
        agent.close()
