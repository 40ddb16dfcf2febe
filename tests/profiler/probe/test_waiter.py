"""A wait in a helper thread without a frame of the program's is put where the step's own thread waits for it."""

import subprocess
import sys

import pytest

from .conftest import DOUBLES, answer

WILD = DOUBLES / "wild_steps.py"

HOOKED = """
import collections, functools, operator, threading
from syncfree.profiler.collectors.probe import ProbeCollector
from syncfree.profiler.counting import count_syncs
from syncfree.profiler.probe import arena as layout
from syncfree.profiler.sites import blamed
sys.path.insert(0, sys.argv[2])
import helpers
event, step = cuda.cuEventSynchronize, threading.current_thread()
probe = ProbeCollector()
WAITS = ("Condition.wait", "Thread.join", "Thread._wait_for_tstate_lock")
def place(thread):  # where the main thread waits for another one, asleep; None where it does not
    frame = sys._current_frames()[thread.ident]
    chain = [frame]
    while chain[-1].f_back: chain.append(chain[-1].f_back)
    asleep = open(f"/proc/self/task/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] == "S"
    waits = frame.f_code.co_qualname in WAITS and "Thread.start" not in [f.f_code.co_qualname for f in chain]
    return (frame.f_code, frame.f_lasti) if asleep and waits and cuda.fake_waiting() else None
def let_go(thread):  # end the driver's wait once that thread waits for it
    before = None
    while before is None or before != place(thread):
        before = place(thread)
        time.sleep(0.005)
    cuda.fake_hold(0)
def stacks(function, *more, wait=event):
    cuda.fake_hold(1)
    releaser = threading.Thread(target=let_go, args=(step,)) if not more else None
    if releaser: releaser.start()
    getattr(helpers, function)(wait, *more)
    if releaser: releaser.join()
    return [[s.kind, blamed(s.call.stack), s.call.stack] for s in count_syncs(probe.drain())]
def lines(function, *more, wait=event):
    return [[kind, frame.file.rpartition("/")[2], frame.line] for kind, frame, _ in stacks(function, *more, wait=wait)]
"""

PROGRAM = """\
import concurrent.futures, queue, threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool


def join(wait):
    thread = threading.Thread(target=wait, args=(3,))
    thread.start()
    thread.join()


class Joins:
    def __init__(self, wait):
        if wait is not None:
            join(wait)


def join_in_a_constructor(wait):
    for argument in [None] * 100 + [wait]:
        Joins(argument)


def future(wait):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(wait, 3).result()


def executor_map(wait):
    with ThreadPoolExecutor(1) as pool:
        for answer in pool.map(wait, [3]):
            return answer


def executor_exit(wait):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(wait, 3)


def as_completed(wait):
    with ThreadPoolExecutor(1) as pool:
        futures = [pool.submit(wait, 3)]
        for done in concurrent.futures.as_completed(futures):
            return done.result()


def pool_apply(wait):
    with ThreadPool(1) as pool:
        return pool.apply(wait, (3,))


def queue_get(wait):
    answers = queue.Queue()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(wait, 3).add_done_callback(answers.put)
        answers.get()


def in_its_own_code(wait):
    def work():
        wait(3)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def computes(wait, go_on, done):
    thread = threading.Thread(target=wait, args=(3,))
    thread.start()
    go_on()
    while not done():
        sum(range(100))
    thread.join()
"""


@pytest.fixture
def hooked(run, tmp_path):
    (tmp_path / "helpers.py").write_text(PROGRAM)
    return lambda code, **how: run(HOOKED + code, str(tmp_path), **how)


def line(function, text):
    """Of the first line of PROGRAM with this text, in or after this function."""
    rows = PROGRAM.splitlines()
    start = next(k for k, row in enumerate(rows) if row.startswith(f"def {function}("))
    return next(k + 1 for k, row in enumerate(rows) if k >= start and text in row)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("join", "thread.join()"),
        ("join_in_a_constructor", "thread.join()"),
        ("future", "result()"),
        ("executor_map", "for answer in"),
        ("executor_exit", "with ThreadPoolExecutor"),
        ("as_completed", "for done in"),
        ("pool_apply", "pool.apply"),
        ("queue_get", "answers.get()"),
    ],
)
def test_the_line_that_waits_for_the_thread_is_blamed(hooked, function, text):
    out = hooked(f"probe.start(); probe.mark(0); found = lines({function!r}); probe.stop(); print(json.dumps(found))")
    assert answer(out) == [["event", "helpers.py", line("join" if "join" in function else function, text)]]


def test_the_stack_is_the_threads_own_and_then_that_of_who_waits(hooked):
    out = hooked(
        "probe.start(); probe.mark(0); [[_, _, stack]] = stacks('join'); probe.stop()\n"
        "print(json.dumps([f.function for f in stack]))"
    )
    names = answer(out)
    own = names.index("Thread._bootstrap") + 1
    assert names[:own] == ["Thread.run", "Thread._bootstrap_inner", "Thread._bootstrap"]
    assert names[own] in ("Thread._wait_for_tstate_lock", "Thread.join")
    assert names[-2:] == ["stacks", "<module>"]
    assert "join" in names[own:]


def test_a_thread_with_a_frame_of_the_programs_keeps_its_own_line(hooked):
    out = hooked(
        "probe.start(); probe.mark(0); [[_, frame, stack]] = stacks('in_its_own_code'); probe.stop()\n"
        "print(json.dumps([frame.line, stack[-1].function]))"
    )
    assert answer(out) == [line("in_its_own_code", "wait(3)"), "Thread._bootstrap"]


def test_a_step_thread_that_computes_is_not_blamed(hooked):
    out = hooked(
        """
probe.start(); probe.mark(0)
found = lines("computes", lambda: cuda.fake_hold(0), lambda: probe._arena.pending())
probe.stop(); print(json.dumps(found))
"""
    )
    assert [file for _, file, _ in answer(out)] == ["threading.py"]


def test_without_a_step_nothing_is_read(hooked):
    out = hooked(
        """
probe.start(); found = lines("join"); probe.mark(0); found += lines("join"); probe.stop()
print(json.dumps([file for _, file, _ in found]))
"""
    )
    assert answer(out) == ["threading.py", "helpers.py"]


def test_a_step_thread_that_has_ended_is_not_read(hooked):
    out = hooked(
        """
probe.start()
ended = threading.Thread(target=probe.mark, args=(0,)); ended.start(); ended.join()
state = layout.word(probe._arena.peek, "step_state")
found = lines("join")
numbers = [layout.word(probe._arena.peek, n) for n in ("step_ident", "step_native")]
for state in (state, 8, -8, 2**47 - 4096, id(probe)):                   # freed, never mapped, another object's
    layout.set_step_thread(probe._arena.poke, state, *numbers); found += lines("join")
probe.stop()
print(json.dumps([file for _, file, _ in found]))
"""
    )
    assert answer(out) == ["threading.py"] * 6


def test_frames_that_do_not_fit_are_not_believed(hooked):
    out = hooked(
        """
probe.start(); probe.mark(0); found = []
for name in ("code_type", "text_type", "bytes_type", "thread_ident", "type_at", "bytes_length"):
    at = layout.OFFSETS["python"] + 8 * layout.PYTHON.index(name)
    right = probe._arena.peek(at, 8)
    for wrong in (8, -8):
        probe._arena.poke(at, (int.from_bytes(right, "little") + wrong & 2**64 - 1).to_bytes(8, "little"))
        found += lines("join")
    probe._arena.poke(at, right)
found += lines("join")
probe.stop()
print(json.dumps([file for _, file, _ in found]))
"""
    )
    *wrong, right = answer(out)
    assert wrong == ["threading.py"] * 12
    assert right == "helpers.py"


def test_a_thread_that_is_done_at_once_is_not_blamed_on_the_line_that_starts_it(hooked):
    out = hooked(
        """
probe.start(); probe.mark(0)
for _ in range(50):
    helpers.join(event); helpers.future(event)
probe.stop()
frames = [blamed(call.stack) for call in probe.drain()]
print(json.dumps(sorted({frame.line for frame in frames if frame.file.endswith("helpers.py")})))
"""
    )
    assert answer(out) == [line("join", "thread.join()"), line("future", "result()")]


@pytest.mark.parametrize(
    ("copy", "kind"),
    [
        ("cuMemcpyDtoHAsync_v2, H, D", "d2h"),
        ("cuMemcpyDtoHAsync_v2, P, D", "d2h"),  # waits by itself, and is counted before its wait
        ("cuMemcpyHtoDAsync_v2, D, P", "h2d"),  # may wait by itself
    ],
)
def test_a_copy_and_its_wait_stay_one(hooked, copy, kind):
    out = hooked(
        f"""
D, H, P = map(ctypes.c_long, (0x1000, 0x2000, 0x9000))
copy = functools.partial(cuda.{copy}, ctypes.c_long(8), ctypes.c_long(7))
both = [copy, functools.partial(cuda.cuStreamSynchronize, ctypes.c_long(7))]
probe.start(); probe.mark(0)
before = probe.mark(0)
found = lines("join", wait=functools.partial(collections.deque, map(operator.call, both)))
after = probe.mark(0) - before; probe.stop()
print(json.dumps([found, after.{kind}, after.stream, after.maybe]))
"""
    )
    assert answer(out) == [[[kind, "helpers.py", line("join", "thread.join()")]], 1, 0, 0]


def test_a_copy_that_was_handed_over_before_its_wait_stays_as_it_was(hooked):
    out = hooked(
        """
copy = functools.partial(cuda.cuMemcpyDtoHAsync_v2, *map(ctypes.c_long, (0x9000, 0x1000, 8, 7)))
taken = []
def drained(): taken.extend(probe.drain()); taken.append(taken[0].stack)
both = [copy, drained, functools.partial(cuda.cuStreamSynchronize, ctypes.c_long(7))]
probe.start(); probe.mark(0)
before = probe.mark(0)
stacks("join", wait=functools.partial(collections.deque, map(operator.call, both)))
after = probe.mark(0) - before; probe.stop()
print(json.dumps([taken[0].api, taken[0].stack == taken[1], after.d2h, after.stream]))
"""
    )
    assert answer(out) == ["cuMemcpyDtoHAsync_v2", True, 1, 0]


def test_where_no_thread_can_be_started_counting_goes_on(hooked):
    out = hooked(
        """
def refuse(thread, started=threading.Thread.start):
    if thread.name == "syncfree-trial": raise RuntimeError("can't start new thread")
    started(thread)
threading.Thread.start = refuse
probe.start()
before = probe.mark(0); event(ctypes.c_long(3)); after = probe.mark(0) - before
probe.stop()
print(json.dumps([after.event, ["helper threads" in note.text for note in probe.notes()].count(True)]))
"""
    )
    assert answer(out) == [1, 1]


def test_a_blocking_copy_alone(hooked):
    out = hooked(
        """
copy = functools.partial(cuda.cuMemcpyDtoH_v2, *map(ctypes.c_long, (0x2000, 0x1000, 8)))
both = [functools.partial(cuda.fake_wait), copy]
probe.start(); probe.mark(0)
found = lines("join", wait=functools.partial(collections.deque, map(operator.call, both)))
probe.stop(); print(json.dumps(found))
"""
    )
    assert answer(out) == [["d2h", "helpers.py", line("join", "thread.join()")]]


def test_a_forked_child_reads_nothing(hooked):
    out = hooked(
        """
probe.start(); probe.mark(0); end = {}
arena = probe._arena
child = os.fork()
if child == 0:
    found = lines("join")                     # by a copy of the hooks, in an arena of its own
    os._exit(0 if layout.word(arena.peek, "event") == 1 and found[0][1] == "threading.py" else 1)
status = os.waitpid(child, 0)[1]
found = lines("join"); probe.stop()
print(json.dumps([status, found[0][1]]))
"""
    )
    assert answer(out) == [0, "helpers.py"]


def test_errno_is_left_alone(hooked):
    out = hooked(
        """
probe.start(); probe.mark(0)
found = lines("join", wait=cuda.fake_copy_and_errno); seen = [cuda.fake_seen_errno()]
layout.set_step_thread(probe._arena.poke, 8, step.ident, step.native_id)                    # cannot be read
found += lines("join", wait=cuda.fake_copy_and_errno); seen.append(cuda.fake_seen_errno())
probe.stop(); print(json.dumps([[file for _, file, _ in found], seen]))
"""
    )
    assert answer(out) == [["helpers.py", "threading.py"], [77, 77]]


def test_a_step_thread_that_runs_wild_harms_nobody(needs_probe, fake_cuda):
    """Every line that is told is one at which the step's thread may wait; the long run is made by hand."""
    command = [sys.executable, "-X", "faulthandler", str(WILD), str(fake_cuda), "6000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    told = answer(done.stdout)
    assert told["waits"] == 6000
    assert told["wrong"] == []
    assert told["joined"] > 0
