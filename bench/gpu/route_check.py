"""Is the choice between persistent and fixed-split MLA decode right on lengths that nothing was fitted to?

    python3 bench/gpu/route_check.py OUT.json [--seeds 7] [--seconds 60]
    python3 bench/gpu/route_check.py OUT.json --seeds 11,12 --seconds 400        # OUT-11.json and OUT-12.json

Draws lengths (uniform, one of 64k or another long one among short ones, lognormal, a mixture of two sizes), batches of
1 to 256 and head counts by each seed, times every kernel on this GPU, and says how much slower the choice of
`backends/mla_decode_times` is than the best. Each seed has its share of the time and a file of its own, which keeps the
lengths and all timings: `fit_times.py` reads one to fit to, and another to say what the fit is worth (`--against`).
One shape in ten is timed again at the end: how far two timings of one kernel lie apart says what 3 % can mean. Exit
code 1 where the choice is more than 3 % slower on more than one shape in twenty. Needs a GPU and Triton.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
TOLERANCE, OFTEN, AGAIN = 0.03, 0.05, 10
HEADS = ((16, 1), (16, 1), (128, 1), (16, 4), (32, 1), (16, 2), (64, 1))
LONGEST, TOKENS = 65536, 1 << 21  # tokens of one request, of a batch: what fits beside the timer's buffers
KINDS = ("uniform", "one 64k", "one long", "lognormal", "two sizes")

Drawn = tuple[str, np.ndarray, int, int]


def drawn(seed: int) -> Iterator[Drawn]:
    """(name, KV lengths [B], heads, query length) without end."""
    rng = np.random.default_rng(seed)
    while True:
        batch = round(2 ** rng.uniform(0, 8))
        longest = int(2 ** rng.uniform(10, 16))
        kind = str(rng.choice(KINDS))
        if kind == "uniform":
            lens = np.full(batch, longest)
        elif kind in ("one long", "one 64k"):
            lens = np.full(batch, int(2 ** rng.uniform(7, 11)))
            lens[rng.integers(batch)] = LONGEST if kind == "one 64k" else longest
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
    import fit_times
    from syncfree.backends import mla_decode_times as model

    choice = model.choose(model.Shape(lens, row["query_len"], row["heads"], num_cu))
    timed = fit_times.timings(row)
    us, best = timed.get(choice.splits), min(timed.values())
    return {
        "shape": row["lengths"],
        "heads": row["heads"],
        "query_len": row["query_len"],
        "choice": choice.kernel,
        "expected_us": round(choice.us, 1),
        "us": us,
        "best_us": best,
        "slower_by": None if us is None else round(us / best - 1, 4),
    }


def apart(first: list[dict[str, Any]], again: list[dict[str, Any]]) -> dict[str, Any]:
    """How far two timings of one kernel lie apart, and the replays of one timing, relative: medians and the worst."""
    distances, spreads = [], []
    for one, other in zip(first, again, strict=True):
        for splits, us in (one["fixed_us"] | {"persistent": one["persistent_us"]}).items():
            second = other["persistent_us"] if splits == "persistent" else other["fixed_us"][splits]
            distances.append(abs(second / us - 1))
            spreads.append(one["spread_us"][str(splits)] / us)
    if not distances:
        return {"kernels": 0}
    return {
        "kernels": len(distances),
        "twice_median": round(statistics.median(distances), 5),
        "twice_p90": round(float(np.quantile(distances, 0.9)), 5),
        "twice_worst": round(max(distances), 5),
        "quartiles_median": round(statistics.median(spreads), 5),
        "quartiles_worst": round(max(spreads), 5),
    }


def checked(seed: int, seconds: float, num_cu: int, time_one: Any) -> dict[str, Any]:
    """What one seed shows in so many seconds. `time_one(name, lens, heads, query_len)` gives a timed row."""
    began, timings, rows = time.monotonic(), [], []
    seen: list[Drawn] = []
    for shape in drawn(seed):
        spent = time.monotonic() - began
        if spent * (1 + 1 / AGAIN) > seconds and rows:
            break
        seen.append(shape)
        timings.append(time_one(*shape) | {"kv_lens": shape[1].tolist()})
        rows.append(judged(timings[-1], shape[1], num_cu))
        print(json.dumps(rows[-1]), flush=True)
    again = [time_one(*shape) for shape in seen[::AGAIN]]
    known = [row["slower_by"] for row in rows if row["slower_by"] is not None]
    return {
        "seed": seed,
        "num_cu": num_cu,
        "shapes": len(known),
        "off": sum(slower > TOLERANCE for slower in known),
        "p90": round(float(np.quantile(known, 0.9)), 4) if known else None,
        "worst": max(known, default=None),
        "noise": apart(timings[::AGAIN], again),
        "rows": rows,
        "timing": {"rows": timings},
    }


def summary(found: dict[str, Any]) -> str:
    if not found["shapes"]:
        return "no choice was timed"
    off = f"{found['off']} of {found['shapes']} choices off by more than {TOLERANCE:.0%}"
    noise = found["noise"]
    twice = (
        f"two timings of a kernel lie {noise['twice_median']:.2%} apart, one in ten {noise['twice_p90']:.2%} or more"
    )
    return f"{off}; one in ten by {found['p90']:.1%} or more, worst {found['worst']:.1%}; {twice}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="7", help="of as many files, in one process; comma-separated")
    parser.add_argument("--seconds", type=float, default=60, help="for all seeds together")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    import mla_h200
    import torch

    run = mla_h200.Run(512, 64, False, time.monotonic() + options.seconds)
    timer, num_cu = mla_h200.Timer(), torch.cuda.get_device_properties(0).multi_processor_count
    about = {"command": " ".join(["python3", *sys.argv]), "device": torch.cuda.get_device_name()}
    about |= {"torch": torch.__version__, "triton": mla_h200.triton.__version__}

    def time_one(*shape: Any) -> dict[str, Any]:
        return mla_h200.time_shape(run, timer, *shape, brief=True)

    for heads, query_len in HEADS:  # compiles and warms up, so that no seed's shapes do
        time_one("warm-up", np.full(8, 4096), heads, query_len)
    wrong = False
    for seed in seeds:
        found = checked(seed, options.seconds / len(seeds), num_cu, time_one)
        name = f"{options.out.stem}-{seed}{options.out.suffix}"
        file = options.out if len(seeds) == 1 else options.out.with_name(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(about | found))
        print(f"seed {seed}: {summary(found)}")
        wrong |= not found["shapes"] or found["off"] > OFTEN * found["shapes"]
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
