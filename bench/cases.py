"""The three field cases in one run: upstream's released files before and after, and ours, in a serving loop.

    python3 bench/cases.py --pack DIR                  where there is a package index: the upstream files a run needs
    bash bench/gpu/cases.sh                            on the GPU machine (vLLM 0.26 from the kit of bench/gpu_vllm)
    python3 bench/cases.py --smoke --out DIR           everything with tiny shapes on the simulated device
    python3 bench/cases.py --report DIR/cases.json     the table and the plot again

Case 1: FP8 prefill metadata on chunked prefill (MLA). Case 2: `seq_lens` copied to the host on decode (FA). Case 3:
persistent MLA decode, fixed splits, and what the route chooses. Shapes: `serving.Sizes`: 32 layers' worth of kernels,
hidden 4096, prompts of 8,192 in chunks of 2,048. The device's work is a model of ours on any GPU; no AMD kernel runs.
Results: cases.json, cases.md, cases.svg, written after each part.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "gpu")]
import cases_report  # noqa: E402
import field_builders as fields  # noqa: E402
from forwards import Forwards  # noqa: E402
from serving import SMOKE, Loop, Model, Sizes  # noqa: E402
from steady import Steady  # noqa: E402

STEADY = Sizes(concurrency=64, decode_steps=160)
STEADY_SMOKE = SMOKE._replace(decode_steps=8)
THIRD = Sizes(concurrency=64, block=1)
THIRD_SMOKE = SMOKE._replace(concurrency=64, block=1)
COUNTED_STEPS = 14
CLASSES = {"decode": "decode", "causal": "causal_prefill", "chunked": "chunked_prefill"}


class Run:
    """One invocation: its device, its time, its results so far."""

    def __init__(self, device: Any, smoke: bool, seconds: float, rounds: int, out: Path) -> None:
        self.device, self.smoke, self.rounds, self.out = device, smoke, rounds, out
        self.deadline = time.monotonic() + seconds
        self.result: dict[str, Any] = {}
        self.collectors = "simulated" if smoke else "kineto"
        self.failures: list[str] = []
        self.tokens_of: dict[str, str] = {}

    def setting(self, sizes: Sizes, drafts: int) -> fields.Setting:
        tokens = sizes.chunk + (1 + drafts) * sizes.concurrency
        return fields.Setting(self.device, self.smoke, sizes.concurrency, tokens, sizes.room, sizes.block, drafts)

    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline

    def keep(self, name: str, told: dict[str, Any]) -> Path:
        """Write a file of results; the folder is made by whatever is kept first."""
        self.out.mkdir(parents=True, exist_ok=True)
        file = self.out / name
        file.write_text(json.dumps(told, indent=1))
        return file

    def write(self) -> None:
        self.result["failures"] = self.failures
        cases_report.write(self.keep("cases.json", self.result))


# ----------------------------------------------------------------- measuring


def decode_kernel(run: Run, sizes: Sizes, drafts: int) -> Callable[..., Any]:
    """Attention of decode rows: our fixed-split Triton kernel on a GPU, the same in torch on the simulated device."""
    if run.smoke:
        return functools.partial(_decode_in_torch, sizes)
    from syncfree.backends import triton_mla

    shape = triton_mla.DecodeShape(sizes.heads, sizes.latent, sizes.rope, 1 + drafts)
    rows = sizes.splits * (1 + drafts) * sizes.concurrency
    pool = triton_mla.PartialPool.allocate(rows, sizes.heads, sizes.latent, run.device)

    def decode(q: Any, cache: Any, qo: Any, kv: Any, pages: Any, inputs: Any, scale: float) -> Any:
        return triton_mla.fixed_split_decode(q, cache, pages, qo, kv, pool, shape, scale, sizes.splits)[0]

    return decode


def _decode_in_torch(sizes: Sizes, q: Any, cache: Any, qo: Any, kv: Any, pages: Any, inputs: Any, scale: float) -> Any:
    """Every row of a decode has the same number of query tokens; `cache` [P, D], values its first columns."""
    from syncfree.backends.reference import masked_attention

    rows = inputs.decode_rows
    each = inputs.decode_tokens // rows
    within = torch.arange(sizes.room, device=q.device)
    lens = kv[1 : rows + 1] - kv[:rows]
    where = (kv[:rows, None] + within).clamp(max=len(pages) - 1)
    keys = cache[pages[where].clamp(0, len(cache) - 1)][:, :, None]
    behind = torch.arange(each - 1, -1, -1, device=q.device)
    visible = within[None, None] < (lens[:, None] - behind)[:, :, None]
    latent = q.shape[-1] - sizes.rope
    out, _ = masked_attention(q.view(rows, each, *q.shape[1:]), keys, keys[..., :latent], visible, scale)
    return out.flatten(0, 1)


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def step_times(records: list[Any]) -> dict[str, list[float]]:
    """Milliseconds between the ends of successive steps on the device, by the later one's kind."""
    times: dict[str, list[float]] = {}
    for last, this in itertools.pairwise(records):
        times.setdefault(this.kind, []).append((this.ended - last.ended) * 1e3)
    return times


class Tally:
    """What the rounds of one variant have shown."""

    def __init__(self) -> None:
        self.steps: dict[str, list[float]] = {}
        self.rounds: dict[str, list[float]] = {}  # median of each round, by kind: how far they lie apart
        self.builds: dict[str, list[float]] = {}
        self.requests: list[Any] = []
        self.seconds = 0.0
        self.tokens: list[Any] = []

    def add(self, records: list[Any], tokens: list[Any], seconds: float) -> None:
        for kind, times in step_times(records).items():
            self.steps.setdefault(kind, []).extend(times)
            self.rounds.setdefault(kind, []).append(statistics.median(times))
        for record in records:
            self.builds.setdefault(record.kind, []).append(record.build_us)
        self.seconds += seconds
        self.tokens.append(tokens)

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "step_ms": {kind: round(statistics.median(times), 4) for kind, times in self.steps.items()},
            "step_ms_of_rounds": {kind: [round(ms, 4) for ms in times] for kind, times in self.rounds.items()},
            "steps": {kind: len(times) for kind, times in self.steps.items()},
            "build_us": {kind: round(statistics.median(times), 1) for kind, times in self.builds.items()},
            "tokens_sha256": hashlib.sha256(json.dumps(self.tokens[0]).encode()).hexdigest(),
            "tokens_repeat": all(tokens == self.tokens[0] for tokens in self.tokens),
        }
        return found | (self._serving() if self.requests else {})

    def _serving(self) -> dict[str, Any]:
        first = [(r.first_token - r.admitted) * 1e3 for r in self.requests]
        each = [(r.ended - r.first_token) * 1e3 / (len(r.tokens) - 1) for r in self.requests]
        whole = [(r.ended - r.admitted) * 1e3 for r in self.requests]
        drafted = sum(r.drafted for r in self.requests)
        return {
            "requests": len(self.requests),
            "ttft_ms": {"median": round(statistics.median(first), 3), "p99": round(quantile(first, 0.99), 3)},
            "tpot_ms": round(statistics.median(each), 4),
            "e2el_ms": round(statistics.median(whole), 3),
            "tokens_per_s": round(sum(len(r.tokens) for r in self.requests) / self.seconds, 2),
            "acceptance": round(sum(r.accepted for r in self.requests) / drafted, 6) if drafted else None,
        }


def counted(run: Run, serve: Callable[[Any], None]) -> dict[str, Any]:
    """Waits, copies and launches of the builds of a few steps, by kind: the most of each. `serve(around_build)`."""
    from syncfree.profiler import Profiler

    with Profiler(run.collectors) as profiler:

        @contextlib.contextmanager
        def around(kind: str) -> Iterator[None]:
            with profiler.step(batch_class=CLASSES[kind]), profiler.phase("build"):
                yield

        serve(around)
    found: dict[str, Any] = {}
    for kind, name in CLASSES.items():
        steps = [step for step in profiler.report.steps if step.batch_class == name]
        if steps:
            found[kind] = {
                "steps": len(steps),
                "syncs": max(step.syncs.total for step in steps),
                "h2d": max(step.copies.h2d for step in steps),
                "d2h": max(step.copies.d2h for step in steps),
                "launches": max(step.launches.kernels for step in steps),
            }
    sites = [f"{Path(site.file).name}:{site.line}" for site in profiler.report.sites if site.phase == "build"]
    return {"by_kind": found, "sites": sites[:12]}


def check(run: Run, case: str, variants: dict[str, Any]) -> None:
    """Ours planned every step, and all variants gave the same tokens."""
    tokens = {name: told["tokens_sha256"] for name, told in variants.items()}
    run.tokens_of[case] = tokens["before"]
    if not all(told["tokens_repeat"] for told in variants.values()):
        run.failures.append(f"{case}: rounds of one builder differ in their tokens: the device does not repeat itself")
    elif len(set(tokens.values())) > 1:
        run.failures.append(f"{case}: not all variants gave the same tokens: {tokens}")


def fell_back(run: Run, case: str, builder: Any) -> None:
    tally = getattr(builder, "tally_of_this_run", None)
    if tally is not None and tally.fallbacks:
        run.failures.append(f"{case}: ours fell back to upstream: {tally.fallbacks}")


# --------------------------------------------------------------------- cases


def serve_prompts(run: Run, case: str, drafts: int) -> dict[str, Any]:
    """Chunked prefill beside decode, every variant in turn, `rounds` times; then a few steps of each counted."""
    sizes = SMOKE if run.smoke else Sizes()
    model = Model(sizes, run.device, decode_kernel(run, sizes, drafts))
    reader, names = fields.reader_of(case, sizes.block), fields.CASES[case]
    tallies = {name: Tally() for name in names}
    loops, forward = {}, Forwards(model)
    for name in names:
        builder = fields.make(case, name, run.setting(sizes, drafts))
        loops[name] = Loop(model, builder, reader, drafts, fields.common_metadata, forward)
        loops[name].run(None if name == "before" else 6)  # once all layouts, for their capture; then a warm-up each
    captured_as_launched(run, case, loops["before"])
    with uncollected():
        rounds(run, tallies, loops)
    told = {}
    for name, loop in loops.items():
        told[name] = {"what": names[name], **tallies[name].told()}
        told[name]["counts"] = counted(run, lambda around, loop=loop: _count_loop(loop, around))
        fell_back(run, case, loop.builder)
    check(run, case, told)
    control = misread(run, case, loops["before"])
    return {"variants": told, "control": control, "sizes": sizes._asdict(), "drafts": drafts, "rounds": run.rounds}


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No variant is to pay for another's garbage."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def rounds(run: Run, tallies: dict[str, Tally], loops: dict[str, Loop]) -> None:
    """Every variant in turn, again and again while there is time."""
    for _ in range(run.rounds):
        for name, loop in loops.items():
            if run.out_of_time() and tallies[name].requests:
                continue
            loop.records.clear()
            torch.cuda.synchronize()
            began = time.perf_counter()
            ended = loop.run()
            tokens = [request.tokens for request in ended]
            tallies[name].add(loop.records, tokens, time.perf_counter() - began)
            tallies[name].requests += ended


def captured_as_launched(run: Run, case: str, loop: Loop) -> None:
    """The captured forward gives the tokens of the one launched operator by operator."""
    ways = (loop.forward, loop.model.forward)
    tokens = []
    for loop.forward in ways:
        tokens.append([request.tokens for request in loop.run(requests=2)])
    loop.forward = ways[0]
    if tokens[0] != tokens[1]:
        run.failures.append(f"{case}: the captured forward gives other tokens than the same launched eagerly")


def misread(run: Run, case: str, loop: Any) -> dict[str, Any]:
    """The same once more, every other token of the cached context read twice instead of its neighbour: it must show."""
    right, loop.reader = loop.reader, dataclasses.replace(loop.reader)
    loop.reader.context = lambda metadata, inputs: _every_other(right.context(metadata, inputs))
    tally = Tally()
    ended = loop.run()
    tally.requests, tally.seconds = ended, 1.0
    tally.tokens.append([request.tokens for request in ended])
    loop.reader = right
    told = tally.told()
    found = {name: told[name] for name in ("tokens_sha256", "acceptance")}
    found["noticed"] = run.tokens_of[case] != found["tokens_sha256"]
    if not found["noticed"]:
        run.failures.append(f"{case}: context read wrong gave the same tokens: they prove nothing")
    return found


def _every_other(slots: Any) -> Any:
    return None if slots is None else slots - slots % 2


def _count_loop(loop: Any, around: Any) -> None:
    loop.around_build = around
    loop.run(COUNTED_STEPS, requests=2)  # of so few, some steps are of decode rows alone
    loop.around_build = contextlib.nullcontext


def decode_steadily(run: Run) -> dict[str, Any]:
    """Case 2: the same rows step after step, the forward a captured graph."""
    sizes = STEADY_SMOKE if run.smoke else STEADY
    model = Model(sizes, run.device, decode_kernel(run, sizes, 0))
    names = fields.CASES["case2"]
    tallies, loops = {name: Tally() for name in names}, {}
    for name in names:
        builder = fields.make("case2", name, run.setting(sizes, 0))
        loops[name] = Steady(model, builder, fields.reader_of("case2", sizes.block), fields.common_metadata)
        for layer in model.layers:
            layer["cache"].normal_(generator=torch.Generator(device=run.device).manual_seed(3))
    for _ in range(run.rounds):
        for name, loop in loops.items():
            began = time.perf_counter()
            records, tokens = loop.run(sizes.decode_steps, contextlib.nullcontext)
            tallies[name].add(records, tokens, time.perf_counter() - began)
    told = {}
    for name, loop in loops.items():
        told[name] = {"what": names[name], **tallies[name].told()}
        told[name]["counts"] = counted(run, lambda around, loop=loop: loop.run(6, around))
        fell_back(run, "case2", loop.builder)
    check(run, "case2 steady", told)
    return {"variants": told, "sizes": sizes._asdict(), "rounds": run.rounds}


def case1(run: Run) -> dict[str, Any]:
    return serve_prompts(run, "case1", drafts=1)


def case2(run: Run) -> dict[str, Any]:
    return {"steady": decode_steadily(run), "serving": serve_prompts(run, "case2", drafts=0)}


def case3(run: Run) -> dict[str, Any]:
    """What the builders fill on decode, and the time of a step by either kernel and by the route's choice."""
    import case3 as third

    builders = third.builders(run, THIRD_SMOKE if run.smoke else THIRD)
    return {"builders": builders, **third.kernels(run)}


PARTS = {"1": ("case1", case1), "2": ("case2", case2), "3": ("case3", case3)}


def about(run: Run) -> dict[str, Any]:
    import syncfree
    import vllm

    on_gpu = not run.smoke
    return {
        "command": " ".join(["python3", *sys.argv]),
        "smoke": run.smoke,
        "device": torch.cuda.get_device_name() if on_gpu else "simulated: no time here says anything about a device",
        "versions": {
            "torch": torch.__version__,
            "vllm": vllm.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "syncfree": getattr(syncfree, "__version__", None),
            "python": sys.version.split()[0],
        },
    }


def execute(run: Run, parts: list[str]) -> int:
    import vllm

    if not vllm.__version__.startswith("0.26."):
        raise SystemExit(f"expected vLLM 0.26, which the other releases' files are put into, got {vllm.__version__}")
    fields.install(run.smoke)
    run.result |= about(run)
    for part in parts:
        name, function = PARTS[part]
        began = time.monotonic()
        try:
            run.result[name] = function(run)
        except Exception as error:  # noqa: BLE001 - a run on a borrowed machine brings home what the other cases showed
            import traceback

            traceback.print_exc()
            run.failures.append(f"{name}: {type(error).__name__}: {error}"[:500])
        else:
            run.result[name]["seconds"] = round(time.monotonic() - began, 1)
        run.write()
        if not run.smoke:
            torch.cuda.empty_cache()
    print((run.out / "cases.md").read_text())
    for failure in run.failures:
        print("FAILED", failure)
    return 1 if run.failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pack", type=Path, metavar="DIR")
    parser.add_argument("--report", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--cases", default="1,2,3")
    parser.add_argument("--rounds", type=int, default=None, help="of every variant, default 3 (smoke: 1)")
    parser.add_argument("--seconds", type=float, default=420, help="no new round is begun after so many")
    parser.add_argument("--out", type=Path, default=Path("cases"))
    options = parser.parse_args()
    if options.pack is not None:
        fields.pack(options.pack)
        return 0
    if options.report is not None:
        cases_report.write(options.report)
        return 0
    rounds = options.rounds or (1 if options.smoke else 3)
    parts = options.cases.split(",")
    if options.smoke:
        from syncfree.profiler import simulated_device

        with simulated_device() as device:
            return execute(Run(device, True, options.seconds, rounds, options.out), parts)
    if not torch.cuda.is_available():
        parser.error("no GPU here: --smoke runs everything on the simulated device")
    return execute(Run(torch.device("cuda", 0), False, options.seconds, rounds, options.out), parts)


if __name__ == "__main__":
    sys.exit(main())
