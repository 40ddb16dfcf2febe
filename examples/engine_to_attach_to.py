"""A serving loop of one's own that `syncfree profile` and `syncfree watch` can attach to.

    python examples/engine_to_attach_to.py --seconds 60 &
    syncfree profile --seconds 5

The loop serves random prompts with the embedded engine on the simulated device. What makes it visible from outside is
`Marks`: an agent that starts on first use, and calls around each step and its phases that cost one test while nobody
records.
"""

import argparse
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from syncfree.backends.engine import Engine, EngineConfig
from syncfree.profiler import simulated_device
from syncfree.profiler.agent import ensure_agent


class Marks:
    def __init__(self) -> None:
        self.recorder = ensure_agent(rank=0, engine="my engine").recorder

    @contextmanager
    def step(self, batch_class: str, **about: object) -> Iterator[None]:
        if self.recorder.session is not None:
            self.recorder.begin_step(batch_class, **about)
        try:
            yield
        finally:
            self.recorder.end_step()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.recorder.begin_phase(name)
        try:
            yield
        finally:
            self.recorder.end_phase()


def serve(builder: str, seconds: float) -> None:
    rng, until = random.Random(1), time.monotonic() + seconds
    torch.set_num_threads(1)
    with simulated_device() as device:
        engine = Engine(EngineConfig(builder=builder), device=device, profiler=Marks())
        while time.monotonic() < until:
            if len(engine.scheduler.running) + len(engine.scheduler.waiting) < 6:
                engine.add_request([rng.randrange(64) for _ in range(rng.choice((5, 9, 100)))], max_tokens=8)
            engine.step()
            time.sleep(0.001)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builder", choices=("planned", "unplanned"), default="unplanned")
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    serve(options.builder, options.seconds)
