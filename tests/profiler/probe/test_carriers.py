"""The thread that carries the injection, and all others that are stopped for the hooks, go on waiting as before."""

import json
import signal
import subprocess
import sys
import time

import pytest
from syncfree.errors import Unreachable
from syncfree.profiler.probe import Attachment, carrier
from syncfree.profiler.probe.tracing import TracingRefused

from .conftest import DOUBLES, compiled

ENDLESS = ("forever", "read")
KINDS = ("forever", "until", "nanosleep", "poll", "select", "semaphore", "read", "epoll")
# The kernel itself ends these with EINTR where a thread was stopped (signal(7)), under any debugger; callers go on.
ENDED_BY_A_STOP = ("epoll",)


class Waiters:
    """waiters.c: one thread for each of `KINDS`."""

    def __init__(self, folder, driver):
        flags = ["-Wl,--no-as-needed", str(driver), f"-Wl,-rpath,{driver.parent}", "-pthread"]
        binary = compiled(DOUBLES / "waiters.c", folder / "waiters", *flags)
        self.process = subprocess.Popen([str(binary)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.threads = dict(zip(KINDS, map(int, self.process.stdout.readline().split()), strict=True))

    def told(self):
        """{kind: (waits, early, interrupted)}"""
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        figures = list(map(int, self.process.stdout.readline().split()))
        return {kind: tuple(figures[3 * k : 3 * k + 3]) for k, kind in enumerate(KINDS)}


@pytest.fixture
def waiters(needs_probe, tmp_path, fake_cuda):
    made = Waiters(tmp_path, fake_cuda)
    yield made
    made.process.kill()
    made.process.communicate()


def test_no_wait_ends_early_whichever_thread_carries_the_injection(waiters):
    for kind in KINDS:
        with Attachment(waiters.process.pid, carrier=waiters.threads[kind]) as probe:
            probe.install()
    before = waiters.told()
    while any(told[kind][0] == before[kind][0] for told in [waiters.told()] for kind in KINDS if kind not in ENDLESS):
        time.sleep(0.05)
    told = waiters.told()
    assert {kind: early for kind, (_, early, _) in told.items() if early} == {}
    assert {kind for kind, (_, _, interrupted) in told.items() if interrupted} <= set(ENDED_BY_A_STOP)
    assert {told[kind][0] for kind in ENDLESS} == {0}


class Numbers:
    """numbers.c, with naps of so many microseconds."""

    def __init__(self, folder, *naps):
        binary = compiled(DOUBLES / "numbers.c", folder / "numbers")
        self.process = subprocess.Popen([str(binary), *map(str, naps)], stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        assert self.process.stdout.readline() == "up\n"

    def changed(self):
        self.process.send_signal(signal.SIGUSR1)
        rounds, changed = map(int, self.process.stdout.readline().split())
        assert rounds > 0
        return changed

    def end(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def numbers(needs_probe, tmp_path):
    made = []

    def start(*naps):
        made.append(Numbers(tmp_path, *naps))
        return made[-1]

    yield start
    for each in made:
        each.end()


def test_a_process_whose_only_thread_computes_is_refused_and_its_numbers_stay(numbers):
    target = numbers()
    with pytest.raises(Unreachable, match=f"no thread of process {target.pid} was found to wait at all, and"):
        Attachment(target.pid)
    with pytest.raises(Unreachable, match=f"thread {target.pid} of process {target.pid} was not found to wait at all"):
        Attachment(target.pid, carrier=target.pid)
    assert target.changed() == 0


@pytest.mark.parametrize("nap", [200, 10_000])
def test_a_thread_that_computes_between_short_naps_carries_the_injection_in_one_of_them(numbers, nap):
    target = numbers(nap)
    for _ in range(3):
        with Attachment(target.pid) as probe:
            assert probe.libraries == []
    assert target.changed() == 0


def test_without_a_guard_only_a_thread_that_waits_for_long_will_do(numbers):
    target = numbers(2_000)
    with pytest.raises(TracingRefused, match=f"no thread of process {target.pid} was found to wait for 30 ms at a str"):
        carrier.idle_thread(target.pid, patience=0.5)
    assert carrier.idle_thread(target.pid, guarded=True) == target.pid


GUARDED = """
import json, os, sys, time
os.environ["TMPDIR"] = "/proc/none"
import frida
from syncfree.profiler.probe import carrier, helper
target, patience = int(sys.argv[1]), float(sys.argv[2])
if "blind" in sys.argv:
    carrier._state = lambda pid, tid: "S"
guard = helper._in_frida(carrier.Guard)
told = None
try:
    with guard.stops(target, target, patience):
        time.sleep(2 * patience if "late" in sys.argv else 0)
        frida.attach(target).detach()
except carrier.TracingRefused as error:
    told = str(error)
print(json.dumps([told, guard.tries]), flush=True)
frida.shutdown()
made = helper.Helper()
made.pid = target
made.wait_until_let_go()
os._exit(0)
"""


def guarded(target, patience, *how):
    """(why frida's stop of its only thread was refused, how often it was tried)"""
    command = [sys.executable, "-c", GUARDED, str(target.pid), str(patience), *how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_thread_that_has_begun_to_compute_since_it_was_chosen_is_not_stopped_for_the_injection(numbers):
    target = numbers()
    told, tries = guarded(target, 1.0)
    assert told.startswith(
        f"thread {target.pid} of process {target.pid} was not found to wait when it was to be stopped"
    )
    assert tries == 0
    assert target.changed() == 0


def test_a_thread_that_wakes_up_just_before_it_stops_is_let_go_and_stopped_again(numbers):
    target = numbers()
    told, tries = guarded(target, 1.0, "blind")
    assert told is not None
    assert tries > 1
    assert target.changed() == 0
    target = numbers(1_000)
    told, tries = guarded(target, 60.0, "blind")
    assert told is None
    assert tries >= 1
    assert target.changed() == 0


def test_its_patience_begins_when_frida_comes_to_stop_the_thread(numbers):
    target = numbers(10_000)
    told, tries = guarded(target, 0.2, "late")
    assert told is None
    assert tries >= 1
    assert target.changed() == 0
