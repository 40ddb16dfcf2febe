"""Attach to a busy process and detach again, many times: does anything grow, is every byte put back, are counts right?

    python bench/attach_cycles.py [CYCLES] [--threads 2] [--json FILE]

The target makes driver calls (of a driver that does nothing) from so many threads without pause. Prints one line
a hundred cycles, one a slow cycle, and a summary; exit code 1 if something grew after the first cycle, was not restored
or was miscounted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from syncfree.profiler.probe import Attachment

SLOW_SECONDS = 5.0

DOUBLES = Path(__file__).parents[1] / "tests" / "doubles"


class Busy:
    """The calling process. `fields`: launches, syncs, frees made so far."""

    def __init__(self, folder: str, threads: int) -> None:
        driver = Path(folder) / "libcuda.so.1"
        program = Path(folder) / "busy"
        compiler = shutil.which("cc") or sys.exit("needs a C compiler (cc)")
        build = [compiler, "-O1", "-g", "-w"]
        subprocess.run(
            [*build, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", driver, DOUBLES / "fake_cuda.c"], check=True
        )
        subprocess.run(
            [
                *build,
                f"-DTHREADS={threads}",
                "-o",
                program,
                DOUBLES / "busy.c",
                driver,
                f"-Wl,-rpath,{folder}",
                "-pthread",
            ],
            check=True,
        )
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.read()

    @property
    def pid(self) -> int:
        return self.process.pid

    def read(self) -> list[int]:
        assert self.process.stdout is not None
        return [int(x) for x in self.process.stdout.readline().split()]

    def ask(self, command: str) -> list[int]:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.read()

    def size(self) -> dict[str, int]:
        proc = Path(f"/proc/{self.pid}")
        return {
            "mappings": len((proc / "maps").read_text().splitlines()),
            "fds": len(list((proc / "fd").iterdir())),
            "threads": len(list((proc / "task").iterdir())),
            "rss_kb": int(next(x for x in (proc / "status").read_text().splitlines() if "VmRSS" in x).split()[1]),
        }

    def code(self) -> bytes:
        """The driver's machine code, as it is in memory now."""
        for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines():
            if "libcuda.so.1" in line and " r-xp " in line:
                start, end = (int(x, 16) for x in line.split()[0].split("-"))
                with open(f"/proc/{self.pid}/mem", "rb") as memory:
                    memory.seek(start)
                    return memory.read(end - start)
        return b""

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(20)


def one_cycle(busy: Busy) -> dict[str, float | bool]:
    began = time.perf_counter()
    with Attachment(busy.pid) as probe:
        installed = probe.install()
        attached = time.perf_counter()
        first, before = busy.ask("p"), probe.counters()
        busy.ask("r")
        last, after = busy.ask("p"), probe.counters()
        busy.ask("r")
        counted = after - before
        told = [counted.kernels, counted.d2h, counted.maybe // 2]
        right = told == [b - a for a, b in zip(first, last, strict=True)][:3]
        leaving = time.perf_counter()
        pause = probe.detach()
    return {
        "attach_s": attached - began,
        "detach_s": time.perf_counter() - leaving,
        "install_pause_ms": installed.pause_ms,
        "detach_pause_ms": pause,
        "right": right,
    }


def spread(figures: list[float], digits: int) -> dict[str, float]:
    return {"median": round(statistics.median(figures), digits), "max": round(max(figures), digits)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cycles", nargs="?", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        busy = Busy(folder, options.threads)
        untouched, fresh = busy.code(), busy.size()
        cycles, sizes = [], []
        for k in range(options.cycles):
            cycles.append(one_cycle(busy))
            sizes.append(busy.size())
            if not cycles[-1]["right"] or busy.code() != untouched:
                print(f"cycle {k + 1}: {'bytes not restored' if cycles[-1]['right'] else 'miscounted'}")
                return 1
            if (k + 1) % 100 == 0 or k == 0:
                print(f"{k + 1:5} cycles  {sizes[-1]}", flush=True)
            if max(cycles[-1]["attach_s"], cycles[-1]["detach_s"]) > SLOW_SECONDS:
                times = ", ".join(f"{name} {cycles[-1][name]:.1f}" for name in ("attach_s", "detach_s"))
                print(f"{k + 1:5} slow: {times}  {sizes[-1]}", flush=True)
        code = busy.end()
    summary = {
        "cycles": len(cycles),
        "threads": options.threads,
        "before": fresh,
        "after_first": sizes[0],
        "after_last": sizes[-1],
        "most": {name: max(s[name] for s in sizes[1:] or sizes) for name in fresh},
        "attach_s": spread([c["attach_s"] for c in cycles], 3),
        "detach_s": spread([c["detach_s"] for c in cycles], 3),
        "install_pause_ms": spread([c["install_pause_ms"] for c in cycles], 2),
        "detach_pause_ms_max": round(max(c["detach_pause_ms"] for c in cycles), 2),
        "exit_code": code,
    }
    # glibc keeps a heap, two mappings, for each of at most eight threads a core that ever ran at the same time.
    room = {"mappings": 2 * 8 * (os.cpu_count() or 1), "rss_kb": sizes[0]["rss_kb"]}
    grown = [name for name, most in summary["most"].items() if most > sizes[0][name] + room.get(name, 0)]
    summary["grown"] = grown
    print(json.dumps(summary, indent=1))
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1))
    return int(code != 0 or bool(grown))


if __name__ == "__main__":
    sys.exit(main())
