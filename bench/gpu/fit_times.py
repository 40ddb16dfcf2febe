"""Fits `backends/mla_decode_times.json` to the timings of one device, and says what the fit is worth.

    python3 bench/gpu/fit_times.py bench/results/2026-11-29-h200/mla_h200.json [MORE.json...] [--write]

Least squares over the relative errors of every timed kernel; a slow number of splits, which no choice comes near,
counts a tenth. Without --write nothing is changed. Prints the root mean square errors and every shape
on which the choice is more than 3 % slower than the best kernel; exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from syncfree.backends import mla_decode_times as model
from syncfree.backends.mla_decode_times import Coefficients, Shape, Times

TOLERANCE = 0.03
BLOCK_N = {16: 64, 32: 64, 64: 32}  # KV tokens of a block, by its packed rows: `triton_mla.TUNING`
FIXED = ("launch", "chain", "pool_rows", "blocks", "programs")
PERSISTENT = ("launch", "workgroup", "pool_rows", "chain", "fresh")
NEAR, FAR_WEIGHT = 1.3, 0.1


def lengths(name: str) -> np.ndarray:
    """The KV lengths of a timed shape by its name, as `mla_h200.timing_shapes` makes them."""
    rng = np.random.default_rng(0)
    drawn = {f"lognormal {b}": np.clip(rng.lognormal(8.0, 1.0, b), 16, 65536).astype(int) for b in (1, 4, 16, 64, 256)}
    if name in drawn:
        return drawn[name]
    words = name.split()
    if words[0] == "uniform":
        return np.full(int(words[1]), int(words[3]))
    return np.array([int(words[1])] + [int(words[5])] * int(words[3]))


def shape_of(row: dict[str, Any], num_cu: int) -> Shape:
    lens = np.array(row["kv_lens"]) if "kv_lens" in row else lengths(row["lengths"])
    if lens.sum() != row["tokens"] or lens.max() != row["longest"]:
        raise SystemExit(f"{row['lengths']}: the lengths of this name are not those that were timed")
    return Shape(lens, row["query_len"], row["heads"], num_cu)


def figures(shape: Shape, splits: int, settings: Coefficients, names: tuple[str, ...]) -> list[float]:
    """What each coefficient is multiplied with: the model's own sums, one coefficient at a time."""
    found = []
    for name in names:
        one = dict.fromkeys(names, 0.0) | {name: 1.0}
        both = msgspec.structs.replace(settings, fixed=one, persistent=one)
        times = Times("", "", shape.num_cu, {model.block_rows(shape.query_len * shape.heads): both})
        found.append(model.fixed_us(shape, splits, times) if splits else model.persistent_us(shape, times))
    return found


def solved(table: list[list[float]], us: list[float], weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Non-negative least squares by coordinate descent: (coefficients, weighted root mean square error)."""
    a = np.array(table) * weights[:, None]
    b = np.array(us) * weights
    scale = np.sqrt((a**2).sum(0)) + 1e-30
    gram, side = (a / scale).T @ (a / scale), (a / scale).T @ b
    x = np.zeros(a.shape[1])
    for _ in range(3000):
        for i in range(len(x)):
            x[i] = max(0.0, x[i] + side[i] - gram[i] @ x)
    x = x / scale
    return x, float(np.sqrt(((a @ x - b) ** 2).mean()))


def candidates(block: int) -> Iterator[Coefficients]:
    nothing: dict[str, float] = {}
    for each, exponent, rate in itertools.product((1, 2, 3), (2, 4, 6, 12), np.arange(0.3, 1.6, 0.05).round(2)):
        yield Coefficients(BLOCK_N[block], each, float(exponent), float(rate), nothing, nothing)


def fit_block(rows: list[dict[str, Any]], block: int, num_cu: int) -> tuple[Coefficients, dict[str, float]]:
    shapes = [shape_of(row, num_cu) for row in rows]
    best = [min(*row["fixed_us"].values(), row["persistent_us"]) for row in rows]
    timed = [
        (shape, int(splits), us, least)
        for shape, row, least in zip(shapes, rows, best, strict=True)
        for splits, us in row["fixed_us"].items()
    ]
    us = [entry[2] for entry in timed]
    weights = np.array([(1 if t < NEAR * least else FAR_WEIGHT) / t for _, _, t, least in timed])
    found: tuple[float, Coefficients, np.ndarray] | None = None
    for settings in candidates(block):
        x, error = solved([figures(shape, splits, settings, FIXED) for shape, splits, _, _ in timed], us, weights)
        if found is None or error < found[0]:
            found = error, settings, x
    assert found is not None
    error, settings, x = found
    us = [row["persistent_us"] for row in rows]
    y, persistent = solved([figures(s, 0, settings, PERSISTENT) for s in shapes], us, 1 / np.array(us))
    fitted = msgspec.structs.replace(
        settings,
        fixed=dict(zip(FIXED, x.round(6).tolist(), strict=True)),
        persistent=dict(zip(PERSISTENT, y.round(6).tolist(), strict=True)),
    )
    return fitted, {"timings": len(timed) + len(rows), "fixed": error, "persistent": persistent}


def regrets(rows: list[dict[str, Any]], times: Times) -> Iterator[tuple[str, str, float]]:
    """(shape, kernel chosen, how much slower it is than the best) of every timed shape."""
    for row in rows:
        choice = model.choose(shape_of(row, times.num_cu), times=times)
        us = row["persistent_us"] if choice.persistent else row["fixed_us"][str(choice.splits)]
        best = min(*row["fixed_us"].values(), row["persistent_us"])
        name = f"{row['lengths']}, {row['heads']} heads, query {row['query_len']}"
        yield name, "persistent" if choice.persistent else f"{choice.splits} splits", us / best - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="of the same device; the last one names the versions")
    parser.add_argument("--num-cu", type=int, default=132, help="of the device that was timed; an H200 has 132")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows = []
    for file in options.results:
        result = json.loads(file.read_text())
        rows += result["timing"]["rows"]
    num_cu = result.get("num_cu", options.num_cu)
    by_block: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_block.setdefault(model.block_rows(row["heads"] * row["query_len"]), []).append(row)
    blocks = {}
    for block, its in sorted(by_block.items()):
        blocks[block], errors = fit_block(its, block, num_cu)
        print(f"blocks of {block}: {errors}")
    source = ", ".join("/".join(file.resolve().parts[-4:]) for file in options.results)
    times = Times(f"{result['device']}, torch {result['torch']}, Triton {result['triton']}", source, num_cu, blocks)
    found = sorted(regrets(rows, times), key=lambda entry: -entry[2])
    bad = [entry for entry in found if entry[2] > TOLERANCE]
    for name, kernel, regret in bad or found[:3]:
        print(f"{name}: {kernel} is {regret:.1%} slower than the best")
    print(f"{len(rows)} shapes, {len(bad)} of them off by more than {TOLERANCE:.0%}")
    if options.write:
        model.DATA.write_bytes(msgspec.json.format(msgspec.json.encode(times), indent=1) + b"\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
