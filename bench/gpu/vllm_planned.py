"""A real vLLM engine on a GPU under `SYNCFREE_PLANNER=off|off|shadow|on`: same tokens, never more waits or launches.

    python3 bench/gpu/vllm_planned.py OUT_DIR MODEL_DIR:BACKEND... [--scheduling sync,async] [--v2] [--jobs N]

Each case (a model with its attention backend, with and without asynchronous scheduling) runs five engines, each in a
process of its own, with all requests queued at the start: cut prompts, a common prefix, decodes. The same requests are
served twice: once for their tokens, once while a recording counts every step. With `on`, no step may have more waits or
more launches than with `off`; the fifth run plans wrong lengths, and its tokens have to differ. OUT_DIR/planned.json
(or --json FILE) gets one object a case, and keeps those of earlier calls. Exit code 1 where a case fails (where the two
runs with `off` differ, tokens say nothing). N engines at a time (default 1): counts and tokens do not depend on it,
times do, so they are left out where N > 1. Needs vLLM, torch and a GPU; settings as in `vllm_steps.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
RUNS = {"off": "off", "control": "off", "shadow": "shadow", "on": "on", "wrong": "on"}
SCHEDULING = ("sync", "async")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="+", type=case_of, metavar="MODEL_DIR:BACKEND")
    parser.add_argument("--scheduling", type=scheduling_of, default=("sync",), help="sync, async or both: sync,async")
    parser.add_argument("--v2", action="store_true")
    parser.add_argument("--collector", default="kineto")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time")
    parser.add_argument("--json", type=Path, help="default OUT_DIR/planned.json")
    parser.add_argument("--mode", choices=RUNS, help="this run of one case, in this process (used by the program)")
    options = parser.parse_args(given)
    if options.mode and (len(options.cases), len(options.scheduling)) != (1, 1):
        parser.error("--mode: expected one case and one scheduling")
    options.json = options.json or options.out / "planned.json"
    return options


def case_of(text: str) -> tuple[Path, str]:
    model, _, backend = text.rpartition(":")
    if not model or not backend:
        raise argparse.ArgumentTypeError(f"expected MODEL_DIR:BACKEND, got {text!r}")
    return Path(model), backend


def scheduling_of(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if odd := [part for part in parts if part not in SCHEDULING]:
        raise argparse.ArgumentTypeError(f"expected sync or async, got {odd[0]!r}")
    return parts


def name_of(model: Path, backend: str, scheduling: str, v2: bool) -> str:
    return f"{model.name}_{backend}_{scheduling}{'_v2' if v2 else ''}"


def requests(count: int):
    """(prompt tokens, output tokens): short prompts, prompts past the token budget, a common prefix."""
    prefix = [(5 * i) % 4000 + 3 for i in range(512)]
    for number in range(count):
        kind = number % 4
        own = [(7 * i + number) % 4000 + 3 for i in range((24, 600, 40, 12)[kind])]
        yield (prefix + own if kind == 2 else own), (20, 6, 12, 40)[kind]


def serve(engine, count: int, name: str) -> tuple[str, int]:
    """Queue everything, step until all is done; (hash of all tokens, steps)."""
    from vllm import SamplingParams

    for number, (prompt, output) in enumerate(requests(count)):
        params = SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False, temperature=0.0)
        engine.add_request(f"{name}{number:03}", {"prompt_token_ids": prompt}, params)
    tokens: dict[str, list[int]] = {}
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens[output.request_id[len(name) :]] = list(output.outputs[0].token_ids)
        steps += 1
    # a request's id may carry a suffix of the engine's own: the order of arrival is kept by sorting
    told = json.dumps([tokens[key] for key in sorted(tokens)])
    return hashlib.sha256(told.encode()).hexdigest(), steps


def run_here(options: argparse.Namespace) -> dict[str, object]:
    import controls
    import vllm_steps

    controls.weights_that_matter()
    if options.mode == "wrong":
        controls.wrong_lengths()
    [(options.model, options.backend)] = options.cases
    options.asynchronous = options.scheduling == ("async",)
    engine = vllm_steps.build(options).llm_engine
    serve(engine, options.requests, "w")
    engine.reset_prefix_cache()
    tokens, steps = serve(engine, options.requests, "a")
    engine.reset_prefix_cache()
    from syncfree.backends.vllm import watch

    recorder = watch.current().recorder
    session = recorder.start(options.collector)
    again, _ = serve(engine, options.requests, "b")
    session.close()
    serve(engine, 1, "c")  # a recording that belongs to the stepping thread ends at its next boundary
    session.advance(force=True)
    recorder.detach(session)
    if session.recording is None:
        raise SystemExit(f"nothing recorded: {session.error}")
    report = session.recording.build()
    counted = [
        {
            "class": step.batch_class,
            "tokens": step.num_tokens,
            "syncs": step.syncs.total,
            "launches": step.launches.kernels,
            "build_syncs": step.phases["build"].syncs.total if "build" in step.phases else None,
            "build_launches": step.phases["build"].launches.kernels if "build" in step.phases else None,
            "build_us": step.phases["build"].duration_us if "build" in step.phases else None,
        }
        for step in report.steps
    ]
    planner = report.planner
    return {
        "mode": options.mode,
        "tokens": tokens,
        "recorded_tokens": again,
        "steps": steps,
        "counted": counted,
        "planner": {"mode": planner.mode, "mismatches": planner.mismatches, "first_mismatch": planner.first_mismatch},
        "notes": [note.text for note in report.notes if note.kind == "planner"],
        "versions": {"vllm": report.source.engine, "torch": report.source.torch, "device": report.source.device},
    }


def run_apart(options: argparse.Namespace, case: tuple[Path, str], scheduling: str, mode: str) -> dict[str, object]:
    model, backend = case
    file = options.out / f"{name_of(model, backend, scheduling, options.v2)}_{mode}.json"
    file.unlink(missing_ok=True)
    environment = {**os.environ, "SYNCFREE_PLANNER": RUNS[mode]}
    command = [sys.executable, __file__, str(options.out), f"{model}:{backend}", "--scheduling", scheduling]
    command += ["--collector", options.collector, "--requests", str(options.requests), "--mode", mode]
    done = subprocess.run([*command, *(["--v2"] if options.v2 else [])], env=environment, check=False, timeout=400)
    if done.returncode or not file.exists():
        raise RuntimeError(f"{file.stem}: exit code {done.returncode}")
    return json.loads(file.read_bytes())


def worse(off: list[dict], on: list[dict]) -> list[str]:
    """Steps in which `on` has more than `off`; steps of the same batches come in the same order."""
    found = []
    if [(s["class"], s["tokens"]) for s in off] != [(s["class"], s["tokens"]) for s in on]:
        return [f"the steps differ: {len(off)} with off, {len(on)} with on"]
    for number, (a, b) in enumerate(zip(off, on, strict=True)):
        for figure in ("syncs", "launches"):
            if a[figure] is None or b[figure] is None:
                found.append(f"step {number}: {figure} unknown")
            elif b[figure] > a[figure]:
                found.append(f"step {number} ({a['class']}): {a[figure]} {figure} with off, {b[figure]} with on")
    return found


FIGURES = ("syncs", "launches", "build_syncs", "build_launches", "build_us")


def table(results: dict[str, dict], timed: bool = True) -> list[dict[str, object]]:
    """Means per step and batch class, by mode; None where unknown. Printed too."""
    figures_told = FIGURES if timed else FIGURES[:-1]
    classes = sorted({step["class"] for result in results.values() for step in result["counted"]})
    rows: list[dict[str, object]] = []
    for name, result in results.items():
        for batch_class in classes:
            steps = [step for step in result["counted"] if step["class"] == batch_class]
            if not steps:
                continue
            means: dict[str, float | None] = {}
            for figure in figures_told:
                known = [step[figure] for step in steps if step[figure] is not None]
                means[figure] = round(sum(known) / len(known), 2) if known else None
            rows.append({"mode": name, "class": batch_class, "steps": len(steps), **means})
            figures = "  ".join(f"{figure} {'unknown' if m is None else m}" for figure, m in means.items())
            print(f"{name:8} {batch_class:16} {len(steps):4} steps  {figures}")
    return rows


def verdict_of(results: dict[str, dict]) -> dict[str, object]:
    """What the runs of one case say; `good` where nothing speaks against the planner."""
    off = results["off"]
    varies = results["control"]["tokens"] != off["tokens"]
    different = [name for name in ("shadow", "on") if results[name]["tokens"] != off["tokens"]]
    blind = "wrong" in results and results["wrong"]["tokens"] == off["tokens"]
    more = worse(off["counted"], results["on"]["counted"])
    shadow = results["shadow"]["planner"]
    # None: the process never compared anything
    agrees = shadow["mismatches"] == 0
    return {
        "good": not ((different and not varies) or more or blind or not agrees),
        "versions": off["versions"],
        "steps": off["steps"],
        "tokens_vary_without_planner": varies,
        "tokens_differ_in": different,
        "wrong_lengths_change_nothing": blind,
        "shadow": shadow,
        "notes": results["shadow"]["notes"] + results["on"]["notes"],
        "worse": more[:20],
    }


def keep(file: Path, name: str, found: dict[str, object]) -> None:
    """One object a case in one file; those of earlier calls stay."""
    told = json.loads(file.read_bytes()) if file.exists() else {}
    told[name] = found
    fresh = file.with_suffix(".part")
    fresh.write_text(json.dumps(told, indent=1))
    fresh.replace(file)


def finish(options: argparse.Namespace, name: str, runs: dict[str, Future[dict]]) -> bool:
    """Wait for the runs of one case, print and keep what they say; False where the case fails."""
    print(f"== {name}", flush=True)
    try:
        results = {mode: run.result() for mode, run in runs.items()}
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"{name}: {error}", flush=True)
        return False
    rows = table(results, timed=options.jobs == 1)
    found = verdict_of(results)
    keep(options.json, name, found | {"classes": rows})
    print("RESULT", name, json.dumps(found), flush=True)
    return bool(found["good"])


def main() -> int:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.mode:
        [(model, backend)], [scheduling] = options.cases, options.scheduling
        made = run_here(options)
        name = name_of(model, backend, scheduling, options.v2)
        (options.out / f"{name}_{options.mode}.json").write_text(json.dumps(made))
        return 0
    bad = 0
    with ThreadPoolExecutor(max_workers=options.jobs) as engines:
        started = {
            (case, scheduling): {mode: engines.submit(run_apart, options, case, scheduling, mode) for mode in RUNS}
            for case in options.cases
            for scheduling in options.scheduling
        }
        for (case, scheduling), runs in started.items():
            bad += not finish(options, name_of(*case, scheduling, options.v2), runs)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
