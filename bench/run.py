"""Every benchmark that this machine can run, one after the other: python bench/run.py [NAME ...]

Figures of a GPU are made by `bench/overhead.py` and the scripts of `bench/gpu`, and kept under `bench/results`.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = {
    "planning": "classify, order, segments; AITER FA extend; steady decode, beside vLLM's own functions and builders",
    "planning_mla": "AITER MLA builds beside vLLM's own builder",
    "schedules": "FP8 prefill and MLA decode schedules beside a C port of aiter's planner",
    "traces": "a 60 MB trace beside json.loads",
    "service": "a plan over the service beside an in-process one",
}


def machine() -> str:
    """Processor, cores, memory, load: a ratio made on a busy machine should say so."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}, load {load:.1f}"


def main() -> int:
    wanted = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in wanted if name not in BENCHMARKS]
    if unknown:
        print(f"bench: expected {', '.join(BENCHMARKS)}; got {unknown[0]!r}", file=sys.stderr)
        return 2
    print(f"machine: {machine()}", flush=True)
    failed = []
    for name in wanted:
        print(f"\n== {name}: {BENCHMARKS[name]}", flush=True)
        began = time.monotonic()
        code = subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=False).returncode
        print(f"({time.monotonic() - began:.0f} s, exit {code})", flush=True)
        if code:
            failed.append(name)
    if failed:
        print(f"bench: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
