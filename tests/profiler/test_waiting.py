"""Waits of helper threads that have no line of the user's, as collectors see them that run Python."""

import _thread
import collections
import operator
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
from syncfree.profiler import waiting
from syncfree.profiler.calls import Call, Direction, Frame, Role
from syncfree.profiler.collectors import gpu_trace
from syncfree.profiler.collectors.gpu_trace import GpuTraceCollector, _callback
from syncfree.profiler.collectors.transfers import TransfersCollector
from syncfree.profiler.sites import blamed

OWN = (Frame("/usr/lib/torch/cuda/streams.py", 254, "Event.synchronize"),)


def place(thread):
    """Where it waits for another thread, asleep; None where it does not."""
    frame = sys._current_frames()[thread.ident]
    state = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[0]
    return (frame.f_code, frame.f_lasti) if state == "S" and waiting._waits(waiting._stack_of(thread)) else None


@pytest.fixture
def gate():
    """Opens once this thread waits for another one."""
    made, main = threading.Event(), threading.current_thread()

    def watch():
        before = None
        while before is None or before != place(main):
            before = place(main)
            threading.Event().wait(0.002)
        made.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield made
    watcher.join()


@pytest.fixture
def step():
    made = waiting.StepThread()
    made.is_this()
    return made


def join(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()  # waits here


def future(work):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()  # waits here


def executor_map(work):
    with ThreadPoolExecutor(1) as pool:
        for _ in pool.map(operator.call, [work]):  # waits here
            pass


def executor_exit(work):
    with ThreadPoolExecutor(1) as pool:  # waits here
        pool.submit(work)


def pool_apply(work):
    with ThreadPool(1) as pool:
        pool.apply(work)  # waits here


def line_of(function):
    first = function.__code__.co_firstlineno
    rows = Path(__file__).read_text().splitlines()[first - 1 :]
    return first + next(k for k, row in enumerate(rows) if row.endswith("# waits here"))


def told(step, gate, function, stack=OWN):
    """What a helper thread with that stack is told while the main thread waits for it in `function`."""
    found = []

    def look():
        gate.wait()
        found.append(step.logical(stack))

    function(look)
    return found


@pytest.mark.parametrize("function", [join, future, executor_map, executor_exit, pool_apply], ids=lambda f: f.__name__)
def test_the_line_that_waits_for_the_thread_is_blamed(step, gate, function):
    found = told(step, gate, function)
    assert found[0][0] == OWN[0]
    assert (blamed(found[0]).function, blamed(found[0]).line) == (function.__name__, line_of(function))


def test_a_stack_with_a_frame_of_the_users_stays(step, gate):
    mine = (*OWN, Frame("/home/me/run.py", 3, "work"))
    assert told(step, gate, join, mine) == [mine]


def test_a_thread_that_does_not_wait_is_not_blamed(step):
    go, done, found = threading.Event(), [], []

    def look():
        go.wait()
        found.append(step.logical(OWN))
        done.append(True)

    thread = threading.Thread(target=look)
    thread.start()
    go.set()
    while not done:
        sum(range(100))
    thread.join()
    assert found == [OWN]


def test_on_the_thread_that_steps_and_without_one_nothing_is_added(step):
    assert step.logical(OWN) == OWN
    nobody = waiting.StepThread()
    assert nobody.logical(OWN) == OWN


def test_a_thread_that_has_ended_is_not_asked(gate):
    step = waiting.StepThread()
    ended = threading.Thread(target=step.is_this)
    ended.start()
    ended.join()
    assert told(step, gate, join) == [OWN]


def test_a_thread_that_python_did_not_make_gets_no_entry_of_its_own(step):
    found, listed = [], []

    def look():
        found.append(step.logical(OWN))
        listed.extend(threading._active)
        done.release()

    done = _thread.allocate_lock()
    done.acquire()
    ident = _thread.start_new_thread(look, ())
    done.acquire()
    assert found
    assert ident not in listed


def test_while_it_starts_the_thread_it_is_given_the_time_to_wait_for_it(step, gate, monkeypatch):
    """The thread's first instructions may come before its starter's next ones; they are only put in order here."""
    real, found, looks = waiting._stack_of, [], []
    starting = (
        Frame(waiting._FILE, 320, "Condition.wait"),
        Frame(waiting._FILE, 935, "Thread.start"),
        Frame("/home/me/run.py", 5, "work"),
    )

    def stack_of(thread):
        looks.append(thread)
        return starting if len(looks) == 1 else real(thread)

    def look():
        gate.wait()
        monkeypatch.setattr(waiting, "_stack_of", stack_of)
        found.append(step.logical(OWN))
        monkeypatch.setattr(waiting, "_stack_of", real)

    join(look)
    assert len(looks) == 2
    assert blamed(found[0]).line == line_of(join)


def test_gpu_trace_blames_who_waits(gate, monkeypatch):
    collector = GpuTraceCollector()
    monkeypatch.setattr(gpu_trace, "_listening", [collector])
    collector.mark(0)
    calls = map(operator.call, [gate.wait, partial(_callback("event"), 7)])
    join(partial(collections.deque, calls))
    [call] = collector.drain()
    assert [frame.function for frame in call.stack[:2]] == ["Thread.run", "Thread._bootstrap_inner"]
    assert blamed(call.stack).line == line_of(join)


def test_transfers_blames_who_waits(gate):
    collector = TransfersCollector()
    collector.mark(0)
    call = Call(api="Tensor.to", role=Role.COPY, ts_ns=0, direction=Direction.D2H, stack=OWN)
    join(partial(collections.deque, map(operator.call, [gate.wait, partial(collector._saw, call)])))
    [note] = collector.notes()
    assert (note.file, note.line) == (__file__, line_of(join))
