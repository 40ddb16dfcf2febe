"""One process of `bench/overhead.py`: the steps that are timed, and one way of counting that can be switched on.

Asked line by line on standard input (JSON), answers line by line; see `Worker.serve`. The thread that steps is pinned
to one core while it is timed, and only then: threads and processes that a collector starts go to the other cores.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

LAUNCHES, GRAPH_NODES, GRAPH_LAUNCHES, BURST = 600, 300, 30, 60


class GpuSteps:
    """600 small eager launches and one `.item()`; a CUDA graph of 300 nodes, 30 eager launches and one `.item()`.

    `burst`: 60 launches alone.
    """

    def __init__(self) -> None:
        import torch

        self.drain = torch.cuda.synchronize
        self.x = torch.zeros(1024, device="cuda")
        self.y = torch.zeros(1024, device="cuda")
        self.replayed = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self.y.add_(1)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.replayed):
            for _ in range(GRAPH_NODES):
                self.y.add_(1)

    def eager(self) -> None:
        x = self.x
        for _ in range(LAUNCHES):
            x.add_(1)
        x[0].item()

    def graph(self) -> None:
        self.replayed.replay()
        x = self.x
        for _ in range(GRAPH_LAUNCHES):
            x.add_(1)
        x[0].item()

    def burst(self) -> None:
        x = self.x
        for _ in range(BURST):
            x.add_(1)


class StandInSteps:
    """The same driver calls, of a libcuda that does nothing (`tests/doubles/fake_cuda.c`): the figures mean nothing."""

    def __init__(self, driver: str) -> None:
        self.driver = ctypes.CDLL(driver, mode=ctypes.RTLD_GLOBAL)
        # A process that never had a second thread has a faster malloc, until the probe's agent brings one: as torch is
        # never one, neither are we.
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def eager(self, launches: int = LAUNCHES) -> None:
        launch = self.driver.cuLaunchKernel
        for _ in range(launches):
            launch(1, 1, 1, 1, 1, 1, 1, 0, 7, 0, 0)
        self.driver.cuMemcpyDtoHAsync_v2(0x2000, 0x1000, 8, 7)
        self.driver.cuStreamSynchronize(7)

    def graph(self) -> None:
        self.driver.cuGraphLaunch(1, 7)
        self.eager(GRAPH_LAUNCHES)

    def burst(self) -> None:
        launch = self.driver.cuLaunchKernel
        for _ in range(BURST):
            launch(1, 1, 1, 1, 1, 1, 1, 0, 7, 0, 0)

    def drain(self) -> None: ...


class Mode:
    """Something that can be switched on and off. The base is the control: nothing is switched.

    `flip`, where there is one, switches between two steps, in microseconds, what `on` has prepared.
    """

    around: Callable[[], AbstractContextManager[object]] | None = None
    flip: Callable[[bool], None] | None = None

    def on(self) -> None: ...

    def off(self) -> None: ...


class Nothing(Mode):
    def flip(self, on: bool) -> None: ...


class Pause(Mode):
    """Nothing, with pauses as long as an attachment's: whether the pauses alone change the steps."""

    def on(self) -> None:
        time.sleep(0.5)

    def off(self) -> None:
        time.sleep(0.2)


class Probe(Mode):
    def on(self) -> None:
        from syncfree.profiler.collectors.probe import ProbeCollector

        self.collector = ProbeCollector()
        self.collector.start()

    def off(self) -> None:
        self.collector.stop()


class ProbeHooks(Probe):
    """The hooks alone: attached all the time, the jumps into them taken out and put back between two steps.

    Only where no thread but this one calls the driver: nobody stands within the bytes that are written.
    """

    def on(self) -> None:
        before = _driver_code()
        super().on()
        self.jumps = []
        for (start, old), (_, new) in zip(before, _driver_code(), strict=True):
            self.jumps += [(start + at, old[at:end], new[at:end]) for at, end in _differences(old, new)]
        if not self.jumps:
            raise RuntimeError("no hook found in the driver's code")
        self.memory = os.open("/proc/self/mem", os.O_RDWR)

    def flip(self, on: bool) -> None:
        for at, without, hooked in self.jumps:
            os.pwrite(self.memory, hooked if on else without, at)

    def off(self) -> None:
        self.flip(True)
        os.close(self.memory)
        super().off()


class ProbeProfiler(Mode):
    def on(self) -> None:
        from syncfree.profiler import Profiler

        self.profiler = Profiler("probe")
        self.profiler.start()
        self.around = lambda: self.profiler.step("decode")

    def off(self) -> None:
        self.around = None
        self.profiler.stop()


class SyncDebug(Mode):
    def on(self) -> None:
        warnings.simplefilter("ignore")
        self.flip(True)

    def flip(self, on: bool) -> None:
        import torch

        torch.cuda.set_sync_debug_mode("warn" if on else "default")

    def off(self) -> None:
        self.flip(False)


class Kineto(Mode):
    def on(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self.profile.start()

    def off(self) -> None:
        self.profile.stop()


class GpuTrace(Mode):
    """Cannot be switched off."""

    started = False

    def on(self) -> None:
        from syncfree.profiler.collectors.gpu_trace import GpuTraceCollector

        if not self.started:
            self.started = True
            GpuTraceCollector().start()


class Cupti(Mode):
    """A callback that counts, on every runtime and driver call of the interesting kinds."""

    def on(self) -> None:
        self.library = ctypes.CDLL(os.environ["SPY_SO"])
        code = self.library.sp_start(1, 1, 1, 0, 0)
        if code:
            raise RuntimeError(f"cuptiSubscribe: {code}")

    def off(self) -> None:
        self.library.sp_stop()


KINDS: dict[str, type[Mode]] = {
    "control": Mode,
    "nothing": Nothing,
    "pause": Pause,
    "probe": Probe,
    "probe_hooks": ProbeHooks,
    "probe_profiler": ProbeProfiler,
    "sync_debug": SyncDebug,
    "kineto": Kineto,
    "gpu_trace": GpuTrace,
    "cupti": Cupti,
}


def _driver_code() -> list[tuple[int, bytes]]:
    """(address, bytes) of libcuda's machine code as it is in memory now."""
    found = []
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(None, 5)
            if len(fields) > 5 and "x" in fields[1] and Path(fields[5]).name.startswith("libcuda.so"):
                start, end = (int(x, 16) for x in fields[0].split("-"))
                found.append((start, os.pread(memory.fileno(), end - start, start)))
    return found


def _differences(old: bytes, new: bytes) -> list[tuple[int, int]]:
    """[start, end) of each run of bytes that differ."""
    import numpy as np

    differ = np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8)
    edges = np.flatnonzero(np.diff(differ.astype(np.int8), prepend=0, append=0))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


class Worker:
    """Answers `time`, `alternate`, `on`, `off`, `pin`."""

    def __init__(self, name: str, driver: str) -> None:
        self.mode = KINDS[name]()
        self.steps = StandInSteps(driver) if driver else GpuSteps()
        self.cores = os.sched_getaffinity(0)
        self.core: int | None = None
        for kind in ("eager", "graph"):
            self.time(kind, 30)
        gc.collect()
        gc.freeze()
        gc.disable()

    def pin(self, core: int) -> None:
        """Time on `core`; every other thread of the process is sent to the other cores."""
        self.core, self.cores = core, self.cores - {core}
        for tid in (int(path.name) for path in Path("/proc/self/task").iterdir()):
            os.sched_setaffinity(tid, {core} if tid == os.getpid() else self.cores)

    def switch(self, on: bool) -> None:
        os.sched_setaffinity(0, self.cores)
        (self.mode.on if on else self.mode.off)()
        if self.core is not None:
            os.sched_setaffinity(0, {self.core})

    def time(self, kind: str, steps: int) -> list[int]:
        """Nanoseconds of each of `steps` steps."""
        step, around, clock, times = getattr(self.steps, kind), self.mode.around, time.perf_counter_ns, []
        for _ in range(steps):
            began = clock()
            if around is None:
                step()
            else:
                with around():
                    step()
            times.append(clock() - began)
        return times

    def alternate(self, kind: str, pairs: int) -> list[list[int]]:
        """[without, with] of each pair, ns of two steps after an untimed one; which goes first alternates."""
        assert self.mode.flip is not None
        found = []
        for k in range(pairs):
            pair = [0, 0]
            for on in (k % 2, 1 - k % 2):
                self.mode.flip(bool(on))
                pair[on] = sum(self.time(kind, 3)[1:])
                self.steps.drain()
            found.append(pair)
        return found

    def answer(self, ask: dict[str, object]) -> object:
        do = ask.pop("do")
        if do in ("on", "off"):
            return self.switch(do == "on")
        return {"time": self.time, "alternate": self.alternate, "pin": self.pin}[str(do)](**ask)

    def serve(self, lines: object, write: Callable[[str], object]) -> None:
        write("null\n")
        for line in lines:
            write(json.dumps(self.answer(json.loads(line))) + "\n")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    Worker(sys.argv[1], sys.argv[2]).serve(sys.stdin, answers.write)


if __name__ == "__main__":
    main()
