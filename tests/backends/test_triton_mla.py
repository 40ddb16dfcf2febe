"""The Triton kernels against the torch reference and the host's schedules; interpreted where there is no GPU."""

import contextlib
import gzip
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from syncfree import backends
from syncfree.backends.reference import LatentCache, mla_decode
from syncfree.planner import schedules
from syncfree.planner.errors import BadInput

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "mla_decode.jsonl.gz"
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LATENT, ROPE = 32, 16
LISTS = ("work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")


def is_triton(module):
    """Triton's Python modules and ours made with it; its compiled core cannot be loaded twice."""
    ours = module.startswith("syncfree.backends.triton_mla")
    return ours or (module.split(".")[0] == "triton" and not module.startswith("triton._C"))


def forget_triton():
    forgotten = {name: sys.modules.pop(name) for name in list(sys.modules) if is_triton(name)}
    for name in forgotten:
        package, _, leaf = name.rpartition(".")
        if package == backends.__name__:  # "from . import x" looks here before it imports
            vars(backends).pop(leaf, None)
    return forgotten


@contextlib.contextmanager
def fresh_triton(interpret):
    """Triton and our modules imported anew: whether to interpret is decided then, and another test may have done it."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: the kernels are not run here")
    others = forget_triton()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1" if interpret else "0")
            yield importlib.import_module("syncfree.backends.triton_mla")
    finally:
        forget_triton()
        sys.modules.update(others)


@pytest.fixture(scope="module")
def triton_mla():
    with fresh_triton(interpret=not ON_GPU) as module:
        yield module


def golden_arguments(most_tokens, most_requests, most_work, kind_of=("gfx", "q_dtype", "num_heads", "max_seqlen_qo")):
    """Arguments of golden plans: (id, indptrs, keyword arguments of `mla_decode`, is_causal).

    The first of each kind that is small enough to interpret, or all on a GPU.
    """
    seen = set()
    with gzip.open(GOLDEN, "rt") as lines:
        for line in lines:
            r = json.loads(line)
            qo, kv = r["seqlens_qo_indptr"], r["seqlens_kv_indptr"]
            rule = {
                "num_heads": r["num_heads_per_head_k"],
                "num_cu": r["num_cu"],
                "gfx": r["gfx"],
                "q_dtype": r["dtype_q"],
                "kv_dtype": r["dtype_kv"],
                "max_seqlen_qo": r["max_seqlen_qo"],
                "uni_seqlen_qo": r["uni_seqlen_qo"],
                "max_split_per_batch": r["max_split_per_batch"],
                "experimental": r["experimental"],
            }
            kind = tuple(rule[name] for name in kind_of)
            small = kv[-1] <= most_tokens and len(kv) - 1 <= most_requests and r["num_works"] <= most_work
            if small and (ON_GPU or kind not in seen):
                seen.add(kind)
                yield r["id"], qo, kv, rule, r["is_causal"]


def shapes_for(requests, rule):
    return schedules.mla_decode_shapes(
        requests,
        rule["max_seqlen_qo"],
        rule["num_heads"],
        rule["q_dtype"],
        rule["kv_dtype"],
        gfx=rule["gfx"],
        num_cu=rule["num_cu"],
        max_split_per_batch=rule.get("max_split_per_batch", -1),
        experimental=rule.get("experimental", False),
    )


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make_case(triton_mla, qo, kv, rule, is_causal, seed=0):
    """Random float32 inputs, loaded work buffers and poisoned outputs for one plan."""
    generator = torch.Generator().manual_seed(seed)
    schedule = schedules.mla_decode(qo, kv, is_causal=is_causal, **rule)
    fold = schedules.packing_rule(len(kv) - 1, **rule).fold
    q = torch.randn(qo[-1], rule["num_heads"], LATENT + ROPE, generator=generator).to(DEVICE)
    pages = torch.randn(kv[-1] + 3, LATENT + ROPE, generator=generator).to(DEVICE)
    page_list = torch.randperm(kv[-1] + 3, generator=generator)[: kv[-1]].to(torch.int32).to(DEVICE)
    info = schedule.work_info
    rows_per_tile = max(1, int((info[:, 3] - info[:, 2]).max(initial=0)))
    shape = triton_mla.DecodeShape(rule["num_heads"], LATENT, ROPE, rows_per_tile, fold, is_causal)
    work = triton_mla.WorkBuffers.allocate(shapes_for(len(kv) - 1, rule), DEVICE)
    work.load(schedule)
    pool = triton_mla.PartialPool.allocate(
        len(work.reduce_partial_map) * rows_per_tile, shape.launched_heads, LATENT, DEVICE
    )
    output = shape.allocate_output(q)
    for poisoned in (*output, pool.out, pool.lse):
        poisoned.fill_(float("nan"))
    return schedule, q, LatentCache(pages, page_list, LATENT), shape, work, pool, output


def assert_near(got, wanted, label=""):
    """Relative error of the whole result below 1e-3 (float32 products), -inf and nan in the same places."""
    wanted = wanted.to(got.dtype).to(got.device)
    assert torch.equal(got.isnan(), wanted.isnan()), label
    assert torch.equal(got.isinf(), wanted.isinf()), label
    finite = got.isfinite()
    error = (got[finite] - wanted[finite]).norm() / wanted[finite].norm().clamp(min=1e-9)
    assert error < 1e-3, (label, float(error))


def test_persistent_decode_equals_the_reference_over_golden_plans(triton_mla):
    heads, queries, folds, splits = set(), set(), set(), 0
    for name, qo, kv, rule, is_causal in golden_arguments(
        1000, 3, most_work=24, kind_of=("gfx", "num_heads", "max_seqlen_qo")
    ):
        schedule, q, cache, shape, work, pool, output = make_case(triton_mla, qo, kv, rule, is_causal)
        got = triton_mla.persistent_decode(q, cache.pages, cache.page_list, int32(qo), work, pool, shape, 0.2, output)
        exact = LatentCache(cache.pages.double().cpu(), cache.page_list.cpu(), LATENT)
        wanted = mla_decode(q.double().cpu(), exact, qo, schedule, scale=0.2, fold=shape.fold, is_causal=is_causal)
        assert_near(got[0], wanted[0], name)
        assert_near(got[1], wanted[1], name)
        heads.add(rule["num_heads"])
        queries.add(rule["max_seqlen_qo"])
        folds.add(shape.fold)
        splits += len(schedule.reduce_partial_map) > 0
    assert heads >= {16, 32, 64, 128}
    assert queries >= {1, 2, 3, 4}
    assert folds >= {1, 2, 4, 8}
    assert splits > 8


def test_a_tile_of_more_packed_rows_than_a_block_is_shared_by_several_programs(triton_mla):
    rule = {"num_heads": 16, "num_cu": 6, "gfx": "gfx942", "q_dtype": "bf16", "kv_dtype": "bf16"}
    rule |= {"max_seqlen_qo": 8, "uni_seqlen_qo": 8}
    schedule, q, cache, shape, work, pool, output = make_case(
        triton_mla, [0, 8, 16], [0, 200, 290], rule, is_causal=True
    )
    assert shape.num_blocks == 2
    got = triton_mla.persistent_decode(
        q, cache.pages, cache.page_list, int32([0, 8, 16]), work, pool, shape, 0.2, output
    )
    exact = LatentCache(cache.pages.double().cpu(), cache.page_list.cpu(), LATENT)
    wanted = mla_decode(q.double().cpu(), exact, [0, 8, 16], schedule, scale=0.2)
    assert_near(got[0], wanted[0])


@pytest.mark.parametrize(("query_len", "num_splits"), [(1, 1), (1, 4), (3, 8)])
def test_fixed_splits_equal_the_reference(triton_mla, query_len, num_splits):
    kv = [0, 1, 1, 150, 240]  # a request shorter than a split, one without KV
    qo = [query_len * i for i in range(5)]
    rule = {"num_heads": 16, "num_cu": 3, "gfx": "gfx942", "q_dtype": "bf16", "kv_dtype": "bf16", "planner": "serial"}
    rule |= {"max_seqlen_qo": query_len, "uni_seqlen_qo": query_len}
    schedule, q, cache, _, _, _, _ = make_case(triton_mla, qo, kv, rule, is_causal=True)
    shape = triton_mla.DecodeShape(16, LATENT, ROPE, query_len)
    pool = triton_mla.PartialPool.allocate(num_splits * len(q), 16, LATENT, DEVICE)
    got = triton_mla.fixed_split_decode(
        q, cache.pages, cache.page_list, int32(qo), int32(kv), pool, shape, 0.2, num_splits
    )
    exact = LatentCache(cache.pages.double().cpu(), cache.page_list.cpu(), LATENT)
    wanted = mla_decode(q.double().cpu(), exact, qo, schedule, scale=0.2)
    assert_near(got[0], wanted[0].nan_to_num(0.0))
    assert_near(got[1], wanted[1])


def plan_on_device(triton_mla, qo, kv, rule, is_causal):
    requests = len(kv) - 1
    packing = schedules.packing_rule(requests, **rule)
    work = triton_mla.WorkBuffers.allocate(shapes_for(requests, rule), DEVICE)
    for name in LISTS:
        getattr(work, name).fill_(-77)
    scheduler = triton_mla.DeviceScheduler(
        packing,
        requests,
        max_seqlen_qo=rule["max_seqlen_qo"],
        uni_seqlen_qo=rule["uni_seqlen_qo"],
        is_causal=is_causal,
        device=DEVICE,
    )
    scheduler(int32(qo), int32(kv), work)
    return work


def assert_same_plan(work, wanted, label=""):
    for name in LISTS:
        expected = getattr(wanted, name)
        got = getattr(work, name).cpu().numpy()
        np.testing.assert_array_equal(got[: len(expected)], expected, err_msg=f"{label} {name}")
        behind = got[len(expected) :]
        assert (behind == (expected[-1] if name == "reduce_indptr" else -77)).all(), (label, name)


def test_the_device_scheduler_equals_the_host_s_over_golden_plans(triton_mla):
    checked = 0
    for name, qo, kv, rule, is_causal in golden_arguments(10**9, most_requests=8, most_work=200):
        wanted = schedules.mla_decode(qo, kv, is_causal=is_causal, **rule)
        assert_same_plan(plan_on_device(triton_mla, qo, kv, rule, is_causal), wanted, name)
        checked += 1
    assert checked > 30


@pytest.mark.parametrize("planner", ["serial", "parallel"])
def test_requests_without_kv_are_placed_as_the_chosen_planner_places_them(triton_mla, planner):
    rng = np.random.default_rng(4)
    for _ in range(12):
        lens = rng.choice([0, 0, 3, 40, 900], size=9)
        kv, qo = [0, *np.cumsum(lens).tolist()], list(range(10))
        rule = {"num_heads": 16, "num_cu": int(rng.integers(1, 9)), "gfx": "gfx942", "q_dtype": "bf16"}
        rule |= {"kv_dtype": "bf16", "max_seqlen_qo": 1, "uni_seqlen_qo": 1, "planner": planner}
        assert_same_plan(plan_on_device(triton_mla, qo, kv, rule, True), schedules.mla_decode(qo, kv, **rule))


class Recorder:
    """A kernel that also remembers its grids and what it was called with: tensors by address, numbers as they are."""

    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid):
        def launch(*args, **constants):
            fixed = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
            self.calls.append((self.kernel.fn.__name__, grid, fixed, constants))
            return self.kernel[grid](*args, **constants)

        return launch


def test_a_graph_captured_once_serves_other_lengths(triton_mla, monkeypatch):
    """A replay repeats launches, addresses and numbers: none of them may depend on lengths, and nothing may be left."""
    calls = []
    for name in ("scan_tiles", "emit_works", "persistent_decode", "reduce_partials"):
        monkeypatch.setattr(triton_mla.kernels, name, Recorder(getattr(triton_mla.kernels, name), calls))
    rule = {"num_heads": 16, "num_cu": 5, "gfx": "gfx942", "q_dtype": "bf16", "kv_dtype": "bf16"}
    rule |= {"max_seqlen_qo": 2, "uni_seqlen_qo": 2}
    requests, most = 3, 600
    qo = int32([2 * i for i in range(requests + 1)])
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2 * requests, 16, LATENT + ROPE, generator=generator).to(DEVICE)
    pages = torch.randn(most, LATENT + ROPE, generator=generator).to(DEVICE)
    page_list = torch.randperm(most, generator=generator).to(torch.int32).to(DEVICE)
    work = triton_mla.WorkBuffers.allocate(shapes_for(requests, rule), DEVICE)
    packing = schedules.packing_rule(requests, **rule)
    scheduler = triton_mla.DeviceScheduler(packing, requests, max_seqlen_qo=2, uni_seqlen_qo=2, device=DEVICE)
    shape = triton_mla.DecodeShape(16, LATENT, ROPE, 2)
    pool = triton_mla.PartialPool.allocate(2 * len(work.reduce_partial_map), 16, LATENT, DEVICE)
    output, kv, steps = shape.allocate_output(q), int32([0] * (requests + 1)), []
    for lens in ([200, 3, 90], [2, 2, 2], [9, 580, 11]):
        starts = [0, *np.cumsum(lens).tolist()]
        kv.copy_(int32(starts))
        for poisoned in (*output, pool.out, pool.lse):
            poisoned.fill_(float("nan"))
        calls.clear()
        scheduler(qo, kv, work)
        got = triton_mla.persistent_decode(q, pages, page_list, qo, work, pool, shape, 0.2, output)
        steps.append(list(calls))
        exact = LatentCache(pages.double().cpu(), page_list.cpu(), LATENT)
        plan = schedules.mla_decode(qo.tolist(), starts, **rule)
        wanted = mla_decode(q.double().cpu(), exact, qo.tolist(), plan, scale=0.2)
        assert_near(got[0], wanted[0], lens)
    assert steps[0] == steps[1] == steps[2]
    assert [name for name, *_ in steps[0]] == ["scan_tiles", "emit_works", "persistent_decode", "reduce_partials"]


def test_buffers_come_all_together_or_not_at_all(triton_mla):
    rule = {"num_heads": 16, "num_cu": 4, "gfx": "gfx942", "q_dtype": "bf16", "kv_dtype": "bf16", "max_seqlen_qo": 1}
    shapes = shapes_for(2, rule)
    del shapes["reduce_indptr"]
    with pytest.raises(BadInput, match="missing reduce_indptr"):
        triton_mla.WorkBuffers.allocate(shapes, DEVICE)


def test_a_schedule_larger_than_its_buffers_is_refused(triton_mla):
    rule = {"num_heads": 16, "num_cu": 4, "gfx": "gfx942", "q_dtype": "bf16", "kv_dtype": "bf16", "max_seqlen_qo": 1}
    work = triton_mla.WorkBuffers.allocate(shapes_for(1, rule), DEVICE)
    plan = schedules.mla_decode(range(10), [100 * i for i in range(10)], uni_seqlen_qo=1, **rule)
    with pytest.raises(BadInput, match=r"work_info: expected at most 4 rows"):
        work.load(plan)


POINTERS = {"scale": "fp32", "q": "*bf16", "pages": "*bf16", "out": "*bf16", "work_metadata_ptrs": "*i64"}
POINTERS |= dict.fromkeys(("lse", "pool_out", "pool_lse"), "*fp32")
SCALARS = ("num_rows", "heads", "fold", "is_causal")
BLOCK = {"LATENT": 512, "ROPE": 64, "BLOCK_M": 16, "BLOCK_N": 32, "STAGES": 2}
KERNELS = {
    "persistent_decode": BLOCK,
    "fixed_split_decode": BLOCK,
    "reduce_partials": {"LATENT": 512, "BLOCK_P": 8},
    "reduce_splits": {"LATENT": 512, "SPLITS": 8},
    "scan_tiles": {"BLOCK": 128},
    "emit_works": {"BLOCK": 64},
}


@pytest.mark.parametrize(
    ("maker", "arch", "warp", "binary"), [("cuda", 90, 32, "cubin"), ("hip", "gfx942", 64, "hsaco")]
)
def test_one_source_compiles_for_both_makers(maker, arch, warp, binary, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with fresh_triton(interpret=False) as module:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        scalars = (*SCALARS, *module.kernels.SCALARS)
        for name, constants in KERNELS.items():
            kernel = getattr(module.kernels, name)
            types = {
                argument: "constexpr" if argument in constants else "i32" if argument in scalars else "*i32"
                for argument in kernel.arg_names
            }
            types |= {argument: POINTERS[argument] for argument in types if argument in POINTERS}
            source = ASTSource(fn=kernel, signature=types, constexprs=constants)
            assert triton.compile(source, target=GPUTarget(maker, arch, warp)).asm[binary], name
