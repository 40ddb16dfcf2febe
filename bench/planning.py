"""Planning beside vLLM 0.32's own functions and builders, on the host; run: python bench/planning.py [1 2 3]

Rows 1 to 3 of the planner's goals: reading and splitting a step, an AITER FA extend, a steady decode. The peers need
vLLM: where this Python has none, the interpreter of $VLLM_VENV (default .venv-vllm) runs the whole benchmark; without
that, our side is measured alone. Ratios are of medians of one process, both sides in turns, one thread. Copies to a
device cost nothing here, on either side: these are host times on CPU tensors.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import os
import platform
import re
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from syncfree.backends.aiter_fa import BACKEND as FA
from syncfree.backends.aiter_mla import BACKEND as MLA
from syncfree.planner import Batch, Environment, Limits, Planner, PrefillTable, classify, rows

ROOT = Path(__file__).resolve().parent.parent
VLLM_TESTS = ROOT / "tests" / "vllm"
HAS_VLLM = importlib.util.find_spec("vllm") is not None
LIMITS = Limits(num_heads=16, num_kv_heads=8, max_num_seqs=1024, max_num_batched_tokens=65536)
MLA_LIMITS = Limits(num_heads=16, max_num_seqs=1024, max_num_batched_tokens=65536)
Side = Callable[[Any], object]
Sides = dict[str, tuple[Callable[[], Any], Side]]


def medians(sides: Sides, rounds: int, seconds: float = 20.0) -> dict[str, float]:
    """Median microseconds of each side's second function on what its first one made, the sides taking turns.

    Each side runs once untimed before, on other data, so that it finds its own code and buffers in the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    end = time.monotonic() + seconds
    for turn in range(rounds + 10):
        for name, (make, run) in sides.items():
            warm, given = make(), make()
            run(warm)
            start = time.perf_counter_ns()
            run(given)
            elapsed = (time.perf_counter_ns() - start) / 1e3
            if turn >= 10 or (turn >= 2 and elapsed > 1e5):
                times[name].append(elapsed)
        if time.monotonic() > end and all(times.values()):
            break
    return {name: statistics.median(values) for name, values in times.items()}


# ---------------------------------------------------------------- row 1: a step, from SchedulerOutput


def lengths(kind: str, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(query, computed, prompt) of rows in vLLM's order: decodes, extends, prefills."""
    query, computed, prompt = (np.ones(count, dtype=int), rng.integers(300, 900, count), np.full(count, 200))
    if kind == "mixed":
        half, quarter = max(1, count // 2), max(1, count * 3 // 4)
        query[half:quarter], prompt[half:quarter] = 16, 4000
        query[quarter:] = prompt[quarter:] = 64
        computed[quarter:] = 0
    return query, computed, prompt


def step_of(query: np.ndarray, computed: np.ndarray, names: list[str]) -> SimpleNamespace:
    """What both sides read of a `SchedulerOutput` whose requests are all cached ones."""
    return SimpleNamespace(
        num_scheduled_tokens=dict(zip(names, query.tolist(), strict=True)),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(names), num_computed_tokens=computed.tolist(), resumed_req_ids=set(), num_output_tokens=[]
        ),
        finished_req_ids=set(),
        scheduled_spec_decode_tokens={},
    )


def table_of(names: list[str], prompt: np.ndarray) -> PrefillTable:
    table = PrefillTable()
    new = [
        SimpleNamespace(req_id=n, prompt_len=int(p), num_computed_tokens=0) for n, p in zip(names, prompt, strict=True)
    ]
    step = step_of(np.zeros(0, dtype=int), np.zeros(0, dtype=int), [])
    step.scheduled_new_reqs = new
    table.observe(step)
    return table


class RunnerBatch:
    """What vLLM's reorder function reads of the runner's batch, and its swaps."""

    def __init__(self, names: list[str], computed: np.ndarray, prompt: np.ndarray) -> None:
        self.req_ids = list(names)
        self.num_computed_tokens_cpu = computed.astype(np.int32)
        self.num_prompt_tokens = prompt.astype(np.int32)

    def swap_states(self, a: int, b: int) -> None:
        self.req_ids[a], self.req_ids[b] = self.req_ids[b], self.req_ids[a]
        for array in (self.num_computed_tokens_cpu, self.num_prompt_tokens):
            array[[a, b]] = array[[b, a]]


def step_sides(kind: str, count: int, shuffled: bool, split: str) -> Sides:
    """Ours on a step never seen before and on one with the rows of the last; theirs on the same rows."""
    rng = np.random.default_rng(count)
    query, computed, prompt = lengths(kind, count, rng)
    names = [f"request-{i:05d}" for i in range(count)]
    table = table_of(names, prompt)
    orders = [rng.permutation(count) if shuffled else np.arange(count) for _ in range(8)]
    step = step_of(query, computed, names)
    runner_orders = itertools.cycle([[names[i] for i in order] for order in orders])

    def ours(given: tuple[list[str] | None, bool]) -> object:
        req_ids, known = given
        if not known:
            table._admissions = None
        batch = Batch.from_vllm_scheduler(step, table, req_ids=req_ids)
        found = classify(batch)
        return found.batch_class, found.order, batch.segments(split)

    def fresh() -> tuple[list[str] | None, bool]:
        return (next(runner_orders) if shuffled else None), False

    sides: Sides = {"ours": (fresh, ours)}
    if not shuffled:
        sides["ours, same rows"] = (lambda: (None, True)), ours
    if HAS_VLLM:
        from vllm.v1.attention.backends import utils

        metadata = common_metadata(Batch.from_lengths(query, query + computed, is_prefilling=computed < prompt))
        cut = utils.split_decodes_prefills_and_extends if split == "three" else utils.split_decodes_and_prefills
        theirs_orders = itertools.cycle(orders)

        def runner() -> RunnerBatch:
            order = next(theirs_orders)
            return RunnerBatch([names[i] for i in order], computed[order], prompt[order])

        def theirs(batch: RunnerBatch) -> object:
            utils.reorder_batch_to_split_decodes_and_prefills(batch, step, 1)
            return cut(metadata, 1)

        sides["vLLM"] = (runner, theirs)
    return sides


def common_metadata(batch: Batch) -> Any:
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts, seq_lens = torch.tensor(batch.query_start_loc), torch.tensor(batch.seq_lens)
    flags = batch.is_prefilling
    return CommonAttentionMetadata(
        query_start_loc=starts.clone(),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.clone(),
        num_reqs=len(batch),
        num_actual_tokens=batch.num_tokens,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        block_table_tensor=torch.zeros(len(batch), 4, dtype=torch.int32),
        slot_mapping=torch.zeros(batch.num_tokens, dtype=torch.int64),
        is_prefilling=None if flags is None else torch.tensor(flags),
        seq_lens_cpu_upper_bound=seq_lens,
    )


def row_1() -> None:
    print("\n1. read a SchedulerOutput, classify, order, segments; vLLM: its reorder and its split")
    print(
        f"   {'rows':>5} {'kind':7}{'order':9}{'split':6}{'vLLM':>9}{'ours':>9}{'ratio':>8}{'same rows':>11}{'goal':>7}"
    )
    for kind, count, shuffled in (
        *(("decode", n, False) for n in (1, 8, 64, 256, 1024)),
        *(("mixed", n, s) for n in (8, 64, 256, 1024) for s in (False, True)),
    ):
        for split in ("three", "two"):
            us = medians(step_sides(kind, count, shuffled, split), 300)
            goal = ">= 1x" if kind == "decode" else ">= 10x" if shuffled else ">= 2x"
            goal = goal if count == 256 or kind == "decode" else ""
            same = f"{us['ours, same rows']:9.1f}us" if "ours, same rows" in us else " " * 11
            theirs, ratio = peer(us, "vLLM", "ours")
            order = "shuffled" if shuffled else "sorted"
            print(f"   {count:5} {kind:7}{order:9}{split:6}{theirs}{us['ours']:7.1f}us{ratio}{same}{goal:>7}")


def peer(us: dict[str, float], theirs: str, ours: str) -> tuple[str, str]:
    """The peer's time and the ratio, dashes where it cannot run."""
    if theirs not in us:
        return f"{'-':>9}", f"{'-':>8}"
    return f"{us[theirs]:7.1f}us", f"{us[theirs] / us[ours]:7.1f}x"


# ---------------------------------------------------------------- row 2: AITER FA extends


def with_one_repeat(builder: Any) -> Any:
    """The builder's own `build` with the lines that compare [chunks, extends, tokens] replaced by one repeat."""
    module = sys.modules[type(builder).__module__]
    source = textwrap.dedent(inspect.getsource(type(builder).build))
    repaired, count = re.subn(
        r"range_idx = .*?token_to_batch_tensor = [^\n]*\n",
        "token_to_batch_tensor = one_repeat(torch, chunk_seq_lens, max_cum_tokens)\n",
        source,
        flags=re.S,
    )
    if count != 1:
        raise AssertionError("the builder of this vLLM has no such lines")

    def one_repeat(torch: Any, lens: Any, width: int) -> Any:
        chunks, extends = lens.shape
        runs = torch.cat([lens, width - lens.sum(dim=1, keepdim=True)], dim=1).flatten()
        owners = torch.arange(extends + 1, dtype=torch.int32).repeat(chunks)
        return torch.repeat_interleave(owners, runs).view(chunks, width)

    space = dict(vars(module), one_repeat=one_repeat)
    exec(compile(repaired, "<repaired build>", "exec"), space)
    return space["build"].__get__(builder)


def extend_batches(count: int) -> Iterator[Batch]:
    """Batches in which every query length moves, so that nothing of the last plan is reused."""
    for turn in itertools.count():
        context = np.arange(count) % 37 + 400 + turn % 5
        yield Batch.from_lengths(query := np.full(count, 16 + turn % 2), query + context)


def extend_sides(count: int) -> Sides:
    batches = extend_batches(count)

    def batch() -> Batch:
        return next(batches)

    def metadata() -> Any:
        return common_metadata(next(batches))

    planners = [Planner(FA, Environment(), LIMITS) for _ in range(3)]

    def without_native(given: Batch) -> object:
        before, rows.active = rows.active, rows.IMPLEMENTATIONS["python"]
        try:
            return planners[1].plan(given)
        finally:
            rows.active = before

    sides: Sides = {"plan": (batch, planners[0].plan), "twin": (batch, without_native)}
    if not HAS_VLLM:
        return sides | {"ours": sides["plan"]}
    builder = fa_builder_of(Environment(kv_dtype="bf16"), LIMITS)
    repaired = with_one_repeat(builder)
    check_repair(builder, repaired, batch())
    sides["ours"] = metadata, lambda given: planners[2].plan(Batch.from_vllm_metadata(given))
    sides["vLLM"] = metadata, lambda given: builder.build(0, given)
    sides["repaired"] = metadata, lambda given: repaired(0, given)
    return sides


def row_2() -> None:
    print("\n2. AITER FA, extends (16 new tokens on 400 of context); vLLM 0.32's builder, as it is and with its")
    print("   token_to_batch line replaced by one repeat; ours from the same CommonAttentionMetadata")
    print(
        f"   {'rows':>5}{'vLLM':>13}{'repaired':>11}{'ours':>10}{'ratio':>10}{'repaired':>10}"
        f"{'plan alone':>12}{'C off':>9}{'goals':>14}"
    )
    for count, goal in ((1, ""), (8, ">= 3x, 3x"), (64, ">= 20x, 3x"), (256, ">= 500x, 3x")):
        us = medians(extend_sides(count), 60 if count > 64 else 200)
        theirs, ratio = peer(us, "vLLM", "ours")
        mended, mended_ratio = peer(us, "repaired", "ours")
        print(
            f"   {count:5}{theirs:>13}{mended:>11}{us['ours']:8.1f}us{ratio:>10}{mended_ratio:>10}"
            f"{us['plan']:10.1f}us{us['twin']:7.1f}us{goal:>14}"
        )


def check_repair(builder: Any, repaired: Any, batch: Batch) -> None:
    context = [
        build(0, common_metadata(batch)).extend_metadata.chunk_context_metadata.token_to_batch
        for build in (builder.build, repaired)
    ]
    if context[0].tolist() != context[1].tolist():
        raise AssertionError("the repaired builder does not build the same")


# ---------------------------------------------------------------- row 3: steady decode


def growing_decodes(count: int) -> Iterator[Batch]:
    """The same rows every step, one token longer."""
    for turn in itertools.count():
        yield Batch.from_lengths(np.ones(count, dtype=int), np.arange(count) % 37 + 500 + turn)


def decode_sides(name: str, count: int) -> Sides:
    environment = Environment(kv_dtype="bf16", gfx="gfx942")
    backend, limits = (FA, LIMITS) if name == "FA" else (MLA, MLA_LIMITS)
    planner, reader = (Planner(backend, environment, limits) for _ in range(2))
    batches = growing_decodes(count)
    sides: Sides = {"ours": (lambda: next(batches), planner.plan)}
    if HAS_VLLM:
        builder = (fa_builder_of if name == "FA" else mla_builder_of)(environment, limits)

        def metadata() -> Any:
            return common_metadata(next(batches))

        sides["vLLM"] = metadata, lambda given: builder.build(0, given)
        sides["read"] = metadata, lambda given: reader.plan(Batch.from_vllm_metadata(given))
    return sides


def row_3() -> None:
    print("\n3. steady decode: the rows of the last step, one token longer, in a new batch; vLLM: its decode build")
    print(f"   {'rows':>5} {'backend':9}{'vLLM':>9}{'ours':>10}{'ratio':>8}{'with reading':>14}{'goal':>8}")
    for name, goal in (("FA", ">= 1x"), ("MLA", ">= 5x")):
        for count in (1, 8, 64, 256, 1024):
            us = medians(decode_sides(name, count), 400)
            theirs, ratio = peer(us, "vLLM", "ours")
            read = f"{us['read']:12.1f}us" if "read" in us else f"{'-':>14}"
            print(f"   {count:5} {name:9}{theirs}{us['ours']:8.1f}us{ratio}{read}{goal:>8}")


def fa_builder_of(environment: Environment, limits: Limits) -> Any:
    import fa_builder

    fa_builder.upstream.torch = fa_builder.TorchWithoutPinning()
    return fa_builder.make_builder(limits, environment, 1)


def mla_builder_of(environment: Environment, limits: Limits) -> Any:
    import mla_builder
    import pytest

    mla_builder.install(pytest.MonkeyPatch(), environment, None)
    return mla_builder.make_builder(limits, environment, 1)


def rerun_in_vllm() -> int | None:
    """Run this file with the interpreter that has vLLM; None where there is none."""
    python = Path(os.environ.get("VLLM_VENV", ROOT / ".venv-vllm")) / "bin" / "python"
    if HAS_VLLM or not python.exists():
        return None
    return subprocess.run([str(python), __file__, *sys.argv[1:]], check=False).returncode


def main() -> int:
    code = rerun_in_vllm()
    if code is not None:
        return code
    sys.path.insert(0, str(VLLM_TESTS))
    if HAS_VLLM:
        import torch

        torch.set_num_threads(1)
    native = "C passes" if "native" in rows.IMPLEMENTATIONS else "NumPy passes (no C extension built)"
    print(f"planning: {platform.machine()}, Python {platform.python_version()}, one thread; ours: {native}")
    if not HAS_VLLM:
        print("   vLLM is not installed here (make .venv-vllm/.ready): our side alone")
    wanted = sys.argv[1:] or ["1", "2", "3"]
    for name, row in (("1", row_1), ("2", row_2), ("3", row_3)):
        if name in wanted:
            row()
    return 0


if __name__ == "__main__":
    sys.exit(main())
