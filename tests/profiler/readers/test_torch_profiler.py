"""Traces that torch.profiler writes here and now."""

import json
import subprocess
import sys

import pytest
from syncfree.profiler.readers import read_traces

pytest.importorskip("torch")


RECORD = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
for path in sys.argv[1:]:
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=3), with_stack=True
    ) as p:
        for i in range(5):
            with record_function("execute_context_0(0)_generation_2(2)"), record_function(f"my part {i}"):
                (torch.ones(64) + 1).sum().item()
            p.step()
    p.export_chrome_trace(path)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Three profiler steps, in two files: plain, and packed by its name.

    Recorded by a process of its own: with stacks torch.profiler visits every thread of its process, and one that an
    earlier test left waiting would stop it for good.
    """
    folder = tmp_path_factory.mktemp("torch")
    files = [folder / "trace.json", folder / "trace.json.gz"]
    command = [sys.executable, "-c", RECORD, *map(str, files)]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    return files


@pytest.mark.parametrize("number", [0, 1])
def test_steps_and_host_work(written, number):
    report = read_traces([written[number]])
    assert len(report.steps) == 3
    assert all(step.name.startswith("ProfilerStep#") for step in report.steps)
    assert {step.batch_class for step in report.steps} == {"decode"}  # the engine's own range inside tells
    assert all(step.host_ops >= 5 and step.duration_us > 0 for step in report.steps)
    assert report.totals.launches.kernels is None  # no device: unknown, not zero
    assert report.totals.kernels_run is None


def test_times_are_those_of_the_file(written):
    report = read_traces([written[0]])
    events = json.loads(written[0].read_text())["traceEvents"]
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    assert [step.start_us for step in report.steps] == sorted(e["ts"] for e in steps)
    assert sorted(step.duration_us for step in report.steps) == sorted(e["dur"] for e in steps)


def test_named_ranges(written):
    report = read_traces([written[0]], steps="my part *")
    assert [step.name for step in report.steps] == ["my part 2", "my part 3", "my part 4"]


def test_the_reader_itself_needs_no_torch(written):
    code = "import sys; from syncfree.profiler.readers import read_traces; read_traces(sys.argv[1:]); "
    code += "print('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code, *written], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.split() == ["False"]
