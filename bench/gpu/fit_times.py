"""Fits `backends/mla_decode_times.json` to the timings of one device, and says what the fit is worth.

    python3 bench/gpu/fit_times.py bench/results/2026-11-29-h200/mla_times.json [MORE.json...] [--write]
    python3 bench/gpu/fit_times.py check-11.json --against check-12.json

Files of `mla_h200.py`, `cases.py` (timing.json) and `route_check.py`. Least squares over the relative errors of every
timed kernel, coefficients not negative; a slow number of splits, which no choice comes near, counts a tenth. A choice
is between kernels of one shape, so what their errors have in common (a clock that was slow just then) counts less than
how they differ. Each file is a run of its own: launches cost a microsecond or two more in one than in another.

Prints, per block size, the errors of the kernels that a choice comes near; then how much slower than the best kernel
the choices are: on the shapes fitted to, and on each fifth of the shapes by a fit to the other four (`--folds`), which
is what to expect of shapes that are new. Without --write nothing is changed. Exit code 1 if a choice is more than 3 %
slower than the best on a shape that was fitted to.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from syncfree.backends import mla_decode_times as model
from syncfree.backends.mla_decode_times import FIXED, PERSISTENT, Coefficients, Shape, Times

TOLERANCE = 0.03
BLOCK_N = {16: 64, 32: 64, 64: 32}  # KV tokens of a block, by its packed rows: `triton_mla.TUNING`
NEAR, FAR_WEIGHT = 1.3, 0.1
COMMON = 0.3  # weight of the error that all near kernels of a shape have in common
PROGRAMS_EACH, OVERHEADS, SETTLES = (1, 2, 3), (0.25, 0.5, 0.75, 1.0, 1.5, 2.0), (4.0, 8.0, 16.0, 32.0)
CACHED_ROWS = (6_000, 8_000, 10_000, 12_500, 16_000, 20_000, 25_000)


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


def timings(row: dict[str, Any]) -> dict[int, float]:
    """Microseconds by splits; 0 is the persistent kernel."""
    return {0: row["persistent_us"]} | {int(splits): us for splits, us in row["fixed_us"].items()}


class Data:
    """The timings of one block size, a line a kernel and shape; of `runs` the last one's launches are kept."""

    def __init__(self, block: int, num_cu: int, runs: int, rows: list[dict[str, Any]]) -> None:
        self.block, self.num_cu, self.runs, self.rows = block, num_cu, runs, rows
        self.splits: list[int] = []
        self.us: list[float] = []
        self.near: list[bool] = []
        self.row_of: list[int] = []
        for index, row in enumerate(rows):
            timed = timings(row)
            self.splits += timed
            self.us += timed.values()
            self.near += [us < NEAR * min(timed.values()) for us in timed.values()]
            self.row_of += [index] * len(timed)

    def weights(self) -> np.ndarray:
        """[timings]: 1, or what a slow number of splits counts."""
        return np.where(np.array(self.near) | (np.array(self.splits) == 0), 1.0, FAR_WEIGHT)

    def relative(self, table: np.ndarray) -> np.ndarray:
        """Of the measured times, less most of what the near kernels of a shape have in common; a column of ones last.

        The least squares of this table against its last column are those of the relative errors, parted so.
        """
        us, row_of, near = np.array(self.us), np.array(self.row_of), np.array(self.near)
        lines = np.column_stack([table / us[:, None], np.ones(len(us))])
        sums = np.zeros((len(self.rows), lines.shape[1]))
        np.add.at(sums, row_of[near], lines[near])
        counts = np.bincount(row_of[near], minlength=len(self.rows))
        return lines - (1 - COMMON) * (sums / counts[:, None])[row_of]

    def table(self, c: Coefficients) -> np.ndarray:
        """[timings, FIXED + PERSISTENT + two a run but the last]: what each coefficient is multiplied with."""
        shapes = [shape_of(row, self.num_cu) for row in self.rows]
        table = np.zeros((len(self.us), len(FIXED) + len(PERSISTENT) + 2 * (self.runs - 1)))
        for line, (index, splits) in enumerate(zip(self.row_of, self.splits, strict=True)):
            if splits:
                figures = model.fixed_figures(shapes[index], splits, c)
                table[line, : len(FIXED)] = [figures[name] for name in FIXED]
            else:
                figures = model.persistent_figures(shapes[index], c)
                table[line, len(FIXED) : len(FIXED) + len(PERSISTENT)] = [figures[name] for name in PERSISTENT]
            run = self.rows[index]["run"]
            if run < self.runs - 1:  # so much more, or less
                at = len(FIXED) + len(PERSISTENT) + 2 * run
                table[line, at : at + 2] = (1.0, -1.0)
        return table

    def tables(self) -> list[tuple[Coefficients, np.ndarray]]:
        """What is fitted (`relative`) for every combination of settings."""
        found = []
        pool_rows, spilled = FIXED.index("pool_rows"), FIXED.index("spilled_rows")
        for each, overhead, settle in itertools.product(PROGRAMS_EACH, OVERHEADS, SETTLES):
            settings = Coefficients(BLOCK_N[self.block], each, overhead, settle, 0, {}, {})
            table = self.table(settings)
            for cached in CACHED_ROWS:
                one = table.copy()
                one[:, spilled] = np.maximum(table[:, pool_rows] - cached, 0)
                found.append((msgspec.structs.replace(settings, cached_rows=cached), self.relative(one)))
        return found


def solved(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, float]:
    """Non-negative least squares of a x = b (Lawson and Hanson): (x, root mean square error)."""
    scale = np.sqrt((a**2).sum(0)) + 1e-30
    gram, side = (a / scale).T @ (a / scale), (a / scale).T @ b
    x, free = np.zeros(len(side)), np.zeros(len(side), bool)
    for _ in range(20 * len(side)):
        gain = np.where(free, -np.inf, side - gram @ x)
        if gain.max() <= 1e-9 * np.abs(side).max():
            break
        free[gain.argmax()] = True
        while True:
            tried = np.zeros_like(x)
            tried[free] = np.linalg.lstsq(gram[np.ix_(free, free)], side[free], rcond=None)[0]
            low = free & (tried <= 0)
            if not low.any():
                x = tried
                break
            x = x + (x[low] / (x[low] - tried[low])).min() * (tried - x)
            free &= x > 1e-12
            x[~free] = 0
    x = x / scale
    return x, float(np.sqrt(((a @ x - b) ** 2).mean()))


def fitted(data: Data, tables: Iterable[tuple[Coefficients, np.ndarray]], used: np.ndarray) -> Coefficients:
    """The settings and coefficients with the least error on the timings `used` (mask)."""
    weights = data.weights()[used][:, None]
    best: tuple[float, Coefficients, np.ndarray] | None = None
    for settings, table in tables:
        lines = table[used] * weights
        x, error = solved(lines[:, :-1], lines[:, -1])
        if best is None or error < best[0]:
            best = error, settings, x
    assert best is not None
    x = best[2].round(6).tolist()
    fixed = dict(zip(FIXED, x[: len(FIXED)], strict=True))
    persistent = dict(zip(PERSISTENT, x[len(FIXED) : len(FIXED) + len(PERSISTENT)], strict=True))
    return msgspec.structs.replace(best[1], fixed=fixed, persistent=persistent)


def predicted(row: dict[str, Any], splits: int, times: Times) -> float:
    """Microseconds of a timed kernel; 0 splits is the persistent one."""
    shape = shape_of(row, times.num_cu)
    return model.fixed_us(shape, splits, times) if splits else model.persistent_us(shape, times)


class Errors(NamedTuple):
    """Relative errors of expected times."""

    fixed: list[float]  # of splits that a choice comes near
    persistent: list[float]
    differing: list[float]  # of the kernels that a choice comes near, less what those of one shape have in common

    def __str__(self) -> str:
        parts = zip(("fixed", "persistent", "between kernels of a shape"), self, strict=True)
        return ", ".join(f"{name} {rms(values)}" for name, values in parts)


def errors(rows: Iterable[dict[str, Any]], times: Times) -> Errors:
    found = Errors([], [], [])
    for row in rows:
        timed = timings(row)
        near = [splits for splits, us in timed.items() if us < NEAR * min(timed.values())]
        off = {splits: predicted(row, splits, times) / timed[splits] - 1 for splits in {0, *near}}
        found.persistent.append(off[0])
        found.fixed.extend(off[splits] for splits in near if splits)
        shared = sum(off[splits] for splits in near) / len(near)
        found.differing.extend(off[splits] - shared for splits in near)
    return found


def name_of(row: dict[str, Any]) -> str:
    return f"{row['lengths']}, {row['heads']} heads, query {row['query_len']}"


def regrets(rows: Iterable[dict[str, Any]], times: Times) -> Iterator[tuple[str, str, float]]:
    """(shape, kernel chosen, how much slower it is than the best) of every timed shape."""
    for row in rows:
        choice = model.choose(shape_of(row, times.num_cu), times=times)
        timed = timings(row)
        us = timed.get(choice.splits, float("inf"))  # one that did not fit the device's memory
        yield name_of(row), choice.kernel, us / min(timed.values()) - 1


def told(found: list[tuple[str, str, float]], what: str) -> int:
    """Prints how far the choices are off, and of which kinds of shapes; how many are off by more than TOLERANCE."""
    off = sorted(regret for _, _, regret in found)
    bad = [name for name, _, regret in found if regret > TOLERANCE]
    p90 = off[min(len(off) - 1, int(0.9 * len(off)))]
    within = f"{len(off) - len(bad)} of {len(off)} within {TOLERANCE:.0%} of the best"
    print(f"{what}: {within}; one in ten off by {p90:.1%} or more, worst {off[-1]:.1%}")
    if bad:
        all_kinds, kinds = Counter(map(kind_of, (name for name, _, _ in found))), Counter(map(kind_of, bad))
        print("  off: " + "; ".join(f"{count} of {all_kinds[kind]} {kind}" for kind, count in kinds.most_common()))
    return len(bad)


def kind_of(name: str) -> str:
    """Of a shape by its name: what its lengths are like, heads, and query length."""
    lens, _, query_len = name.rpartition(", query ")
    like = re.match("one 64k|[a-z]+( long| sizes)?", lens)
    return f"{like[0] if like else lens}, {lens.rpartition(', ')[2]} x {query_len}"


def worst(found: list[tuple[str, str, float]], rows: list[dict[str, Any]], times: Times) -> None:
    """The shapes that are off (or the next ones): the choice and the best kernel, as timed and as expected."""
    order = sorted(range(len(found)), key=lambda index: -found[index][2])
    for index in [index for index in order if found[index][2] > TOLERANCE][:30] or order[:3]:
        name, kernel, regret = found[index]
        timed = timings(rows[index])
        best = min(timed, key=lambda splits: timed[splits])
        chosen = 0 if kernel == "persistent" else int(kernel.split()[0])
        us = [
            f"{predicted(rows[index], splits, times):.1f} us, was {timed.get(splits, 0):.1f}"
            for splits in (chosen, best)
        ]
        other = model.Choice(best, timed[best]).kernel
        print(f"  {name}: {kernel} (expected {us[0]}) is {regret:.1%} slower than {other} (expected {us[1]})")


def rms(values: list[float]) -> str:
    return f"{np.sqrt(np.mean(np.square(values))):.1%} (worst {np.abs(values).max():.0%})" if values else "none"


def fit_block(data: Data, device: str, folds: int) -> tuple[Coefficients, list[tuple[str, str, float]]]:
    """The coefficients, and what choices were worth on shapes that a fit had not seen."""
    tables, row_of = data.tables(), np.array(data.row_of)
    c = fitted(data, tables, np.ones(len(data.us), bool))
    seen = errors(data.rows, Times(device, "", data.num_cu, {data.block: c}))
    print(f"blocks of {data.block}: {len(data.rows)} shapes, {len(data.us)} timings; {settings_of(c)}")
    print(f"  errors of near kernels: {seen}")
    fold_of = np.random.default_rng(0).permutation(len(data.rows)) % max(folds, 1)
    found: list[tuple[str, str, float]] = []
    unseen = Errors([], [], [])
    for fold in range(folds if folds > 1 else 0):
        times = Times(device, "", data.num_cu, {data.block: fitted(data, tables, fold_of[row_of] != fold)})
        left_out = [row for row, its in zip(data.rows, fold_of, strict=True) if its == fold]
        for known, new in zip(unseen, errors(left_out, times), strict=True):
            known += new
        found += regrets(left_out, times)
    if found:
        print(f"  of shapes left out:     {unseen}")
    return c, found


def settings_of(c: Coefficients) -> str:
    return (
        f"{c.programs_each} programs a unit, overhead {c.overhead:g} blocks, apart after {c.settle:g}, "
        f"{c.cached_rows} rows cached"
    )


def read(files: list[Path]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(rows of all files, each with the number of its run; the last file)."""
    rows = []
    for run, file in enumerate(files):
        result = json.loads(file.read_text())
        rows += [row | {"run": run} for row in result["timing"]["rows"]]
    return rows, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="of the same device; the last one names the versions")
    parser.add_argument("--num-cu", type=int, default=132, help="of the device that was timed; an H200 has 132")
    parser.add_argument("--against", type=Path, nargs="+", default=[], help="files to judge the fit by, not fitted to")
    parser.add_argument("--folds", type=int, default=5, help="parts of the shapes that are left out in turn; 0: none")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows, result = read(options.results)
    num_cu = result.get("num_cu", options.num_cu)
    device = f"{result['device']}, torch {result['torch']}, Triton {result['triton']}"
    by_block: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_block.setdefault(model.block_rows(row["heads"] * row["query_len"]), []).append(row)
    blocks, left_out = {}, []
    for block, its in sorted(by_block.items()):
        data = Data(block, num_cu, len(options.results), its)
        blocks[block], found = fit_block(data, device, options.folds)
        left_out += found
    source = ", ".join("/".join(file.resolve().parts[-4:]) for file in options.results)
    times = Times(device, source, num_cu, blocks)
    found = list(regrets(rows, times))
    bad = told(found, "choices on the shapes fitted to")
    worst(found, rows, times)
    if left_out:
        told(left_out, "choices on shapes left out of the fit")
    for file in options.against:
        others, _ = read([file])
        judged = list(regrets(others, times))
        told(judged, f"choices on {file.name}, which was not fitted to")
        worst(judged, others, times)
    if options.write:
        model.DATA.write_bytes(msgspec.json.format(msgspec.json.encode(times), indent=1) + b"\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
