"""A plan over the planning service beside the same plan in one's own process; run: python bench/service.py

`--stress` instead: 8 client processes, 10,000 plans each, every one compared with the client's own planner, the
service's memory watched after the warm-up. Exit code 1 where a plan differs, a request fails or memory grows.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from syncfree.backends.attention import attention_backend
from syncfree.backends.service import PlanClient
from syncfree.planner import Batch, Environment, Limits, Planner

LIMITS = Limits(num_heads=16, max_num_seqs=1024, max_num_batched_tokens=65536)
FA_LIMITS = Limits(num_heads=16, num_kv_heads=8, max_num_seqs=1024, max_num_batched_tokens=65536)
BACKENDS = {"aiter_mla": LIMITS, "aiter_fa": FA_LIMITS, "triton": FA_LIMITS}
CLIENTS, PLANS, WARM_UP = 8, 10_000, 1_000
MAX_GROWTH_BYTES = 2 * 1024 * 1024  # an allocator's own noise; a leak of 32 bytes a plan would be past it


@contextmanager
def service() -> Iterator[Path]:
    """A service in a process of its own, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="syncfree-bench-") as folder:
        path = Path(folder) / "sockets" / "plan.sock"
        command = [sys.executable, "-m", "syncfree.cli", "serve", "--socket", str(path), "--idle", "600"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield path
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        if process.returncode or any(path.parent.iterdir()):
            raise AssertionError(f"the service ended with {process.returncode} and left {list(path.parent.iterdir())}")


# ---------------------------------------------------------------- latency


def steps(kind: str, rows: int) -> Callable[[], Batch]:
    """Makes the next step: decodes that grow by a token, or with a quarter of extends and a quarter of prefills."""
    rng = np.random.default_rng(rows)
    context = rng.integers(300, 4000, rows)
    query = np.ones(rows, dtype=np.int64)
    if kind == "mixed":
        query[rows // 2 :] = 32
        context[rows * 3 // 4 :] = 0

    def step() -> Batch:
        context[: rows // 2 if kind == "mixed" else rows] += 1
        return Batch.from_lengths(query, context + query)

    return step


def microseconds(run: Callable[..., object], *given: object) -> float:
    start = time.perf_counter_ns()
    run(*given)
    return (time.perf_counter_ns() - start) / 1e3


def compare(
    client: PlanClient, backend: str, kind: str, rows: int, rounds: int = 400
) -> tuple[list[float], list[float]]:
    """Microseconds of each step's plan in this process and over the service, in turns."""
    limits, step = BACKENDS[backend], steps(kind, rows)
    planner = Planner(attention_backend(backend), Environment(), limits)
    here, there = [], []
    for turn in range(rounds + 20):
        batch = step()
        mine = microseconds(planner.plan, batch)
        theirs = microseconds(client.plan, backend, batch, Environment(), limits)
        if turn >= 20:
            here.append(mine)
            there.append(theirs)
    return here, there


def latency() -> None:
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}; microseconds a plan")
    print(f"{'':28}{'in process':>18}{'service':>18}{'':>10}")
    print(f"{'':28}{'p50':>9}{'p99':>9}{'p50':>9}{'p99':>9}{'added p50':>12}")
    with service() as path, PlanClient(path) as client:
        for backend in BACKENDS:
            for kind in ("decode", "mixed"):
                for rows in (16, 256):
                    here, there = compare(client, backend, kind, rows)
                    figures = [f(side) for side in (here, there) for f in (statistics.median, _p99)]
                    added = figures[2] - figures[0]
                    name = f"{backend}, {kind}, {rows} rows"
                    print(f"{name:28}" + "".join(f"{figure:9.0f}" for figure in figures) + f"{added:12.0f}")


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


# ---------------------------------------------------------------- stress


def random_step(rng: random.Random) -> Batch:
    rows = rng.randint(1, 64)
    kinds = sorted(rng.choice("ddddep") for _ in range(rows))
    query = [1 if kind == "d" else rng.randint(2, 64) for kind in kinds]
    context = [0 if kind == "p" else rng.randint(1, 4000) for kind in kinds]
    return Batch.from_lengths(query, [q + c for q, c in zip(query, context, strict=True)])


def run_client(path: Path, plans: int, seed: int) -> None:
    """One client process; a different plan or an error ends it with a traceback."""
    rng = random.Random(seed)
    planners = {name: Planner(attention_backend(name), Environment(), limits) for name, limits in BACKENDS.items()}
    with PlanClient(path, timeout_s=120) as client:
        for number in range(plans):
            name, batch = rng.choice(list(BACKENDS)), random_step(rng)
            expected = planners[name].plan(batch).to_bytes()
            got = client.plan_bytes(name, batch, Environment(), BACKENDS[name])
            if got != expected:
                raise AssertionError(f"plan {number} of {name} differs: {batch!r}")


def start_clients(path: Path, plans: int) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, __file__, "--client", str(path), "--plans", str(plans)]
    return [subprocess.Popen([*command, "--seed", str(n)]) for n in range(CLIENTS)]


def stress(plans: int) -> int:
    """The same clients warm the service up and go on: what it holds for them is held before memory is first read."""
    warm_up = min(WARM_UP, plans)
    with service() as path, PlanClient(path, timeout_s=120) as client:
        running = start_clients(path, warm_up + plans)
        while client.health().plans < CLIENTS * warm_up and any(process.poll() is None for process in running):
            time.sleep(0.1)
        warm, start = client.health(), time.monotonic()
        failed = sum(process.wait() != 0 for process in running)
        seconds, after = time.monotonic() - start, client.health()
    growth, made = after.memory_bytes - warm.memory_bytes, after.plans - warm.plans
    print(
        f"{CLIENTS} clients, {after.plans} plans, {made} of them after the warm-up in {seconds:.0f} s "
        f"({made / seconds:.0f} a second), {failed} clients failed, {after.refused} refused, "
        f"{after.undelivered} undelivered; memory {warm.memory_bytes / 1e6:.1f} MB after the warm-up, "
        f"{growth / 1e6:+.2f} MB since"
    )
    good = not failed and not after.refused and not after.undelivered and growth <= MAX_GROWTH_BYTES
    return 0 if good and after.plans == CLIENTS * (warm_up + plans) else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stress", action="store_true")
    parser.add_argument("--plans", type=int, default=PLANS, help="of each client")
    parser.add_argument("--client", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        run_client(options.client, options.plans, options.seed)
    elif options.stress:
        sys.exit(stress(options.plans))
    else:
        latency()


if __name__ == "__main__":
    main()
