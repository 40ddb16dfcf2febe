"""Where traces come from: made by others (the folder `shared` beside the repository), our own, and made on the spot."""

import gzip
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHARED = ROOT.parent / "shared" / "traces"
OWN = ROOT / "tests" / "data" / "traces"


@pytest.fixture(scope="session")
def shared():
    if not (SHARED / "expected.json").is_file():
        pytest.skip(f"NO TRACES OF OTHERS: {SHARED} is missing, so reading them is NOT tested here")
    return SHARED


@pytest.fixture(scope="session")
def own():
    return OWN


class Kineto:
    """Builds a Kineto trace event by event; times in microseconds."""

    def __init__(self, folder):
        self.folder = folder
        self.events = []
        self.fields = {"schemaVersion": 1}

    def event(self, cat, name, ts, dur, tid=1, pid=1, **args):
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )
        return self

    def step(self, name, ts, dur, **more):
        return self.event("user_annotation", name, ts, dur, **more)

    def call(self, name, ts, dur=1.0, correlation=None, tid=1, **args):
        if correlation is not None:
            args["correlation"] = correlation
        return self.event("cuda_runtime", name, ts, dur, tid, **args)

    def kernel(self, ts, dur, correlation=None, name="kernel", cat="kernel", **args):
        if correlation is not None:
            args["correlation"] = correlation
        return self.event(cat, name, ts, dur, 7, 0, device=0, stream=7, **args)

    def copy(self, ts, dur, correlation, name, **args):
        return self.kernel(ts, dur, correlation, name, "gpu_memcpy", **args)

    def text(self, **dumps):
        return json.dumps({**self.fields, "traceEvents": self.events}, **dumps)

    def write(self, name="trace.json", **dumps):
        path = self.folder / name
        data = self.text(**dumps).encode()
        path.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
        return path


@pytest.fixture
def kineto(tmp_path):
    return Kineto(tmp_path)
