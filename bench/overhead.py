"""What counting costs: step times on a GPU with and without each collector, side by side in one run of some 90 s.

    python3 bench/overhead.py [--json FILE] [--seconds 65] [--modes nothing,probe,...] [--smoke]

Two steps: 600 small eager launches and one `.item()`; a CUDA graph of 300 nodes, 30 eager launches and one `.item()`.
A host's clock rate and neighbours change by more than what is measured, so nothing is compared that is not side by
side: each mode has a process of its own, and one more never has anything attached (the control); they take turns on
one core, the quietest, with garbage collection off. `x1.0012 [1.0004, 1.0019]` is the median of the ratios of one
round each and its 95 % interval; `undisturbed`: (lower decile of all steps with it) / (of all without), whatever the
neighbours did to the others. What a ratio is made of:

- flip (nothing, probe_hooks, sync_debug): switched between two steps and the next two, hundreds of times; a third kind
  of step there is a burst of 60 launches alone, short enough for thousands of pairs.
- rounds (pause, probe, probe_profiler): switched on and off again each round; (with it) / (mean of without, before
  and after). For `probe` that is a whole attachment. `pause` is nothing, with an attachment's pauses.
- control (kineto, gpu_trace, cupti): what cannot be switched off, or is felt after its end: (with it / control in the
  same round) over the same before it was ever switched on.

"after": (mode / control, switched off again) over (mode / control, before it was ever switched on).
`--smoke`: the same on a driver that does nothing, without a GPU: whether it all works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SPY = ROOT / "tests" / "data" / "sync_corpus" / "spy.c"
SHARES = {  # of the time; an attachment takes most of a second
    "nothing": 1.0,
    "pause": 1.5,
    "probe_hooks": 3.0,
    "probe": 4.5,
    "probe_profiler": 2.0,
    "sync_debug": 0.7,
    "kineto": 1.5,
    "gpu_trace": 1.0,
    "cupti": 1.0,
}
FLIPPED = ("nothing", "probe_hooks", "sync_debug")
AGAINST_CONTROL = ("kineto", "gpu_trace", "cupti")
STAYS = ("gpu_trace",)
NEED_GPU = ("sync_debug", "kineto", "gpu_trace", "cupti")
STEP_KINDS = ("eager", "graph")
FLIP_KINDS = {"eager": 0.5, "graph": 0.2, "burst": 0.3}  # and their shares of the time
BLOCK_NS = {"eager": 80e6, "graph": 40e6}  # one block of steps
FIRST_PAIRS = 7  # blocks of (mode, control) before anything is switched on
SETTLING_NS = 15e6  # first steps of a block, not counted: another process had the core, or something was switched
DRAWS = 1000
PAUSE_SECONDS = 0.2  # before each of the first blocks: later ones follow an attachment, a core that has slept is slower


class Failed(Exception):
    """A mode that does not work here; the text is the last line that its process wrote."""


class Worker:
    """A process of `overhead_worker.py`."""

    def __init__(self, name: str, driver: str, spy: str, folder: str) -> None:
        self.name, self.errors = name, Path(folder) / f"{name}.err"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("overhead_worker.py")), name, driver],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "SPY_SO": spy},
            )
        self.steps: dict[str, tuple[int, int]] = {}

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            raise Failed((self.errors.read_text().strip().splitlines() or ["its process ended"])[-1])
        return json.loads(line)

    def ask(self, do: str, **what: object):
        try:
            self.process.stdin.write(json.dumps({"do": do, **what}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `read` finds out why
        return self.read()

    def block(self, kind: str) -> list[int]:
        """Step times in ns."""
        if kind not in self.steps:
            usual = statistics.median(self.ask("time", kind=kind, steps=20))
            self.steps[kind] = max(2, round(SETTLING_NS / usual)), max(6, round(BLOCK_NS[kind] / usual))
        settling, counted = self.steps[kind]
        return self.ask("time", kind=kind, steps=settling + counted)[settling:]

    def end(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# ------------------------------------------------------------------ figures


def median_of(ratios: list[float]) -> dict[str, object]:
    """The median, and the 95 % interval that order statistics give it."""
    ordered, n = sorted(ratios), len(ratios)
    reach = 0.98 * math.sqrt(n)
    low, high = math.floor(n / 2 - reach) - 1, math.ceil(n / 2 + reach)
    return {
        "ratio": round(statistics.median(ordered), 5),
        "ci95": [round(ordered[max(0, low)], 5), round(ordered[min(n - 1, high)], 5)],
        "rounds": n,
    }


def median_over(later: list[float], earlier: list[float]) -> dict[str, object]:
    """median(later) / median(earlier), with a 95 % bootstrap interval."""
    chance = random.Random(1)
    drawn = sorted(
        statistics.median(chance.choices(later, k=len(later)))
        / statistics.median(chance.choices(earlier, k=len(earlier)))
        for _ in range(DRAWS)
    )
    return {
        "ratio": round(statistics.median(later) / statistics.median(earlier), 5),
        "ci95": [round(drawn[DRAWS // 40], 5), round(drawn[DRAWS - 1 - DRAWS // 40], 5)],
        "rounds": len(later),
    }


def undisturbed(on: list[list[int]], off: list[list[int]]) -> dict[str, object]:
    """Lower decile of all steps of `on` over that of `off`; the 95 % interval by drawing rounds."""

    def decile(rounds: list[list[int]]) -> float:
        ordered = sorted(x for r in rounds for x in r)
        return ordered[len(ordered) // 10]

    chance = random.Random(1)
    drawn = sorted(
        decile(chance.choices(on, k=len(on))) / decile(chance.choices(off, k=len(off))) for _ in range(DRAWS)
    )
    return {
        "off_us": round(decile(off) / 1e3, 1),
        "ratio": round(decile(on) / decile(off), 5),
        "ci95": [round(drawn[DRAWS // 40], 5), round(drawn[DRAWS - 1 - DRAWS // 40], 5)],
    }


# ------------------------------------------------------------------ measuring


def by_flips(worker: Worker, seconds: float) -> dict[str, object]:
    result: dict[str, object] = {}
    worker.ask("on")
    for kind, share in FLIP_KINDS.items():
        until, pairs = time.monotonic() + seconds * share, []
        while time.monotonic() < until or len(pairs) < 40:
            pairs += worker.ask("alternate", kind=kind, pairs=10)
        off, on = ([p[k] / 2e3 for p in pairs] for k in (0, 1))
        result[kind] = {
            "off_us": round(statistics.median(off), 1),
            "on_us": round(statistics.median(on), 1),
            **median_of([b / a for a, b in zip(off, on, strict=True)]),
            "undisturbed": undisturbed([[p[1] // 2] for p in pairs], [[p[0] // 2] for p in pairs]),
        }
    worker.ask("off")
    return result


def by_rounds(worker: Worker, control: Worker, seconds: float) -> dict[str, object]:
    parts = ("first", "first_control", "on", "on_control", "off", "off_control")
    blocks: dict[str, dict[str, list[list[int]]]] = {k: {part: [] for part in parts} for k in STEP_KINDS}

    def measure(which: str) -> None:
        for kind in STEP_KINDS:
            blocks[kind][which].append(worker.block(kind))
            blocks[kind][f"{which}_control"].append(control.block(kind))

    until = time.monotonic() + seconds
    for kind in STEP_KINDS:  # the first blocks after a start
        worker.block(kind), control.block(kind)
    for _ in range(FIRST_PAIRS):
        time.sleep(PAUSE_SECONDS)
        measure("first")
    if worker.name not in STAYS:
        measure("off")
    while time.monotonic() < until or len(blocks["graph"]["on"]) < 5:
        worker.ask("on")
        measure("on")
        if worker.name in STAYS:
            continue
        worker.ask("off")
        measure("off")
    return {kind: summary(worker.name, blocks[kind]) for kind in STEP_KINDS}


def summary(name: str, blocks: dict[str, list[list[int]]]) -> dict[str, object]:
    """The figures of one kind of step, from the step times of each round's blocks."""
    b = {part: [statistics.median(steps) for steps in rounds] for part, rounds in blocks.items()}
    over_control = {
        which: [x / y for x, y in zip(b[which], b[f"{which}_control"], strict=True)] for which in ("first", "on", "off")
    }
    around = [(x + y) / 2 for x, y in zip(b["off"], b["off"][1:], strict=False)]
    if name in AGAINST_CONTROL:
        figure, without = median_over(over_control["on"], over_control["first"]), "on_control"
    else:
        figure, without = median_of([x / y for x, y in zip(b["on"], around, strict=True)]), "off"
    figure = {
        "off_us": round(statistics.median(b[without]) / 1e3, 1),
        "on_us": round(statistics.median(b["on"]) / 1e3, 1),
        **figure,
        "undisturbed": undisturbed(blocks["on"], blocks[without]),
        "on_over_control": median_over(over_control["on"], over_control["first"]),
    }
    if name not in STAYS:
        figure["after"] = median_over(over_control["off"][1:], over_control["first"])
        figure["after_undisturbed"] = undisturbed(blocks["off"][1:], blocks["first"])
    return figure


def quietest(cores: set[int]) -> int:
    """The core on which the slowest of many equal loops is the fastest."""

    def slowest(core: int) -> float:
        os.sched_setaffinity(0, {core})
        times = []
        for _ in range(60):
            began = time.perf_counter_ns()
            sum(range(20_000))
            times.append(time.perf_counter_ns() - began)
        return statistics.quantiles(times, n=20)[-1]

    try:
        return min(sorted(cores, reverse=True), key=slowest)  # the first core serves the machine's interrupts
    finally:
        os.sched_setaffinity(0, cores)


# ------------------------------------------------------------------ running


def build(folder: str, name: str, sources: list[str]) -> tuple[str, str]:
    """(path of the shared library or "", the compiler's last line)."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "", "no C compiler"
    target = f"{folder}/{name}"
    command = [compiler, "-O2", "-w", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", target, *sources]
    done = subprocess.run(command, capture_output=True, text=True)
    return ("" if done.returncode else target), (done.stderr.strip().splitlines() or [""])[-1]


def build_spy(folder: str) -> str:
    """spy.c against the CUPTI that torch loads; "" where that cannot be built here."""
    roots = [Path("/usr/local/cuda"), *Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*")]
    includes = {p.parent for r in roots if r.exists() for p in (*r.rglob("cupti.h"), *r.rglob("cuda_runtime_api.h"))}
    libraries = [p for r in roots if r.exists() for p in r.rglob("libcupti.so*")]
    if not libraries or not includes:
        return ""
    torch_owned = [p for p in libraries if "site-packages" in str(p)] or libraries
    flags = [f"-I{include}" for include in sorted(includes)]
    path, why = build(folder, "spy.so", [str(SPY), *flags, str(torch_owned[0]), "-ldl"])
    if not path:
        print("CUPTI spy not built:", why, flush=True)
    return path


def text(figure: dict[str, object]) -> str:
    low, high = figure["ci95"]
    return f"x{figure['ratio']:.4f} [{low:.4f}, {high:.4f}]"


def show(name: str, row: dict[str, object]) -> None:
    for kind, f in row.items():
        if kind == "mode":
            continue
        after = f"  after {text(f['after'])}, {text(f['after_undisturbed'])}" if "after" in f else ""
        times = f"{f['off_us']:9.1f} ->{f['on_us']:9.1f} us"
        print(
            f"{name:15}{kind:6}{times}  {text(f)} of {f['rounds']}  undisturbed {text(f['undisturbed'])}{after}",
            flush=True,
        )


def run(names: list[str], seconds: float, smoke: bool, folder: str) -> list[dict[str, object]]:
    driver, why = build(folder, "libcuda.so.1", [str(ROOT / "tests/doubles/fake_cuda.c")]) if smoke else ("", "")
    if smoke and not driver:
        sys.exit(f"the stand-in driver was not built: {why}")
    spy = build_spy(folder) if "cupti" in names else ""
    workers = [Worker(n, driver, spy, folder) for n in names if n != "cupti" or spy]
    control = Worker("control", driver, "", folder)
    table: list[dict[str, object]] = []
    try:
        control.read()
        ready = [w for w in workers if attempt(w, w.read)]
        cores = os.sched_getaffinity(0)
        if len(cores) > 1:
            core = quietest(cores)
            os.sched_setaffinity(0, cores - {core})
            for worker in (control, *ready):
                worker.ask("pin", core=core)
        one_share = seconds / sum(SHARES[w.name] for w in ready)
        for w in ready:
            share = SHARES[w.name] * one_share
            row = attempt(w, lambda w=w, s=share: by_flips(w, s) if w.name in FLIPPED else by_rounds(w, control, s))
            if row:
                table.append({"mode": w.name, **row})
                show(w.name, row)
    finally:
        for worker in (control, *workers):
            worker.end()
    return table


def attempt(worker: Worker, what) -> object:
    """What `what` returns (True where that is nothing), or None and a line that says why not."""
    try:
        return what() or True
    except Failed as error:
        print(f"{worker.name}: failed: {error}", flush=True)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=65.0, help="of measuring, all modes together")
    parser.add_argument("--modes", default="")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    names = options.modes.split(",") if options.modes else [n for n in SHARES if not (options.smoke and n in NEED_GPU)]
    if unknown := [n for n in names if n not in SHARES]:
        parser.error(f"--modes: {unknown[0]} is not one of {', '.join(SHARES)}")
    with tempfile.TemporaryDirectory() as folder:
        table = run(names, options.seconds, options.smoke, folder)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))
    if len(table) < len([n for n in names if n != "cupti"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
