"""Writing into a process that stands still."""

import os
import subprocess
import sys
import time

import pytest
from syncfree.profiler.probe import tracing
from syncfree.profiler.probe.carrier import idle_thread

from .conftest import compiled

pytestmark = pytest.mark.usefixtures("needs_probe")

TARGET = """
import ctypes, threading, time
block = ctypes.create_string_buffer(b"before__", 16)
go = threading.Event()
for _ in range(5): threading.Thread(target=go.wait, daemon=True).start()
print(ctypes.addressof(block), flush=True)
n = 0
while True:
    n += 1
"""


@pytest.fixture
def target():
    process = subprocess.Popen([sys.executable, "-c", TARGET], stdout=subprocess.PIPE, text=True)
    process.address = int(process.stdout.readline())
    yield process
    process.kill()
    process.wait()


def patch(target, before=b"before__", after=b"after___"):
    return tracing.Patch("name", target.address, before, after, 8)


def memory(target):
    with open(f"/proc/{target.pid}/mem", "rb") as file:
        file.seek(target.address)
        return file.read(8)


def states(target):
    return {tracing._state(target.pid, tid) for tid in tracing.threads_of(target.pid)}


def test_every_thread_stands_still_and_goes_on(target):
    with tracing.standstill(target.pid) as stopped:
        assert set(stopped.places) == set(tracing.threads_of(target.pid))
        assert states(target) == {"t"}
    assert len(stopped.places) == 6
    assert stopped.seconds > 0
    time.sleep(0.05)
    assert "t" not in states(target)
    assert {tracing.tracer_of(target.pid, tid) for tid in tracing.threads_of(target.pid)} == {0}


def scheduling():
    return os.sched_getscheduler(0), os.sched_getparam(0).sched_priority, os.getpriority(os.PRIO_PROCESS, 0)


def test_while_it_stands_still_nobody_goes_before_us_where_that_is_allowed(target):
    before = scheduling()
    with tracing.standstill(target.pid):
        inside = os.sched_getscheduler(0)
    assert scheduling() == before
    with pytest.raises(KeyError), tracing.standstill(target.pid):
        raise KeyError
    assert scheduling() == before
    if os.geteuid() == 0:
        assert inside == os.SCHED_FIFO


def test_without_real_time_priority_it_stands_still_all_the_same(target, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    before = scheduling()
    with tracing.standstill(target.pid) as stopped:
        assert states(target) == {"t"}
    assert len(stopped.places) == 6
    assert scheduling() == before


def test_the_busiest_thread_is_stopped_last_and_let_go_first(target, monkeypatch):
    monkeypatch.setattr(tracing, "_BUSY", 2)
    asked = []
    ptrace = tracing._ptrace

    def noted(request, tid, *more):
        asked.append((request, tid))
        return ptrace(request, tid, *more)

    monkeypatch.setattr(tracing, "_ptrace", noted)
    with tracing.standstill(target.pid) as stopped:
        assert states(target) == {"t"}
        assert set(stopped.places) == set(tracing.threads_of(target.pid))
    stops = [tid for request, tid in asked if request == tracing._INTERRUPT]
    goes = [tid for request, tid in asked if request == tracing._DETACH]
    assert stops[-1] == goes[0] == target.pid  # the one that counts
    assert len(set(stops)) == len(set(goes)) == 6
    rested = asked.index((tracing._GETREGS, stops[0]))
    assert rested < asked.index((tracing._INTERRUPT, target.pid)), "the idle ones stand before the busy are stopped"


def test_a_patch_goes_in_and_out(target):
    tracing.apply(target.pid, [patch(target)])
    assert memory(target) == b"after___"
    _, free = tracing.revert(target.pid, [patch(target)], [], lambda: 0, 1.0)
    assert (memory(target), free) == (b"before__", True)


def test_what_somebody_else_has_changed_is_left_alone(target):
    with pytest.raises(tracing.TracingRefused, match="changed by somebody else"):
        tracing.apply(target.pid, [patch(target, before=b"other___")])
    assert memory(target) == b"before__"
    tracing.revert(target.pid, [patch(target, after=b"other___")], [], lambda: 0, 1.0)
    assert memory(target) == b"before__"


def test_code_that_is_still_in_use_is_told(target):
    _, free = tracing.revert(target.pid, [], [], lambda: 1, 0.05)
    assert not free


def test_nothing_is_written_while_a_thread_stands_in_the_way(target):
    with tracing.standstill(target.pid) as stopped:
        place = stopped.places[target.pid][0]
    everywhere = tracing.Patch("all", place - (1 << 20), b"", b"", 1 << 22)
    assert tracing._in_the_way(stopped, [everywhere])
    with pytest.raises(tracing.TracingRefused, match="never left"):
        tracing.apply(target.pid, [everywhere], attempts=3)


INTERRUPTED = """
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static void handler(int number) {
    char big[3000], line;
    memset(big, number, sizeof big);
    __asm__ volatile("" ::"r"(big) : "memory");
    write(1, "inside\\n", 7);
    read(0, &line, 1);
}
void trap(void);
__asm__("trap: int3\\n nop\\n nop\\n nop\\n nop\\n ret\\n");
int main(void) {
    long raw[4];
    signal(SIGTRAP, handler);
    syscall(13, SIGTRAP, 0, raw, 8); /* as the kernel has it: handler, flags, restorer, mask */
    printf("%ld %ld\\n", (long)trap, raw[2]), fflush(stdout);
    trap();
    write(1, "out\\n", 4);
    return (int)read(0, &raw, 1);
}
"""


def test_a_place_that_a_signal_has_interrupted_is_one_that_is_come_back_to(tmp_path):
    source = tmp_path / "interrupted.c"
    source.write_text(INTERRUPTED)
    binary = compiled(source, tmp_path / "interrupted", "-w")
    process = subprocess.Popen([str(binary)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        trap, restorer = (int(x) for x in process.stdout.readline().split())
        assert process.stdout.readline() == "inside\n"
        code, moved = [(trap, 6)], tracing.Patch("trap", trap, b"", b"", 5)
        assert not tracing.revert(process.pid, [], code, lambda: 0, 0.05, [restorer])[1]
        with pytest.raises(tracing.TracingRefused, match="never left"):
            tracing.apply(process.pid, [moved], [restorer], attempts=3)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "out\n"
        assert tracing.revert(process.pid, [], code, lambda: 0, 0.05, [restorer])[1]
        tracing.apply(process.pid, [moved], [restorer], attempts=3)
    finally:
        process.kill()
        process.wait()


def test_the_carrier_is_a_thread_that_waits(target):
    carrier = idle_thread(target.pid)
    assert carrier != target.pid
    assert carrier in tracing.threads_of(target.pid)
    tracing.consent(target.pid, carrier)


def test_a_process_that_has_ended_is_refused(target):
    target.kill()
    target.wait()
    with pytest.raises(tracing.TracingRefused, match="No such file"):
        tracing.apply(target.pid, [patch(target)])


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
def test_a_stranger_may_not(target):
    code = (
        "import os; from syncfree.profiler.probe import tracing\n"
        "os.setgid(65534); os.setuid(65534)\n"
        f"try: tracing.consent({target.pid}, {target.pid})\n"
        "except PermissionError as error: print(error.strerror)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "Operation not permitted\n"
    assert memory(target) == b"before__"


def test_who_holds_a_thread_is_known_whichever_of_its_threads_does(target):
    """The kernel names the tracing thread, not its process; frida traces from a thread of its own."""
    code = (
        "import ctypes, sys, threading, time; libc = ctypes.CDLL(None);\n"
        f"t = threading.Thread(target=lambda: (libc.ptrace(0x4206, {target.pid}, None, None), print('on', flush=True), "
        "sys.stdin.read()))\n"
        "t.start(); t.join()"
    )
    tracer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert tracer.stdout.readline() == "on\n"
    assert tracing.holds_any(target.pid, tracer.pid)
    assert not tracing.holds_any(target.pid)
    tracer.communicate("")
    assert not tracing.holds_any(target.pid, tracer.pid)
