"""What PyTorch's GPUTrace callbacks become; the callbacks themselves need a device."""

import pytest
import torch
from syncfree.planner.errors import Unreachable
from syncfree.profiler.collectors import gpu_trace
from syncfree.profiler.collectors.gpu_trace import GpuTraceCollector, _callback
from syncfree.profiler.counting import count_syncs


@pytest.fixture
def listening():
    collector = GpuTraceCollector()
    gpu_trace._listening.append(collector)
    yield collector
    gpu_trace._listening.clear()


class Stream:
    def synchronize(self):
        _callback("stream")(7)


def test_an_operator_that_waits_is_a_copy_of_unknown_direction(listening):
    _callback("stream")(7)
    (sync,) = count_syncs(listening.drain())
    assert sync.kind == "copy"
    assert sync.call.stack[0].file == __file__
    assert sync.blocked_ns is None


def test_an_explicit_wait_is_named_by_what_waits(listening):
    Stream().synchronize()
    _callback("event")(7)
    _callback("device")()
    assert [s.kind for s in count_syncs(listening.drain())] == ["stream", "event", "device"]


def test_nothing_is_recorded_after_it_stopped(listening):
    gpu_trace._listening.clear()
    _callback("stream")(7)
    assert listening.drain() == []


def test_a_failing_callback_is_switched_off_and_said_once(listening, monkeypatch):
    monkeypatch.setattr(gpu_trace, "capture", lambda skip: 1 / 0)
    _callback("stream")(7)
    _callback("stream")(7)
    assert [n.kind for n in listening.notes()] == ["disabled"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device")
def test_it_says_why_it_cannot_work_here():
    assert GpuTraceCollector.available() == "this process has no device"
    with pytest.raises(Unreachable, match="gpu_trace: this process has no device"):
        GpuTraceCollector().start()
