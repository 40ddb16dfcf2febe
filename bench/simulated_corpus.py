"""The simulated device against a GPU, snippet by snippet: a Markdown table.

    python bench/simulated_corpus.py tests/data/sync_corpus MEASURED.json > bench/results/DATE-h200/sync_corpus.md

MEASURED.json is what `tests/data/sync_corpus/measure.py truth MEASURED.json FOLDER` wrote on a GPU.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "profiler" / "simulated"))

from corpora import load, run  # noqa: E402

FIGURES = ("syncs", "maybe", "kernel_launch_calls", "graph_launch_calls", "d2h_copies", "h2d_copies", "d2d_copies")


def measured(row):
    """The same figures from a row of measure.py: calls by name, and device copies by kind."""
    api, memory = row["kineto"]["api"], row["kineto"]["gpu_mem"]

    def copies(kind, place=""):
        return sum(count for name, count in memory.items() if kind in name and place in name)

    waits = sum(count for name, count in api.items() if name.startswith("cuda") and name.endswith("Synchronize"))
    syncs = waits or copies("DtoH", "Pageable")
    frees = api.get("cudaFree", 0)
    return {
        "syncs": syncs,
        "maybe": frees if row["blocked"] and not syncs else 0,
        "kernel_launch_calls": sum(n for name, n in api.items() if name.startswith(("cudaLaunch", "cuLaunch"))),
        "graph_launch_calls": api.get("cudaGraphLaunch", 0),
        "d2h_copies": copies("DtoH"),
        "h2d_copies": copies("HtoD"),
        "d2d_copies": copies("DtoD"),
    }


def simulated(case):
    try:
        counts, _, _ = run(case)
    except (ImportError, RuntimeError, TypeError, ValueError) as error:  # NotImplementedError is a RuntimeError
        return type(error).__name__
    return {name: counts[name] for name in FIGURES}


def main(folder, path):
    document = json.loads(Path(path).read_text())
    sys.path.insert(0, str(Path(folder).resolve()))
    cases, _ = load(Path(folder).name, "truth.json" if Path(folder).name == "sync_corpus" else "measured.json")
    meta = document["meta"]
    print(f"# Simulated device against {meta['gpu']}, torch {meta['torch']}\n")
    print("`a` where both agree, else `simulated / measured`.\n")
    print("| case | " + " | ".join(name.replace("_calls", "").replace("_", " ") for name in FIGURES) + " |")
    print("|---|" + "---|" * len(FIGURES))
    agree = agree_all = 0
    for name, case in cases.items():
        row, ours = document["cases"][name], simulated(case)
        theirs = row["error"].split(":")[0] if "error" in row else measured(row)
        if isinstance(ours, str) or isinstance(theirs, str):
            shown = [side if isinstance(side, str) else str(side["syncs"]) for side in (ours, theirs)]
            texts = [shown[0] if ours == theirs else " / ".join(shown)] + [""] * (len(FIGURES) - 1)
            same = [ours == theirs]
        else:
            same = [ours[f] == theirs[f] for f in FIGURES]
            texts = [str(ours[f]) if ours[f] == theirs[f] else f"{ours[f]} / {theirs[f]}" for f in FIGURES]
        agree += all(same[:2])
        agree_all += all(same)
        print(f"| {name} | " + " | ".join(texts) + " |")
    print(f"\n{len(cases)} cases: syncs and maybe agree in {agree}, every figure in {agree_all}.")


if __name__ == "__main__":
    main(*sys.argv[1:])
