"""The agent's answers, as a function of requests; no socket, and the stepping is done by the test."""

import msgspec
import pytest
from syncfree.planner.errors import Unreachable
from syncfree.profiler.agent import desk as desk_module
from syncfree.profiler.agent import protocol
from syncfree.profiler.agent.desk import Desk
from syncfree.profiler.agent.recorder import Recorder
from syncfree.profiler.calls import Call, Direction, Frame, Role

CLIENT, OTHER = b"one", b"two"


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(desk_module, "time", clock)
    return clock


@pytest.fixture
def recorder():
    return Recorder(rank=3, engine="test")


@pytest.fixture
def desk(recorder, clock):
    desk = Desk(recorder)
    for client, pid in ((CLIENT, 11), (OTHER, 22)):
        ask(desk, protocol.Hello(id=1, protocol=protocol.PROTOCOL, pid=pid), client)
    return desk


def ask(desk, request, client=CLIENT):
    return protocol.decode_reply(desk.handle(client, [protocol.encode(request)]))


def start(desk, **options):
    reply = ask(desk, protocol.Start(id=2, **options))
    assert isinstance(reply, protocol.Started), reply
    return reply.session


def do_steps(recorder, count, batch_class="decode", **about):
    for _ in range(count):
        recorder.begin_step(batch_class, **about)
        recorder.begin_phase("build")
        recorder.end_phase()
        recorder.end_step()


def fetch_all(desk, session, size, section=0):
    steps, at = [], 0
    while at < size:
        part = ask(desk, protocol.Fetch(id=3, session=session, section=section, offset=at))
        assert part.next > at
        at = part.next
        steps += part.steps + part.calls
    return steps


def test_hello_tells_who_answers(desk):
    reply = ask(desk, protocol.Hello(id=7, protocol=protocol.PROTOCOL))
    assert (reply.id, reply.rank, reply.engine) == (7, 3, "test")


def test_another_protocol_is_refused_with_both_versions(desk):
    reply = ask(desk, protocol.Hello(id=7, protocol=99))
    assert reply.code == "protocol"
    assert f"protocol {protocol.PROTOCOL}" in reply.reason
    assert "99" in reply.reason


def test_nothing_is_answered_before_hello(desk):
    assert ask(desk, protocol.Health(id=1), client=b"stranger").code == "protocol"


def test_health_tells_of_hooks_that_were_switched_off(desk, recorder):
    recorder.disabled = "KeyError: x"
    assert ask(desk, protocol.Health(id=1)).disabled == "KeyError: x"
    assert ask(desk, protocol.Start(id=2)).reason.endswith("switched off: KeyError: x")


def test_steps_are_recorded_followed_and_fetched(desk, recorder):
    session = start(desk)
    do_steps(recorder, 3, num_reqs=2, num_tokens=9)
    do_steps(recorder, 1, "extend", mixed=True)
    state = ask(desk, protocol.Status(id=4, session=session))
    assert (state.state, state.steps, state.classes) == ("recording", 4, {"decode": 3, "extend": 1})
    state = ask(desk, protocol.Stop(id=5, session=session))
    assert (state.state, state.sizes) == ("stopped", [4])
    assert state.head.source.ranks == [3]
    steps = fetch_all(desk, session, 4)
    assert [s.batch_class for s in steps] == ["decode"] * 3 + ["extend"]
    assert [(s.num_reqs, s.num_tokens) for s in steps[:2]] == [(2, 9), (2, 9)]
    assert [p.name for p in steps[0].phases] == ["build"]
    assert isinstance(ask(desk, protocol.Drop(id=6, session=session)), protocol.Done)
    assert recorder.session is None


def test_many_steps_come_in_parts(desk, recorder):
    session = start(desk)
    do_steps(recorder, 1300)
    size = ask(desk, protocol.Stop(id=5, session=session)).sizes[0]
    part = ask(desk, protocol.Fetch(id=3, session=session, section=0, offset=0))
    assert (size, part.next, len(part.steps)) == (1300, protocol.PART_ITEMS, protocol.PART_ITEMS)
    assert [s.index for s in fetch_all(desk, session, size)] == list(range(1300))


def test_large_records_come_in_smaller_parts_and_one_too_large_is_left_out(desk, recorder):
    session = start(desk)
    do_steps(recorder, 4, name="n" * (protocol.PART_BYTES // 3))
    do_steps(recorder, 1, name="n" * (protocol.PART_BYTES + 1))
    do_steps(recorder, 1)
    ask(desk, protocol.Stop(id=5, session=session))
    at, found, left_out = 0, [], 0
    while at < 6:
        data = desk.handle(CLIENT, [protocol.encode(protocol.Fetch(id=3, session=session, section=0, offset=at))])
        assert len(data) <= protocol.MAX_REPLY_BYTES
        part = protocol.decode_reply(data)
        at, left_out = part.next, left_out + part.left_out
        found += [s.index for s in part.steps]
    assert (found, left_out) == ([0, 1, 2, 3, 5], 1)


def test_a_second_recording_is_refused_and_says_whose_the_first_is(desk):
    start(desk)
    reply = ask(desk, protocol.Start(id=9), client=OTHER)
    assert (reply.code, reply.id) == ("busy", 9)
    assert "process 11 has been recording" in reply.reason


def test_somebody_elses_session_cannot_be_stopped_by_guessing(desk):
    start(desk)
    assert ask(desk, protocol.Stop(id=3, session="0" * 16), client=OTHER).code == "session"


def test_recording_ends_by_itself_after_the_steps_that_were_asked_for(desk, recorder):
    session = start(desk, steps=5)
    do_steps(recorder, 9)
    state = ask(desk, protocol.Stop(id=3, session=session))
    assert state.sizes == [5]
    assert not state.head.source.partial


def test_the_output_of_the_last_step_asked_for_still_belongs_to_it(desk, recorder):
    session = start(desk, steps=1)
    do_steps(recorder, 1)
    assert recorder.reopen_step() is not None
    recorder.begin_phase("output")
    recorder.end_phase()
    recorder.end_step()
    do_steps(recorder, 1)
    ask(desk, protocol.Stop(id=3, session=session))
    (step,) = fetch_all(desk, session, 1)
    assert [p.name for p in step.phases] == ["build", "output"]


def test_a_recording_that_reaches_the_maximum_is_partial(desk, recorder, monkeypatch):
    monkeypatch.setattr("syncfree.profiler.agent.recorder.MAX_STEPS", 20)
    session = start(desk)
    do_steps(recorder, 30)
    state = ask(desk, protocol.Stop(id=3, session=session))
    assert state.sizes == [20]
    assert state.head.source.partial
    assert any("the recording ended at 20 steps" in note.text for note in state.head.notes)


def test_stop_waits_for_the_step_that_is_running(desk, recorder):
    session = start(desk)
    do_steps(recorder, 2)
    recorder.begin_step("decode")
    assert ask(desk, protocol.Stop(id=3, session=session)).state == "stopping"
    assert desk.patience_ms() < 50
    recorder.end_step()
    desk.tick()
    assert ask(desk, protocol.Stop(id=4, session=session)).sizes == [3]


def test_a_forced_stop_leaves_the_running_step_out_and_says_so(desk, recorder):
    session = start(desk)
    do_steps(recorder, 2)
    recorder.begin_step("decode")
    state = ask(desk, protocol.Stop(id=3, session=session, force=True))
    assert (state.state, state.sizes, state.head.source.partial) == ("stopped", [2], True)
    recorder.end_step()
    do_steps(recorder, 1)
    assert ask(desk, protocol.Stop(id=4, session=session)).sizes == [2]


def test_a_silent_client_loses_its_recording_and_the_next_one_may_record(desk, recorder, clock):
    session = start(desk, lease_s=5.0)
    clock.now += 4.0
    desk.tick()
    ask(desk, protocol.Status(id=3, session=session))
    clock.now += 4.0
    desk.tick()
    assert ask(desk, protocol.Status(id=3, session=session)).state == "recording"
    clock.now += 5.1
    desk.tick()
    assert recorder.session is None
    assert ask(desk, protocol.Status(id=3, session=session)).code == "session"
    assert isinstance(ask(desk, protocol.Start(id=4), client=OTHER), protocol.Started)


def test_a_recording_dropped_in_the_middle_of_a_step_is_over_at_once(desk, recorder, clock):
    start(desk, lease_s=5.0)
    recorder.begin_step("decode")
    clock.now += 6.0
    desk.tick()
    session = start(desk)
    recorder.end_step()
    do_steps(recorder, 2)
    assert ask(desk, protocol.Stop(id=5, session=session)).sizes == [2]


def test_an_unknown_collector_is_bad_input_and_leaves_no_recording(desk, recorder):
    reply = ask(desk, protocol.Start(id=4, collectors="nonsense"))
    assert reply.code == "input"
    assert "nonsense" in reply.reason
    assert recorder.session is None


class Broken:
    """A collector whose method named by `where` raises."""

    name = "broken"
    sees = frozenset({"syncs"})
    blind = ""
    thread_bound = False

    def __init__(self, where):
        self.where = where
        self.stopped = False

    def _maybe(self, where):
        if where == self.where:
            raise OSError(f"broken in {where}")

    def start(self):
        if self.where == "start":
            raise Unreachable("collector broken: not here")

    def stop(self):
        self.stopped = True
        self._maybe("stop")

    def mark(self, now_ns):
        self._maybe("mark")

    def drain(self):
        self._maybe("drain")
        return []


@pytest.fixture
def collector(monkeypatch):
    def use(collector):
        monkeypatch.setattr("syncfree.profiler.agent.recorder.choose", lambda wanted: ([collector], []))
        return collector

    return use


def test_a_collector_that_cannot_work_is_a_refusal_with_its_reason(desk, recorder, collector):
    collector(Broken("start"))
    reply = ask(desk, protocol.Start(id=4))
    assert (reply.code, reply.reason) == ("collector", "collector broken: not here")
    assert recorder.session is None


@pytest.mark.parametrize("where", ["mark", "stop", "drain"])
def test_a_collector_that_raises_ends_the_recording_and_not_the_host(desk, recorder, collector, where):
    broken = collector(Broken(where))
    session = start(desk)
    do_steps(recorder, 3)
    state = ask(desk, protocol.Stop(id=5, session=session))
    assert state.state == "failed"
    assert state.error == f"OSError: broken in {where}"
    assert broken.stopped
    ask(desk, protocol.Drop(id=6, session=session))
    do_steps(recorder, 1)
    collector(Broken("nowhere"))
    start(desk)


def test_a_collector_bound_to_its_thread_is_begun_and_ended_by_the_steps(desk, recorder, collector):
    bound = collector(Broken("nowhere"))
    bound.thread_bound = True
    began = []
    bound.start = lambda: began.append("start")
    session = start(desk)
    assert began == []
    do_steps(recorder, 2)
    assert began == ["start"]
    assert ask(desk, protocol.Stop(id=5, session=session)).state == "stopping"
    assert not bound.stopped
    do_steps(recorder, 1)
    assert bound.stopped
    assert ask(desk, protocol.Stop(id=5, session=session)).sizes == [2, 0]


def test_a_bound_collector_is_ended_without_its_thread_when_no_step_comes_any_more(desk, recorder, collector):
    bound = collector(Broken("nowhere"))
    bound.thread_bound = True
    session = start(desk)
    do_steps(recorder, 2)
    assert ask(desk, protocol.Stop(id=5, session=session, force=True)).sizes == [2, 0]
    assert bound.stopped


def test_a_dropped_recording_of_a_bound_collector_is_over_when_its_thread_steps_again(desk, recorder, collector):
    bound = collector(Broken("nowhere"))
    bound.thread_bound = True
    session = start(desk)
    do_steps(recorder, 1)
    ask(desk, protocol.Drop(id=3, session=session))
    assert ask(desk, protocol.Start(id=4)).code == "busy"
    do_steps(recorder, 1)
    desk.tick()
    assert bound.stopped
    start(desk)


def test_calls_travel_with_the_blamed_source_line_and_without_our_own_frames(tmp_path):
    line = tmp_path / "model.py"
    line.write_text("import torch\nx = y.item()\n")
    own = desk_module.__file__
    stack = (Frame(own, 1, "inside"), Frame("/x/torch/_tensor.py", 5, "item"), Frame(str(line), 2, "forward"))
    call = Call(api="cudaMemcpyAsync", role=Role.COPY, direction=Direction.D2H, ts_ns=1, stack=stack)
    found = desk_module.portable(call)
    assert [f.function for f in found.stack] == ["item", "forward"]
    assert found.stack[1].source == "x = y.item()"
    assert msgspec.msgpack.decode(protocol.encode(found), type=Call) == found
