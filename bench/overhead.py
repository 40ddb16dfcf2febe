"""What counting costs: step times on a GPU with and without each collector, side by side in one run.

    python3 bench/overhead.py [--json FILE] [--rounds 12] [--steps 40] [--modes nothing,probe,...]

Two steps: 600 small eager launches and one `.item()`; a CUDA graph of 300 nodes, 30 eager launches and one `.item()`.
Each mode has a process of its own, in which it alternates with nothing, round by round, so that clocks and neighbours
hit both alike: GPUTrace cannot be switched off, and CUPTI's subscription is felt after it has ended. The figure of a
mode is the median over rounds of (median step with it) / (median step without it in the same round). `probe` is also
measured after it has gone ("after"), against its own first rounds without.

Modes: nothing, probe, probe_profiler (probe and a Profiler with a step mark around each step), sync_debug, kineto,
gpu_trace, cupti (needs cc and CUPTI's headers).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

MODES = "nothing probe probe_profiler sync_debug kineto gpu_trace cupti".split()
SPY = Path(__file__).resolve().parents[1] / "tests" / "data" / "sync_corpus" / "spy.c"


class Steps:
    """The two steps that are timed."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.x = torch.zeros(1024, device="cuda")
        self.y = torch.zeros(1024, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self.y.add_(1)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            for _ in range(300):
                self.y.add_(1)

    def eager(self) -> None:
        x = self.x
        for _ in range(600):
            x.add_(1)
        x[0].item()

    def graphed(self) -> None:
        self.graph.replay()
        x = self.x
        for _ in range(30):
            x.add_(1)
        x[0].item()

    def time(self, step, count: int, around=None) -> float:
        """Median step time in microseconds."""
        times = []
        for _ in range(count):
            began = time.perf_counter_ns()
            if around is None:
                step()
            else:
                with around():
                    step()
            times.append(time.perf_counter_ns() - began)
        return statistics.median(times) / 1e3


class Mode:
    """Something that can be switched on, and perhaps off."""

    removable = True
    around = None

    def on(self) -> None: ...

    def off(self) -> None: ...


class Probe(Mode):
    def on(self) -> None:
        from syncfree.profiler.collectors.probe import ProbeCollector

        self.collector = ProbeCollector()
        self.collector.start()

    def off(self) -> None:
        self.collector.stop()


class ProbeProfiler(Mode):
    def on(self) -> None:
        from syncfree.profiler import Profiler

        self.profiler = Profiler("probe")
        self.profiler.start()
        self.around = lambda: self.profiler.step("decode")

    def off(self) -> None:
        self.around = None
        self.profiler.stop()


class SyncDebug(Mode):
    def on(self) -> None:
        import torch

        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("warn")

    def off(self) -> None:
        import torch

        torch.cuda.set_sync_debug_mode("default")


class Kineto(Mode):
    def on(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self.profile.start()

    def off(self) -> None:
        self.profile.stop()


class GpuTrace(Mode):
    removable = False

    def on(self) -> None:
        from syncfree.profiler.collectors.gpu_trace import GpuTraceCollector

        GpuTraceCollector().start()


class Cupti(Mode):
    """A callback that counts, on every runtime and driver call of the interesting kinds."""

    def on(self) -> None:
        self.library = ctypes.CDLL(os.environ["SPY_SO"])
        code = self.library.sp_start(1, 1, 1, 0, 0)
        if code:
            raise RuntimeError(f"cuptiSubscribe: {code}")

    def off(self) -> None:
        self.library.sp_stop()


KINDS = {
    "nothing": Mode,
    "probe": Probe,
    "probe_profiler": ProbeProfiler,
    "sync_debug": SyncDebug,
    "kineto": Kineto,
    "gpu_trace": GpuTrace,
    "cupti": Cupti,
}


def measure(name: str, rounds: int, count: int) -> dict[str, object]:
    steps, mode = Steps(), KINDS[name]()
    kinds = {"eager": steps.eager, "graph": steps.graphed}
    for step in kinds.values():
        steps.time(step, 30)
    times: dict[str, list[float]] = {f"{k}_{w}": [] for k in kinds for w in ("off", "on")}
    if mode.removable:
        for _ in range(rounds):
            for k, step in kinds.items():
                times[f"{k}_off"].append(steps.time(step, count))
            mode.on()
            for k, step in kinds.items():
                times[f"{k}_on"].append(steps.time(step, count, mode.around))
            mode.off()
    else:
        for which in ("off", "on"):
            if which == "on":
                mode.on()
            for _ in range(rounds):
                for k, step in kinds.items():
                    times[f"{k}_{which}"].append(steps.time(step, count))
    result: dict[str, object] = {"mode": name}
    half = max(1, rounds // 3)
    for k in kinds:
        off, on = times[f"{k}_off"], times[f"{k}_on"]
        result[k] = {
            "off_us": round(statistics.median(off), 1),
            "on_us": round(statistics.median(on), 1),
            "ratio": round(statistics.median(b / a for a, b in zip(off, on, strict=True)), 4),
            "after": round(statistics.median(off[-half:]) / statistics.median(off[:half]), 4),
        }
    return result


def build_spy(folder: str) -> str | None:
    """spy.c against the CUPTI that torch loads; None where that cannot be built here."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    roots = [Path("/usr/local/cuda"), *Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*")]
    includes = {p.parent for r in roots if r.exists() for p in (*r.rglob("cupti.h"), *r.rglob("cuda_runtime_api.h"))}
    libraries = [p for r in roots if r.exists() for p in r.rglob("libcupti.so*")]
    if compiler is None or not libraries or len(includes) == 0:
        return None
    torch_owned = [p for p in libraries if "site-packages" in str(p)] or libraries
    target = f"{folder}/spy.so"
    flags = [f"-I{include}" for include in sorted(includes)]
    done = subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", target, str(SPY), *flags, str(torch_owned[0]), "-ldl"],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print("CUPTI spy not built:", done.stderr.strip().splitlines()[-1:], flush=True)
        return None
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("RESULT " + json.dumps(measure(options.one, options.rounds, options.steps)))
        return
    table = []
    with tempfile.TemporaryDirectory() as folder:
        spy = build_spy(folder) if "cupti" in options.modes else None
        for name in options.modes.split(","):
            if name == "cupti" and spy is None:
                continue
            command = [sys.executable, __file__, "--one", name, "--rounds", str(options.rounds)]
            done = subprocess.run(
                [*command, "--steps", str(options.steps)],
                capture_output=True,
                text=True,
                env={**os.environ, "SPY_SO": spy or ""},
            )
            line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
            if line is None:
                print(f"{name}: failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
                continue
            row = json.loads(line[7:])
            table.append(row)
            e, g = row["eager"], row["graph"]
            print(
                f"{name:15}"
                f" eager {e['off_us']:8.1f} -> {e['on_us']:8.1f} us  x{e['ratio']:.4f} (after x{e['after']:.4f})"
                f" graph {g['off_us']:7.1f} -> {g['on_us']:7.1f} us  x{g['ratio']:.4f} (after x{g['after']:.4f})",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
