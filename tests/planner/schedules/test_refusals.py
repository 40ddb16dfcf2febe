"""Bad input to a schedule: one line that names the argument, the element and what was expected."""

from typing import Any

import numpy as np
import pytest
from syncfree.planner import schedules
from syncfree.planner.errors import BadInput

pytestmark = pytest.mark.usefixtures("implementation")


def _ps(**changes: Any) -> schedules.WorkSchedule:
    call: dict[str, Any] = {
        "qo_indptr": [0, 4, 9],
        "kv_indptr": [0, 4, 9],
        "context_lens": [4, 5],
        "num_heads_k": 4,
        "num_cu": 8,
    }
    call.update(changes)
    return schedules.ps_prefill(call.pop("qo_indptr"), call.pop("kv_indptr"), call.pop("context_lens"), **call)


def _mla(**changes: Any) -> schedules.WorkSchedule:
    call: dict[str, Any] = {
        "qo_indptr": [0, 1, 2],
        "kv_indptr": [0, 40, 90],
        "num_heads": 16,
        "num_cu": 8,
        "gfx": "gfx942",
        "q_dtype": "bf16",
        "kv_dtype": "bf16",
        "max_seqlen_qo": 1,
    }
    call.update(changes)
    return schedules.mla_decode(call.pop("qo_indptr"), call.pop("kv_indptr"), **call)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qo_indptr": [0, 4, 3]}, "qo_indptr[2]: expected at least qo_indptr[1] = 4, got 3"),
        ({"qo_indptr": [0, 4]}, "qo_indptr: expected 3 entries for 2 requests, got 2"),
        ({"qo_indptr": []}, "qo_indptr: expected 3 entries for 2 requests, got 0"),
        ({"qo_indptr": [-1, 4, 9]}, "qo_indptr[0]: expected at least 0, got -1"),
        ({"kv_indptr": [0, 4, 8]}, "context_lens[1]: expected at most 4, what its KV pages hold, got 5"),
        ({"kv_indptr": [0, 9, 4]}, "kv_indptr[2]: expected at least kv_indptr[1] = 9, got 4"),
        ({"num_cu": [80]}, "num_cu: expected an integer, got [80]"),
        ({"context_lens": [4, -5]}, "context_lens[1]: expected at least 0, got -5"),
        ({"context_lens": [3, 5]}, "context_lens[0]: expected at least the 4 query rows (causal), got 3"),
        ({"context_lens": [4, 5.5]}, "context_lens[1]: expected an integer, got 5.5"),
        ({"context_lens": [4, float("nan")]}, "context_lens[1]: expected an integer, got nan"),
        ({"context_lens": [4, 2**31]}, "context_lens[1]: expected an int32 value, got 2147483648"),
        ({"context_lens": [4, 2**70]}, f"context_lens[1]: expected an int32 value, got {2**70}"),
        ({"context_lens": np.array([4.0, 5.0])}, "context_lens[0]: expected an integer, got 4.0"),
        ({"context_lens": [[4, 5]]}, "context_lens: expected one dimension, got 2"),
        ({"context_lens": [True, False]}, "context_lens[0]: expected an integer, got True"),
        ({"num_heads_k": 0}, "num_heads_k: expected at least 1, got 0"),
        ({"num_heads_k": 2.0}, "num_heads_k: expected an integer, got 2.0"),
        ({"num_cu": -3}, "num_cu: expected at least 1, got -3"),
        ({"num_cu": 2**31}, "num_cu: expected 1 to 2147483647, got 2147483648"),
        ({"qo_indptr": [0, True, 4]}, "qo_indptr[1]: expected an integer, got True"),
        ({"qlen_granularity": 0}, "qlen_granularity: expected at least 1, got 0"),
        ({"kvlen_granularity": 96}, "kvlen_granularity: expected a power of two, got 96"),
        ({"block_size": 256}, "kvlen_granularity: expected a multiple of block_size = 256, got 128"),
        ({"num_heads_k": 128, "qhead_granularity": 512}, "qhead_granularity: expected 1 to 511, got 512"),
    ],
)
def test_a_bad_prefill_argument_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as caught:
        _ps(**changes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_indptr": [0, 40, 30]}, "kv_indptr[2]: expected at least kv_indptr[1] = 40, got 30"),
        ({"kv_indptr": [5, 40, 90]}, "kv_indptr[0]: expected 0, got 5"),
        ({"kv_indptr": [0]}, "kv_indptr: expected at least one request, got 1 entries"),
        ({"kv_indptr": []}, "kv_indptr: expected at least one request, got 0 entries"),
        ({"kv_indptr": [0, 40, "x"]}, "kv_indptr[2]: expected an integer, got 'x'"),
        ({"qo_indptr": [0, 1]}, "qo_indptr: expected 3 entries for 2 requests, got 2"),
        ({"qo_indptr": [0, 1, 3]}, "qo_indptr[2]: expected at most max_seqlen_qo = 1 rows, got 2"),
        ({"num_heads": [16]}, "num_heads: expected an integer, got [16]"),
        ({"num_heads": 20}, "num_heads: expected a multiple of 16, "),
        ({"num_heads": 8}, "num_heads: expected a multiple of 16, "),
        ({"gfx": "gfx90a"}, "gfx: expected one of gfx942, gfx950, got 'gfx90a'"),
        ({"q_dtype": "fp32"}, "q_dtype: expected one of bf16, fp16, fp8, got 'fp32'"),
        ({"kv_dtype": ["bf16"]}, "kv_dtype: expected one of bf16, fp16, fp8, got ['bf16']"),
        ({"max_seqlen_qo": 0}, "max_seqlen_qo: expected at least 1, got 0"),
        ({"uni_seqlen_qo": 0}, "uni_seqlen_qo: expected -1 (read the lengths) or a query length, got 0"),
        ({"uni_seqlen_qo": 2}, "uni_seqlen_qo: expected -1 to 1, got 2"),
        ({"num_heads": 32}, "uni_seqlen_qo: expected a uniform query length where heads are folded; "),
        ({"max_seqlen_qo": 9}, "uni_seqlen_qo: expected a uniform query length where queries are tiled; "),
        ({"kv_granularity": 12}, "kv_granularity: expected a power of two, got 12"),
        ({"page_size": 16}, "page_size: expected 1, "),
        ({"max_split_per_batch": 0}, "max_split_per_batch: expected at least 1, got 0"),
        ({"planner": "fast"}, "planner: expected one of auto, serial, parallel, got 'fast'"),
        ({"planner": "parallel", "max_seqlen_qo": 2}, "planner: expected 'auto' or 'serial'; "),
        (
            {"kv_indptr": [0, 2**31 - 1, 2**31 - 1], "kv_granularity": 1},
            "kv_indptr: expected a batch whose work costs ",
        ),
    ],
)
def test_a_bad_decode_argument_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as caught:
        _mla(**changes)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 20}, "num_heads: expected a multiple of 8, got 20"),
        ({"num_cu": 0}, "num_cu: expected at least 1, got 0"),
        ({"batch_size": -1}, "batch_size: expected at least 0, got -1"),
        ({"kv_dtype": "int8"}, "kv_dtype: expected one of bf16, fp16, fp8, got 'int8'"),
    ],
)
def test_a_bad_size_argument_is_named(changes: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"batch_size": 4, "max_seqlen_qo": 1, "num_heads": 16, "q_dtype": "bf16", "kv_dtype": "bf16"}
    call |= {"gfx": "gfx942", "num_cu": 304}
    with pytest.raises(BadInput) as caught:
        schedules.mla_decode_shapes(**(call | changes))
    assert str(caught.value) == message


def test_lists_and_arrays_of_any_integer_type_give_the_same_schedule() -> None:
    expected = _mla().work_info.tolist()
    for convert in (
        tuple,
        np.asarray,
        lambda values: np.asarray(values, np.uint16),
        lambda values: np.repeat(values, 2)[::2],
    ):
        plan = _mla(qo_indptr=convert([0, 1, 2]), kv_indptr=convert([0, 40, 90]))
        assert plan.work_info.tolist() == expected
        assert plan.work_info.dtype == np.int32


def test_an_empty_prefill_batch_has_an_empty_schedule() -> None:
    plan = _ps(qo_indptr=[0], kv_indptr=[0], context_lens=[])
    assert plan.work_indptr.tolist() == [0] * 9
    assert plan.work_info.shape == (0, 8)
    assert plan.reduce_indptr.tolist() == [0]


def test_a_staging_buffer_of_another_size_is_refused_untouched() -> None:
    cluster = _ps().cluster
    assert cluster is not None
    work_indptr = np.full(cluster.num_workgroups + 1, 7, np.int32)
    work_info = np.full((cluster.num_works + 1, 8), 7, np.int32)
    with pytest.raises(ValueError, match="other sizes"):
        cluster.expand(work_indptr, work_info)
    assert (work_info == 7).all()
    assert (work_indptr == 7).all()


def test_expanding_into_a_staging_buffer_equals_the_whole_schedule() -> None:
    plan = _ps(qo_indptr=[0, 700, 1900], kv_indptr=[0, 700, 1900], context_lens=[700, 1200], num_heads_k=12, num_cu=8)
    cluster = plan.cluster
    assert cluster is not None
    staging = np.full(cluster.num_workgroups + 1 + 8 * cluster.num_works, -9, np.int32)
    cluster.expand(
        staging[: cluster.num_workgroups + 1], staging[cluster.num_workgroups + 1 :].reshape(cluster.num_works, 8)
    )
    assert staging.tolist() == [*plan.work_indptr.tolist(), *plan.work_info.reshape(-1).tolist()]
