"""Hooks on a driver that does nothing: what is counted, named and left behind."""

from .conftest import answer

HOOKED = """
from syncfree.profiler.collectors.probe import ProbeCollector
from syncfree.profiler.counting import count_syncs
from syncfree.profiler.sites import blamed
from syncfree.profiler.calls import Role
D, H, P = 0x1000, 0x2000, 0x9000
cuda.fake_calls.restype = cuda.fake_sum.restype = ctypes.c_long
def c(name, *a):
    return getattr(cuda, name)(*map(ctypes.c_long, a))
def told(counters):
    return {n: getattr(counters, n) for n in counters.__struct_fields__ if getattr(counters, n) and n != "blocked_ns"}
probe = ProbeCollector()
"""


def test_every_entry_point_is_counted_once_and_gets_its_arguments(run):
    out = run(
        HOOKED
        + """
from syncfree.profiler.probe.entry_points import CUDA, encoded
names = [s for s, *_ in encoded(CUDA) if hasattr(cuda, s) and s not in ("cuModuleUnload",)]
def arguments(name):
    if "2D" in name or "3D" in name or "Ex" in name or "Batch" in name:
        return [0] + [k + 3 for k in range(13)]
    return [P] + [k + 3 for k in range(13)]
plain = {}
for n in names:
    c(n, *arguments(n)); plain[n] = cuda.fake_sum(n.encode())
before = {n: cuda.fake_calls(n.encode()) for n in names}
probe.start()
for n in names:
    if "Capture" not in n:
        c(n, *arguments(n))
probe.stop()
inner = ("cuMemcpyAsync", "cuLaunchCooperativeKernel_ptsz")
looked_at = [n for n in names if "Capture" not in n and n not in inner]
wrong = [n for n in looked_at if probe.api.get(n) != 1]
lost = [n for n in looked_at if cuda.fake_calls(n.encode()) != before[n] + 1]
changed = [n for n in looked_at if cuda.fake_sum(n.encode()) != plain[n]]
print(json.dumps([len(names), wrong, lost, changed, [probe.api[n] for n in inner], [x.text for x in probe.notes()]]))
"""
    )
    count, wrong, lost, changed, inner, notes = answer(out)
    assert count > 80
    assert (wrong, lost, changed) == ([], [], [])
    assert inner == [1, 1]  # once by itself; the one inside cuMemcpy2D or cuMemsetD2D32 is not the program's
    assert any("cuModuleUnload" in note for note in notes)  # two instructions long: said, not hooked


def test_directions_bytes_and_pageable_memory(run):
    out = run(
        HOOKED
        + """
probe.start(); a = probe.mark(0)
c("cuMemcpyDtoHAsync_v2", H, D, 100, 7)          # asynchronous, alone
c("cuLaunchKernel", *[1] * 11)
c("cuMemcpyDtoHAsync_v2", P, D, 10, 7)           # into pageable memory: waits by itself
c("cuMemcpyHtoDAsync_v2", D, H, 1000, 7)
c("cuMemcpyAsync", D, D, 5, 7); c("cuMemcpyAsync", H, D, 6, 7); c("cuMemcpyAsync", D, P, 7, 7)
c("cuMemcpyPeerAsync", D, 0, D, 1, 64, 7)
two, three = (ctypes.c_long * 16)(), (ctypes.c_long * 25)()
for k, value in {2: 2, 4: D, 9: 1, 10: H, 14: 3, 15: 5}.items(): two[k] = value     # device to host, 3 x 5
c("cuMemcpy2DAsync_v2", ctypes.addressof(two), 7)
for k, value in {4: 4, 6: H, 15: 4, 17: D, 22: 2, 23: 3, 24: 4}.items(): three[k] = value   # host to device
c("cuMemcpy3DAsync_v2", ctypes.addressof(three), 7)
to, frm, size = (ctypes.c_long * 2)(D, D), (ctypes.c_long * 2)(H, H), (ctypes.c_long * 2)(1, 2)
c("cuMemcpyBatchAsync_v2", *map(ctypes.addressof, (to, frm, size)), 2, 0, 0, 0, 7)
b = probe.mark(0); probe.stop()
print(json.dumps([told(b - a), [[s.kind, s.call.api] for s in count_syncs(probe.drain())]]))
"""
    )
    counters, syncs = answer(out)
    assert counters == {
        "d2h": 1,
        "maybe": 1,
        "copies_d2h": 4,
        "copies_h2d": 4,
        "copies_d2d": 2,
        "bytes_d2h": 100 + 10 + 6 + 15,
        "bytes_h2d": 1000 + 7 + 24 + 3,
        "kernels": 1,
    }
    assert syncs == [["d2h", "cuMemcpyDtoHAsync_v2"], ["maybe", "cuMemcpyAsync"]]


def test_capture_is_apart_from_execution(run):
    out = run(
        HOOKED
        + """
launch = lambda stream: c("cuLaunchKernel", 1, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0)
probe.start(); a = probe.mark(0)
c("cuStreamBeginCapture_v2", 5, 0)
launch(5); launch(5)
config = (ctypes.c_long * 8)(); config[4] = 5
c("cuLaunchKernelEx", ctypes.addressof(config), 0, 0, 0)
c("cuMemcpyDtoHAsync_v2", P, D, 8, 5); c("cuMemsetD8Async", D, 0, 8, 5); c("cuGraphLaunch", 0, 5)
launch(6)                                        # another stream, running meanwhile
c("cuMemcpyDtoHAsync_v2", H, D, 8, 6); c("cuStreamSynchronize", 6)
c("cuStreamEndCapture", 5, 0)
launch(5); c("cuGraphLaunch", 0, 5)
b = probe.mark(0); probe.stop()
print(json.dumps(told(b - a)))
"""
    )
    assert answer(out) == {"captured": 4, "kernels": 2, "graphs": 1, "d2h": 1, "copies_d2h": 1, "bytes_d2h": 8}


def test_the_host_time_of_a_wait_is_told(run):
    out = run(
        HOOKED
        + """
cuda.fake_sleep(ctypes.c_long(30_000_000))
probe.start(); a = probe.mark(0)
c("cuStreamSynchronize", 1); c("cuEventSynchronize", 1)
b = probe.mark(0); probe.stop()
calls = probe.drain()
print(json.dumps([(b - a).blocked_ns, [x.dur_ns for x in calls], [x.role for x in calls]]))
"""
    )
    blocked, durations, roles = answer(out)
    assert roles == ["sync", "sync"]
    assert blocked == sum(durations)
    assert all(d >= 30_000_000 for d in durations)


def test_the_line_that_waits_is_named_in_every_thread(run, tmp_path):
    program = tmp_path / "waits.py"
    program.write_text(
        "def item(c):\n"
        "    c('cuMemcpyDtoHAsync_v2', 0x2000, 0x1000, 8, 7); c('cuStreamSynchronize', 7)  # line 2\n"
        "def fetch(c):\n"
        "    c('cuMemcpyDtoHAsync_v2', 0x2000, 0x1000, 8, 7)\n"
        "    c('cuEventSynchronize', 3)  # line 5\n"
        "def pageable(c):\n"
        "    c('cuMemcpyDtoHAsync_v2', 0x9000, 0x1000, 8, 7)  # line 7\n"
        "    c('cuStreamSynchronize', 7)\n"
        "def free(c):\n"
        "    c('cuMemFree_v2', 0x1000)  # line 10\n"
        "def poll(c):\n"
        "    for _ in range(20): c('cuEventQuery', 3)  # line 12\n"
    )
    out = run(
        HOOKED
        + f"""
import threading
sys.path.insert(0, {str(tmp_path)!r})
import waits
def everything():
    waits.item(c); waits.fetch(c); waits.pageable(c); waits.free(c); waits.poll(c)
probe.start()
everything()
other = threading.Thread(target=everything); other.start(); other.join()
probe.stop()
calls = probe.drain()
found = [[s.kind, blamed(s.call.stack).line, s.call.thread == threading.get_native_id()] for s in count_syncs(calls)]
print(json.dumps([found, [[n.line, n.text[:4]] for n in probe.notes() if n.line]]))
"""
    )
    found, notes = answer(out)
    wanted = [["d2h", 2], ["event", 5], ["d2h", 7], ["maybe", 10]]
    assert found == [[*w, True] for w in wanted] + [[*w, False] for w in wanted]
    assert notes == [[12, "a lo"]]


def test_a_large_pageable_upload_is_listed_as_blind(run):
    out = run(
        HOOKED
        + """
probe.start()
c("cuMemcpyHtoDAsync_v2", D, P, 5 << 20, 7)
probe.stop()
print(json.dumps([[n.kind, n.text] for n in probe.notes() if n.line]))
"""
    )
    assert answer(out) == [
        ["blind", "a host-to-device copy of 4 MiB or more from pageable memory waits here, without a sync call"]
    ]


def test_many_threads_at_once_lose_nothing(run):
    out = run(
        HOOKED
        + """
import threading
def work():
    for _ in range(2000):
        c("cuLaunchKernel", *[1] * 11); c("cuMemcpyDtoHAsync_v2", H, D, 8, 7); c("cuStreamSynchronize", 7)
probe.start(); a = probe.mark(0)
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
b = probe.mark(0); probe.stop()
print(json.dumps(told(b - a)))
"""
    )
    n = 16_000
    assert answer(out) == {"kernels": n, "d2h": n, "copies_d2h": n, "bytes_d2h": 8 * n}


def test_recordings_follow_each_other_and_each_begins_at_zero(run):
    out = run(
        HOOKED
        + """
seen = []
for k in range(3):
    probe.start(); a = probe.mark(0)
    for _ in range(k + 1): c("cuStreamSynchronize", 7)
    seen.append([a.stream, probe.mark(0).stream, len(open("/proc/self/maps").readlines()) > 0])
    probe.stop()
    seen[-1].append(len(probe.drain()))
    c("cuStreamSynchronize", 7)
print(json.dumps(seen))
"""
    )
    assert answer(out) == [[0, 1, True, 1], [0, 2, True, 2], [0, 3, True, 3]]


def test_a_profiler_uses_the_probe_by_name(run):
    out = run(
        HOOKED
        + """
from syncfree.profiler import Profiler
with Profiler(collectors="probe") as p:
    for k in range(3):
        with p.step(batch_class="decode"):
            with p.phase("build"):
                c("cuMemcpyDtoHAsync_v2", H, D, 8, 7); c("cuStreamSynchronize", 7)
            with p.phase("forward"):
                for _ in range(5): c("cuLaunchKernel", *[1] * 11)
r = p.report
print(json.dumps([[s.syncs.total, s.launches.kernels, s.phases["build"].syncs.d2h] for s in r.steps] +
    [[s.kind, s.count, s.phase] for s in r.sites] + [r.source.collectors]))
"""
    )
    assert answer(out) == [[1, 5, 1]] * 3 + [["d2h", 3, "build"]] + [["probe"]]


def test_calls_can_be_taken_while_recording_goes_on(run):
    out = run(
        HOOKED
        + """
probe.start(); parts = []
for n in (2, 0, 3):
    for _ in range(n):
        c("cuStreamSynchronize", 7)
    parts.append([call.api for call in probe.drain()])
c("cuEventSynchronize", 9); c("cuMemcpyDtoHAsync_v2", H, D, 8, 7)
parts.append([s.kind for s in count_syncs(probe.drain())])       # a copy whose wait is yet to come
c("cuStreamSynchronize", 7)
total = probe.mark(0); probe.stop()
parts.append([call.api for call in probe.drain()])
print(json.dumps([parts, told(total)]))
"""
    )
    parts, total = answer(out)
    assert parts[0] == ["cuStreamSynchronize"] * 2
    assert parts[1] == []
    assert parts[2] == ["cuStreamSynchronize"] * 3
    assert parts[3] == ["event"]
    assert parts[4][-1] == "cuStreamSynchronize"
    assert {name: total[name] for name in ("stream", "event", "d2h")} == {"stream": 5, "event": 1, "d2h": 1}
