"""What is left behind: nothing, whoever ends first and however."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from syncfree.planner.errors import Unreachable
from syncfree.profiler.probe import Attachment

from .conftest import DOUBLES, compiled

pytestmark = pytest.mark.attach


class Busy:
    """busy.c: calls the driver from two threads without pause."""

    def __init__(self, folder, driver):
        flags = [str(driver), f"-Wl,-rpath,{driver.parent}", "-pthread", "-w"]
        binary = compiled(DOUBLES / "busy.c", folder / "busy", *flags)
        self.process = subprocess.Popen([str(binary)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        self.read()

    def read(self):
        return [int(x) for x in self.process.stdout.readline().split()]

    def ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.read()

    def code(self):
        for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines():
            if "libcuda.so.1" in line and " r-xp " in line:
                start, end = (int(x, 16) for x in line.split()[0].split("-"))
                with open(f"/proc/{self.pid}/mem", "rb") as memory:
                    memory.seek(start)
                    return memory.read(end - start)
        raise AssertionError("no driver in the target")

    def size(self):
        proc = Path(f"/proc/{self.pid}")
        return {
            "mappings": len((proc / "maps").read_text().splitlines()),
            "fds": len(list((proc / "fd").iterdir())),
            "threads": len(list((proc / "task").iterdir())),
        }

    def settle(self, wanted):
        """Wait until the agent's last thread has gone too."""
        for _ in range(200):
            if self.size()["threads"] <= wanted["threads"] and self.size()["fds"] <= wanted["fds"]:
                break
            time.sleep(0.05)
        return self.size()


@pytest.fixture
def busy(needs_probe, tmp_path, fake_cuda):
    others = set(children(os.getpid()))  # another test's, of a longer life
    made = Busy(tmp_path, fake_cuda)
    made.others = others
    yield made
    if made.process.poll() is None:
        made.process.kill()
    made.process.wait()


def children(pid):
    """Processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def temporary():
    return {p.name for p in Path("/tmp").iterdir() if p.name.startswith(("frida", "idun", "syncfree", "linjector"))}


def test_a_busy_process_is_counted_exactly_and_left_as_it_was(busy):
    untouched, before = busy.code(), busy.size()
    litter = temporary()
    sizes = []
    for _ in range(6):
        with Attachment(busy.pid) as probe:
            probe.install()
            assert busy.code() != untouched
            first, a = busy.ask("p"), probe.counters()
            busy.ask("r")
            last, b = busy.ask("p"), probe.counters()
            busy.ask("r")
        counted = b - a
        assert [counted.kernels, counted.d2h, counted.maybe // 2, 0] == [
            y - x for x, y in zip(first, last, strict=True)
        ]
        assert busy.code() == untouched
        sizes.append(busy.settle(before))
    assert [s["fds"] for s in sizes] == [before["fds"]] * 6
    assert [s["threads"] for s in sizes] == [before["threads"]] * 6
    # glibc keeps an arena (two mappings) for each thread that ever ran at the same time as others: a few, then no more
    assert sizes[-1]["mappings"] <= sizes[0]["mappings"] + 2 * 16
    assert temporary() == litter
    assert set(children(os.getpid())) - busy.others == {busy.pid}


def test_a_helper_that_is_killed_leaves_a_working_process_without_hooks(busy):
    untouched, before = busy.code(), busy.size()
    probe = Attachment(busy.pid)
    probe.install()
    os.kill(probe._process.pid, signal.SIGKILL)
    for _ in range(200):
        if busy.code() == untouched:
            break
        time.sleep(0.05)
    assert busy.code() == untouched
    assert busy.settle(before)["threads"] == before["threads"]
    with pytest.raises(Unreachable, match=r"ended|died"):
        probe.counters()
    probe.detach()
    busy.ask("p")
    assert busy.process.poll() is None
    with Attachment(busy.pid) as again:  # and it can be attached to once more
        again.install()
        busy.ask("r")


def test_a_client_that_is_killed_takes_its_helper_and_the_hooks_along(busy, tmp_path):
    untouched = busy.code()
    code = (
        "import sys, time; from syncfree.profiler.probe import Attachment\n"
        f"probe = Attachment({busy.pid}); probe.install(); print(probe._process.pid, flush=True); time.sleep(600)"
    )
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    helper = int(client.stdout.readline())
    assert busy.code() != untouched
    client.kill()
    client.wait()
    for _ in range(200):
        if busy.code() == untouched and not Path(f"/proc/{helper}").exists():
            break
        time.sleep(0.05)
    assert busy.code() == untouched
    assert not Path(f"/proc/{helper}").exists()
    busy.ask("p")


def test_a_target_that_exits_or_is_killed_ends_the_attachment(busy):
    probe = Attachment(busy.pid)
    probe.install()
    busy.process.stdin.write("x\n")  # exit() while the others still call
    busy.process.stdin.flush()
    assert busy.process.wait(30) == 3
    probe.detach()
    assert not probe.alive
    with pytest.raises(Unreachable):
        probe.counters()


def test_a_target_that_is_killed_ends_the_attachment(busy):
    probe = Attachment(busy.pid)
    probe.install()
    busy.process.kill()
    busy.process.wait()
    probe.detach()
    assert not probe.alive


def test_a_forked_child_works_and_counts_nothing_into_its_parent(busy):
    with Attachment(busy.pid) as probe:
        probe.install()
        busy.ask("p")
        before = probe.counters()
        assert busy.ask("f")[3] == 7
        assert probe.counters() == before
        busy.ask("r")
    assert busy.ask("p")[3] == 0


def test_a_thread_inside_a_wait_is_waited_for_before_the_code_goes(busy):
    probe = Attachment(busy.pid)
    probe.install()
    busy.ask("s 900")  # every wait now sleeps 0.9 s
    time.sleep(0.2)
    probe.detach()
    assert not probe.lingering
    busy.ask("s 0")
    busy.ask("p")
    assert busy.process.poll() is None


def test_code_that_a_thread_does_not_leave_in_time_stays_and_the_jumps_go(busy):
    untouched = busy.code()
    probe = Attachment(busy.pid)
    probe.install()
    busy.ask("s 900")
    time.sleep(0.2)
    assert not probe._ask("detach", seconds=0.0)["free"]
    probe.close()
    assert busy.code() == untouched
    busy.ask("s 0")
    busy.ask("p")
    busy.ask("r")
    with Attachment(busy.pid) as another:
        assert another.install().names
    busy.ask("p")
    assert busy.process.poll() is None


def test_a_process_that_does_not_exist_is_refused():
    with pytest.raises(Unreachable, match="process 4194303 does not exist"):
        Attachment(4194303)


def test_a_process_without_a_driver_is_refused():
    other = subprocess.Popen(["sleep", "60"])
    try:
        with Attachment(other.pid) as probe, pytest.raises(Unreachable, match="neither libcuda nor libamdhip64"):
            probe.install()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_process_that_is_being_debugged_is_refused(busy):
    code = (
        "import ctypes, sys; libc = ctypes.CDLL(None); "
        f"print(libc.ptrace(ctypes.c_long(0x4206), ctypes.c_long({busy.pid}), None, None), flush=True); input()"
    )
    debugger = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert debugger.stdout.readline() == "0\n"
    with pytest.raises(Unreachable):
        Attachment(busy.pid, carrier=busy.pid)
    debugger.communicate("\n")
    busy.ask("p")
    with Attachment(busy.pid) as probe:
        assert probe.install().names


PYTHON_TARGET = """
import ctypes, sys, threading, time
cuda = ctypes.CDLL(sys.argv[1])
def waits_here():
    cuda.cuStreamSynchronize(ctypes.c_long(7))
print("ready", flush=True)
for line in sys.stdin:
    waits_here()
    print(line.strip(), flush=True)
"""


def test_python_runs_in_another_process_and_its_lines_are_named(needs_probe, fake_cuda, tmp_path):
    script = tmp_path / "serving.py"
    script.write_text(PYTHON_TARGET)
    target = subprocess.Popen(
        [sys.executable, str(script), str(fake_cuda)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert target.stdout.readline() == "ready\n"
        with Attachment(target.pid) as probe:
            assert probe.run_python("import os; answer = str(os.getpid())") == str(target.pid)
            assert probe.run_python("answer = 1 / 0") is None
            assert probe.run_python("answer = str('answer' in dir(__builtins__))") in ("True", "False")
            probe.install()
            assert probe.calibrate_stacks() is None
            target.stdin.write("go\n")
            target.stdin.flush()
            assert target.stdout.readline() == "go\n"
            (call,) = probe.take_calls()
        assert [(Path(f.file).name, f.function) for f in call.stack] == [
            ("serving.py", "waits_here"),
            ("serving.py", "<module>"),
        ]
    finally:
        target.stdin.close()
        assert target.wait(20) == 0


def test_threads_that_hold_the_gil_and_a_driver_lock_never_wait_for_each_other(run):
    """One thread waits for a driver lock with the GIL held, another holds that lock inside a hooked call without it."""
    out = run(
        """
import threading
from syncfree.profiler.collectors.probe import ProbeCollector
held = ctypes.PyDLL(sys.argv[1])   # calls through it keep the GIL
long = ctypes.c_long
def with_gil():
    for _ in range(3000): held.cuMemFree_v2(long(4096)); held.cuStreamSynchronize(long(7))
def without_gil():
    for _ in range(3000): cuda.cuMemFree_v2(long(4096)); cuda.cuStreamSynchronize(long(7))
probe = ProbeCollector(); probe.start()
threads = [threading.Thread(target=f) for f in (with_gil, without_gil) * 2]
[t.start() for t in threads]; [t.join() for t in threads]
probe.stop()
print(probe.mark(0).maybe, probe.mark(0).stream)
"""
    )
    assert out.split() == ["12000", "12000"]


def test_the_collector_outlives_its_helper(run):
    out = run(
        """
import signal
from syncfree.profiler.collectors.probe import ProbeCollector
probe = ProbeCollector(); probe.start()
cuda.cuStreamSynchronize(ctypes.c_long(7))
os.kill(probe._attachment._process.pid, signal.SIGKILL); probe._attachment._process.wait()
time.sleep(1)
cuda.cuStreamSynchronize(ctypes.c_long(7))
probe.mark(0)
probe.stop()
print(probe.mark(0).stream, [n.text for n in probe.notes() if n.kind == "partial"])
probe.start(); cuda.cuStreamSynchronize(ctypes.c_long(7)); probe.stop(); print(probe.mark(0).stream)
"""
    )
    assert out.splitlines() == ["1 ['probe: its helper process died; calls after that were not counted']", "1"]


def test_memory_that_hooks_may_still_write_to_outlives_a_helper_that_died(run):
    """The agent takes them out by itself, but later than we learn of it."""
    out = run(
        """
import signal
from syncfree.profiler.collectors import probe as collector
probe = collector.ProbeCollector(); probe.start()
helper = probe._attachment._process
os.kill(helper.pid, signal.SIGKILL); helper.wait()
probe.stop()
for _ in range(1000): cuda.cuLaunchKernel(*[ctypes.c_long(1)] * 11)
print(len(collector._keep))
while "frida-agent" in open("/proc/self/maps").read():  # a program that ends just then can end in frida's code
    time.sleep(0.02)
"""
    )
    assert out.split() == ["1"]


def test_a_program_that_ends_while_recording_ends_well(run):
    out = run(
        """
from syncfree.profiler.collectors.probe import ProbeCollector
probe = ProbeCollector(); probe.start()
cuda.cuStreamSynchronize(ctypes.c_long(7))
print(probe._attachment._process.pid, flush=True)
"""
    )
    assert not Path(f"/proc/{out.strip()}").exists()


def test_a_program_that_is_killed_while_recording_leaves_no_helper(needs_probe, fake_cuda):
    code = """
import ctypes, sys, os, multiprocessing, time
cuda = ctypes.CDLL(sys.argv[1])
from syncfree.profiler.collectors.probe import ProbeCollector
probe = ProbeCollector(); probe.start()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)); child.start()  # holds the pipes too
print(probe._attachment._process.pid, child.pid, flush=True)
time.sleep(60)
"""
    program = subprocess.Popen([sys.executable, "-c", code, str(fake_cuda)], stdout=subprocess.PIPE, text=True)
    helper, child = map(int, program.stdout.readline().split())
    program.kill()
    program.wait()
    for _ in range(200):
        if not Path(f"/proc/{helper}").exists():
            break
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    assert not Path(f"/proc/{helper}").exists()


def test_a_forked_child_of_a_recording_program_goes_on_without_it(run):
    out = run(
        """
from syncfree.profiler.collectors.probe import ProbeCollector
probe = ProbeCollector(); probe.start()
child = os.fork()
if not child:
    for _ in range(100): cuda.cuStreamSynchronize(ctypes.c_long(7))
    probe.stop()
    os._exit(5)
status = os.waitpid(child, 0)[1]
cuda.cuStreamSynchronize(ctypes.c_long(7))
probe.stop()
print(os.WEXITSTATUS(status), probe.mark(0).stream)
"""
    )
    assert out.split() == ["5", "1"]


def test_an_arena_serves_many_attachments_and_their_threads(busy):
    """Whoever keeps an arena in its target (an agent there) has room for its threads each time."""
    from syncfree.profiler.probe import arena as layout

    with Attachment(busy.pid) as keeper:
        kept = keeper.bring(bytes(layout.SIZE))
        used = []
        for _ in range(3):
            with Attachment(busy.pid) as probe:
                probe.install(arena=kept)
                busy.ask("p")
                busy.ask("r")
                busy.ask("p")
                used.append(layout.word(probe.peek, "threads_used"))
                busy.ask("r")
    assert used == [2, 2, 2]


def test_a_second_profiler_is_refused_and_the_first_goes_on(busy):
    with Attachment(busy.pid) as first:
        first.install()
        with Attachment(busy.pid) as second, pytest.raises(Unreachable, match="cuLaunchKernel is already hooked"):
            second.install()
        busy.ask("p")
        before = first.counters()
        busy.ask("r")
        busy.ask("p")
        assert first.counters() != before
        busy.ask("r")
    with Attachment(busy.pid) as second:
        assert second.install().names


def test_a_helper_that_stays_silent_is_replaced_once(busy, monkeypatch):
    from syncfree.profiler.probe import attach

    monkeypatch.setattr(attach, "_FIRST_SECONDS", 0.01)  # before it can have begun
    with Attachment(busy.pid) as probe:
        assert probe.install().names
    assert set(children(os.getpid())) - busy.others == {busy.pid}
    monkeypatch.setattr(attach, "_start_helper", lambda: subprocess.Popen(SILENT, stdin=-1, stdout=-1))
    with pytest.raises(Unreachable, match=r"no answer to attach within 0\.5 s"):
        Attachment(busy.pid, seconds=0.5)
    assert set(children(os.getpid())) - busy.others == {busy.pid}


def test_a_helper_that_has_a_thread_of_the_target_stopped_is_waited_for_longer(busy, monkeypatch):
    from syncfree.profiler.probe import attach

    started, start = [], attach._start_helper
    monkeypatch.setattr(attach, "_start_helper", lambda: started.append(start()) or started[-1])
    monkeypatch.setattr(attach, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(attach.Attachment, "_carried", lambda self: True)
    with Attachment(busy.pid) as probe:
        assert probe.install().names
    assert len(started) == 1


def test_a_target_that_cannot_let_the_agent_in_for_seven_seconds_is_waited_for_and_lives(busy):
    """frida itself gives up after five, and takes away the code that its own thread is to return to."""
    busy.ask("d 7")  # another thread is in the dynamic loader for so long
    with Attachment(busy.pid, carrier=busy.pid) as probe:
        assert probe.attach_seconds > 5
        assert probe.install().names
    busy.ask("p")
    assert busy.process.poll() is None


SILENT = [sys.executable, "-c", "import sys; sys.stdin.read()"]
