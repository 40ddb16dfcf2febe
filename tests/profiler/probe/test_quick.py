"""Launches that are counted without a call: the same as by the wrappers, whatever comes in between."""

import pytest

from .conftest import answer

RANDOM = """
import random, threading
from concurrent.futures import ThreadPoolExecutor
from syncfree.profiler.collectors.probe import ProbeCollector
from syncfree.profiler.counting import count_syncs
from syncfree.profiler.probe import attach
seed, keys = int(sys.argv[2]), int(sys.argv[3])
if sys.argv[4:] == ["wrapped"]:
    text = attach._text
    attach._text = lambda name: text(name).replace("threadLocal(key))", "null)")
libc = ctypes.CDLL(None)
for _ in range(keys):
    assert libc.pthread_key_create(ctypes.byref(ctypes.c_uint()), None) == 0
D, H, P = 0x1000, 0x2000, 0x9000
cuda.fake_sum.restype = ctypes.c_long
def c(name, *a):
    return getattr(cuda, name)(*map(ctypes.c_long, a))
LAUNCHES = ("cuLaunchKernel", "cuLaunchKernel_ptsz", "cuLaunchCooperativeKernel", "cuGraphLaunch", "cuGraphLaunch_ptsz")
def step(chance):
    stream = chance.choice((3, 3, 4))
    if chance.random() < 0.6:
        name = chance.choice(LAUNCHES)
        a = [0, stream] if "Graph" in name else [chance.randrange(1 << 40) for _ in range(8)] + [stream, 5, 6]
        a += [chance.randrange(1 << 40) for _ in range(11 - len(a))]
        c(name, *a)
        return cuda.fake_sum(name.encode()) == sum((k + 1) * x for k, x in enumerate(a))
    c(*chance.choice((
        ("cuMemcpyDtoHAsync_v2", H, D, 8, stream), ("cuMemcpyDtoHAsync_v2", P, D, 8, stream),
        ("cuMemcpyHtoDAsync_v2", D, P, 8, stream), ("cuStreamSynchronize", stream), ("cuEventSynchronize", 9),
        ("cuEventQuery", 9), ("cuMemsetD8Async", D, 0, 8, stream), ("cuMemcpy2D_v2", 0, 2, 3),
        ("cuMemsetD2D32_v2", D, 4, 0, 1, 1), ("cuMemsetD2D32_v2", D, 4, 0, 1, 1),  # launch a kernel inside
        ("cuStreamBeginCapture_v2", stream, 0), ("cuStreamEndCapture", stream, 0),
    )))
    return True
def enters():
    at = ctypes.cast(cuda.cuLaunchKernel, ctypes.c_void_p).value
    jump = ctypes.string_at(at, 5)
    assert jump[0] == 0xE9
    return ctypes.string_at(at + 5 + int.from_bytes(jump[1:], "little", signed=True), 2).hex()
probe = ProbeCollector()
probe.start(); a = probe.mark(0)
first = enters()
chances = [random.Random(f"{seed} {k}") for k in range(3)]
pools = [ThreadPoolExecutor(1) for _ in range(3)]
order = random.Random(seed)
right = all([pools[k].submit(step, chances[k]).result() for k in order.choices(range(3), k=3000)])
for pool in pools: pool.shutdown()
b = probe.mark(0); probe.stop()
calls = probe.drain()
counters = {n: getattr(b - a, n) for n in (b - a).__struct_fields__ if n != "blocked_ns"}
tids = sorted({x.thread for x in calls})
syncs = sorted([tids.index(s.call.thread), s.kind, s.call.api] for s in count_syncs(calls))
print(json.dumps([first, right, counters, probe.api, syncs]))
"""
QUICK, WRAPPER = "644c", "ff25"  # mov r11, fs:[...]; jmp [rip]
KEYS = [0, 32, 200]  # glibc keeps the values of the first 32 in one place, of others in another


@pytest.mark.parametrize("seed", range(4))
def test_any_calls_are_counted_as_by_the_wrappers(run, seed):
    first, right, *quick = answer(run(RANDOM, str(seed), str(KEYS[seed % 3])))
    assert (first, right) == (QUICK, True)
    first, right, *wrapped = answer(run(RANDOM, str(seed), "0", "wrapped"))
    assert (first, right) == (WRAPPER, True)
    assert quick == wrapped
    counters, api, syncs = quick
    assert min(counters[name] for name in ("kernels", "graphs", "captured", "d2h", "stream")) > 0
    assert api["cuLaunchKernel"] > 100
    assert api["cuMemsetD2D32_v2"] > 100
    launched = sum(counters[name] for name in ("kernels", "graphs", "captured"))
    assert launched == sum(n for name, n in api.items() if "Launch" in name)
    assert syncs


@pytest.mark.parametrize("keys", KEYS)
def test_every_thread_counts_for_itself_and_ended_ones_make_room(run, keys):
    out = run(
        """
for _ in range(int(sys.argv[2])):
    assert ctypes.CDLL(None).pthread_key_create(ctypes.byref(ctypes.c_uint()), None) == 0
import threading
from syncfree.profiler.collectors.probe import ProbeCollector
def work():
    for k in range(3):
        cuda.cuLaunchKernel(*[ctypes.c_long(1)] * 11)
seen = []
for _ in range(2):                     # the second time under another key, in threads that knew the first
    probe = ProbeCollector()
    probe.start(); a = probe.mark(0)
    for _ in range(700):               # more than there are slots, one after the other
        thread = threading.Thread(target=work); thread.start(); thread.join()
    work()
    b = probe.mark(0); probe.stop()
    seen.append([(b - a).kernels, probe.api])
print(json.dumps(seen))
""",
        str(keys),
    )
    assert answer(out) == [[2103, {"cuLaunchKernel": 2103}]] * 2


def test_a_launch_that_begins_with_a_call_is_waited_for(run):
    """What it calls returns to the moved instructions: they have to stay for as long."""
    out = run(
        """
import threading
from syncfree.profiler.collectors.probe import ProbeCollector
launch = lambda: cuda.cuLaunchCooperativeKernelMultiDevice(*map(ctypes.c_long, range(11)))
def work():
    launch()                           # the first of a thread is wrapped in any case
    cuda.fake_sleep(ctypes.c_long(900_000_000))
    launch()
probe = ProbeCollector(); probe.start()
thread = threading.Thread(target=work); thread.start()
while not cuda.fake_waiting(): time.sleep(0.01)
probe.stop()
print(probe.mark(0).kernels, cuda.fake_waiting())
thread.join()
"""
    )
    assert out.split() == ["2", "0"]
