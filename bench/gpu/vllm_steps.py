"""A real vLLM engine on a GPU, profiled through its agent while it serves: one report per collector.

    python3 bench/gpu/vllm_steps.py OUT_DIR MODEL_DIR BACKEND [--async] [--v2] [--logprobs N] [--collectors kineto]

Runs the engine in this process with the plugin registered, keeps it busy with all four batch classes, and meanwhile
starts `syncfree profile --collectors NAME` as another process against the engine's socket. Needs vLLM, torch, a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_settings import ENGINE, ON_GPU, VARIABLES


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("backend")
    parser.add_argument("--async", dest="asynchronous", action="store_true")
    parser.add_argument("--v2", action="store_true")
    parser.add_argument("--logprobs", type=int, default=None)
    parser.add_argument("--collectors", default="kineto,probe")
    parser.add_argument("--steps", type=int, default=150)
    return parser.parse_args()


def build(options: argparse.Namespace):
    os.environ.update(VARIABLES, VLLM_USE_V2_MODEL_RUNNER=str(int(options.v2)))
    import syncfree.backends.vllm as plugin

    plugin.register()
    import vllm.v1.worker.gpu_worker as worker
    from vllm import LLM

    worker.kernel_warmup = lambda *a, **k: None  # imports every model's warm-up, which needs compiled ops left out here
    return LLM(
        model=str(options.model),
        async_scheduling=options.asynchronous,
        attention_config={"backend": options.backend},
        **ENGINE,
        **ON_GPU,
    )


class Load:
    """Requests without end: short prompts, prompts longer than the token budget, and a shared prefix."""

    def __init__(self, engine, logprobs: int | None) -> None:
        self.engine, self.count, self.logprobs = engine, 0, logprobs
        self.prefix = [(5 * i) % 4000 + 3 for i in range(512)]

    def add(self) -> None:
        from vllm import SamplingParams

        self.count += 1
        kind = self.count % 4
        own = [(7 * i + self.count) % 4000 + 3 for i in range((24, 600, 40, 12)[kind])]
        prompt = self.prefix + own if kind == 2 else own
        params = SamplingParams(
            max_tokens=8, ignore_eos=True, detokenize=False, temperature=0.0, logprobs=self.logprobs
        )
        self.engine.add_request(f"r{self.count}", {"prompt_token_ids": prompt}, params)

    def step(self) -> None:
        if not self.engine.has_unfinished_requests():
            for _ in range(3):
                self.add()
        elif self.count % 4 and self.engine.get_num_unfinished_requests() < 6:
            self.add()
        self.engine.step()
        if self.engine.get_num_unfinished_requests() < 2:
            self.add()


def record(load: Load, collector: str, options: argparse.Namespace) -> dict[str, object]:
    report = options.out / f"vllm_{options.model.name}_{collector}{'_async' if options.asynchronous else ''}.json"
    command = [
        sys.executable,
        "-m",
        "syncfree.cli",
        "profile",
        "--steps",
        str(options.steps),
        "--collectors",
        collector,
    ]
    began = time.time()
    with subprocess.Popen([*command, "--json", str(report)]) as client:
        while client.poll() is None and time.time() - began < 150:
            load.step()
        client.terminate()
    if not report.exists():
        return {"collector": collector, "exit": client.returncode, "error": "no report"}
    told = json.loads(report.read_bytes())
    classes = {
        name: {"steps": c["steps"], "syncs": c["syncs_per_step"], "launches": c["launches_per_step"]["p50"]}
        for name, c in told["classes"].items()
    }
    sites = [(s["kind"], s["phase"], f"{s['file'][-50:]}:{s['line']}", s["count"]) for s in told["sites"][:12]]
    return {"collector": collector, "exit": client.returncode, "classes": classes, "sites": sites}


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    llm = build(options)
    print(f"engine up after {time.time() - began:.1f} s", flush=True)
    load = Load(llm.llm_engine, options.logprobs)
    for _ in range(60):
        load.step()
    for collector in options.collectors.split(","):
        print("RESULT", json.dumps(record(load, collector, options)), flush=True)


if __name__ == "__main__":
    main()
