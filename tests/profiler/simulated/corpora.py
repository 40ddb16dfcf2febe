"""Runs the snippets of a measured corpus on the simulated device and says what was counted."""

import importlib.util
import inspect
import json
import sys
import warnings
from collections import Counter
from pathlib import Path

from syncfree.profiler import simulated_device, sites
from syncfree.profiler.calls import Role
from syncfree.profiler.collectors.simulated import SimulatedCollector
from syncfree.profiler.counting import count_syncs

DATA = Path(__file__).resolve().parents[2] / "data"
WARM_UPS = 3


def load(name, rows):
    """The cases of corpus `name` and its measured rows."""
    folder = DATA / name
    spec = importlib.util.spec_from_file_location(f"corpus_of_{name}", folder / "corpus.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.CASES, json.loads((folder / rows).read_text())["cases"]


def marked_lines(case):
    """Lines of the snippet that carry the mark."""
    source, start = inspect.getsourcelines(case.run)
    return [start + i for i, line in enumerate(source) if "# @sync" in line]


def run(case, device="cuda"):
    """(counts, lines at which the host waits, notes) of one run after warm-ups, as it was measured."""
    import torch

    with simulated_device(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = case.setup(device)
        for _ in range(WARM_UPS):
            case.run(state)
        torch.cuda.synchronize()
        collector = SimulatedCollector()
        collector.start()
        try:
            result = case.run(state)
        finally:
            collector.stop()
        del result, state
    calls = collector.drain()
    found = count_syncs(calls)
    counts = Counter(syncs=sum(s.kind != "maybe" for s in found), maybe=sum(s.kind == "maybe" for s in found))
    for call in calls:
        _count(counts, call)
    lines = sorted({sites.blamed(s.call.stack).line for s in found})
    return counts, lines, collector.notes()


def _count(counts, call):
    if call.role is Role.LAUNCH:
        counts["kernel_launch_calls"] += 1
    elif call.role is Role.GRAPH_LAUNCH:
        counts["graph_launch_calls"] += 1
    elif call.role is Role.MEMSET:
        counts["memsets"] += 1
    elif call.role is Role.COPY:
        counts[f"{call.direction.value}_copies"] += 1
        counts[f"{call.direction.value}_pageable"] += bool(call.pageable)


def mismatch(counts, row):
    """What `syncs` and `maybe` should have been, or None. `at_least_one`: how often depends on torch's internals."""
    got = (counts["syncs"], counts["maybe"])
    if row["compare"] == "at_least_one":
        return None if counts["syncs"] >= 1 and counts["maybe"] == row["maybe"] else f"expected >= 1, got {got}"
    return None if got == (row["syncs"], row["maybe"]) else f"expected {(row['syncs'], row['maybe'])}, got {got}"
