"""AITER MLA builds beside vLLM 0.32's own builder, on the host; run: python bench/planning_mla.py

The steady decode is in planning.py, the FP8 prefill schedule in schedules.py. Here: batches with prefill rows, each
unlike the last, so that nothing is reused. Same peers, rules and interpreter as planning.py.
"""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from planning import HAS_VLLM, MLA, MLA_LIMITS, ROOT, VLLM_TESTS, Sides, common_metadata, medians, mla_builder_of, peer
from syncfree.backends.mla_host import decode_buffers, decode_schedule
from syncfree.planner import Batch, Environment, Planner, rows

BF16 = Environment(kv_dtype="bf16", gfx="gfx942")


def batches_of(kind: str, count: int) -> Iterator[Batch]:
    """Decodes, extends of 16 tokens on 400 of context, prompts of 64; a token more or less at every turn."""
    for turn in itertools.count():
        row = np.arange(count)
        query, context = np.ones(count, dtype=int), 500 + row % 37 + turn % 5
        extends = slice(count if kind == "decode" else count // 2 if kind == "mixed" else 0, count)
        prompts = slice({"mixed": count * 3 // 4, "prefill": 0}.get(kind, count), count)
        query[extends], context[extends] = 16 + turn % 2, 400 + row[extends] % 37 + turn % 5
        query[prompts], context[prompts] = 64 + turn % 2, 0
        yield Batch.from_lengths(query, query + context)


def sides_of(kind: str, count: int) -> Sides:
    batches = batches_of(kind, count)
    planner, reader = (Planner(MLA, BF16, MLA_LIMITS) for _ in range(2))
    sides: Sides = {"ours": (lambda: next(batches), planner.plan)}
    if HAS_VLLM:
        builder = mla_builder_of(BF16, MLA_LIMITS)

        def metadata() -> Any:
            return common_metadata(next(batches))

        sides["vLLM"] = metadata, lambda given: builder.build(0, given)
        sides["read"] = metadata, lambda given: reader.plan(Batch.from_vllm_metadata(given))
    return sides


def builds() -> None:
    print("\nAITER MLA, one build; vLLM 0.32's builder on CPU tensors (its copies and launches cost nothing here)")
    print(f"   {'rows':>5} {'kind':9}{'vLLM':>11}{'ours':>10}{'ratio':>8}{'from its metadata':>19}")
    for kind in ("extend", "prefill", "mixed"):
        for count in (8, 64, 256, 512):
            us = medians(sides_of(kind, count), 100)
            theirs, ratio = peer(us, "vLLM", "ours")
            read = f"{us['read']:17.1f}us" if "read" in us else f"{'-':>19}"
            print(f"   {count:5} {kind:9}{theirs:>11}{us['ours']:8.1f}us{ratio}{read}")


def host_decode() -> None:
    print("\nA decode planned on the host alone: plan, both indptrs and the schedule of the six work buffers")
    for count in (1, 64, 256):
        planner = Planner(MLA, BF16, MLA_LIMITS)
        batches = batches_of("decode", count)

        def whole(batch: Batch, planner: Planner = planner) -> object:
            plan = planner.plan(batch)
            return decode_schedule(plan, decode_buffers(plan, batch, BF16), BF16)

        sides: Sides = {"ours": (lambda batches=batches: next(batches), whole)}
        print(f"   {count:5} rows: {medians(sides, 200)['ours']:.1f}us")


def main() -> int:
    python = Path(os.environ.get("VLLM_VENV", ROOT / ".venv-vllm")) / "bin" / "python"
    if not HAS_VLLM and python.exists():
        return subprocess.run([str(python), __file__], check=False).returncode
    sys.path.insert(0, str(VLLM_TESTS))
    if HAS_VLLM:
        import torch

        torch.set_num_threads(1)
    native = "C passes" if "native" in rows.IMPLEMENTATIONS else "NumPy passes (no C extension built)"
    print(f"planning_mla: {platform.machine()}, Python {platform.python_version()}, one thread; ours: {native}")
    if not HAS_VLLM:
        print("   vLLM is not installed here (make .venv-vllm/.ready): our side alone")
    builds()
    host_decode()
    return 0


if __name__ == "__main__":
    sys.exit(main())
