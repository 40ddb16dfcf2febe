"""The demonstration: a fixed workload on the embedded engine, profiled."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...planner import BadInput
from ...profiler.report import Report
from ...profiler.session import Profiler
from .engine import Engine, EngineConfig

Progress = Callable[[int, float], None]  # steps done, seconds since the recording began
BUILDERS = ("unplanned", "planned")
DEFAULT_STEPS = 64
PERIOD = 16  # steps after which the workload repeats, with other prompts
SYSTEM_PROMPT_LEN = 24
CONFIG = EngineConfig(num_blocks=48, block_size=8, token_budget=48, max_num_seqs=6)


def run_demo(
    builder: str, steps: int | None = None, progress: Progress | None = None, *, collectors: str = "auto"
) -> Report:
    """Serve the demonstration workload for `steps` steps (default 64) and report on it.

    Runs on the GPU if there is one, else on the simulated device. `builder` is one of `BUILDERS`, `collectors` as for
    `Profiler`. The report's `source.kind` is "demo". Raises `BadInput` for steps < 1 or an unknown builder.
    """
    if builder not in BUILDERS:
        raise BadInput(f"builder: expected {' or '.join(BUILDERS)}, got {builder!r}")
    count = DEFAULT_STEPS if steps is None else steps
    if count < 1:
        raise BadInput(f"steps: expected >= 1, got {count}")
    if torch.cuda.is_available():
        device = torch.device("cuda")
        return profile_workload(builder, count, device, progress, warm_up=True, collectors=collectors)
    from ...profiler.simulated import simulated_device

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for tensors this small a second thread costs ten times what it brings
    try:
        with simulated_device() as device:
            return profile_workload(builder, count, device, progress, collectors=collectors)
    finally:
        torch.set_num_threads(threads)


def profile_workload(
    builder: str,
    steps: int,
    device: Any,
    progress: Progress | None = None,
    *,
    warm_up: bool = False,
    collectors: str = "auto",
) -> Report:
    """The demonstration on a given device; inside `simulated_device()` if it is a simulated one.

    `warm_up`: run it once unprofiled, as a GPU's first calls load modules and grow memory pools.
    """
    config = EngineConfig(
        builder=builder,
        num_blocks=CONFIG.num_blocks,
        block_size=CONFIG.block_size,
        token_budget=CONFIG.token_budget,
        max_num_seqs=CONFIG.max_num_seqs,
    )
    if warm_up:
        serve(Engine(config, device=device), steps)
    profiler = Profiler(collectors, engine=f"syncfree engine ({builder})", kind="demo")
    engine = Engine(config, device=device, profiler=profiler)
    with profiler:
        serve(engine, steps, progress)
    return profiler.report


def serve(engine: Engine, steps: int, progress: Progress | None = None) -> None:
    """Run exactly `steps` steps of the workload: arrivals are timed in steps, idle time is skipped."""
    arrivals = _arrivals(random.Random(20))
    clock, due = 0, next(arrivals)
    done, began = 0, time.perf_counter()
    while done < steps:
        while due[0] <= clock:
            for prompt, max_tokens in due[1]:
                engine.add_request(prompt, max_tokens)
            due = next(arrivals)
        if engine.step() is None:
            clock = due[0]
            continue
        clock += 1
        done += 1
        if progress is not None:
            progress(done, time.perf_counter() - began)


def _arrivals(rng: random.Random) -> Iterator[tuple[int, list[tuple[list[int], int]]]]:
    """`(step, [(prompt, max_tokens), ...])` without end: short prompts, prompts with a known prefix, a long prompt."""
    vocab = CONFIG.model.vocab_size

    def prompt(shortest: int, longest: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(rng.randint(shortest, longest))]

    system_prompt = prompt(SYSTEM_PROMPT_LEN, SYSTEM_PROMPT_LEN)
    yield 0, [(system_prompt, 4)]
    start = 0
    while True:
        yield start, [(prompt(4, 16), 4), (prompt(4, 16), 6)]
        yield start + 5, [(system_prompt + prompt(4, 12), 5)]
        yield start + 7, [(system_prompt + prompt(4, 12), 6)]
        yield start + 10, [(prompt(100, 120), 4)]
        start += PERIOD
