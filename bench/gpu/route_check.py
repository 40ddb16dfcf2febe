"""Is the choice between persistent and fixed-split MLA decode right on lengths that nothing was fitted to?

    python3 bench/gpu/route_check.py OUT.json [--seed 7] [--seconds 60]

Draws lengths (uniform, one long among short ones, lognormal, a mixture of two sizes), batches of 1 to 256 and head
counts by the seed, times every kernel on this GPU, and says how much slower the choice of `backends/mla_decode_times`
is than the best. OUT.json keeps all timings too: `fit_times.py` reads them. Exit code 1 where the choice is more than
3 % slower on more than one shape in twenty. Needs a GPU and Triton.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
TOLERANCE, OFTEN = 0.03, 0.05
HEADS = ((16, 1), (128, 1), (16, 4), (32, 1), (16, 2), (64, 1))
LONGEST, TOKENS = 65536, 1 << 21  # tokens of one request, of a batch: what fits beside the timer's buffers


def drawn(seed: int) -> Iterator[tuple[str, np.ndarray, int, int]]:
    """(name, KV lengths [B], heads, query length) without end."""
    rng = np.random.default_rng(seed)
    while True:
        batch = int(rng.choice([1, 2, 3, 6, 8, 12, 24, 48, 96, 160, 256]))
        longest = int(2 ** rng.uniform(10, 16))
        kind = str(rng.choice(["uniform", "one long", "lognormal", "two sizes"]))
        if kind == "uniform":
            lens = np.full(batch, longest)
        elif kind == "one long":
            lens = np.full(batch, int(2 ** rng.uniform(7, 11)))
            lens[rng.integers(batch)] = longest
        elif kind == "lognormal":
            lens = rng.lognormal(rng.uniform(6.5, 9.0), rng.uniform(0.4, 1.4), batch)
        else:
            lens = np.where(rng.random(batch) < rng.uniform(0.1, 0.6), longest, longest // 8)
        lens = np.clip(lens, 16, LONGEST).astype(int)
        lens = np.maximum(16, lens * min(1.0, TOKENS / lens.sum())).astype(int)
        heads, query_len = HEADS[int(rng.integers(len(HEADS)))]
        yield f"{kind}, {batch} rows, up to {lens.max()}", lens, heads, query_len


def judged(row: dict[str, Any], lens: np.ndarray, num_cu: int) -> dict[str, Any]:
    """The choice on a timed shape, and how much slower than the best it is; None where the choice was not timed."""
    from syncfree.backends import mla_decode_times as model

    choice = model.choose(model.Shape(lens, row["query_len"], row["heads"], num_cu))
    fixed = {int(splits): us for splits, us in row["fixed_us"].items()}
    us = row["persistent_us"] if choice.persistent else fixed.get(choice.splits)
    best = min(row["persistent_us"], *fixed.values())
    return {
        "shape": row["lengths"],
        "heads": row["heads"],
        "query_len": row["query_len"],
        "choice": "persistent" if choice.persistent else f"{choice.splits} splits",
        "expected_us": round(choice.us, 1),
        "us": us,
        "best_us": best,
        "slower_by": None if us is None else round(us / best - 1, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    import mla_h200
    import torch

    run = mla_h200.Run(512, 64, False, time.monotonic() + options.seconds)
    timer, num_cu = mla_h200.Timer(), torch.cuda.get_device_properties(0).multi_processor_count
    rows: list[dict[str, Any]] = []
    timings: list[dict[str, Any]] = []
    for name, lens, heads, query_len in drawn(options.seed):
        if run.out_of_time():
            break
        timed = mla_h200.time_shape(run, timer, name, lens, heads, query_len)
        rows.append(judged(timed, lens, num_cu))
        timings.append(timed | {"kv_lens": lens.tolist()})
        print(json.dumps(rows[-1]), flush=True)
    known = [row for row in rows if row["slower_by"] is not None]
    off = [row for row in known if row["slower_by"] > TOLERANCE]
    told = {"command": " ".join(["python3", *sys.argv]), "device": torch.cuda.get_device_name(), "seed": options.seed}
    told |= {"torch": torch.__version__, "triton": mla_h200.triton.__version__, "num_cu": num_cu}
    told |= {"shapes": len(known), "off": len(off), "rows": rows, "timing": {"rows": timings}}
    options.out.write_text(json.dumps(told))
    print(f"{len(known)} shapes, {len(off)} of them off by more than {TOLERANCE:.0%}")
    return 1 if not known or len(off) > OFTEN * len(known) else 0


if __name__ == "__main__":
    sys.exit(main())
