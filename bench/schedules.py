"""FP8 prefill and MLA decode schedules, beside a C port of aiter's host planner; run: python bench/schedules.py

The port (ps_prefill_port.c) is compiled here with the system's C compiler and checked for equality before it is timed.
Each ratio is of medians, both sides measured in turns in this one process.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from syncfree.planner import schedules
from syncfree.planner.schedules import packing

HEADS = 128
NUM_CU = 256
MAX_REQUESTS, MAX_TOKENS = 256, 8192
RULE = {"num_heads_k": HEADS, "num_cu": NUM_CU, "qlen_granularity": 256, "kvlen_granularity": 128, "block_size": 1}
INT32 = ctypes.POINTER(ctypes.c_int32)


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, INT32) for name in ("qo", "kv", "ctx")),
        *((name, ctypes.c_int32) for name in ("batch", "heads", "num_cu", "qhead", "qlen", "kvlen", "block", "causal")),
    )


class _Lists(ctypes.Structure):
    _fields_ = (
        *((name, INT32) for name in ("work_indptr", "work_info", "reduce_indptr", "final_map", "partial_map")),
        ("reduce_size", ctypes.c_int64),
    )


def _pointer(array: np.ndarray) -> ctypes.Array[ctypes.c_int32]:
    return array.ctypes.data_as(INT32)


def _lists(arrays: list[np.ndarray]) -> _Lists:
    return _Lists(*(_pointer(array) for array in arrays), arrays[2].size)


def compile_port() -> ctypes.CDLL | None:
    """The port as a shared library; None, with a line that says so, where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        print("schedules: no C compiler here, the C port cannot be compared")
        return None
    library = Path(tempfile.mkdtemp(prefix="syncfree-bench-")) / "port.so"
    source = Path(__file__).with_name("ps_prefill_port.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    port = ctypes.CDLL(str(library))
    for function in (port.ps_pack, port.ps_plan):
        function.restype = ctypes.c_int64
    return port


@dataclass
class Port:
    """The port with one batch and buffers of the engine's size."""

    library: ctypes.CDLL
    lengths: np.ndarray

    def __post_init__(self) -> None:
        self.indptr = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
        self.call = _Call(
            *(_pointer(array) for array in (self.indptr, self.indptr, self.lengths)),
            len(self.lengths),
            HEADS,
            NUM_CU,
            1,
            256,
            128,
            1,
            1,
        )
        shapes = schedules.ps_prefill_shapes(MAX_REQUESTS, HEADS, MAX_TOKENS, 256, NUM_CU)
        names = ("work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
        self.targets = [np.zeros(int(np.prod(shapes[name])), np.int32) for name in names]
        self.lists = _lists(self.targets)
        self.sizes = (ctypes.c_int64 * 5)(*(array.size for array in self.targets))
        # The bare packing gets lists of exactly its own size, so that nothing beyond the work is written.
        plan = self.plan()
        tight = [plan.work_indptr, plan.work_info, plan.reduce_indptr, plan.reduce_final_map, plan.reduce_partial_map]
        self.bare = [np.zeros(max(1, array.size), np.int32) for array in tight]
        self.bare_lists = _lists(self.bare)
        self.library.ps_pack(ctypes.byref(self.call), ctypes.byref(self.bare_lists))
        for mine, port in zip(tight, self.bare, strict=True):
            if mine.reshape(-1).tolist() != port[: mine.size].tolist():
                raise AssertionError("the port and syncfree disagree")

    @property
    def bytes_moved(self) -> int:
        return sum(array.nbytes for array in self.targets)

    def pack(self) -> None:
        self.library.ps_pack(ctypes.byref(self.call), ctypes.byref(self.bare_lists))

    def whole(self) -> None:
        self.library.ps_plan(ctypes.byref(self.call), self.sizes, ctypes.byref(self.lists))

    def plan(self) -> schedules.WorkSchedule:
        return schedules.ps_prefill(self.indptr, self.indptr, self.lengths, **RULE)


def stage_cluster(plan: schedules.WorkSchedule, staging: np.ndarray) -> int:
    """Pack one cluster's plan tightly into `staging`; the device repeats it over heads. Returns the bytes to copy."""
    cluster = plan.cluster
    assert cluster is not None
    at = 0
    for part in (
        cluster.work_indptr,
        cluster.work_info,
        plan.reduce_indptr,
        plan.reduce_final_map,
        plan.reduce_partial_map,
    ):
        flat = part.reshape(-1)
        staging[at : at + flat.size] = flat
        at += flat.size
    return 4 * at


def stage_grid(plan: schedules.WorkSchedule, staging: np.ndarray) -> int:
    """Write every head's works into `staging` on the host. Returns the bytes to copy."""
    cluster = plan.cluster
    assert cluster is not None
    indptr = cluster.num_workgroups + 1
    end = indptr + 8 * cluster.num_works
    cluster.expand(staging[:indptr], staging[indptr:end].reshape(cluster.num_works, 8))
    at = end
    for part in (plan.reduce_indptr, plan.reduce_final_map, plan.reduce_partial_map):
        flat = part.reshape(-1)
        staging[at : at + flat.size] = flat
        at += flat.size
    return 4 * at


def medians(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median microseconds of each side, the sides taking turns; each warms its own cache lines first."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 5):
        for name, side in sides.items():
            side()
            start = time.perf_counter_ns()
            side()
            if turn >= 5:
                times[name].append((time.perf_counter_ns() - start) / 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def prefill(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(0)
    batches = {
        "64 requests, 8,192 tokens in all": np.full(64, 128, np.int32),
        "64 requests of 1..8,192": rng.integers(1, MAX_TOKENS + 1, 64).astype(np.int32),
        "64 requests x 8,192": np.full(64, MAX_TOKENS, np.int32),
    }
    print(f"FP8 prefill schedule, H = {HEADS}, {NUM_CU} CUs, buffers for {MAX_REQUESTS} requests x {MAX_TOKENS}")
    print(
        f"  {'batch':34}{'port whole':>12}{'port bare':>12}{'ours':>10}{'whole/ours':>12}{'bare/ours':>11}{'bytes':>22}"
    )
    staging = np.zeros(sum(array.size for array in Port(library, batches["64 requests x 8,192"]).targets), np.int32)
    for name, lengths in batches.items():
        port = Port(library, lengths)
        sides: dict[str, Callable[[], object]] = {
            "whole": port.whole,
            "bare": port.pack,
            "cluster": lambda port=port: stage_cluster(port.plan(), staging),
            "grid": lambda port=port: stage_grid(port.plan(), staging),
        }
        us = medians(sides, 40)
        for side, label in (("cluster", name), ("grid", "  the same, heads written on the host")):
            moved = stage_cluster(port.plan(), staging) if side == "cluster" else stage_grid(port.plan(), staging)
            ratios = f"{us['whole'] / us[side]:11.0f}x{us['bare'] / us[side]:10.1f}x"
            bytes_moved = f"{moved:,} of {port.bytes_moved:,}"
            print(f"  {label:34}{us['whole']:10.0f}us{us['bare']:10.0f}us{us[side]:8.1f}us{ratios}{bytes_moved:>26}")


def decode() -> None:
    print("MLA decode schedule, 16 heads, bf16, 304 CUs (the GPU plans this one with a kernel launch)")
    rng = np.random.default_rng(0)
    for rows in (1, 64, 256):
        kv = np.concatenate([[0], np.cumsum(rng.integers(1, 8000, rows))]).astype(np.int32)
        qo = np.arange(rows + 1, dtype=np.int32)
        us: dict[str, float] = {}
        for name, implementation in packing.IMPLEMENTATIONS.items():
            packing.active = implementation
            sides = {
                name: lambda qo=qo, kv=kv: schedules.mla_decode(
                    qo,
                    kv,
                    num_heads=16,
                    num_cu=304,
                    gfx="gfx942",
                    q_dtype="bf16",
                    kv_dtype="bf16",
                    max_seqlen_qo=1,
                    uni_seqlen_qo=1,
                )
            }
            us |= medians(sides, 200)
        packing.active = packing.IMPLEMENTATIONS.get("native", packing.IMPLEMENTATIONS["python"])
        print(f"  {rows:4} rows: " + ", ".join(f"{name} {value:.1f} us" for name, value in us.items()))


def main() -> int:
    native = "C extension" if "native" in packing.IMPLEMENTATIONS else "NumPy twin (no C extension built)"
    print(f"machine: {platform.machine()}, Python {platform.python_version()}, one thread; ours: {native}")
    library = compile_port()
    if library is not None:
        prefill(library)
    decode()
    return 0


if __name__ == "__main__":
    sys.exit(main())
