"""vLLM's own AITER builders on this GPU, unplanned and planned, above a stand-in for aiter: what a build costs.

    python3 bench/gpu/aiter_builders.py [--rows 8,64,256] [--simulated] [--json FILE]

Every segment (decode, extend, prefill, mixed) of both builders: waits, copies and launches of one build as the profiler
counts them (kineto on a GPU), host time as the median of many builds, and that both make the same metadata. Schedules
are made for a gfx950 with 256 compute units; nothing of this runs an AMD kernel. Needs vLLM 0.26 or 0.32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "vllm"))
SEGMENTS = ("decode", "extend", "prefill", "mixed")
WARM_UP = 6


def lengths(segment: str, rows: int) -> tuple[list[int], list[int]]:
    """Query and sequence lengths: a decode has 500 tokens of context, an extend 400, a prefill none."""
    kinds = [segment] * rows
    if segment == "mixed":
        kinds = ["decode"] * (rows // 2) + ["extend"] * (rows // 4) + ["prefill"] * (rows - rows // 2 - rows // 4)
    query = [{"decode": 1, "extend": 16, "prefill": 64}[kind] for kind in kinds]
    context = [{"decode": 500 + i % 37, "extend": 400 + i % 37, "prefill": 0}[kind] for i, kind in enumerate(kinds)]
    return query, [q + c for q, c in zip(query, context, strict=True)]


class Patches:
    """What pytest's monkeypatch does, for good: this process ends with the measurement."""

    def setattr(self, target, name: str, value, raising: bool = True) -> None:
        if raising:
            getattr(target, name)
        setattr(target, name, value)

    def setitem(self, mapping, name: str, value) -> None:
        mapping[name] = value


class Case:
    """One builder of vLLM's, unplanned and planned, on one device."""

    def __init__(self, name: str, device, release: str) -> None:
        import planned_builders as builders
        import planned_simulated
        from syncfree.planner import Environment, Limits

        environment = Environment(vllm=release)
        sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 16384}
        make, limits = {
            "ROCM_AITER_FA": (builders.fa, Limits(num_kv_heads=8, **sizes)),
            "ROCM_AITER_MLA": (builders.mla, Limits(workspace_tokens=65536, **sizes)),
        }[name]
        self.builders, self.simulated, self.device = builders, planned_simulated, device
        self.adapter, self.tally = builders.ADAPTERS[make](), builders.tally_of("on")
        self.theirs = planned_simulated.builder(make, limits, environment, 1, device)
        ours = planned_simulated.builder(make, limits, environment, 1, device)
        self.ours = builders.adopt(ours, self.adapter, limits, environment, self.tally)

    def common(self, segment: str, rows: int):
        from syncfree.planner import Batch

        query, seq = lengths(segment, rows)
        return self.simulated.metadata(
            Batch.from_lengths(query, seq, is_prefilling=[q > 1 for q in query]), self.device
        )

    def check(self, common) -> None:
        """Both make the same; raises AssertionError naming the fields."""
        theirs, ours = self.theirs.build(0, common), self.ours.build(0, common)
        assert not self.tally.fallbacks, self.tally.fallbacks
        _, plan = self.ours._attached.plan(self.ours, common)
        wrong = self.builders.differences(self.adapter, plan, theirs, ours)
        assert not wrong, wrong


def counted(builder, common, collectors: str, synchronize) -> dict[str, object]:
    """Waits, copies and launches of one build: the most of a few."""
    from syncfree.profiler import Profiler

    for _ in range(WARM_UP):
        builder.build(0, common)
    synchronize()
    with Profiler(collectors) as profiler:
        for _ in range(3):
            with profiler.step(), profiler.phase("build"):
                builder.build(0, common)
    steps = profiler.report.steps

    def most(figure):
        found = [figure(step) for step in steps]
        return None if None in found else max(found)

    return {
        "syncs": most(lambda step: step.syncs.total),
        "h2d": most(lambda step: step.copies.h2d),
        "d2h": most(lambda step: step.copies.d2h),
        "d2d": most(lambda step: step.copies.d2d),
        "launches": most(lambda step: step.launches.kernels),
    }


def timed(builders, common, repeats: int, synchronize) -> list[float]:
    """Median host time of a build in microseconds, builders taking turns; the device is idle at the start of each."""
    times: list[list[float]] = [[] for _ in builders]
    for _ in range(repeats):
        for builder, its in zip(builders, times, strict=True):
            synchronize()
            began = time.perf_counter_ns()
            builder.build(0, common)
            its.append((time.perf_counter_ns() - began) / 1000)
    return [statistics.median(its) for its in times]


def measure(case: Case, segment: str, rows: int, collectors: str, synchronize) -> dict[str, object]:
    repeats = 3 if collectors == "simulated" else 100  # a simulated device says nothing about time
    common = case.common(segment, rows)
    case.check(common)
    row: dict[str, object] = {"segment": segment, "rows": rows}
    builders = {"unplanned": case.theirs, "planned": case.ours}
    for name, builder in builders.items():
        row[name] = counted(builder, common, collectors, synchronize)
    for name, us in zip(builders, timed(list(builders.values()), common, repeats, synchronize), strict=True):
        row[name] |= {"host_us": round(us, 1)}
    return row


def line(name: str, row) -> str:
    parts = [f"{name:15} {row['segment']:8} {row['rows']:4}"]
    for which in ("unplanned", "planned"):
        f = row[which]
        parts.append(
            f"{which}: {f['syncs']} syncs {f['h2d']} h2d {f['d2h']} d2h {f['d2d']} d2d {f['launches']} launches "
            f"{f['host_us']:9.1f} us"
        )
    return " | ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="8,64,256")
    parser.add_argument("--simulated", action="store_true", help="on the simulated device instead of a GPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import torch
    import vllm
    from syncfree.planner import Environment
    from syncfree.profiler import simulated_device

    release = ".".join(vllm.__version__.split(".")[:2])
    opened = simulated_device() if options.simulated else contextlib.nullcontext(torch.device("cuda", 0))
    collectors = "simulated" if options.simulated else "kineto"
    results = []
    with opened as device:
        import planned_simulated

        planned_simulated.install(Patches(), Environment(vllm=release))
        for name in ("ROCM_AITER_FA", "ROCM_AITER_MLA"):
            case = Case(name, device, release)
            for segment in SEGMENTS:
                for rows in map(int, options.rows.split(",")):
                    row = measure(case, segment, rows, collectors, torch.cuda.synchronize)
                    results.append({"builder": name, **row})
                    print(line(name, row), flush=True)
    device_name = "simulated" if options.simulated else torch.cuda.get_device_name(0)
    told = {"vllm": vllm.__version__, "torch": torch.__version__, "device": device_name, "results": results}
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1))
    print("RESULT", json.dumps(told))


if __name__ == "__main__":
    main()
