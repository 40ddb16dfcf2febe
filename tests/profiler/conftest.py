"""A fake GPU for tests of what lies above the collectors."""

import sys
import threading
import time
import types

import pytest
from syncfree.profiler import collectors
from syncfree.profiler.calls import Call, Direction, Role
from syncfree.profiler.collectors.base import GROUPS
from syncfree.profiler.sites import capture


class FakeGpu(types.ModuleType):
    """`item()` and `launch()` are seen by every started collector of this GPU, with the caller's stack."""

    def __init__(self):
        super().__init__("fake_gpu")
        self.watching = []

    def _seen(self, **about):
        for collector in self.watching:
            call = Call(ts_ns=time.perf_counter_ns(), dur_ns=2000, thread=threading.get_native_id(), **about)
            collector.calls.append(call)

    def item(self):
        stack = capture(2)
        self._seen(api="fakeMemcpy", role=Role.COPY, direction=Direction.D2H, blocking=True, nbytes=4, stack=stack)

    def launch(self, captured=False):
        self._seen(api="fakeLaunch", role=Role.LAUNCH, captured=captured)

    def collector(self):
        return FakeCollector(self)


class FakeCollector:
    """An event collector of `FakeGpu`."""

    name = "fake"
    sees = GROUPS - {"kernels", "host_ops"}
    blind = "everything but the fake GPU"

    def __init__(self, gpu):
        self.gpu = gpu
        self.calls = []

    def start(self):
        self.gpu.watching.append(self)

    def stop(self):
        self.gpu.watching.remove(self)

    def mark(self, now_ns):
        return None

    def drain(self):
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def fake_gpu(monkeypatch):
    """The fake GPU, importable as `fake_gpu` and watched by the collector named "fake"."""
    gpu = FakeGpu()
    monkeypatch.setitem(sys.modules, "fake_gpu", gpu)
    monkeypatch.setitem(collectors.NAMES, "fake", gpu.collector)
    yield gpu
    assert not gpu.watching, "a collector was left running"
