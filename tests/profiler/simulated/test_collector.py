"""The collector over the simulated device, the profiler with it, and Triton's stand-in."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
from syncfree.planner.errors import Unreachable
from syncfree.profiler import Profiler, simulated_device
from syncfree.profiler.calls import Role
from syncfree.profiler.collectors.base import GROUPS, Collector
from syncfree.profiler.collectors.simulated import SimulatedCollector

torch = pytest.importorskip("torch")


def test_it_is_a_collector_and_says_what_it_cannot_see():
    collector = SimulatedCollector()
    assert isinstance(collector, Collector)
    assert collector.sees <= GROUPS
    assert "blocked" not in collector.sees
    assert collector.blind
    assert collector.mark(0) is None


def test_outside_a_context_it_is_unreachable():
    with pytest.raises(Unreachable, match="simulated_device"):
        SimulatedCollector().start()
    with pytest.raises(Unreachable), Profiler(collectors="simulated"):
        pass


def test_two_at_a_time_see_their_own_window_each():
    with simulated_device() as device:
        x = torch.ones(3, device=device)
        outer, inner = SimulatedCollector(), SimulatedCollector()
        outer.start()
        x.add_(1)
        inner.start()
        with pytest.raises(RuntimeError, match="already started"):
            inner.start()
        x.add_(1)
        inner.stop()
        x.add_(1)
        outer.stop()
        x.add_(1)
    assert [call.role for call in inner.drain()] == [Role.LAUNCH]
    assert [call.role for call in outer.drain()] == [Role.LAUNCH] * 3
    assert outer.drain() == []


def test_a_report_of_steps_and_phases():
    with simulated_device() as device:
        lens = torch.tensor([3, 4], device=device)
        with Profiler() as profiler:
            for _ in range(2):
                with profiler.step(batch_class="decode"):
                    with profiler.phase("build"):
                        longest = int(lens.max())
                    with profiler.phase("forward"):
                        torch.ones(longest, device=device).mul_(2)
    report = profiler.report
    assert report.source.device == "simulated"
    assert report.source.collectors == ["simulated"]
    for step in report.steps:
        assert (step.syncs.total, step.syncs.d2h, step.launches.kernels) == (1, 1, 3)
        assert (step.copies.d2h, step.copies.d2h_bytes) == (1, 8)
        assert step.phases["build"].syncs.total == 1
        assert step.phases["forward"].syncs.total == 0
        assert step.blocked_us is None
    [site] = report.sites
    assert (site.file, site.count, site.source) == (__file__, 2, "longest = int(lens.max())")
    assert report.totals.api["cudaLaunchKernel"] == 6
    assert report.totals.kernels_run == 6


def test_a_line_that_reads_one_value_again_and_again_is_told():
    with simulated_device() as device:
        n = torch.tensor(5, device=device)
        collector = SimulatedCollector()
        collector.start()
        for layer in range(4):
            if layer == 3:
                n.add_(1)
            int(n)
        collector.stop()
    copies = [call for call in collector.drain() if call.role is Role.COPY]
    assert [call.repeat_value for call in copies] == [False, True, True, False]


def test_queries_and_large_pageable_uploads_are_listed_as_blind():
    with simulated_device() as device:
        target, event = torch.empty(1 << 21, device=device), torch.cuda.Event()
        with Profiler() as profiler, profiler.step():
            target.copy_(torch.zeros(1 << 21), non_blocking=True)
            event.record()
            while not event.query():
                pass
    [step] = profiler.report.steps
    assert (step.syncs.total, step.syncs.maybe) == (0, 0)
    assert [note.kind for note in profiler.report.notes] == ["blind", "blind"]
    assert all(note.file == __file__ for note in profiler.report.notes)


def test_a_free_waits_unless_the_device_was_seen_idle():
    def frees(synchronize):
        big = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
        del big
        if synchronize:
            torch.cuda.synchronize()
        torch.cuda.empty_cache()

    for synchronize, maybe in ((False, 1), (True, 0)):
        with simulated_device(), Profiler() as profiler, profiler.step():
            frees(synchronize)
        assert profiler.report.steps[0].syncs.maybe == maybe
        assert profiler.report.totals.api["cudaFree"] == 1


@pytest.fixture
def no_triton(monkeypatch):
    """As on a machine where it is not installed; its compiled core stays, which cannot be loaded twice."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "triton" else find(name, *a))
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and name[:9] != "triton._C"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("no_triton")
def test_without_triton_a_kernel_is_counted_and_not_run():
    assert "triton" not in sys.modules
    with simulated_device() as device:
        import triton
        import triton.language as tl

        @triton.autotune(configs=[triton.Config({"BLOCK": 256})], key=["n"])
        @triton.jit
        def add_one(pointer, n, BLOCK: tl.constexpr):
            raise AssertionError("the body of a kernel is never run")

        x = torch.zeros(1000, device=device)
        with Profiler() as profiler, profiler.step():
            add_one[(triton.cdiv(1000, 256),)](x, 1000, BLOCK=256)
            add_one[lambda meta: (4,)](x, 1000, BLOCK=256)
        with pytest.raises(RuntimeError, match="Cannot call"):
            add_one(x, 1000)
    assert sys.modules.get("triton") is not triton
    assert profiler.report.steps[0].launches.kernels == 2
    assert profiler.report.totals.api == {"cuLaunchKernelEx": 2}
    [*notes] = profiler.report.notes
    assert [(note.kind, note.file) for note in notes] == [("blind", __file__)] * 2
    assert "add_one" in notes[0].text


def test_with_triton_installed_its_launcher_is_stubbed(monkeypatch):
    class JITFunction:
        fn = SimpleNamespace(__name__="scale")

        def __getitem__(self, grid):
            return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)

        def run(self, *args, **kwargs):
            raise AssertionError("there is no device to launch on")

    spec = type(sys)("triton")
    spec.__spec__ = SimpleNamespace(name="triton")
    for name in ("triton", "triton.runtime", "triton.runtime.jit"):
        monkeypatch.setitem(sys.modules, name, spec)
    monkeypatch.setattr(spec, "JITFunction", JITFunction, raising=False)
    monkeypatch.setattr(spec, "runtime", spec, raising=False)
    monkeypatch.setattr(spec, "jit", spec, raising=False)
    with simulated_device() as device, Profiler() as profiler, profiler.step():
        JITFunction()[(1,)](torch.ones(3, device=device), n=3)
    assert profiler.report.totals.api["cuLaunchKernelEx"] == 1
    with pytest.raises(AssertionError):
        JITFunction()[(1,)]()
