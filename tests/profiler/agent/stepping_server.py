"""A server that only steps: run as a program, it prints its socket and steps until it is ended.

    python stepping_server.py [--rank N] [--socket PATH] [--pause SECONDS] [--seconds S] [--fork | --spawn]
                              [--counted [--kineto-misses N] [--probe-dies]]

With --fork or --spawn a child process steps too, and its socket is printed second. With --counted each step makes two
launches and a wait, and stand-ins for the collectors `probe` and `kineto` count them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
import time
from pathlib import Path

from syncfree.profiler import collectors
from syncfree.profiler.agent import ensure_agent
from syncfree.profiler.apis import lookup
from syncfree.profiler.calls import Call
from syncfree.profiler.collectors.base import Counters
from syncfree.profiler.report import Note

CLASSES = ("decode", "extend", "chunked_prefill", "causal_prefill")


made = []  # (call, when) of everything that the server "did" on its device


def work_on_the_device():
    for name in ("cudaLaunchKernel", "cudaLaunchKernel", "cudaStreamSynchronize"):
        made.append((name, time.perf_counter_ns()))


class Probe:
    """Counts as the probe does: by marks."""

    name, blind, sees = "probe", "", collectors.GROUPS

    def __init__(self, dies):
        self.dies = dies

    def start(self):
        made.clear()

    def mark(self, now_ns):
        names = [name for name, _ in made]
        return Counters(kernels=names.count("cudaLaunchKernel"), stream=names.count("cudaStreamSynchronize"))

    def stop(self):
        pass

    def drain(self):
        return []

    def notes(self):
        return [Note(kind="partial", text="probe: its helper process died")] if self.dies else []


class Kineto:
    """Hands over calls, as kineto does; leaves out every `misses`th."""

    name, blind, sees, thread_bound = "kineto", "", collectors.GROUPS, True

    def __init__(self, misses):
        self.misses = misses

    def start(self):
        pass

    stop = start

    def mark(self, now_ns):
        return None

    def drain(self):
        told = [item for k, item in enumerate(made, 1) if not self.misses or k % self.misses]
        return [
            Call(api=name, role=lookup(name).role, wait=lookup(name).wait, ts_ns=when, dur_ns=1) for name, when in told
        ]


def step_forever(rank: int, socket: Path | None, pause: float, seconds: float, prints: bool = True) -> None:
    agent = ensure_agent(rank=rank, engine="stepping", path=socket)
    agent.ready.wait(10)
    if agent.error:
        sys.exit(agent.error)
    if prints:
        print(agent.path, flush=True)
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        recorder = ensure_agent(rank=rank, engine="stepping").recorder
        if recorder.session is not None:
            recorder.begin_step(CLASSES[count % 4], num_reqs=count % 7 + 1, num_tokens=count % 50 + 1)
        for phase in ("build", "forward", "sample"):
            recorder.begin_phase(phase)
            if phase == "forward":
                work_on_the_device()
            time.sleep(pause / 3)
            recorder.end_phase()
        recorder.end_step()
        count += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--socket", type=Path)
    parser.add_argument("--pause", type=float, default=0.003)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--fork", action="store_true")
    parser.add_argument("--spawn", action="store_true")
    parser.add_argument("--counted", action="store_true")
    parser.add_argument("--kineto-misses", type=int, default=0)
    parser.add_argument("--probe-dies", action="store_true")
    options = parser.parse_args()
    if options.counted:
        collectors.NAMES["probe"] = lambda: Probe(options.probe_dies)
        collectors.NAMES["kineto"] = lambda: Kineto(options.kineto_misses)
    work = (options.rank, options.socket, options.pause, options.seconds)
    if options.fork or options.spawn:
        threading.Thread(target=step_forever, args=work, daemon=True).start()
        time.sleep(0.3)
        context = multiprocessing.get_context("fork" if options.fork else "spawn")
        child = context.Process(target=step_forever, args=(options.rank + 1, None, options.pause, options.seconds))
        child.start()
        child.join(options.seconds)
    else:
        step_forever(*work)


if __name__ == "__main__":
    main()
