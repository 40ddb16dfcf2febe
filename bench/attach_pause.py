"""Attach to a running vLLM server and leave again, many times: how long do its clients wait, does anything grow?

    python bench/attach_pause.py PID PORT [--attaches 40] [--json FILE]

Streams of tokens run all the while; what is measured is the longest gap between two tokens of a stream: in as many
seconds without us before, while arriving, while recording, and while leaving. Exit code 1 if a stream failed or
something in a worker grew after the first visit.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from syncfree.backends.live import ENGINES
from syncfree.profiler.agent.client import profile_socket
from syncfree.profiler.attach.processes import find_workers
from syncfree.profiler.attach.visit import Visit

STREAMS = 2


class Stream(threading.Thread):
    """One client that always has a request running. `gaps`: (when, ms) between two tokens of one request."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.gaps: list[tuple[float, float]] = []
        self.failed = 0

    def run(self) -> None:
        while True:
            try:
                self.request()
            except (OSError, http.client.HTTPException):
                self.failed += 1

    def request(self) -> None:
        body = {"model": "tiny", "prompt": "once upon a time", "max_tokens": 1000, "stream": True, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        self.failed += response.status != 200
        last = 0.0
        for line in response:
            if line.startswith(b"data:"):
                now = time.monotonic()
                if last:
                    self.gaps.append((now, (now - last) * 1e3))
                last = now
        connection.close()


def size(pid: int) -> dict[str, int]:
    proc = Path(f"/proc/{pid}")
    rss = next(x for x in (proc / "status").read_text().splitlines() if "VmRSS" in x)
    return {
        "mappings": len((proc / "maps").read_text().splitlines()),
        "fds": len(list((proc / "fd").iterdir())),
        "threads": len(list((proc / "task").iterdir())),
        "rss_mb": int(rss.split()[1]) // 1024,
    }


def settled(pid: int, threads: int) -> dict[str, int]:
    """Its size once frida's threads have ended there: they do so a moment after the detach."""
    until = time.monotonic() + 5
    while size(pid)["threads"] > threads and time.monotonic() < until:
        time.sleep(0.05)
    return size(pid)


def stream(port: int) -> int:
    """The clients, in a process of their own: what attaches must not keep them from looking at the clock.

    A line on standard input, a time, is answered with the longest gap since then and how many requests failed.
    """
    streams = [Stream(port) for _ in range(STREAMS)]
    for each in streams:
        each.start()
    for line in sys.stdin:
        began = float(line)
        gaps = [ms for each in streams for when, ms in list(each.gaps[-20_000:]) if when >= began]
        told = {"ms": max(gaps, default=0.0), "tokens": len(gaps), "failed": sum(each.failed for each in streams)}
        print(json.dumps(told), flush=True)
    return 0


class Clients:
    """The longest gap of any stream, by what we were doing."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, __file__, "0", str(port), "--streams"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.longest: dict[str, list[float]] = {}
        self.failed = 0

    def during(self, what: str, began: float) -> None:
        time.sleep(0.02)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{began}\n")
        self.process.stdin.flush()
        told = json.loads(self.process.stdout.readline())
        self.longest.setdefault(what, []).append(told["ms"])
        self.failed = told["failed"]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(pid: int, port: int, attaches: int) -> dict[str, object]:
    worker = find_workers(pid)[0]
    clients = Clients(port)
    time.sleep(3)
    sizes, attach_ms = [size(worker.pid)], []
    try:
        for _ in range(attaches):
            began = time.monotonic()
            time.sleep(1.0)
            clients.during("before", began)
        for _ in range(attaches):
            began = time.monotonic()
            visit = Visit(worker, ENGINES)
            attach_ms.append((time.monotonic() - began) * 1e3)
            clients.during("arriving", began)
            began = time.monotonic()
            profile_socket(visit.path, seconds=0.5)
            clients.during("recording", began)
            began = time.monotonic()
            visit.leave()
            clients.during("leaving", began)
            sizes.append(settled(worker.pid, sizes[0]["threads"]))
    finally:
        clients.end()
    return {
        "worker": worker.label,
        "attaches": attaches,
        "arriving_ms": {"p50": statistics.median(attach_ms), "max": max(attach_ms)},
        "longest_gap_ms": {k: {"p50": statistics.median(v), "max": max(v)} for k, v in clients.longest.items()},
        "failed": clients.failed,
        "sizes": {"untouched": sizes[0], "first": sizes[1], "last": sizes[-1]},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pid", type=int)
    parser.add_argument("port", type=int)
    parser.add_argument("--attaches", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.streams:
        return stream(options.port)
    result = measure(options.pid, options.port, options.attaches)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    first, last = result["sizes"]["first"], result["sizes"]["last"]  # type: ignore[index]
    grown = [name for name in ("fds", "threads") if last[name] > first[name]]
    grown += ["mappings"] if last["mappings"] > first["mappings"] + 8 else []
    if grown or result["failed"]:
        print(f"grown: {grown}; failed requests: {result['failed']}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
