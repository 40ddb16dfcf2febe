"""The thread that carries the injection, and all others that are stopped for the hooks, go on waiting as before."""

import signal
import subprocess
import time

import pytest
from syncfree.errors import Unreachable
from syncfree.profiler.probe import Attachment

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


def test_a_process_whose_only_thread_computes_is_refused_and_its_numbers_stay(needs_probe, tmp_path):
    binary = compiled(DOUBLES / "numbers.c", tmp_path / "numbers")
    target = subprocess.Popen([str(binary)], stdout=subprocess.PIPE, text=True)
    try:
        assert target.stdout.readline() == "up\n"
        with pytest.raises(Unreachable, match=f"no thread of process {target.pid} waits for anything"):
            Attachment(target.pid)
        with pytest.raises(Unreachable, match=f"thread {target.pid} of process {target.pid} does not wait"):
            Attachment(target.pid, carrier=target.pid)
        target.send_signal(signal.SIGUSR1)
        rounds, changed = map(int, target.stdout.readline().split())
        assert rounds > 0
        assert changed == 0
    finally:
        target.kill()
        target.communicate()
