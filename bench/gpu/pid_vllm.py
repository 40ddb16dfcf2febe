"""`syncfree profile --pid` on real vLLM engines in which nothing was prepared: counts, pauses, growth, ranks.

    python3 bench/gpu/pid_vllm.py OUT_DIR MODEL_DIR [pid] [ranks] [--engine-path PYTHONPATH] [--smoke LIBCUDA]

pid:   one engine. A recording with the probe; visits one after another (the longest step of the target before, while
       arriving, recording, leaving; what grows); then `--verify`: probe and kineto on the same steps, by batch class.
ranks: two servers of two tensor-parallel ranks each on GPUs 0 and 1, or of one rank on a GPU each where that does not
       start; one recording of all of them.
All recorded steps are looked for in the engine's own book: class, requests and tokens, in the same order, with no gap.
Writes OUT_DIR/pid.json after each part; a part that fails or takes too long does not keep the others from running.
Exit code 1 where a figure is not as it should be. `--smoke`: a CPU engine that calls that driver, which does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIGURES = ("syncs", "d2h copies", "h2d copies", "d2d copies", "kernel launches", "graph launches", "captured launches")


class Server:
    """An engine in a process group of its own. `steps()`: its book since the last time."""

    def __init__(self, options: argparse.Namespace, name: str, *more: str, gpus: str | None = None) -> None:
        self.log = options.out / f"{name}.log"
        self.folder = options.work
        keep = {k: v for k, v in os.environ.items() if not k.startswith("SYNCFREE")}
        keep.pop("PYTHONPATH", None)
        if options.engine_path:
            keep["PYTHONPATH"] = options.engine_path
        if gpus is not None:
            keep["CUDA_VISIBLE_DEVICES"] = gpus
        command = [options.python, str(HERE / "pid_engine.py"), str(options.model), *more]
        command += ["--cpu", "--driver", options.smoke] if options.smoke else []
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=keep, cwd=options.work,
                start_new_session=True, text=True,
            )  # fmt: skip
        self.pid = self.process.pid
        self.about: dict[str, object] = {}
        self.ready, self.written = threading.Event(), threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with self.log.with_suffix(".out").open("w") as kept:
            for line in self.process.stdout:
                if "ready {" in line:
                    self.about = json.loads(line[line.index("{") :])
                    self.ready.set()
                elif line == "written\n":
                    self.written.set()
                else:
                    kept.write(line)
                    kept.flush()
        self.ready.set()  # it has ended
        self.written.set()

    def wait(self, seconds: float) -> None:
        if not self.ready.wait(seconds) or not self.about:
            tail = self.log.read_text(errors="replace")[-1500:] + self.log.with_suffix(".out").read_text()[-1500:]
            raise RuntimeError(f"{self.log.stem} did not start (exit {self.process.poll()}): {tail}")

    def steps(self) -> list[dict]:
        path = self.folder / f"steps{self.pid}.json"
        self.written.clear()
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        if not self.written.wait(30) or self.process.poll() is not None:
            raise RuntimeError(f"{self.log.stem} does not answer (exit {self.process.poll()})")
        return json.loads(path.read_text())

    def end(self) -> int | None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):  # its own group: whatever of it is left
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(10)
        with contextlib.suppress(OSError):  # its log lies beside the results: one file of both streams
            printed = self.log.with_suffix(".out")
            self.log.write_bytes(printed.read_bytes()[-200_000:] + self.log.read_bytes()[-200_000:])
            printed.unlink()
        return code


def command_line(options: argparse.Namespace, name: str, *arguments: str, seconds: float) -> dict:
    """`syncfree profile ...` as a user runs it: exit code, last words, when, and its report."""
    path = options.work / f"{name}.json"
    command = [sys.executable, "-m", "syncfree.cli", "profile", *arguments, "--json", str(path)]
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        code, out, err = None, str(error.stdout), f"took more than {seconds} s: {error.stderr}"
    told = {"command": ["syncfree", *command[3:-2]], "exit": code, "window": [began, time.monotonic()]}
    told["stderr"] = err.strip()[-1500:]
    report = json.loads(path.read_bytes()) if path.exists() else None
    if report is None:
        raise RuntimeError(f"{name}: no report, exit {code}: {err[-800:]} {out[-400:]}")
    with path.open("rb") as plain, gzip.open(options.out / f"{name}.json.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    return told | {"report": report, "screen": out[-6000:]}


def found_in(book: list[dict], steps: list[dict]) -> int | None:
    """Where the recorded steps stand in the engine's own book, all of them in a row; None if nowhere."""
    own = [(s["class"], s["reqs"], s["tokens"]) for s in book]
    seen = [(s["batch_class"], s["num_reqs"], s["num_tokens"]) for s in steps]
    for at in range(len(own) - len(seen) + 1):
        if own[at] == seen[0] and own[at : at + len(seen)] == seen:
            return at
    return None


def by_class(report: dict, rank: int | None = None) -> dict[str, dict]:
    """Per class and step: syncs, copies, launches, graphs as [least, mean, most]."""
    groups: dict[str, list[dict]] = {}
    for step in report["steps"]:
        if rank is None or step["rank"] == rank:
            groups.setdefault(step["batch_class"], []).append(step)
    told = {}
    for name, steps in sorted(groups.items()):
        told[name] = {"steps": len(steps)}
        for figure, read in {
            "syncs": lambda s: s["syncs"]["total"],
            "d2h": lambda s: s["copies"]["d2h"],
            "h2d": lambda s: s["copies"]["h2d"],
            "launches": lambda s: s["launches"]["kernels"],
            "graphs": lambda s: s["launches"]["graphs"],
        }.items():
            known = [value for value in map(read, steps) if value is not None]
            told[name][figure] = [min(known), round(statistics.mean(known), 2), max(known)] if known else None
    return told


def sites_of(report: dict) -> list[str]:
    return [
        f"{s['kind']} {s['phase']} {s['file'][-60:]}:{s['line']} {s['function']} x{s['count']}"
        for s in report["sites"][:12]
    ]


def longest(book: list[dict], windows: list[list[float]]) -> dict[str, float | int | None]:
    """The longest step in each window; ms. A step counts where it overlaps."""
    most = []
    for began, ended in windows:
        inside = [s["ms"] for s in book if s["at"] + s["ms"] / 1e3 >= began and s["at"] <= ended]
        most.append(max(inside, default=0.0))
    return {"windows": len(most), "p50": round(statistics.median(most), 2), "max": round(max(most), 2)} if most else {}


# ------------------------------------------------------------------------ one engine


def record(options: argparse.Namespace, server: Server, book: list[dict]) -> dict:
    told = command_line(options, "record", "--pid", str(server.pid), "--seconds", str(options.seconds), seconds=100)
    report = told.pop("report")
    book += server.steps()
    at = found_in(book, report["steps"])
    return told | {
        "collectors": report["source"]["collectors"],
        "engine": report["source"]["engine"],
        "partial": report["source"]["partial"],
        "steps": len(report["steps"]),
        "found_in_engines_book_at": at,
        "classes": by_class(report),
        "sites": sites_of(report),
        "notes": [f"{n['kind']}: {n['text']}" for n in report["notes"]][:20],
        "good": told["exit"] == 0 and at is not None and not report["source"]["partial"] and len(by_class(report)) == 4,
    }


def verify(options: argparse.Namespace, server: Server, book: list[dict]) -> dict:
    limits = ("--seconds", str(options.seconds), "--steps", "300")
    told = command_line(options, "verify", "--pid", str(server.pid), *limits, "--verify", seconds=150)
    report = told.pop("report")
    book += server.steps()
    at = found_in(book, report["steps"])
    rows: dict[str, dict] = {}
    for compared in report["verification"]:
        for name, figures in compared["classes"].items():
            rows[name] = {f["name"]: [f["steps"], f["left"], f["right"], f["differ"]] for f in figures}
    seen = {figure for row in rows.values() for figure in row}
    same = bool(rows) and not any(figure[3] for row in rows.values() for figure in row.values())
    return told | {
        "order": ["steps", "probe", "kineto", "steps that differ"],
        "classes": rows,
        "per_step": by_class(report),
        "steps": len(report["steps"]),
        "found_in_engines_book_at": at,
        "sites": sites_of(report),
        "notes": [f"{n['kind']}: {n['text']}" for n in report["notes"]][:30],
        "good": told["exit"] == 0 and same and len(rows) == 4 and seen >= set(FIGURES[:6]) and at is not None,
    }


def visits(options: argparse.Namespace) -> int:
    """Run in a process of its own, so that one that hangs can be given up: visit after visit, and what each left."""
    sys.path.insert(0, str(HERE.parent))
    from attach_pause import settled, size
    from syncfree.backends.live import ENGINES
    from syncfree.profiler.agent.client import profile_socket
    from syncfree.profiler.attach.processes import find_workers
    from syncfree.profiler.attach.visit import Visit

    [worker] = find_workers(options.visits)
    untouched = size(worker.pid)
    windows: dict[str, list[list[float]]] = {"arriving": [], "recording": [], "leaving": []}
    sizes, notes, steps = [], [], []
    for _ in range(options.attaches):
        marks = [time.monotonic()]
        visit = Visit(worker, ENGINES)
        marks.append(time.monotonic())
        report = profile_socket(visit.path, seconds=0.5)
        marks.append(time.monotonic())
        pause = visit.leave()
        marks.append(time.monotonic())
        notes.append(
            [*(note.text for note in visit.notes), f"its threads stood still for {pause:.2f} ms on the way out"]
        )
        steps.append(len(report.steps))
        for name, began, ended in zip(windows, marks, marks[1:], strict=False):
            windows[name].append([began, ended])
        sizes.append(settled(worker.pid, untouched["threads"]))
        found = {"untouched": untouched, "sizes": sizes, "windows": windows, "notes": notes, "steps": steps}
        (options.work / "visits.json").write_text(json.dumps(found))
        time.sleep(0.3)
    return 0


def visited(options: argparse.Namespace, server: Server, book: list[dict]) -> dict:
    path = options.work / "visits.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, __file__, str(options.out), str(options.model), "--attaches", str(options.attaches)]
    try:
        done = subprocess.run([*command, "--visits", str(server.pid)], capture_output=True, text=True, timeout=90)
        error = done.stderr.strip()[-800:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        error = "took more than 90 s"
    book += server.steps()
    if not path.exists():
        raise RuntimeError(f"visits: {error}")
    found = json.loads(path.read_text())
    first, last = found["sizes"][0], found["sizes"][-1]
    most = {name: max(size[name] for size in found["sizes"][1:]) for name in last} if found["sizes"][1:] else last
    return {
        "error": error,
        "attaches": len(found["sizes"]),
        "arriving_s": [round(b - a, 3) for a, b in found["windows"]["arriving"]],
        "longest_step_ms": {name: longest(book, windows) for name, windows in found["windows"].items()},
        "sizes": {"untouched": found["untouched"], "first": first, "last": last, "most_after_the_first": most},
        "steps": found["steps"],
        "notes": found["notes"][:3],
        "good": not error and all(last[n] <= first[n] for n in ("fds", "threads")) and min(found["steps"]) > 0,
    }


def one_engine(options: argparse.Namespace, told: dict) -> None:
    server = Server(options, "engine", gpus=None if options.smoke else "0")
    book: list[dict] = []
    try:
        server.wait(240)
        told["engine"] = server.about
        quiet = time.monotonic()
        time.sleep(options.quiet)
        told["untouched"] = size_of(server.pid)
        halves = [[quiet + k / 2, quiet + k / 2 + 0.5] for k in range(int(2 * options.quiet))]
        for name, part in (("record", record), ("visits", visited), ("verify", verify)):
            told[name] = attempt(lambda part=part: part(options, server, book))
            told[name]["size_after"] = size_of(server.pid)
            save(options, told)
        after = time.monotonic()
        time.sleep(2)
        book += server.steps()
        later = [[after + k / 2, after + k / 2 + 0.5] for k in range(4)]
        told["longest_step_ms"] = {"before": longest(book, halves), "after": longest(book, later)}
        for name in ("record", "verify"):
            if "window" in told[name]:
                told["longest_step_ms"][name] = longest(book, [told[name]["window"]])
        told["own_steps"] = {"all": len(book), "classes": Counter(s["class"] for s in book)}
    finally:
        told["exit"] = server.end()


# ------------------------------------------------------------------------ several ranks


def several_ranks(options: argparse.Namespace, told: dict) -> None:
    gpus = 2 if options.smoke else _gpus()
    told["gpus"] = gpus
    if gpus < 2:
        told["skipped"] = "fewer than two GPUs"
        return
    for tp, gpus_of in ((2, ("0,1", "0,1")), (1, ("0", "1"))):
        try:
            _ranks_of(options, told, tp, gpus_of)
            return
        except RuntimeError as error:
            told[f"error_with_{tp}_ranks_each"] = str(error)[-2500:]
            save(options, told)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _ranks_of(options: argparse.Namespace, told: dict, tp: int, gpus: tuple[str, str]) -> None:
    servers: list[Server] = []
    try:
        for number, which in enumerate(gpus):
            more = ("--tp", str(tp), "--seed", str(number + 1))
            servers.append(Server(options, f"server{number}", *more, gpus=None if options.smoke else which))
        for server in servers:
            server.wait(options.start)
        pids = [str(server.pid) for server in servers]
        arguments = ("--pid", pids[0], "--pid", pids[1], "--seconds", str(options.seconds))
        found = command_line(options, f"ranks_tp{tp}", *arguments, seconds=120)
        report = found.pop("report")
        books = [server.steps() for server in servers]
        ranks = {}
        for rank in report["source"]["ranks"]:
            steps = [step for step in report["steps"] if step["rank"] == rank]
            places = [found_in(book, steps) if steps else None for book in books]
            of = [number for number, place in enumerate(places) if place is not None]
            ranks[rank] = {"steps": len(steps), "server": of, "places": places, "classes": by_class(report, rank)}
        per_server = Counter(of for rank in ranks.values() for of in rank["server"])
        told |= {
            "tensor_parallel": tp,
            "engines": [server.about for server in servers],
            "recording": found,
            "ranks": ranks,
            "partial": report["source"]["partial"],
            "sites": sites_of(report),
            "notes": [f"{n['kind']}: {n['text']}" for n in report["notes"]][:20],
            "good": found["exit"] == 0
            and len(ranks) == 2 * tp
            and all(len(rank["server"]) == 1 and rank["steps"] for rank in ranks.values())
            and set(per_server.values()) == {tp},
        }
    finally:
        told["exits"] = [server.end() for server in servers]


# ------------------------------------------------------------------------ all


def size_of(pid: int) -> dict[str, int]:
    sys.path.insert(0, str(HERE.parent))
    from attach_pause import size

    return size(pid)


def attempt(part) -> dict:
    """The other parts are worth their time, whatever happens in this one."""
    try:
        return part()
    except Exception as error:  # noqa: BLE001 - as said
        traceback.print_exc()
        return {"good": False, "failed": f"{type(error).__name__}: {error}"[-3000:]}


def save(options: argparse.Namespace, told: dict) -> None:
    options.results[told["part"]] = told
    (options.out / "pid.json").write_text(json.dumps(options.results, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("parts", nargs="*", metavar="pid|ranks")
    parser.add_argument("--engine-path", default="", help="the engines' PYTHONPATH")
    parser.add_argument("--python", default=sys.executable, help="the engines' interpreter")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--quiet", type=float, default=4)
    parser.add_argument("--start", type=float, default=150, help="seconds for two servers to start")
    parser.add_argument("--attaches", type=int, default=10)
    parser.add_argument("--smoke", metavar="LIBCUDA", default="")
    parser.add_argument("--visits", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.parts = options.parts or ["pid"]
    if odd := set(options.parts) - {"pid", "ranks"}:
        parser.error(f"expected pid or ranks, got {min(odd)}")
    options.out.mkdir(parents=True, exist_ok=True)
    options.work = Path("/tmp/pid_vllm")
    options.work.mkdir(exist_ok=True)
    if options.visits:
        return visits(options)
    options.results = {}
    bad = 0
    for name in options.parts:
        told: dict = {"part": name}
        began = time.monotonic()
        failed = attempt(
            lambda told=told, name=name: (one_engine if name == "pid" else several_ranks)(options, told) or {}
        )
        told |= failed | {"took_s": round(time.monotonic() - began, 1)}
        save(options, told)
        kept = [told[p].get("good") for p in ("record", "visits", "verify") if p in told] or [told.get("good")]
        print(f"RESULT {name}", json.dumps(told, indent=1)[:9000], flush=True)
        print(f"GOOD {name}", kept, flush=True)
        bad += failed != {} or not all(kept)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
