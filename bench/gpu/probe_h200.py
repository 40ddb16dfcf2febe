"""The probe on a real GPU, in one run: what is counted, what it costs, what it leaves behind.

    python3 bench/gpu/probe_h200.py OUT_DIR [--parts exports,corpus,coexist,attach,cycles,overhead] [--cycles 60]

    exports    which entry points of the table this driver has, and whether cuGetProcAddress hands out the same ones
    corpus     every case of the sync corpus: syncs, copies, launches and the waiting line, against truth.json
    coexist    torch.profiler before, while and after the probe counts: the same events each time
    attach     another process's PyTorch loop, attached from outside: pause, slowest step, counts, lines
    cycles     attach and detach that loop again and again: mappings, descriptors, threads, counts
    overhead   bench/overhead.py

Prints a few lines a part and writes OUT_DIR/probe_h200.json. Needs torch, a GPU, frida, and cc for CUPTI's figure.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "data" / "sync_corpus"
PARTS = "exports corpus coexist attach cycles overhead".split()


# ------------------------------------------------------------------- exports


def exports() -> dict[str, object]:
    import torch
    from syncfree.profiler.probe.entry_points import CUDA, encoded

    torch.zeros(1, device="cuda")
    driver = ctypes.CDLL("libcuda.so.1")
    names = [symbol for symbol, *_ in encoded(CUDA)]
    missing = [n for n in names if not hasattr(driver, n)]
    known = {ctypes.cast(getattr(driver, n), ctypes.c_void_p).value: n for n in names if n not in missing}
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    elsewhere = []
    for point in CUDA.table:
        for flags in (1, 2):  # legacy, per-thread default stream
            address, status = ctypes.c_void_p(), ctypes.c_int()
            error = driver.cuGetProcAddress_v2(
                point.name.encode(),
                ctypes.byref(address),
                version.value,
                ctypes.c_uint64(flags),
                ctypes.byref(status),
            )
            if error == 0 and address.value and address.value not in known:
                elsewhere.append(point.name)
    costs = {}
    buffer = ctypes.create_string_buffer(64)
    pinned = torch.zeros(8, pin_memory=True)
    kind = ctypes.c_uint()
    for name, pointer in (("pageable", ctypes.addressof(buffer)), ("pinned", pinned.data_ptr())):
        ask, out, at = driver.cuPointerGetAttribute, ctypes.byref(kind), ctypes.c_uint64(pointer)
        began = time.perf_counter_ns()
        for _ in range(20000):
            ask(out, 2, at)
        costs[name] = (time.perf_counter_ns() - began) / 20000
    began = time.perf_counter_ns()
    for _ in range(20000):
        driver.cuDriverGetVersion(out)
    costs["empty_call"] = (time.perf_counter_ns() - began) / 20000
    print(f"EXPORTS driver {version.value}: {len(names) - len(missing)} of {len(names)} exported; missing {missing}")
    print(f"EXPORTS cuGetProcAddress gives other functions for: {sorted(set(elsewhere))}")
    print("EXPORTS cuPointerGetAttribute ns", {k: round(v) for k, v in costs.items()})
    return {"missing": missing, "elsewhere": elsewhere, "pointer_attribute_ns": costs}


# -------------------------------------------------------------------- corpus


def corpus() -> dict[str, object]:
    """All cases under one attachment; each is a step."""
    import torch
    from syncfree.profiler.collectors.probe import ProbeCollector
    from syncfree.profiler.counting import count_syncs
    from syncfree.profiler.sites import blamed

    sys.path.insert(0, str(CORPUS))
    import corpus as cases

    truth = json.loads((CORPUS / "truth.json").read_text())["cases"]
    torch.zeros(1, device="cuda")
    probe = ProbeCollector()
    probe.start()
    print(f"CORPUS attached in {probe.attach_seconds:.2f} s, pause {probe.pause_ms:.2f} ms", flush=True)
    marks: dict[str, tuple[object, object, int, int]] = {}
    errors = {}
    for name, case in cases.CASES.items():
        try:
            state = case.setup("cuda")
            for _ in range(3):
                result = case.run(state)
                del result
            torch.cuda.synchronize()
            a, began = probe.mark(0), time.perf_counter_ns()
            result = case.run(state)
            ended, b = time.perf_counter_ns(), probe.mark(0)
            marks[name] = (a, b, began, ended)
            torch.cuda.synchronize()
            del result, state
        except Exception as error:  # noqa: BLE001 - one case that cannot run here must not hide the others
            errors[name] = f"{type(error).__name__}: {error}"[:200]
    probe.stop()
    calls = probe.drain()
    notes = {n.line for n in probe.notes() if n.line and (n.file or "").endswith("corpus.py")}
    rows, bad, blocking, found, lines_bad = {}, [], 0, 0, []
    for name, (a, b, began, ended) in marks.items():
        counted, wanted = b - a, truth[name]
        syncs = count_syncs(c for c in calls if began <= c.ts_ns <= ended)
        lines = sorted({getattr(blamed(s.call.stack), "line", 0) for s in syncs if s.kind != "maybe"})
        row = {
            "syncs": sum(getattr(counted, k) for k in "d2h h2d stream device event memset copy".split()),
            "told": sum(s.kind != "maybe" for s in syncs),
            "maybe": counted.maybe,
            "launch_calls": counted.kernels + counted.captured,
            "captured": counted.captured,
            "graphs": counted.graphs,
            "copies": [counted.copies_d2h, counted.copies_h2d, counted.copies_d2d],
            "blocked_us": counted.blocked_ns / 1e3,
            "lines": lines,
        }
        rows[name] = row
        wrong = differences(row, wanted)
        source, first = inspect.getsourcelines(cases.CASES[name].run)
        span = set(range(first, first + len(source)))
        if wanted["blocked"]:
            blocking += 1
            found += bool(row["syncs"] or row["maybe"] or span & notes)
            if wanted["compare"] == "exact" and lines != sorted(wanted["sync_lines"]):
                lines_bad.append(name)
                wrong.append(f"lines {lines} != {wanted['sync_lines']}")
        if wrong:
            bad.append(name)
            print(f"CORPUS DIFF {name}: {'; '.join(wrong)}", flush=True)
    for name, text in errors.items():
        print(f"CORPUS ERROR {name}: {text}")
    print(
        f"CORPUS {len(marks) - len(bad)} of {len(marks)} rows as measured; {found} of {blocking} blocking found "
        f"(syncs, maybe or named as blind); lines wrong in {lines_bad}; blind lines {sorted(notes)}",
        flush=True,
    )
    for note in probe.notes():
        if not note.line:
            print("CORPUS note:", note.text)
    return {"rows": rows, "differs": bad, "errors": errors, "blocking": blocking, "found": found, "api": probe.api}


def differences(row: dict, wanted: dict) -> list[str]:
    rule, wrong = wanted["compare"], []
    if rule in ("exact", "idle", "blind") and row["syncs"] != wanted["syncs"]:
        wrong.append(f"syncs {row['syncs']} != {wanted['syncs']}")
    if rule == "at_least_one" and not row["syncs"]:
        wrong.append("no sync")
    if rule == "maybe" and (row["syncs"] or not row["maybe"]):
        wrong.append(f"syncs {row['syncs']}, maybe {row['maybe']}: expected only maybe")
    if row["told"] != row["syncs"]:
        wrong.append(f"{row['syncs']} counted, {row['told']} told")
    pairs = (
        ("launch calls", row["launch_calls"], wanted["kernel_launch_calls"]),
        ("graphs", row["graphs"], wanted["graph_launch_calls"]),
        ("copies", row["copies"], [wanted["d2h_copies"], wanted["h2d_copies"], wanted["d2d_copies"]]),
    )
    return wrong + [f"{what} {mine} != {theirs}" for what, mine, theirs in pairs if mine != theirs]


# ------------------------------------------------------------------- coexist


def coexist() -> dict[str, object]:
    """torch.profiler's own counts without the probe, under it, and after it."""
    import torch
    from syncfree.profiler.collectors.probe import ProbeCollector
    from torch.profiler import ProfilerActivity, profile

    x = torch.zeros(1024, device="cuda")

    def work() -> None:
        for _ in range(50):
            x.add_(1)
        x.cpu()
        x[0].item()

    def profiled() -> dict[str, int]:
        work()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
            work()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            p.export_chrome_trace(f"{folder}/t.json")
            events = json.loads(Path(f"{folder}/t.json").read_text())["traceEvents"]
        wanted = ("cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy", "gpu_memset", "cpu_op")
        return dict(collections.Counter(e["cat"] for e in events if e.get("cat") in wanted))

    before = profiled()
    probe = ProbeCollector()
    probe.start()
    a = probe.mark(0)
    during = profiled()
    b = probe.mark(0)
    probe.stop()
    after = profiled()
    counted = b - a
    own = {"kernels": counted.kernels, "d2h": counted.d2h, "device": counted.device}
    same = before == during == after
    print(f"COEXIST torch.profiler {'the same each time' if same else 'DIFFERS'}: {before}")
    if not same:
        print(f"COEXIST during {during} after {after}")
    print(f"COEXIST probe under torch.profiler: {own} (expected 100 kernels, 4 d2h)", flush=True)
    return {"before": before, "during": during, "after": after, "probe": own}


# -------------------------------------------------------------------- attach

TARGET = """
import json, sys, time, torch
x = torch.zeros(1024, device="cuda")
a = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
y = torch.zeros(1024, device="cuda")
def warm():
    y.add_(1); torch.mm(a, a); x[0].item()
s = torch.cuda.Stream()
with torch.cuda.stream(s):
    warm()
torch.cuda.synchronize()
g = torch.cuda.CUDAGraph()
with torch.cuda.graph(g):
    for _ in range(20): y.add_(1)
def step():
    for _ in range(200): x.add_(1)
    for _ in range(10): torch.mm(a, a)
    g.replay()
    x[0].item()      # line 18
for _ in range(20): step()
import threading, queue
ask = queue.Queue()
threading.Thread(target=lambda: [ask.put(l.strip()) for l in sys.stdin] and ask.put("quit"), daemon=True).start()
print("ready", flush=True)
n, slowest = 0, 0.0
while True:
    t = time.perf_counter(); step(); t = time.perf_counter() - t
    n += 1; slowest = max(slowest, t)
    if not ask.empty():
        line = ask.get()
        if line == "quit": break
        print(json.dumps([n, slowest * 1e3]), flush=True)     # stands still until told to go on
        if line == "hold": ask.get()
        slowest = 0.0
"""


class Loop:
    """A PyTorch loop in another process; `ask("look")` = steps so far and the slowest step (ms) since the last look."""

    def __init__(self, folder: str) -> None:
        script = Path(folder) / "loop.py"
        script.write_text(TARGET)
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "ready\n"
        self.pid = self.process.pid

    def say(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str = "look") -> list[float]:
        self.say(line)
        return json.loads(self.process.stdout.readline())

    def size(self) -> dict[str, int]:
        proc = Path(f"/proc/{self.pid}")
        return {
            "mappings": len((proc / "maps").read_text().splitlines()),
            "fds": len(list((proc / "fd").iterdir())),
            "threads": len(list((proc / "task").iterdir())),
        }

    def end(self) -> int:
        self.say("quit")
        return self.process.wait(60)


def exact(loop: Loop, probe) -> tuple[dict[str, float], bool]:
    """Counts over some seconds of steps, taken while the loop stands still at both ends."""
    first = loop.ask("hold")
    a = probe.counters()
    loop.say("go")
    time.sleep(1.0)
    last = loop.ask("hold")
    b = probe.counters()
    loop.say("go")
    steps = last[0] - first[0]
    c = b - a
    per_step = {"kernels": c.kernels / steps, "graphs": c.graphs / steps, "d2h": c.d2h / steps}
    right = (c.kernels, c.graphs, c.d2h, c.stream, c.device, c.event) == (210 * steps, steps, steps, 0, 0, 0)
    return per_step, right


def attach() -> dict[str, object]:
    from syncfree.profiler.probe import Attachment
    from syncfree.profiler.sites import blamed

    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(folder)
        loop.ask()
        time.sleep(2)
        before = loop.ask()[1]
        rows = []
        for _ in range(5):
            began = time.perf_counter()
            probe = Attachment(loop.pid)
            injected = time.perf_counter() - began
            slow_inject = loop.ask()[1]
            installed = probe.install()
            slow_install = loop.ask()[1]
            reason = probe.calibrate_stacks()
            slow_stacks = loop.ask()[1]
            per_step, right = exact(loop, probe)
            calls = probe.take_calls()
            lines = collections.Counter(getattr(blamed(c.stack), "line", 0) for c in calls)
            loop.ask()
            pause = probe.detach()
            slow_detach = loop.ask()[1]
            rows.append(
                {
                    "attach_s": round(injected, 3),
                    "install_pause_ms": round(installed.pause_ms, 2),
                    "detach_pause_ms": round(pause, 2),
                    "slowest_step_ms": [round(x, 2) for x in (slow_inject, slow_install, slow_stacks, slow_detach)],
                    "per_step": per_step,
                    "exact": right,
                    "stacks": reason,
                    "lines": dict(lines.most_common(3)),
                    "names": len(installed.names),
                    "missing": installed.missing,
                }
            )
            print("ATTACH", json.dumps(rows[-1]), flush=True)
        time.sleep(2)
        after = loop.ask()[1]
        code = loop.end()
        print(f"ATTACH slowest step without: {before:.2f} ms before, {after:.2f} ms after; exit {code}", flush=True)
    return {"rows": rows, "slowest_before_ms": before, "slowest_after_ms": after, "exit": code}


def cycles(count: int) -> dict[str, object]:
    from syncfree.profiler.probe import Attachment

    sizes, wrong, pauses, began = [], 0, [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(folder)
        fresh = loop.size()
        for _ in range(count):
            probe = Attachment(loop.pid)
            pauses.append(probe.install().pause_ms)
            first = loop.ask("hold")[0]
            a = probe.counters()
            loop.say("go")
            last = loop.ask("hold")[0]
            b = probe.counters()
            loop.say("go")
            wrong += (b - a).kernels != 210 * (last - first)
            pauses.append(probe.detach())
            sizes.append(loop.size())
        code = loop.end()
    most = {k: max(s[k] for s in sizes[1:]) for k in fresh}
    print(
        f"CYCLES {count} in {time.perf_counter() - began:.0f} s: miscounted {wrong}, exit {code}; before {fresh}, "
        f"after the first {sizes[0]}, most later {most}, last {sizes[-1]}; "
        f"pause median {statistics.median(pauses):.2f}, max {max(pauses):.2f} ms",
        flush=True,
    )
    return {"fresh": fresh, "sizes": sizes, "miscounted": wrong, "exit": code, "pauses_ms": pauses}


def overhead(out: Path) -> object:
    target = out / "overhead.json"
    subprocess.run([sys.executable, str(ROOT / "bench" / "overhead.py"), "--json", str(target)], check=False)
    return json.loads(target.read_text()) if target.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--cycles", type=int, default=60)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.one:
        part = {
            "exports": exports,
            "corpus": corpus,
            "coexist": coexist,
            "attach": attach,
            "cycles": lambda: cycles(options.cycles),
            "overhead": lambda: overhead(options.out),
        }[options.one]
        try:
            result = part()
        except Exception:  # noqa: BLE001 - the other parts are still worth their time
            traceback.print_exc()
            sys.exit(1)
        (options.out / f"probe_{options.one}.json").write_text(json.dumps(result))
        return
    results = {}
    for name in options.parts.split(","):
        print(f"== {name}", flush=True)
        began = time.perf_counter()
        command = [sys.executable, "-X", "faulthandler", __file__, str(options.out), "--one", name]
        done = subprocess.run([*command, "--cycles", str(options.cycles)], env={**os.environ, "PYTHONUNBUFFERED": "1"})
        part = options.out / f"probe_{name}.json"
        results[name] = json.loads(part.read_text()) if part.exists() else None
        part.unlink(missing_ok=True)
        print(f"== {name}: exit {done.returncode}, {time.perf_counter() - began:.0f} s", flush=True)
    (options.out / "probe_h200.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
