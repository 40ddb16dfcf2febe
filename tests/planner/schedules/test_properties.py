"""Schedules of random batches against the brute-force planner, and what every schedule must be."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from syncfree.planner import schedules
from syncfree.planner.errors import BadInput

# The implementation fixture only swaps a module attribute: it holds for all examples of a test.
relaxed = settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])

pytestmark = pytest.mark.usefixtures("implementation")

LENGTHS = st.one_of(
    st.integers(0, 40), st.integers(0, 600), st.sampled_from([0, 1, 15, 16, 17, 127, 128, 129, 5000, 70000])
)


def _indptr(lengths: list[int]) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()] if lengths else [0]


@st.composite
def prefill_calls(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.sampled_from([1, 1, 2, 16, 64]))
    kvlen = block_size * draw(st.sampled_from([1, 2, 8, 128]))
    causal = draw(st.booleans())
    rows = draw(st.lists(st.one_of(st.integers(0, 30), st.integers(0, 900)), min_size=0, max_size=12))
    context = [draw(LENGTHS) + (q if causal else 0) for q in rows]
    pages = [-(-tokens // block_size) + draw(st.sampled_from([0, 0, 0, 1, 5])) for tokens in context]
    return {
        "qo": _indptr(rows),
        "kv": _indptr(pages),
        "ctx": context,
        "heads": draw(st.sampled_from([1, 2, 3, 8, 12, 16, 40])),
        "num_cu": draw(st.sampled_from([1, 2, 7, 8, 20, 64])),
        "qhead": draw(st.sampled_from([1, 4])),
        "qlen": draw(st.sampled_from([1, 3, 16, 100, 256])),
        "kvlen": kvlen,
        "block_size": block_size,
        "causal": causal,
    }


def _ps(call: dict[str, Any]) -> schedules.WorkSchedule:
    return schedules.ps_prefill(
        call["qo"],
        call["kv"],
        call["ctx"],
        num_heads_k=call["heads"],
        num_cu=call["num_cu"],
        qhead_granularity=call["qhead"],
        qlen_granularity=call["qlen"],
        kvlen_granularity=call["kvlen"],
        block_size=call["block_size"],
        is_causal=call["causal"],
    )


@relaxed
@given(call=prefill_calls())
def test_prefill_equals_the_brute_force(call: dict[str, Any], brute_force: ModuleType) -> None:
    plan = _ps(call)
    work_indptr, work_info, reduce_indptr, final_map, partial_map = brute_force.prefill(**call)
    assert plan.work_indptr.tolist() == work_indptr
    assert plan.work_info.tolist() == work_info
    assert plan.reduce_indptr.tolist() == reduce_indptr
    assert plan.reduce_final_map.tolist() == final_map
    assert plan.reduce_partial_map.tolist() == partial_map


@relaxed
@given(call=prefill_calls())
def test_prefill_covers_every_visible_token_of_every_head_once(call: dict[str, Any]) -> None:
    """Not what aiter does but what attention needs: no gap and no overlap, and nothing past the request."""
    plan = _ps(call)
    seen: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for request, _, q_start, q_end, kv_start, kv_end, _, heads in plan.work_info.tolist():
        assert call["qo"][request] <= q_start < q_end <= call["qo"][request + 1]
        seen.setdefault((heads & 0xFFFF, q_start, q_end), []).append((kv_start, kv_end))
    for b, tokens in enumerate(call["ctx"]):
        rows = call["qo"][b + 1] - call["qo"][b]
        for start in range(0, rows, call["qlen"]):
            end = min(start + call["qlen"], rows)
            needed = min(tokens - rows + end, tokens) if call["causal"] else tokens
            for head in range(call["heads"]):
                key = (head * call["qhead"], call["qo"][b] + start, call["qo"][b] + end)
                pieces = seen.get(key, [])
                at = call["kv"][b]
                for kv_start, kv_end in pieces:
                    assert kv_start == at
                    at = kv_end
                assert (at - call["kv"][b]) * call["block_size"] >= needed
                assert at <= call["kv"][b + 1]


@relaxed
@given(call=prefill_calls())
def test_prefill_fits_the_buffers_that_the_size_function_asks_for(call: dict[str, Any]) -> None:
    plan = _ps(call)
    rows = np.diff(call["qo"])
    longest = int(rows.max()) if rows.size else 0
    sizes = schedules.ps_prefill_shapes(len(rows), call["heads"], longest, call["qlen"], call["num_cu"])
    assert plan.work_indptr.shape == sizes["work_indptr"]
    assert len(plan.reduce_indptr) <= sizes["reduce_indptr"][0]
    assert len(plan.reduce_final_map) <= sizes["reduce_final_map"][0]
    assert plan.num_partials <= max(0, sizes["reduce_partial_map"][0])
    assert plan.num_works <= sizes["work_info"][0]


@st.composite
def decode_calls(draw: st.DrawFn) -> dict[str, Any]:
    longest = draw(st.integers(1, 8))
    ragged = draw(st.booleans()) and draw(st.booleans())
    requests = draw(st.integers(1, 14))
    kv = draw(st.lists(LENGTHS, min_size=requests, max_size=requests))
    rows = (
        draw(st.lists(st.integers(0, longest), min_size=requests, max_size=requests))
        if ragged
        else [longest] * requests
    )
    q_dtype, kv_dtype = draw(st.sampled_from([("bf16", "bf16"), ("fp8", "fp8"), ("bf16", "fp8")]))
    return {
        "qo": _indptr(rows),
        "kv": _indptr(kv),
        "heads": draw(st.sampled_from([8, 12, 16, 20, 32, 48, 64, 96, 112, 128, 256])),
        "num_cu": draw(st.sampled_from([1, 2, 5, 16, 80])),
        "gfx": draw(st.sampled_from(["gfx942", "gfx950"])),
        "q_dtype": q_dtype,
        "kv_dtype": kv_dtype,
        "longest": longest,
        "uniform": -1 if ragged else longest,
        "block": draw(st.sampled_from([16, 16, 1, 64])),
        "causal": draw(st.booleans()),
        "max_split": draw(st.sampled_from([-1, -1, 1, 3])),
        "experimental": draw(st.booleans()),
    }


def _mla(call: dict[str, Any], planner: str) -> schedules.WorkSchedule:
    return schedules.mla_decode(
        call["qo"],
        call["kv"],
        num_heads=call["heads"],
        num_cu=call["num_cu"],
        gfx=call["gfx"],
        q_dtype=call["q_dtype"],
        kv_dtype=call["kv_dtype"],
        max_seqlen_qo=call["longest"],
        uni_seqlen_qo=call["uniform"],
        kv_granularity=call["block"],
        is_causal=call["causal"],
        max_split_per_batch=call["max_split"],
        experimental=call["experimental"],
        planner=planner,
    )


def _is_defined(call: dict[str, Any], brute_force: ModuleType) -> bool:
    kernel = [call[key] for key in ("gfx", "q_dtype", "kv_dtype", "heads", "longest", "experimental")]
    fold = brute_force.folds(*kernel)
    if fold is None:
        return False
    return call["uniform"] > 0 or (fold == 1 and not brute_force.tiling(*kernel)[1])


def _runs_parallel(call: dict[str, Any], brute_force: ModuleType) -> bool:
    kernel = [call[key] for key in ("gfx", "q_dtype", "kv_dtype", "heads", "longest", "experimental")]
    return call["longest"] == 1 and brute_force.folds(*kernel) == 1 and not brute_force.tiling(*kernel)[1]


@settings(relaxed, max_examples=700)
@given(call=decode_calls())
def test_decode_equals_the_brute_force_or_is_refused(call: dict[str, Any], brute_force: ModuleType) -> None:
    if not _is_defined(call, brute_force):
        with pytest.raises(BadInput, match=r"num_heads|uni_seqlen_qo"):
            _mla(call, "auto")
        return
    parallel = _runs_parallel(call, brute_force)
    for planner, is_parallel in (("auto", parallel), ("serial", False), *([("parallel", True)] if parallel else [])):
        plan = _mla(call, planner)
        expected = brute_force.decode(**call, parallel=is_parallel)
        assert plan.work_indptr.tolist() == expected.work_indptr
        assert plan.work_info.tolist() == expected.works
        assert plan.reduce_indptr.tolist() == expected.reduce_indptr
        assert plan.reduce_final_map.tolist() == [span or [-1, -1] for span in expected.final]
        assert plan.reduce_partial_map.tolist() == expected.partial_map
    if not parallel:
        with pytest.raises(BadInput, match="planner"):
            _mla(call, "parallel")


@relaxed
@given(call=decode_calls())
def test_decode_fits_the_buffers_that_the_size_function_asks_for(call: dict[str, Any], brute_force: ModuleType) -> None:
    if not _is_defined(call, brute_force) or call["heads"] % 8:
        return
    plan = _mla(call, "auto")
    sizes = schedules.mla_decode_shapes(
        len(call["kv"]) - 1,
        call["longest"],
        call["heads"],
        call["q_dtype"],
        call["kv_dtype"],
        gfx=call["gfx"],
        num_cu=call["num_cu"],
        max_split_per_batch=call["max_split"],
        experimental=call["experimental"],
    )
    assert plan.work_indptr.shape == sizes["work_indptr"]
    for name in ("work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map"):
        assert len(getattr(plan, name)) <= sizes[name][0], name
