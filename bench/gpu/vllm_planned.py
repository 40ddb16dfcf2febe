"""A real vLLM engine on a GPU under `SYNCFREE_PLANNER=off|off|shadow|on`: same tokens, never more waits or launches.

    python3 bench/gpu/vllm_planned.py OUT_DIR MODEL_DIR BACKEND [--async] [--v2] [--collector kineto]

Each mode runs in a process of its own, with all requests queued at the start: cut prompts, a common prefix, decodes.
The same requests are served twice: once for their tokens, once while a recording counts every step. With `on`, no step
may have more waits or more launches than with `off`. Exit code 1 where it has, where tokens differ (and the two runs
with `off` do not), or where shadow found a mismatch. Needs vLLM, torch and a GPU; settings as in `vllm_steps.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
RUNS = {"off": "off", "control": "off", "shadow": "shadow", "on": "on"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("backend")
    parser.add_argument("--async", dest="asynchronous", action="store_true")
    parser.add_argument("--v2", action="store_true")
    parser.add_argument("--collector", default="kineto")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--mode", help="run this mode in this process (used by the program itself)")
    return parser.parse_args()


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
    import vllm_steps

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


def run_apart(options: argparse.Namespace, name: str) -> dict[str, object]:
    file = options.out / f"planned_{options.model.name}_{name}.json"
    file.unlink(missing_ok=True)
    environment = {**os.environ, "SYNCFREE_PLANNER": RUNS[name]}
    command = [sys.executable, __file__, *sys.argv[1:], "--mode", name]
    done = subprocess.run(command, env=environment, check=False, timeout=400)
    if done.returncode or not file.exists():
        raise SystemExit(f"{name}: exit code {done.returncode}")
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


def table(results: dict[str, dict]) -> None:
    """Means per step and batch class, by mode."""
    classes = sorted({step["class"] for result in results.values() for step in result["counted"]})
    for name, result in results.items():
        for batch_class in classes:
            steps = [step for step in result["counted"] if step["class"] == batch_class]
            if not steps:
                continue
            means = {}
            for figure in ("syncs", "launches", "build_syncs", "build_launches", "build_us"):
                known = [step[figure] for step in steps if step[figure] is not None]
                means[figure] = f"{sum(known) / len(known):8.2f}" if known else "unknown"
            figures = "  ".join(f"{figure} {value}" for figure, value in means.items())
            print(f"{name:8} {batch_class:16} {len(steps):4} steps  {figures}")


def main() -> int:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.mode:
        made = run_here(options)
        (options.out / f"planned_{options.model.name}_{options.mode}.json").write_text(json.dumps(made))
        return 0
    results = {name: run_apart(options, name) for name in RUNS}
    table(results)
    off = results["off"]
    varies = results["control"]["tokens"] != off["tokens"]
    different = [name for name in ("shadow", "on") if results[name]["tokens"] != off["tokens"]]
    more = worse(off["counted"], results["on"]["counted"])
    mismatches = results["shadow"]["planner"]["mismatches"]
    verdict = {
        "model": options.model.name,
        "backend": options.backend,
        "asynchronous": options.asynchronous,
        "v2": options.v2,
        "versions": off["versions"],
        "steps": off["steps"],
        "tokens_vary_without_planner": varies,
        "tokens_differ_in": different,
        "shadow": results["shadow"]["planner"],
        "notes": results["shadow"]["notes"] + results["on"]["notes"],
        "worse": more[:20],
    }
    print("RESULT", json.dumps(verdict), flush=True)
    return int(bool((different and not varies) or more or mismatches))


if __name__ == "__main__":
    sys.exit(main())
