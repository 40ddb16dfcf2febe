"""Reading a 60 MB Kineto trace, whole process, beside json.loads; run: python bench/traces.py [TRACE]

The trace is the one of `../shared/traces` that DESIGN names, where that folder is there; else one of its shape is made.
Each side is a process of its own, from start to exit, in turns; wall and CPU time are medians, memory is the peak.
HolisticTraceAnalysis and TraceLens were measured elsewhere, beside json.loads on that machine: quoted, not run. So that
machines do not matter, the ratio to them goes over json.loads: (theirs / json.loads there) / (ours / json.loads here).
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "traces" / "rocm_owlv2_mi300x.json.gz"
ROUNDS = 7
GOAL_RATIO, GOAL_MB = 5.0, 135.0
# name: (seconds, peak MB), recorded in one session with json.loads on the same file
RECORDED = {"HolisticTraceAnalysis 0.5.0": (3.5, 299.0), "TraceLens": (2.9, 405.0)}
RECORDED_JSON = 0.97
_IMPORT = "from syncfree.profiler.readers import read_traces"
SIDES = {
    "syncfree trace --json": [str(ROOT / "cli.py"), "trace", "{file}", "--json"],
    "reader alone": ["-c", f"{_IMPORT}; read_traces(['{{file}}'])"],
    "json.loads": ["-c", "import gzip, json; json.loads(gzip.open('{file}').read())"],
}


def run(arguments: list[str]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak megabytes of a Python process."""
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {child.returncode}")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def make_trace(path: str) -> None:
    """A trace of the shape of the real one: Python frames, operators with shapes, launches, kernels; 60 MB of text."""
    events: list[dict[str, object]] = []

    def add(cat: str, name: str, ts: float, dur: float, tid: int, **args: object) -> None:
        events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args})

    shapes = {"Input Dims": [[16, 3072], [3072, 3072], []], "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"]}
    add("user_annotation", "ProfilerStep#1", 0.0, 1e6, 1)
    for i in range(8400):
        at = 200.25 * i
        for depth in range(15):
            add("python_function", f"model/layer{depth}.py({depth + 10}): forward", at + depth, 150.0 - depth, 1, id=i)
        for depth in range(6):
            add("cpu_op", "aten::linear", at + 20 + depth, 60.0 - depth, 1, **shapes)
        add("cuda_runtime", "hipLaunchKernel", at + 30, 5.0, 1, correlation=i + 1, kernel="Cijk_" + "A" * 300)
        add("kernel", "Cijk_" + "A" * 300, at + 90, 50.0, 7, correlation=i + 1, device=0, stream=0)
        if i % 50 == 0:
            add("cuda_runtime", "hipMemcpyWithStream", at + 100, 40.0, 1, correlation=100_000 + i, kind="2", bytes="8")
    with gzip.open(path, "wt", compresslevel=6) as file:
        json.dump({"schemaVersion": 1, "traceEvents": events}, file, indent=2)


def text_size(path: Path) -> int:
    """Bytes of the unpacked text."""
    with gzip.open(path) as file:
        return sum(len(block) for block in iter(lambda: file.read(1 << 20), b""))


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        given = Path(sys.argv[1]) if len(sys.argv) > 1 else SHARED
        path = given
        if not path.is_file():
            path = Path(folder) / "made.json.gz"
            # In a process of its own: a child's peak memory counts from what its parent held when it was started.
            subprocess.run([sys.executable, __file__, "--make", path], check=True)
        print(f"{path.name}: {text_size(path) / 1e6:.1f} MB of JSON, {path.stat().st_size / 1e6:.1f} MB packed")
        print(f"medians of {ROUNDS} runs")
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SIDES}
        for _ in range(ROUNDS):
            for name, arguments in SIDES.items():
                found[name].append(run([a.format(file=path) for a in arguments]))
    print(f"{'':30} {'wall s':>8} {'CPU s':>8} {'peak MB':>8} {'x json.loads':>13}")
    wall, cpu, peak = ({n: statistics.median(r[i] for r in rs) for n, rs in found.items()} for i in range(3))
    for name in SIDES:
        print(
            f"{name:30} {wall[name]:8.2f} {cpu[name]:8.2f} {peak[name]:8.0f} {wall[name] / wall['json.loads']:12.2f}x"
        )
    for name, (seconds, megabytes) in RECORDED.items():
        print(f"{name + ', recorded':30} {seconds:8.2f} {'':8} {megabytes:8.0f} {seconds / RECORDED_JSON:12.2f}x")
    ours = "syncfree trace --json"
    kept = True
    for name, (seconds, _) in RECORDED.items():
        ratio = seconds / RECORDED_JSON / (wall[ours] / wall["json.loads"])
        print(f"{name}: {ratio:.1f}x the time of {ours} (over json.loads)")
        kept = kept and (ratio >= GOAL_RATIO or not name.startswith("Holistic"))
    kept = kept and peak[ours] <= GOAL_MB
    print(f"goal: at least {GOAL_RATIO:g}x, at most {GOAL_MB:g} MB: {'kept' if kept else 'MISSED'}")
    return 0 if kept else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make_trace(sys.argv[2])
    else:
        raise SystemExit(main())
