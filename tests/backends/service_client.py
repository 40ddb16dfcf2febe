"""A client process for the tests: asks for plans of random batches and compares them with its own planner's.

python service_client.py SOCKET PLANS SEED
"""

import random
import sys
from pathlib import Path

from syncfree.backends.attention import attention_backend
from syncfree.backends.service import PlanClient
from syncfree.planner import Batch, Environment, Limits, Planner

BACKENDS = ("aiter_fa", "aiter_mla", "triton")


def random_batch(rng, rows=None):
    """Decodes, then extends, then fresh prefills, as a scheduler sends them."""
    rows = rng.randint(1, 24) if rows is None else rows
    kinds = sorted(rng.choice("dddeep") for _ in range(rows))
    query = [1 if kind == "d" else rng.randint(2, 40) for kind in kinds]
    context = [0 if kind == "p" else rng.randint(1, 900) for kind in kinds]
    return Batch.from_lengths(query, [q + c for q, c in zip(query, context, strict=True)])


def main(path, plans, seed):
    rng = random.Random(seed)
    environment, limits = Environment(), Limits(num_heads=16 * (1 + seed % 4))
    planners = {name: Planner(attention_backend(name), environment, limits) for name in BACKENDS}
    with PlanClient(path, timeout_s=60, reconnect_s=60) as client:
        for _ in range(plans):
            batch, name = random_batch(rng), rng.choice(BACKENDS)
            mine = planners[name].plan(batch).to_bytes()
            if client.plan_bytes(name, batch, environment, limits) != mine:
                sys.exit(f"{name}: another plan for {batch!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
