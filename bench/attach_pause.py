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
        self.done = False

    def run(self) -> None:
        while not self.done:
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


class Gaps:
    """The longest gap of any stream, by what we were doing."""

    def __init__(self, streams: list[Stream]) -> None:
        self.streams = streams
        self.longest: dict[str, list[float]] = {}

    def during(self, what: str, began: float) -> None:
        time.sleep(0.02)
        found = [ms for stream in self.streams for when, ms in list(stream.gaps[-5000:]) if when >= began]
        self.longest.setdefault(what, []).append(max(found, default=0.0))


def measure(pid: int, port: int, attaches: int) -> dict[str, object]:
    worker = find_workers(pid)[0]
    streams = [Stream(port) for _ in range(STREAMS)]
    for stream in streams:
        stream.start()
    time.sleep(3)
    gaps, sizes, attach_ms = Gaps(streams), [size(worker.pid)], []
    for _ in range(attaches):
        began = time.monotonic()
        time.sleep(1.0)
        gaps.during("before", began)
    for _ in range(attaches):
        began = time.monotonic()
        visit = Visit(worker, ENGINES)
        attach_ms.append((time.monotonic() - began) * 1e3)
        gaps.during("arriving", began)
        began = time.monotonic()
        profile_socket(visit.path, seconds=0.5)
        gaps.during("recording", began)
        began = time.monotonic()
        visit.leave()
        gaps.during("leaving", began)
        sizes.append(settled(worker.pid, sizes[0]["threads"]))
    for stream in streams:
        stream.done = True
    return {
        "worker": worker.label,
        "attaches": attaches,
        "arriving_ms": {"p50": statistics.median(attach_ms), "max": max(attach_ms)},
        "longest_gap_ms": {k: {"p50": statistics.median(v), "max": max(v)} for k, v in gaps.longest.items()},
        "failed": sum(stream.failed for stream in streams),
        "sizes": {"untouched": sizes[0], "first": sizes[1], "last": sizes[-1]},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pid", type=int)
    parser.add_argument("port", type=int)
    parser.add_argument("--attaches", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
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
