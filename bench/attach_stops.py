"""What attaching does to a process, told by the process itself: how long none of its threads ran, how long its Python
waited, its longest step; before, while arriving, while recording, while leaving.

    python bench/attach_stops.py [--visits 20] [--json FILE]

The target is a program of its own: a loop of Python and torch work in steps of some 3 ms with vLLM's names (that of the
tests), a driver that does nothing, and three clocks. A thread in C wakes every 0.1 ms, at real-time priority where that
is allowed, so that it runs whatever else does: where it is late, the process stood still. One in Python does so every
0.5 ms: where it is late, something held the interpreter (or, it has no such priority, the processors were taken).
Needs torch, frida and a C compiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOUBLES = ROOT / "tests" / "doubles"
ENGINE = ROOT / "tests" / "profiler" / "attach" / "engine.py"
PHASES = ("before", "arriving", "recording", "leaving")

BEAT = r"""
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>
static atomic_long longest;
static long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}
static void *beat(void *realtime) {
    struct sched_param most = {.sched_priority = 50};
    *(int *)realtime = pthread_setschedparam(pthread_self(), SCHED_FIFO, &most) == 0;
    struct timespec pause = {0, 100000};
    for (long last = now();;) {
        nanosleep(&pause, 0);
        long t = now();
        if (t - last - 100000 > longest) longest = t - last - 100000;
        last = t;
    }
}
static int realtime;
int start(void) { pthread_t t; return pthread_create(&t, 0, beat, &realtime); }
int is_realtime(void) { return realtime; }
long take(void) { return atomic_exchange(&longest, 0); }
"""

# The tests' engine, with clocks beside it; a line on standard input gets what they showed since the last.
TARGET = """
import ctypes, json, runpy, sys, threading, time
beat = ctypes.CDLL(sys.argv[1])
beat.take.restype = ctypes.c_long
engine = runpy.run_path(sys.argv[2])
torch, fake_vllm = engine["torch"], engine["fake_vllm"]
torch.set_num_threads(1)
fake_vllm.install()
runner = sys.modules["vllm.v1.worker.gpu_model_runner"].GPUModelRunner()
server = engine["Server"](sys.argv[3], 0.003)
runner.fetch, server.runner = server.fetch, runner
waited = [0.0]
def listen():
    last = time.perf_counter()
    while True:
        time.sleep(0.0005)
        now = time.perf_counter()
        waited[0] = max(waited[0], now - last - 0.0005)
        last = now
for work in (server.work, listen):
    threading.Thread(target=work, daemon=True).start()
beat.start()
time.sleep(0.2)
print("ready", beat.is_realtime(), flush=True)
for _ in sys.stdin:
    step, server.longest_ms = server.longest_ms, 0.0
    python, waited[0] = waited[0], 0.0
    print(json.dumps({"stood_ms": beat.take() / 1e6, "python_ms": python * 1e3, "step_ms": step}), flush=True)
engine["os"]._exit(0)
"""


class Target:
    def __init__(self, python: str, folder: Path) -> None:
        for name, source in (("beat", BEAT), ("libcuda", (DOUBLES / "fake_cuda.c").read_text())):
            (folder / f"{name}.c").write_text(source)
            flags = ["-O1", "-w", "-shared", "-fPIC", "-pthread", *(["-Wl,-soname,libcuda.so.1"] * (name == "libcuda"))]
            library = folder / ("libcuda.so.1" if name == "libcuda" else "beat.so")
            subprocess.run(["cc", *flags, "-o", str(library), str(folder / f"{name}.c")], check=True)
        command = [python, "-c", TARGET, str(folder / "beat.so"), str(ENGINE), str(folder / "libcuda.so.1")]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        ready = self.process.stdout.readline().split()
        assert ready[:1] == ["ready"], "the target did not start"
        self.realtime = ready[1] == "1"

    def ask(self) -> dict[str, float]:
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(20)


def measure(target: Target, visits: int) -> dict[str, dict[str, list[float]]]:
    from syncfree.backends.live import ENGINES
    from syncfree.profiler.agent.client import profile_socket
    from syncfree.profiler.attach.processes import find_workers
    from syncfree.profiler.attach.visit import Visit

    told: dict[str, dict[str, list[float]]] = {phase: {} for phase in PHASES}

    def keep(phase: str, seconds: float) -> None:
        for name, value in {**target.ask(), "took_ms": seconds * 1e3}.items():
            told[phase].setdefault(name, []).append(round(value, 3))

    [worker] = find_workers(target.pid)
    for _ in range(visits):
        target.ask()
        time.sleep(0.5)
        keep("before", 0.5)
        began = time.perf_counter()
        visit = Visit(worker, ENGINES)
        keep("arriving", time.perf_counter() - began)
        began = time.perf_counter()
        profile_socket(visit.path, seconds=0.5)
        keep("recording", time.perf_counter() - began)
        began = time.perf_counter()
        visit.leave()
        keep("leaving", time.perf_counter() - began)
        time.sleep(0.1)
    return told


def summary(told: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """The first visit apart: it imports what the later ones find."""
    return {
        phase: {
            name: {"first": values[0], "p50": statistics.median(values[1:]), "max": max(values[1:])}
            for name, values in figures.items()
        }
        for phase, figures in told.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--visits", type=int, default=20)
    parser.add_argument("--python", default=sys.executable, help="the target's interpreter")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target = Target(options.python, Path(folder))
        try:
            told = measure(target, max(options.visits, 2))
        finally:
            target.end()
    found = {"realtime_clock": target.realtime, "visits": options.visits, "figures": summary(told)}
    if options.json:
        options.json.write_text(json.dumps({**found, "all": told}, indent=1) + "\n")
    for phase, figures in found["figures"].items():
        row = "  ".join(f"{n} {v['first']:.2f} / {v['p50']:.2f} / {v['max']:.2f}" for n, v in figures.items())
        print(f"{phase:10} first / median / max of later: {row}")
    print("the clock in C ran", "at real-time priority" if target.realtime else "without real-time priority")
    return 0


if __name__ == "__main__":
    sys.exit(main())
