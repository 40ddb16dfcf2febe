"""A process that computes with torch's thread pool and autograd: attached to again and again, its numbers stay."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from syncfree.profiler.probe import Attachment

pytest.importorskip("torch")

pytestmark = pytest.mark.attach
PROGRAM = Path(__file__).with_name("torch_work.py")
# Far more by hand: SYNCFREE_ATTACHES=200
ATTACHES = int(os.environ.get("SYNCFREE_ATTACHES", "4"))


class Worker:
    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.digest = self.process.stdout.readline().strip()

    def told(self):
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def rounds_after(self, rounds):
        """What it tells once it has made more rounds than that."""
        while (told := self.told())["rounds"] <= rounds:
            time.sleep(0.02)
        return told

    def stop(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def work():
    started = []

    def start(*arguments):
        started.append(Worker(*arguments))
        return started[-1]

    yield start
    for worker in started:
        worker.stop()


def test_every_round_gives_the_bytes_of_an_undisturbed_run(work, fake_cuda):
    alone = work("--threads", "3")
    alone.stop()
    worker = work("--threads", "3", "--driver", str(fake_cuda), "--seconds", str(120 + 30 * ATTACHES))
    assert worker.digest == alone.digest
    for _ in range(ATTACHES):
        before = worker.told()["rounds"]
        with Attachment(worker.process.pid) as probe:
            probe.install()
            assert probe.calibrate_stacks() is None
            probe.take_calls()  # those before that have no stack
            counted = worker.told()["rounds"], probe.counters().stream
            worker.rounds_after(counted[0] + 1)
            assert probe.counters().stream > counted[1]
            assert {call.stack[0].function for call in probe.take_calls()} == {"Work.go_on"}
        told = worker.rounds_after(before + 1)
        assert told["different"] == 0
    assert worker.process.poll() is None
