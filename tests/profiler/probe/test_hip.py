"""The real HIP runtime, without a card: every call fails, and every call is counted."""

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
from syncfree.profiler.probe import HIP, Attachment
from syncfree.profiler.probe.entry_points import encoded

from .conftest import compiled, why_no_probe

try:
    ctypes.CDLL("libamdhip64.so.5")
    MISSING = why_no_probe()
except OSError:
    MISSING = "no libamdhip64.so.5 (Debian: apt-get install libamdhip64-5)"
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"SKIPPED LOUDLY: {MISSING}")

CALLS = """
import ctypes, json
hip = ctypes.CDLL("libamdhip64.so.5")
L = lambda *a: [ctypes.c_long(x) for x in a]
from syncfree.profiler.collectors.probe import ProbeCollector
from syncfree.profiler.counting import count_syncs
from syncfree.profiler.sites import blamed
probe = ProbeCollector()
def told(c):
    return {n: getattr(c, n) for n in c.__struct_fields__ if getattr(c, n) and n != "blocked_ns"}
"""


def python(code):
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", CALLS + code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_python_calls_are_counted_once_each():
    counters, api, syncs = python("""
probe.start(); a = probe.mark(0)
for _ in range(5):
    hip.hipLaunchKernel(*L(0, 1, 1, 1, 1, 0, 0, 0))
    hip.hipModuleLaunchKernel(*L(0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
    hip.hipMemcpyWithStream(*L(0, 0, 4, 2, 0))
    hip.hipMemcpyAsync(*L(0, 0, 8, 1, 0))
    hip.hipStreamSynchronize(*L(0))
    hip.hipDeviceSynchronize()
b = probe.mark(0); probe.stop()
print(json.dumps([told(b - a), probe.api, [s.kind for s in count_syncs(probe.drain())]]))
""")
    names = "hipLaunchKernel hipModuleLaunchKernel hipMemcpyWithStream hipMemcpyAsync hipStreamSynchronize".split()
    assert api == dict.fromkeys([*names, "hipDeviceSynchronize"], 5)
    assert counters == {
        "kernels": 10,
        "copies_d2h": 5,
        "copies_h2d": 5,
        "bytes_d2h": 20,
        "bytes_h2d": 40,
        "d2h": 5,
        "h2d": 5,
        "device": 5,
    }
    assert syncs == ["d2h", "h2d", "device"] * 5


def test_every_export_of_the_table_is_counted_and_keeps_its_result():
    before, after, api, unhooked = python("""
from syncfree.profiler.probe.entry_points import HIP, encoded
# null pointers are refused by the runtime before it looks for a device; frees of null succeed
skip = "Capture hipMemcpy3D Param hipDrv MultiDevice ExC hipMemset3D hipMalloc3D hipModuleLoad".split()
names = [(s, n) for s, _, _, n in encoded(HIP) if hasattr(hip, s) and not any(x in s for x in skip)]
call = lambda s: getattr(hip, s)(*L(*[0] * 14))
before = [call(s) for s, _ in names]
probe.start()
after = [call(s) for s, _ in names]
probe.stop()
api = [probe.api.get(n) for _, n in names]
print(json.dumps([before, after, api, [x.text for x in probe.notes() if "not hooked" in x.text]]))
""")
    assert len(before) > 60
    assert after == before
    assert set(api) == {1}
    assert unhooked == []


def test_the_waiting_line_is_named():
    sites = python("""
exec(compile("def f():\\n    hip.hipDeviceSynchronize()\\n", "/tmp/model.py", "exec"))
probe.start(); f(); probe.stop()
print(json.dumps([[blamed(c.stack).file, blamed(c.stack).line] for c in probe.drain()]))
""")
    assert sites == [["/tmp/model.py", 2]]


def test_a_failed_query_of_ours_never_becomes_the_programs_last_error():
    result = python("""
probe.start()
hip.hipGetLastError()
first = hip.hipPeekAtLastError()
hip.hipMemcpyAsync(*L(0x5000, 0x6000, 8, 2, 0))
during = hip.hipGetLastError()
probe.stop()
hip.hipMemcpyAsync(*L(0x5000, 0x6000, 8, 2, 0))
print(json.dumps([first, during, hip.hipGetLastError()]))
""")
    assert result[1] == result[2]


C_PROGRAM = """
#include <stdio.h>
#include <unistd.h>
int hipDeviceSynchronize(void); int hipStreamSynchronize(void *); int hipLaunchKernel();
int hipMemcpyWithStream(void *, const void *, unsigned long, int, void *);
int main(void) {
    char line[16];
    for (;;) {
        puts("ready"); fflush(stdout);
        if (!fgets(line, sizeof line, stdin)) return 0;
        for (int i = 0; i < 7; i++) {
            hipLaunchKernel(0L, 1L, 1L, 1L, 1L, 0L, 0L, 0L);
            hipMemcpyWithStream(0, 0, 4, 2, 0);
            hipStreamSynchronize(0);
            hipDeviceSynchronize();
        }
    }
}
"""


@pytest.fixture
def c_program(tmp_path):
    source = tmp_path / "program.c"
    source.write_text(C_PROGRAM)
    libraries = Path("/usr/lib/x86_64-linux-gnu")
    binary = compiled(source, tmp_path / "program", f"-L{libraries}", "-l:libamdhip64.so.5", "-w")
    process = subprocess.Popen([str(binary)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.wait(20)


def test_a_c_program_is_counted_from_outside(c_program):
    def round_of_calls():
        c_program.stdin.write("go\n")
        c_program.stdin.flush()
        assert c_program.stdout.readline() == "ready\n"

    with Attachment(c_program.pid) as probe:
        installed = probe.install()
        assert installed.vendor == "hip"
        assert set(installed.names) <= {name for *_, name in encoded(HIP)}
        assert not probe.has_python
        assert probe.calibrate_stacks() == "no Python in the target"
        round_of_calls()
        counters = probe.counters()
        calls = probe.take_calls()
    told = {n: getattr(counters, n) for n in counters.__struct_fields__ if getattr(counters, n)}
    assert told.pop("blocked_ns") > 0
    assert told == {"kernels": 7, "copies_d2h": 7, "bytes_d2h": 28, "d2h": 7, "device": 7}
    assert len(calls) == 21
    round_of_calls()  # and it goes on
    assert c_program.poll() is None
