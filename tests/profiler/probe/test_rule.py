"""The counters in C and the counting rule in Python are one rule: both are driven with the same calls."""

import ctypes
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syncfree.profiler.aggregate import tally
from syncfree.profiler.apis import lookup
from syncfree.profiler.calls import Call, Direction, Role
from syncfree.profiler.counting import count_syncs
from syncfree.profiler.probe import CUDA, arena
from syncfree.profiler.probe.entry_points import encoded
from syncfree.profiler.probe.events import Decoder

DEVICE, PINNED, PAGEABLE = 0x1000, 0x2000, 0x9000
SIDES = {DEVICE: "d", PINNED: "h", PAGEABLE: "h"}
DIRECTIONS = {"dd": Direction.D2D, "dh": Direction.H2D, "hd": Direction.D2H, "hh": Direction.H2H}  # to, from
WANTED = {name: bytes(row) for name, row, _, _ in encoded(CUDA)}
NAMES = [
    *("cuLaunchKernel", "cuLaunchKernel_ptsz", "cuGraphLaunch", "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"),
    *("cuMemcpyDtoDAsync_v2", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2", "cuMemcpyAsync", "cuMemcpy", "cuMemcpyPeerAsync"),
    *("cuMemcpy3DBatchAsync", "cuMemsetD8Async", "cuMemsetD8_v2", "cuStreamSynchronize", "cuEventSynchronize"),
    *("cuCtxSynchronize", "cuMemAlloc_v2", "cuMemFree_v2", "cuEventQuery", "cuStreamQuery"),
]
POINTS = {name: next(p for p in CUDA.table if name in [e for e, _ in p.exports()]) for name in NAMES}
KINDS = "d2h h2d stream device event memset copy maybe".split()

steps = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.sampled_from([0, 0, 0, 1]),  # thread
        st.sampled_from([DEVICE, PINNED, PAGEABLE]),
        st.sampled_from([DEVICE, PINNED, PAGEABLE]),
        st.integers(0, 9 << 20),
        st.sampled_from([0, 0, 0, 0, 1]),  # whether the call's stream captures
    ),
    max_size=40,
)


class Driver:
    """The harness, with each thread of the test a real thread."""

    def __init__(self, harness):
        self.c = harness
        self.c.harness_arena.restype = ctypes.c_void_p
        self.base = self.c.harness_arena()
        self.threads = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]
        self.tids = [pool.submit(threading.get_native_id).result() for pool in self.threads]
        for index, name in enumerate(NAMES):
            self.poke(arena.OFFSETS["entries"] + arena.ENTRY.size * index, WANTED[name])

    def peek(self, offset, size):
        return ctypes.string_at(self.base + offset, size)

    def poke(self, offset, data):
        ctypes.memmove(self.base + offset, data, len(data))

    def start(self):
        for pool in self.threads:
            assert pool.submit(self.c.harness_start).result() == 0

    def call(self, name, thread, to, source, nbytes, captures):
        self.c.harness_capture(captures)
        arguments = (ctypes.c_long * 14)(to, source, nbytes)
        if name == "cuMemcpyPeerAsync":
            arguments[4] = nbytes
        self.threads[thread].submit(self.c.harness_call, NAMES.index(name), arguments).result()

    def counters(self):
        raw = self.peek(arena.OFFSETS["counters"], 8 * len(arena.COUNTERS))
        return dict(zip(arena.COUNTERS, memoryview(raw).cast("q"), strict=True))


@pytest.fixture(scope="module")
def driver(harness):
    made = Driver(harness)
    yield made
    for pool in made.threads:
        pool.shutdown()


def as_call(index, name, thread, to, source, nbytes, captures):
    """What a collector that sees every call would have said."""
    api, point = lookup(name), POINTS[name]
    direction, pageable = api.direction, None
    if api.role is Role.COPY:
        if point.reads.name == "POINTERS":
            direction = DIRECTIONS[SIDES[to] + SIDES[source]]
        host = to if direction is Direction.D2H else source if direction is Direction.H2D else None
        pageable = host == PAGEABLE if point.dst >= 0 else None
    return Call(
        api=name,
        role=api.role,
        ts_ns=10 * index,
        dur_ns=1,
        thread=thread,
        wait=api.wait,
        direction=direction,
        nbytes=nbytes if point.nbytes else None,
        pageable=pageable,
        blocking=api.blocking or (direction is Direction.D2H and bool(pageable)),
        captured=bool(captures)
        and point.stream >= 0
        and api.role in (Role.LAUNCH, Role.GRAPH_LAUNCH, Role.COPY, Role.MEMSET),
    )


def plain(sync):
    return sync.kind, sync.call.api


@settings(max_examples=400, deadline=None)
@given(steps)
def test_the_counters_and_the_counting_rule_agree_on_any_calls(driver, sequence):
    driver.start()
    for step in sequence:
        driver.call(*step)
    calls = [as_call(i, name, driver.tids[t], *rest) for i, (name, t, *rest) in enumerate(sequence)]
    counted = driver.counters()
    _, everything = tally([], calls)
    for name in arena.COUNTERS:
        if name == "copies_unknown":  # host-to-host copies have no place of their own in the report
            continue
        if name != "blocked_ns":
            assert counted[name] == getattr(everything.counters, name), name


@settings(max_examples=400, deadline=None)
@given(steps)
def test_the_records_tell_the_same_syncs_as_all_the_calls(driver, sequence):
    driver.start()
    for step in sequence:
        driver.call(*step)
    calls = [as_call(i, name, driver.tids[t], *rest) for i, (name, t, *rest) in enumerate(sequence)]
    decoder = Decoder(NAMES, driver.peek)
    told = decoder.decode(arena.take_records(driver.peek, driver.poke))
    for tid in driver.tids:
        wanted = [plain(s) for s in count_syncs(c for c in calls if c.thread == tid and not c.captured)]
        found = [plain(s) for s in count_syncs(c for c in told if c.thread == tid)]
        assert Counter(found) == Counter(wanted)  # a pair is told at the time of its wait, not of its copy
    assert arena.word(driver.peek, "ring_tail") == arena.word(driver.peek, "ring_head")


def test_copies_of_unknown_direction_are_counted_apart(driver):
    driver.start()
    driver.call("cuMemcpy3DBatchAsync", 0, DEVICE, DEVICE, 1, 0)
    assert driver.counters()["copies_unknown"] == 1


def test_the_ring_never_overwrites_what_was_not_drained(driver):
    driver.start()
    for _ in range(arena.RING + 10):
        driver.c.harness_call(NAMES.index("cuStreamSynchronize"), (ctypes.c_long * 14)())
    assert len(arena.take_records(driver.peek, driver.poke)) == arena.RING
    assert arena.word(driver.peek, "ring_dropped") == 10
    assert driver.counters()["stream"] == arena.RING + 10
    driver.call("cuStreamSynchronize", 0, 0, 0, 0, 0)
    assert len(arena.take_records(driver.peek, driver.poke)) == 1


def test_more_threads_than_slots_are_lost_loudly_and_ended_ones_make_room(driver):
    driver.start()
    index, nothing = NAMES.index("cuLaunchKernel"), (ctypes.c_long * 14)()
    for _ in range(arena.MAX_THREADS + 50):  # one after the other: each has ended when the next begins
        thread = threading.Thread(target=driver.c.harness_call, args=(index, nothing))
        thread.start()
        thread.join()
    counted, lost = driver.counters()["kernels"], arena.word(driver.peek, "threads_lost")
    assert (counted, lost) == (arena.MAX_THREADS + 50, 0)


def test_calls_by_entry_point_add_up(driver):
    driver.start()
    for name, times in {"cuLaunchKernel": 3, "cuEventQuery": 2, "cuMemcpyAsync": 1}.items():
        for k in range(times):
            driver.call(name, k % 2, DEVICE, PINNED, 8, 0)
    called = Counter(dict(zip(NAMES, arena.calls(driver.peek, len(NAMES)), strict=True)))
    assert +called == {"cuLaunchKernel": 3, "cuEventQuery": 2, "cuMemcpyAsync": 1}
