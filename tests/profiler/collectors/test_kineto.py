"""Collector kineto, as far as a machine without a GPU shows it; bench/gpu/corpus.py runs it on one."""

import subprocess
import sys

import pytest
import torch
from syncfree.planner.errors import Unreachable
from syncfree.profiler import Profiler, Report
from syncfree.profiler.collectors.kineto import Clock
from syncfree.profiler.readers.process_trace import Range

RECORD = """
import sys, torch
from syncfree.profiler import Profiler, Report
from syncfree.profiler.collectors.kineto import KinetoCollector

class HostOnly(KinetoCollector):
    # the same recording without a device: everything but the device's records
    def _activities(self):
        return [torch.profiler.ProfilerActivity.CPU]

with Profiler([HostOnly(with_stack=sys.argv[1] == "True")]) as p:
    for _ in range(3):
        with p.step("decode"), p.phase("build"):
            (torch.ones(4) + 1).sum().item()
open(sys.argv[2], "wb").write(p.report.to_json())
"""


@pytest.mark.parametrize("with_stack", [False, True])
def test_a_recording_without_runtime_calls_is_unknown_and_not_free_of_syncs(with_stack, tmp_path):
    # In a process of its own: with stacks torch.profiler visits every thread, those that earlier tests left as well.
    path = tmp_path / "r.json"
    command = [sys.executable, "-c", RECORD, str(with_stack), str(path)]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    report = Report.load(path)
    assert report.steps[0].syncs.total is None
    assert report.classes["decode"].verdict == "unknown"
    assert "no runtime calls" in report.notes[0].text


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is said where there is no device")
def test_without_a_device_it_says_so():
    with pytest.raises(Unreachable, match="no CUDA or ROCm device"):
        Profiler("kineto").start()


CHECK = """
import sys, torch
from syncfree.profiler.collectors.kineto import KinetoCollector

class HostOnly(KinetoCollector):
    def _activities(self):
        return [torch.profiler.ProfilerActivity.CPU]

HostOnly().check()
before = set(sys.modules)
from torch.profiler import profile
with profile(activities=[torch.profiler.ProfilerActivity.CPU]):
    torch.ones(4) + 1
print(sorted(name for name in set(sys.modules) - before if name.startswith("torch._inductor")))
"""


def test_the_thread_that_steps_does_not_import_what_starting_needs():
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"


def marks(*pairs):
    return Clock([Range(f"syncfree.mark#{mine}", theirs, theirs + 1) for theirs, mine in pairs])


def test_a_moment_between_two_marks_stays_between_them():
    clock = marks((1000, 50), (2000, 900))
    assert clock.ours(1000) == 50
    assert clock.ours(1500) == 550
    assert clock.ours(1999) == 899  # by kineto's clock 1049, but the second mark came first
    assert clock.ours(2000) == 900
    assert clock.ours(2500) == 1400
    assert clock.ours(900) == -50


def test_before_a_mark_stays_before_it():
    assert marks((1000, 50)).ours(999) == 49


def test_of_a_mark_and_its_twin_on_the_device_the_host_counts():
    assert marks((1000, 50), (1400, 50)).ours(1010) == 60


def test_a_trace_without_marks_keeps_its_own_clock():
    assert marks().ours(7) == 7
