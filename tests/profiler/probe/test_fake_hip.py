"""What the real HIP runtime only does with a device: exports that call each other, memory kinds, the last error."""

import json

import pytest

from .conftest import DOUBLES, compiled

PROGRAM = """
from syncfree.profiler.collectors.probe import ProbeCollector
from syncfree.profiler.counting import count_syncs
hip = ctypes.CDLL(sys.argv[2])
D, H, P = 0x1000, 0x2000, 0x9000
def c(name, *a):
    return getattr(hip, name)(*map(ctypes.c_long, a))
class Dim(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint) for n in "xyz"]
def launch(stream=0):
    return hip.hipLaunchKernel(None, Dim(1, 2, 3), Dim(4, 5, 6), None, ctypes.c_long(7), ctypes.c_long(stream))
def told(c):
    return {n: getattr(c, n) for n in c.__struct_fields__ if getattr(c, n) and n != "blocked_ns"}
probe = ProbeCollector()
import syncfree.profiler.collectors.probe as module
module._torch_vendor = lambda: "hip"      # both doubles are loaded here
probe.start(); a = probe.mark(0)
"""
END = """
b = probe.mark(0); probe.stop()
print(json.dumps([told(b - a), probe.api, [s.kind for s in count_syncs(probe.drain())], result]))
"""


@pytest.fixture
def hip(run, tmp_path):
    library = compiled(DOUBLES / "fake_hip.c", tmp_path / "libamdhip64.so.6", "-shared", "-fPIC")

    def run_hip(code):
        return json.loads(run(PROGRAM + code + END, str(library)).strip().splitlines()[-1])

    return run_hip


def test_a_call_inside_a_call_counts_once(hip):
    counters, api, syncs, result = hip("""
result = [launch(), c("hipMemcpyPeer", D, 0, D, 0, 8), c("hipMemcpy", H, D, 8, 2)]
result.append(c("hipMemcpyWithStream", H, D, 8, 2, 5))
""")
    assert result == [0, 0, 0, 0]
    assert api == dict.fromkeys(("hipLaunchKernel", "hipMemcpyPeer", "hipMemcpy", "hipMemcpyWithStream"), 1)
    assert counters == {"kernels": 1, "stream": 1, "d2h": 2, "copies_d2d": 1, "copies_d2h": 2, "bytes_d2h": 16}
    assert syncs == ["stream", "d2h", "d2h"]


def test_structs_passed_by_value_arrive(hip):
    *_, result = hip("result = launch()")
    assert result == 0  # the double adds up what it got


def test_an_asynchronous_copy_into_pageable_memory_waits(hip):
    counters, _, syncs, _ = hip("""
c("hipMemcpyAsync", P, D, 8, 2, 5); launch(); c("hipMemcpyAsync", H, D, 8, 2, 5); launch()
c("hipMemcpyAsync", D, H, 8, 4, 5); launch(); result = 0
""")
    assert syncs == ["d2h"]
    assert (counters["copies_d2h"], counters["copies_h2d"]) == (2, 1)


def test_the_last_error_stays_the_programs_own(hip):
    *_, result = hip("""
c("hipEventSynchronize", 0)
before = hip.hipPeekAtLastError()
c("hipMemcpyAsync", P, D, 8, 2, 5)               # not asked about while an error stands: it would be lost
after = hip.hipGetLastError()
c("hipMemcpyAsync", P, D, 8, 2, 5)               # asking fails, and must not show
result = [before, after, hip.hipGetLastError()]
""")
    assert result == [9, 9, 0]


def test_capture_is_apart_from_execution(hip):
    counters, *_ = hip("""
c("hipStreamBeginCapture", 5, 0); launch(5); launch(0); c("hipStreamEndCapture", 5, 0); launch(5); result = 0
""")
    assert counters == {"captured": 1, "kernels": 2}
