"""Traces made by others are read as an independent script counted them (`expected.json` beside them)."""

import json
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest
from syncfree.profiler.readers import read_traces

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "traces"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())["traces"] if (FOLDER / "expected.json").is_file() else {}
GROUPS = (
    "launch",
    "graph_launch",
    "sync",
    "sync_copy",
    "sync_memset",
    "async_copy",
    "async_memset",
    "implicit_sync_candidate",
    "device_side_wait",
    "poll",
)
NAMES = sorted(EXPECTED) or ["(no traces)"]
_reports = {}


@pytest.fixture
def case(request, shared):
    name = request.param
    if name not in _reports:
        _reports[name] = read_traces([shared / name])
    return _reports[name], EXPECTED[name]["counts"]


def group(counts, name):
    for key in (f"api_{name}", "groups", "api_groups"):
        found = counts.get(key)
        if found and key.startswith("api_") and "total" in found:
            return found
        if found and name in found:
            return found[name]
    return {"total": 0, "by_name": {}}


def has_calls(counts):
    return any(group(counts, name)["total"] for name in GROUPS)


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_calls_by_name(case):
    report, counts = case
    for name in GROUPS:
        for api, number in group(counts, name)["by_name"].items():
            assert report.totals.api[api] == number, api
    for table in ("api_calls_by_category_and_name", "api_by_name"):
        told = counts.get(table)
        if told:
            calls = told if table == "api_by_name" else sum((Counter(names) for names in told.values()), Counter())
            assert report.totals.api == dict(calls)


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_launches_and_kernels(case):
    report, counts = case
    launches = report.totals.launches
    if has_calls(counts):
        assert launches.kernels + launches.captured == group(counts, "launch")["total"]
        assert launches.graphs == group(counts, "graph_launch")["total"]
    else:  # no record of a call: unknown, not zero
        assert (launches.kernels, launches.graphs, launches.captured) == (None, None, None)
        assert report.totals.syncs.total is None
    kernels = counts.get("gpu_kernels", {}).get("total", counts.get("kernels_total"))
    assert report.totals.kernels_run == (kernels or None)


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_blocking_copies_by_direction(case):
    report, counts = case
    if "blocking_copies" not in counts:
        return
    told = Counter()
    for shape, number in counts["blocking_copies"]["by_direction_and_shape"].items():
        told[shape.partition("|")[0]] += number
    syncs = report.totals.syncs
    if told["unknown"]:
        assert (syncs.d2h, syncs.h2d) == (None, None)
    else:
        assert (syncs.d2h, syncs.h2d) == (told["DtoH"], told["HtoD"])
    waits = sum(group(counts, name)["total"] for name in ("sync", "sync_copy", "sync_memset"))
    assert syncs.total == waits  # a copy followed by its wait is one: in these files every such copy has one wait


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_steps(case):
    report, counts = case
    told = [(Decimal(s["ts"]), Decimal(s["ts"]) + Decimal(s["dur"]), s) for s in counts.get("steps", [])]
    outer = [
        (start, end, s)
        for i, (start, end, s) in enumerate(told)
        if not any(a <= start and end <= b and j != i for j, (a, b, _) in enumerate(told))
    ]
    assert len(report.steps) == len(outer)
    for step, (start, end, s) in zip(report.steps, sorted(outer, key=lambda o: o[0]), strict=True):
        figures = s["all_threads"]
        assert step.name == s["name"]
        assert Decimal(repr(step.duration_us)) == end - start
        assert step.launches.kernels + step.launches.captured == figures["launch"]
        assert step.launches.graphs == figures["graph_launch"]
        assert step.syncs.total == figures["sync"] + figures["sync_copy"] + figures["sync_memset"]
        kinds = figures.get("hip_copy_kinds") or figures["gpu_by_correlation"]["memcpy"]
        if sum(kinds.values()) == figures["async_copy"] + figures["sync_copy"] and report.totals.kernels_run:
            mine = {"DtoH": step.copies.d2h, "HtoD": step.copies.h2d, "DtoD": step.copies.d2d}
            assert {name: number for name, number in mine.items() if number} == kinds


@pytest.mark.parametrize(
    ("name", "batch_class", "coarse", "mixed", "requests", "tokens"),
    [
        ("rocm_vllm_decode_fullgraph_mi300x.json.gz", "decode", False, False, 32, 32),
        ("rocm_vllm_prefilldecode_piecewise_mi300x.json.gz", "chunked_prefill", True, True, 46, 8192),
        ("rocm_sglang_decode_qwen3_8b_mi300x.json.gz", "decode", False, False, 32, 32),
        ("cuda_vllm_eager_b200.json.gz", "unknown", False, False, 1, 888),
    ],
)
def test_batch_class_from_the_annotation(shared, name, batch_class, coarse, mixed, requests, tokens):
    (step,) = read_traces([shared / name]).steps
    told = (step.batch_class, step.coarse, step.mixed, step.num_reqs, step.num_tokens)
    assert told == (batch_class, coarse, mixed, requests, tokens)


def test_capture_is_not_replay(shared):
    report = read_traces([shared / "rocm_sglang_capture_bs32_mi300x.json.gz"])
    assert (report.totals.launches.captured, report.totals.launches.kernels, report.totals.kernels_run) == (544, 2, 2)
    assert [(step.warmup, step.warmup_cause) for step in report.steps] == [(True, "capture")]
    assert report.classes == {}


def test_graph_launches_are_named_with_their_kernels(shared):
    groups = read_traces([shared / "rocm_vllm_prefilldecode_piecewise_mi300x.json.gz"]).run_ahead.graph_launches
    assert sorted((g.launches, g.kernels) for g in groups) == [(1, 4), (1, 12), (23, 15)]
    assert all(g.names for g in groups)


def test_the_site_of_a_wait_is_the_line_outside_torch(shared):
    report = read_traces([shared / "rocm_sglang_decode_qwen3_8b_mi300x.json.gz"])
    (site,) = [site for site in report.sites if site.kind != "maybe"]
    assert site.file.endswith("sglang/srt/model_executor/cuda_graph_runner.py")
    assert (site.function, site.kind, site.blocked_us) == ("populate_from_forward_batch", "d2h", 463063.75)


def test_a_folder_of_everything_is_one_report(shared):
    report = read_traces([shared])
    assert len(report.source.files) == len(EXPECTED)
    alone = [_reports.get(name) or read_traces([shared / name]) for name in EXPECTED]
    assert len(report.steps) == sum(len(r.steps) for r in alone)
    assert report.totals.launches.kernels is None  # some files know no launches: the sum is not known either
