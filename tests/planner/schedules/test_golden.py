"""Schedules and sizes against vectors that aiter's own planners produced."""

import hashlib
from typing import Any

import numpy as np
import pytest
from syncfree.planner import schedules


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array, "<i4").tobytes()).hexdigest()


def _whole(prefix: np.ndarray, shape: list[int], fill: int = 0) -> np.ndarray:
    buffer = np.full(shape, fill, np.int32)
    buffer[: len(prefix)] = prefix
    return buffer


def _ps_schedule(record: dict[str, Any]) -> schedules.WorkSchedule:
    return schedules.ps_prefill(
        record["seqlens_qo_indptr"],
        record["pages_kv_indptr"],
        record["context_lens"],
        num_heads_k=record["num_heads_k"],
        num_cu=record["num_cu"],
        qhead_granularity=record["qhead_granularity"],
        qlen_granularity=record["qlen_granularity"],
        kvlen_granularity=record["kvlen_granularity"],
        block_size=record["block_size"],
        is_causal=record["is_causal"],
    )


@pytest.mark.usefixtures("implementation")
def test_every_prefill_vector_is_matched_bit_for_bit(golden: Any) -> None:
    seen = 0
    for record in golden("ps_prefill"):
        plan = _ps_schedule(record)
        name = record["id"]
        assert plan.num_works == len(plan.work_info) == record["num_works"], name
        assert plan.num_partials == record["num_partials"], name
        assert len(plan.reduce_final_map) == record["num_reduce_groups"], name
        assert plan.work_indptr.tolist() == record["work_indptr"], name
        stored = record["work_info_rows_stored"]
        assert plan.work_info[:stored].T.tolist() == record["work_info"], name
        assert plan.reduce_indptr.tolist() == record["reduce_indptr"], name
        assert plan.reduce_final_map.tolist() == record["reduce_final_map"], name
        assert plan.reduce_partial_map.tolist() == record["reduce_partial_map"], name
        shapes = record["buffer_shapes"]
        whole = {
            "work_indptr": plan.work_indptr,
            "work_info": _whole(plan.work_info, shapes["work_info"]),
            "reduce_indptr": _whole(plan.reduce_indptr, shapes["reduce_indptr"], record["reduce_indptr_tail"]),
            "reduce_final_map": _whole(plan.reduce_final_map, shapes["reduce_final_map"]),
            "reduce_partial_map": _whole(plan.reduce_partial_map, shapes["reduce_partial_map"]),
        }
        assert {key: _sha256(value) for key, value in whole.items()} == record["sha256"], name
        seen += 1
    assert seen == 301


def _decode_schedule(record: dict[str, Any], planner: str) -> schedules.WorkSchedule:
    return schedules.mla_decode(
        record["seqlens_qo_indptr"],
        record["seqlens_kv_indptr"],
        num_heads=record["num_heads_per_head_k"],
        num_cu=record["num_cu"],
        gfx=record["gfx"],
        q_dtype=record["dtype_q"],
        kv_dtype=record["dtype_kv"],
        max_seqlen_qo=record["max_seqlen_qo"],
        uni_seqlen_qo=record["uni_seqlen_qo"],
        kv_granularity=record["kv_granularity"],
        page_size=record["page_size"],
        is_causal=record["is_causal"],
        max_split_per_batch=record["max_split_per_batch"],
        experimental=record["experimental"],
        planner=planner,
    )


def _assert_decode(
    plan: schedules.WorkSchedule, expected: dict[str, Any], shapes: dict[str, list[int]], name: str
) -> None:
    assert len(plan.work_info) == expected["num_works"], name
    assert plan.num_partials == expected["num_partials"], name
    assert plan.work_indptr.tolist() == expected["work_indptr"], name
    assert plan.work_info.T.tolist() == expected["work_info"] or not expected["num_works"], name
    reduce_indptr = _whole(plan.reduce_indptr, shapes["reduce_indptr"], int(plan.reduce_indptr[-1]))
    assert reduce_indptr.tolist() == expected["reduce_indptr"], name
    assert plan.reduce_partial_map.tolist() == expected["reduce_partial_map"], name
    written = [[row, *pair] for row, pair in enumerate(plan.reduce_final_map.tolist()) if pair != [-1, -1]]
    assert written == expected["reduce_final_map_rows"], name
    hashes = {
        "work_indptr": plan.work_indptr,
        "work_info_prefix": plan.work_info,
        "reduce_indptr": reduce_indptr,
        "reduce_partial_map_prefix": plan.reduce_partial_map,
    }
    assert {key: _sha256(value) for key, value in hashes.items()} == expected["sha256"], name


@pytest.mark.usefixtures("implementation")
def test_every_decode_vector_is_matched_by_the_planner_aiter_chooses(golden: Any) -> None:
    seen = 0
    for record in golden("mla_decode"):
        _assert_decode(_decode_schedule(record, "auto"), record, record["buffer_shapes"], record["id"])
        _assert_decode(_decode_schedule(record, record["planner"]), record, record["buffer_shapes"], record["id"])
        seen += 1
    assert seen == 467


@pytest.mark.usefixtures("implementation")
def test_serial_planner_is_matched_where_aiter_would_choose_the_parallel_one(golden: Any) -> None:
    seen = differing = 0
    for record in golden("mla_decode"):
        if record["planner"] != "parallel":
            continue
        expected = record if record["serial_agrees"] else record["serial"]
        _assert_decode(_decode_schedule(record, "serial"), expected, record["buffer_shapes"], record["id"])
        seen += 1
        differing += not record["serial_agrees"]
    assert (seen, differing) == (175, 13)


def test_every_buffer_size_is_matched(golden: Any) -> None:
    seen = 0
    for record in golden("buffer_info"):
        expected = {key: tuple(shape) for key, shape in record["buffer_shapes"].items()}
        if record["func"] == "get_ps_metadata_info_v1":
            arguments = [record[key] for key in ("batch_size", "num_head_k", "max_qlen", "qlen_granularity", "num_cu")]
            assert schedules.ps_prefill_shapes(*arguments) == expected, record
        else:
            place = {"gfx": record["gfx"], "num_cu": record["num_cu"], "experimental": record["experimental"]}
            query = [record[key] for key in ("max_seqlen_qo", "num_head_qo", "dtype_q", "dtype_kv")]
            shapes = schedules.mla_decode_shapes(
                record["batch_size"],
                *query,
                **place,
                is_sparse=record["is_sparse"],
                fast_mode=record["fast_mode"],
                num_kv_splits=record["num_kv_splits"],
                intra_batch_mode=record["intra_batch_mode"],
                max_split_per_batch=record["max_split_per_batch"],
            )
            assert shapes == expected, record
            heads = record["num_head_qo"]
            splits = schedules.mla_decode_max_splits(heads, query[0], *query[2:], **place)
            assert splits == record["max_splits"], record
        seen += 1
    assert seen == 2928


def test_vectors_carry_the_buffer_sizes_of_their_own_call(golden: Any) -> None:
    for record in golden("ps_prefill"):
        sizes = [record["alloc"][key] for key in ("batch_size", "num_head_k", "max_qlen", "qlen_granularity")]
        expected = {key: tuple(shape) for key, shape in record["buffer_shapes"].items()}
        assert schedules.ps_prefill_shapes(*sizes, record["num_cu"]) == expected, record["id"]
    for record in golden("mla_decode"):
        shapes = schedules.mla_decode_shapes(
            record["alloc_batch_size"],
            record["max_seqlen_qo"],
            record["num_heads_per_head_k"],
            record["dtype_q"],
            record["dtype_kv"],
            gfx=record["gfx"],
            num_cu=record["num_cu"],
            max_split_per_batch=record["max_split_per_batch"],
            experimental=record["experimental"],
        )
        assert shapes == {key: tuple(shape) for key, shape in record["buffer_shapes"].items()}, record["id"]
