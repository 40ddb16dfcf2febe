"""Every case of the sync corpus on a GPU, through one collector, against what was measured on an H200.

    python3 bench/gpu/corpus.py OUT.json [--collectors kineto] [--cases name,name]

Prints one line per case that differs and a summary. The rule of comparison is `compare` in truth.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path

import torch
from syncfree.profiler import Profiler

CORPUS = Path(__file__).resolve().parents[2] / "tests" / "data" / "sync_corpus"
WARMUPS = 3


def lines_of(report) -> list[int]:
    """Innermost corpus line of each counted sync."""
    found = set()
    for site in report.sites:
        if site.kind != "maybe":
            for frame in [f"{site.file}:{site.line} x", *site.stack]:
                file, _, rest = frame.rpartition(":")
                if file.endswith("corpus.py"):
                    found.add(int(rest.split()[0]))
                    break
    return sorted(found)


def run_case(case, collectors: str) -> dict[str, object]:
    state = case.setup("cuda")
    for _ in range(WARMUPS):
        case.run(state)
    torch.cuda.synchronize()
    with Profiler(collectors) as profiler:
        with profiler.step("case"):
            case.run(state)
        # Records of the device arrive with its next synchronize; this one lies after the step.
        torch.cuda.synchronize()
    report = profiler.report
    step = report.steps[0]
    return {
        "syncs": step.syncs.total,
        "kinds": {k: v for k in ("d2h", "h2d", "stream", "device", "event", "memset") if (v := getattr(step.syncs, k))},
        "maybe": step.syncs.maybe,
        "kernels": step.launches.kernels,
        "graphs": step.launches.graphs,
        "captured": step.launches.captured,
        "d2h": step.copies.d2h,
        "h2d": step.copies.h2d,
        "d2d": step.copies.d2d,
        "lines": lines_of(report),
    }


def differences(got: dict[str, object], truth: dict[str, object]) -> list[str]:
    wrong = []
    rule, syncs = truth["compare"], got["syncs"]
    if rule in ("exact", "idle", "blind") and syncs != truth["syncs"]:
        wrong.append(f"syncs {syncs} != {truth['syncs']} ({rule})")
    if rule == "at_least_one" and not syncs:
        wrong.append("syncs 0, expected at least one")
    if rule == "maybe" and (syncs or not got["maybe"]):
        wrong.append(f"syncs {syncs}, maybe {got['maybe']}: expected only maybe")
    launches = got["kernels"] + (got["captured"] or 0) if got["kernels"] is not None else None
    for mine, theirs, value in (
        ("launch calls", "kernel_launch_calls", launches),
        ("graphs", "graph_launch_calls", got["graphs"]),
        ("d2h copies", "d2h_copies", got["d2h"]),
        ("h2d copies", "h2d_copies", got["h2d"]),
        ("d2d copies", "d2d_copies", got["d2d"]),
    ):
        if value is not None and value != truth[theirs]:
            wrong.append(f"{mine} {value} != {truth[theirs]}")
    if truth["sync_lines"] and rule != "maybe" and rule != "blind" and got["lines"] != sorted(truth["sync_lines"]):
        wrong.append(f"lines {got['lines']} != {truth['sync_lines']}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--collectors", default="kineto")
    parser.add_argument("--cases", default="")
    options = parser.parse_args()
    sys.path.insert(0, str(CORPUS))
    from corpus import CASES

    truth = json.loads((CORPUS / "truth.json").read_text())["cases"]
    wanted = options.cases.split(",") if options.cases else list(CASES)
    table: dict[str, object] = {}
    bad = blocking = found = 0
    for name in wanted:
        try:
            got = run_case(CASES[name], options.collectors)
            wrong = differences(got, truth[name])
        except Exception as error:  # noqa: BLE001 - one case that cannot run here must not hide the others
            traceback.print_exc(limit=-2)
            got, wrong = {}, [f"{type(error).__name__}: {error}"]
        if truth[name]["blocked"]:
            blocking += 1
            found += bool(got.get("syncs"))
        if wrong:
            bad += 1
            print(f"DIFF {name}: {'; '.join(wrong)}", flush=True)
        table[name] = {**got, "wrong": wrong}
    meta = {"collectors": options.collectors, "torch": torch.__version__, "device": torch.cuda.get_device_name()}
    options.out.write_text(json.dumps({"meta": meta, "cases": table}, indent=1))
    print(
        f"CORPUS {options.collectors}: {len(wanted) - bad} of {len(wanted)} as measured; {found} of {blocking} blocking"
    )


if __name__ == "__main__":
    main()
