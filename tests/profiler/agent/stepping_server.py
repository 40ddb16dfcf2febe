"""A server that only steps: run as a program, it prints its socket and steps until it is ended.

    python stepping_server.py [--rank N] [--socket PATH] [--pause SECONDS] [--seconds S] [--fork | --spawn]

With --fork or --spawn a child process steps too, and its socket is printed second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
import time
from pathlib import Path

from syncfree.profiler.agent import ensure_agent

CLASSES = ("decode", "extend", "chunked_prefill", "causal_prefill")


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
    options = parser.parse_args()
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
