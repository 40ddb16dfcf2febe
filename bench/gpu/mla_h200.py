"""MLA decode on a GPU: numerics and schedules over every golden plan, graph replay, and persistent against fixed split.

    python3 bench/gpu/mla_h200.py OUT.json [--parts schedules,numerics,graph,timing] [--seconds 400]

(with `syncfree` importable: on a bare machine, a folder on PYTHONPATH with a link of that name to this checkout).
Prints a summary and writes OUT.json after each part. Exit code 1 if a plan differs, an output is wrong or unwritten.
`--quick` takes few and small cases, to try the script under Triton's interpreter (TRITON_INTERPRET=1, with --latent 32
--rope 16). `--sanitizer` runs those under compute-sanitizer's memcheck and racecheck, each in a process of its own, and
says so where the machine has none or it does not serve the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gzip
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import sanitizer
import torch
import triton
from syncfree.backends import triton_mla as mla
from syncfree.planner import schedules

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "data" / "golden" / "mla_decode.jsonl.gz"
LISTS = ("work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = 1e-2  # relative error of bf16 products against float64
SCALE = 576**-0.5
POISON = float("nan")


@dataclass
class Run:
    """What one invocation is about."""

    latent: int
    rope: int
    quick: bool
    deadline: float
    result: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.latent + self.rope

    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline


@dataclass
class Plan:
    """Arguments of `schedules.mla_decode`."""

    name: str
    qo: list[int]
    kv: list[int]
    rule: dict[str, Any]
    is_causal: bool = True

    @property
    def requests(self) -> int:
        return len(self.kv) - 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        names = ("gfx", "num_cu", "max_split_per_batch", "experimental")
        rule = {name: self.rule[name] for name in names if name in self.rule}
        types = (self.rule["q_dtype"], self.rule["kv_dtype"])
        return schedules.mla_decode_shapes(
            self.requests, self.rule["max_seqlen_qo"], self.rule["num_heads"], *types, **rule
        )

    def schedule(self) -> Any:
        return schedules.mla_decode(self.qo, self.kv, is_causal=self.is_causal, **self.rule)


def golden_plans(run: Run) -> Iterator[Plan]:
    names = {"num_heads": "num_heads_per_head_k", "q_dtype": "dtype_q", "kv_dtype": "dtype_kv"}
    same = ("num_cu", "gfx", "max_seqlen_qo", "uni_seqlen_qo", "max_split_per_batch", "experimental")
    seen = set()
    with gzip.open(GOLDEN, "rt") as lines:
        for line in lines:
            r = json.loads(line)
            kind = (r["num_heads_per_head_k"], r["max_seqlen_qo"], r["num_works"] > len(r["seqlens_kv_indptr"]))
            if run.quick and (kind in seen or r["seqlens_kv_indptr"][-1] > 1500 or r["num_works"] > 40):
                continue
            seen.add(kind)
            rule = {ours: r[theirs] for ours, theirs in names.items()} | {name: r[name] for name in same}
            yield Plan(r["id"], r["seqlens_qo_indptr"], r["seqlens_kv_indptr"], rule, r["is_causal"])


def int32(values: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.int32), device=DEVICE)


def device_scheduler(plan: Plan) -> mla.DeviceScheduler:
    return mla.DeviceScheduler(
        schedules.packing_rule(plan.requests, **plan.rule),
        plan.requests,
        max_seqlen_qo=plan.rule["max_seqlen_qo"],
        uni_seqlen_qo=plan.rule["uni_seqlen_qo"],
        is_causal=plan.is_causal,
        device=DEVICE,
    )


# ---------------------------------------------------------------- schedules


def check_schedules(run: Run) -> dict[str, Any]:
    """The device's schedules against the host's, whole buffers: prefixes equal, nothing else written."""
    checked = 0
    for plan in golden_plans(run):
        work = mla.WorkBuffers.allocate(plan.shapes(), DEVICE)
        for name in LISTS:
            getattr(work, name).fill_(-77)
        device_scheduler(plan)(int32(plan.qo), int32(plan.kv), work)
        wanted = plan.schedule()
        for name in LISTS:
            got, expected = getattr(work, name).cpu().numpy(), getattr(wanted, name)
            tail = expected[-1] if name == "reduce_indptr" else -77
            if not np.array_equal(got[: len(expected)], expected) or (got[len(expected) :] != tail).any():
                run.failures.append(f"schedule {plan.name}: {name} differs")
        checked += 1
    return {"plans": checked}


# ----------------------------------------------------------------- numerics


@dataclass
class Inputs:
    q: torch.Tensor
    pages: torch.Tensor
    page_list: torch.Tensor
    qo: torch.Tensor
    kv: torch.Tensor


def random_inputs(run: Run, plan: Plan, seed: int, most_pages: int = 4_000_000) -> Inputs:
    """Fresh random inputs; a page may serve several places where the plan has more tokens than `most_pages`."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    tokens = max(plan.kv[-1], 1)
    num_pages = min(tokens + 7, most_pages)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.float32).to(DTYPE)

    page_list = torch.randint(num_pages, (tokens,), generator=generator, device=DEVICE, dtype=torch.int32)
    q = normal(plan.qo[-1], plan.rule["num_heads"], run.size)
    return Inputs(q, normal(num_pages, run.size), page_list, int32(plan.qo), int32(plan.kv))


def exact(run: Run, plan: Plan, inputs: Inputs) -> torch.Tensor:
    """Dense attention in float64, request by request; queries that see nothing give 0."""
    out = torch.zeros(*inputs.q.shape[:2], run.latent, dtype=torch.float64, device=DEVICE)
    for request in range(plan.requests):
        kv_start, kv_stop = plan.kv[request : request + 2]
        first, stop = plan.qo[request : request + 2]
        if first == stop or kv_start == kv_stop:
            continue
        k = inputs.pages[inputs.page_list[kv_start:kv_stop]].double()
        q = inputs.q[first:stop].double()
        scores = torch.einsum("qhd,ld->qhl", q, k) * SCALE
        if plan.is_causal:
            seen = len(k) - torch.arange(stop - first - 1, -1, -1, device=DEVICE)
            hidden = torch.arange(len(k), device=DEVICE)[None] >= seen[:, None]
            scores.masked_fill_(hidden[:, None], float("-inf"))
        out[first:stop] = torch.einsum("qhl,le->qhe", scores.softmax(-1).nan_to_num_(0.0), k[:, : run.latent])
    return out


def decode_setup(run: Run, plan: Plan, schedule: Any, tuning: mla.Tuning | None = None) -> tuple[Any, Any, Any]:
    """(shape, loaded work buffers, pool) of a plan."""
    info = schedule.work_info
    rows = max(1, int((info[:, 3] - info[:, 2]).max(initial=0)))
    fold = schedules.packing_rule(plan.requests, **plan.rule).fold
    shape = mla.DecodeShape(plan.rule["num_heads"], run.latent, run.rope, rows, fold, plan.is_causal, tuning)
    work = mla.WorkBuffers.allocate(plan.shapes(), DEVICE)
    work.load(schedule)
    pool_rows = int(schedule.reduce_partial_map.max(initial=0)) + rows
    return shape, work, mla.PartialPool.allocate(pool_rows, shape.launched_heads, run.latent, DEVICE)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def check_numerics(run: Run) -> dict[str, Any]:
    """Every golden plan that fits, fresh inputs, poisoned outputs, against float64; the fixed-split peer beside it."""
    errors, peer_errors, left_out = [], [], 0
    for index, plan in enumerate(golden_plans(run)):
        if run.out_of_time():
            left_out += 1
            continue
        schedule, inputs = plan.schedule(), random_inputs(run, plan, seed=index)
        shape, work, pool = decode_setup(run, plan, schedule)
        output = shape.allocate_output(inputs.q)
        for tensor in (*output, pool.out, pool.lse):
            tensor.fill_(POISON)
        arguments = (inputs.q, inputs.pages, inputs.page_list, inputs.qo)
        out, _ = mla.persistent_decode(*arguments, work, pool, shape, SCALE, output)
        wanted = exact(run, plan, inputs)
        unwritten = out.isnan().flatten(1).any(1)
        has_kv = torch.as_tensor(np.repeat(np.diff(plan.kv) > 0, np.diff(plan.qo)), device=DEVICE)
        if bool((unwritten & has_kv).any()):
            run.failures.append(f"numerics {plan.name}: {int((unwritten & has_kv).sum())} rows not written")
        errors.append(relative_error(out[~unwritten], wanted[~unwritten]))
        if not errors[-1] < TOLERANCE:
            run.failures.append(f"numerics {plan.name}: relative error {errors[-1]:.2e}")
        if plan.requests <= 64 and plan.qo[-1] > 0:
            peer = mla.DecodeShape(
                plan.rule["num_heads"], run.latent, run.rope, plan.rule["max_seqlen_qo"], 1, plan.is_causal
            )
            peer_pool = mla.PartialPool.allocate(8 * len(inputs.q), peer.heads, run.latent, DEVICE)
            out, _ = mla.fixed_split_decode(*arguments, inputs.kv, peer_pool, peer, SCALE, 8)
            peer_errors.append(relative_error(out, wanted))
            if not peer_errors[-1] < TOLERANCE:
                run.failures.append(f"numerics {plan.name}: fixed split: relative error {peer_errors[-1]:.2e}")
    return {
        "plans": len(errors),
        "left_out_for_time": left_out,
        "worst_relative_error": max(errors),
        "median_relative_error": statistics.median(errors),
        "fixed_split_plans": len(peer_errors),
        "fixed_split_worst": max(peer_errors),
    }


# -------------------------------------------------------------------- graph


def check_graph(run: Run) -> dict[str, Any]:
    """Scheduler and decode captured once, replayed for other lengths: equal to a fresh plan of those lengths."""
    if DEVICE == "cpu":
        return {"skipped": "no GPU"}
    rng = np.random.default_rng(1)
    rule = {"num_heads": 16, "num_cu": 128, "gfx": "gfx942", "q_dtype": "bf16", "kv_dtype": "bf16"}
    rule |= {"max_seqlen_qo": 2, "uni_seqlen_qo": 2}
    lengths = [rng.integers(2, 6000, size=24) for _ in range(6)]
    plans = [
        Plan(f"replay {i}", list(range(0, 50, 2)), [0, *np.cumsum(n).tolist()], rule) for i, n in enumerate(lengths)
    ]
    longest = max(plans, key=lambda plan: plan.kv[-1])
    inputs = random_inputs(run, longest, seed=5)
    shape, work, _ = decode_setup(run, longest, longest.schedule())
    pool = mla.PartialPool.allocate(len(work.reduce_partial_map) * shape.rows_per_tile, 16, run.latent, DEVICE)
    scheduler, output = device_scheduler(longest), shape.allocate_output(inputs.q)

    def step() -> None:
        scheduler(inputs.qo, inputs.kv, work)
        mla.persistent_decode(inputs.q, inputs.pages, inputs.page_list, inputs.qo, work, pool, shape, SCALE, output)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    errors = []
    for plan in plans:
        inputs.kv.copy_(int32(plan.kv))
        for tensor in (*output, pool.out, pool.lse):
            tensor.fill_(POISON)
        graph.replay()
        errors.append(relative_error(output[0], exact(run, plan, inputs)))
        if not errors[-1] < TOLERANCE:
            run.failures.append(f"graph {plan.name}: relative error {errors[-1]:.2e}")
    return {"replays": len(errors), "worst_relative_error": max(errors)}


# ------------------------------------------------------------------- timing


def timing_shapes(quick: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Sequence lengths: uniform, one of 64k among short ones, lognormal."""
    rng = np.random.default_rng(0)
    sizes = [(1, 1024), (1, 8192), (1, 65536), (4, 8192), (16, 4096), (32, 4096), (64, 4096), (128, 2048), (256, 2048)]
    for batch, length in sizes[:2] if quick else sizes:
        yield f"uniform {batch} x {length}", np.full(batch, length)
    for batch in () if quick else (4, 16, 64, 256):
        yield f"one 65536 + {batch - 1} x 1024", np.array([65536] + [1024] * (batch - 1))
    for batch in () if quick else (1, 4, 16, 64, 256):
        yield f"lognormal {batch}", np.clip(rng.lognormal(8.0, 1.0, batch), 16, 65536).astype(int)


class Timer:
    """Median device time of a captured graph, with the last-level cache emptied before each replay."""

    def __init__(self) -> None:
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)

    def in_turn(self, functions: dict[str, Any], repeats: int = 25) -> dict[str, list[float]]:
        """Microseconds of each replay of each function; they take turns, so that a clock's drift is no one's fault."""
        graphs = {}
        for name, function in functions.items():
            for _ in range(2):
                function()
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                function()
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(repeats):
            for name, graph in graphs.items():
                self.flush.zero_()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times[name].append(begin.elapsed_time(end) * 1e3)
        return times

    def __call__(self, function: Any, repeats: int = 25) -> float:
        return statistics.median(self.in_turn({"": function}, repeats)[""])


def time_shapes(run: Run) -> dict[str, Any]:
    """Microseconds of persistent decode and of each number of fixed splits; blocks of 16, 32 and 64 packed rows."""
    if DEVICE == "cpu":
        return {"skipped": "no GPU"}
    timer, rows = Timer(), []
    for heads, query_len in ((16, 1), (128, 1), (16, 4), (32, 1)):
        for name, lens in timing_shapes(run.quick):
            if run.out_of_time():
                return {"rows": rows, "partial": True}
            rows.append(time_shape(run, timer, name, lens, heads, query_len))
            best = min(rows[-1]["fixed_us"].values())
            print(
                f"{heads:4} heads q {query_len}  {name:28} persistent {rows[-1]['persistent_us']:8.1f}  "
                f"fixed split best {best:8.1f}  floor {rows[-1]['floor_us']:8.1f}  "
                f"scheduler {rows[-1]['scheduler_us']:6.1f} us",
                flush=True,
            )
    return {"rows": rows, "tunings": time_tunings(run, timer), "partial": False}


def timed_plan(name: str, lens: np.ndarray, heads: int, query_len: int, num_cu: int) -> Plan:
    qo = [query_len * i for i in range(len(lens) + 1)]
    rule = {"num_heads": heads, "num_cu": num_cu, "gfx": "gfx950", "q_dtype": "bf16", "kv_dtype": "bf16"}
    rule |= {"max_seqlen_qo": query_len, "uni_seqlen_qo": query_len}
    return Plan(name, qo, [0, *np.cumsum(lens).tolist()], rule)


# Faster than `TUNING` on 64 x 8192 (193 against 287 us, 690 against 950), the only shape timed so far.
CANDIDATES = {16: mla.Tuning(128, 2, 8), 64: mla.Tuning(64, 2, 8)}


def time_shape(
    run: Run, timer: Timer, name: str, lens: np.ndarray, heads: int, query_len: int, brief: bool = False
) -> dict[str, Any]:
    """Medians of every kernel, and their spread: between the quartiles of the replays. `brief`: of nothing else."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    blocks = -(-heads * query_len // 64)
    plan = timed_plan(name, lens, heads, query_len, processors // blocks)
    inputs = random_inputs(run, plan, seed=9)
    shape, work, pool = decode_setup(run, plan, plan.schedule())
    arguments = (inputs.q, inputs.pages, inputs.page_list, inputs.qo)
    output = shape.allocate_output(inputs.q)
    peer = mla.DecodeShape(heads, run.latent, run.rope, query_len)
    kernels = {
        "persistent": functools.partial(mla.persistent_decode, *arguments, work, pool, shape, SCALE, output),
    }
    for splits in (1, 2, 4, 8, 16, 32, 64):
        if splits * len(inputs.q) * heads * run.latent * 4 > 8 << 30:
            break
        peer_pool = mla.PartialPool.allocate(splits * len(inputs.q), heads, run.latent, DEVICE)
        kernels[str(splits)] = functools.partial(
            mla.fixed_split_decode, *arguments, inputs.kv, peer_pool, peer, SCALE, splits, output
        )
    quartiles = {name: statistics.quantiles(times, n=4) for name, times in timer.in_turn(kernels).items()}
    persistent = quartiles["persistent"][1]
    kv_bytes = int(lens.sum()) * run.size * 2
    flops = 2 * int(lens.sum()) * query_len * heads * (run.size + run.latent)
    timed = {
        "lengths": name,
        "batch": len(lens),
        "tokens": int(lens.sum()),
        "longest": int(lens.max()),
        "heads": heads,
        "query_len": query_len,
        "persistent_us": persistent,
        "fixed_us": {int(name): middle for name, (_, middle, _) in quartiles.items() if name != "persistent"},
        "spread_us": {name: high - low for name, (low, _, high) in quartiles.items()},
        "floor_us": max(kv_bytes / 4.3e12, flops / 790e12) * 1e6,  # copy and bf16 matrix rates of an H200, measured
    }
    if brief:
        return timed
    trial = dataclasses.replace(shape, tuning=CANDIDATES.get(shape.block_m))
    candidate = persistent
    if trial.tuning is not None:
        candidate = timer(lambda: mla.persistent_decode(*arguments, work, pool, trial, SCALE, output))
    scheduler = device_scheduler(plan)
    scheduling = timer(lambda: scheduler(inputs.qo, inputs.kv, work))
    began = time.perf_counter()
    for _ in range(20):
        plan.schedule()
    return timed | {
        "persistent_candidate_us": candidate,
        "scheduler_us": scheduling,
        "host_schedule_us": (time.perf_counter() - began) / 20 * 1e6,
        "works": len(plan.schedule().work_info),
        "partials": len(plan.schedule().reduce_partial_map),
    }


def time_tunings(run: Run, timer: Timer) -> list[dict[str, Any]]:
    """Launch parameters of the persistent kernel, on one memory-bound and one compute-bound shape."""
    processors, found = torch.cuda.get_device_properties(0).multi_processor_count, []
    for heads, candidates in (
        (16, [(32, 2, 4), (64, 2, 4), (64, 2, 8), (64, 3, 4), (32, 3, 4), (32, 4, 4), (128, 2, 8)]),
        (32, [(32, 2, 4), (64, 2, 8), (32, 2, 8), (32, 3, 8)]),
        (128, [(32, 2, 8), (16, 3, 8), (16, 2, 8), (64, 2, 8), (32, 3, 8)]),
    ):
        plan = timed_plan("64 x 8192", np.full(64, 8192), heads, 1, processors // -(-heads // 64))
        inputs, schedule = random_inputs(run, plan, seed=3), plan.schedule()
        for candidate in candidates:
            if run.out_of_time():
                return found
            shape, work, pool = decode_setup(run, plan, schedule, mla.Tuning(*candidate))
            output = shape.allocate_output(inputs.q)
            row: dict[str, Any] = {"heads": heads, "tuning": candidate}
            arguments = (inputs.q, inputs.pages, inputs.page_list, inputs.qo, work, pool, shape, SCALE, output)
            try:
                row["us"] = timer(functools.partial(mla.persistent_decode, *arguments))
            except triton.runtime.errors.OutOfResources as error:
                row["error"] = str(error)
            found.append(row)
            print(row, flush=True)
    return found


PARTS = {"schedules": check_schedules, "numerics": check_numerics, "graph": check_graph, "timing": time_shapes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sanitizer", action="store_true")
    parser.add_argument("--latent", type=int, default=512)
    parser.add_argument("--rope", type=int, default=64)
    arguments = parser.parse_args()
    if arguments.sanitizer:
        return sanitizer.run(Path(__file__).resolve(), arguments.out, arguments.seconds, DEVICE)
    run = Run(arguments.latent, arguments.rope, arguments.quick, time.monotonic() + arguments.seconds)
    on_gpu = DEVICE == "cuda"
    run.result |= {
        "command": " ".join(["python3", *sys.argv]),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu (Triton's interpreter)",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "dtype": str(DTYPE),
        "latent": run.latent,
        "rope": run.rope,
    }
    for name in arguments.parts.split(","):
        began = time.monotonic()
        run.result[name] = PARTS[name](run)
        run.result[name]["seconds"] = round(time.monotonic() - began, 1)
        run.result["failures"] = run.failures
        arguments.out.write_text(json.dumps(run.result, indent=1))
        print(name, {k: v for k, v in run.result[name].items() if not isinstance(v, list)}, flush=True)
    for failure in run.failures[:20]:
        print("FAILED", failure)
    print(f"{len(run.failures)} failures")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
