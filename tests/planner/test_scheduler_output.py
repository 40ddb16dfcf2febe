"""Batches from scheduler steps: both runners' shapes, chunking, prefix hits, preemption and resume, drafts."""

from types import SimpleNamespace

import pytest
from syncfree.planner import BadInput, Batch, PrefillTable, RowKind, classify, rows

IMPLEMENTATIONS = sorted(rows.IMPLEMENTATIONS)


@pytest.fixture(params=IMPLEMENTATIONS, autouse=True)
def implementation(request, monkeypatch):
    monkeypatch.setattr(rows, "active", rows.IMPLEMENTATIONS[request.param])


def new(req_id, prompt, computed=0, prefill_tokens=None):
    """A new request as V1 sends it, or as V2 does with `prefill_tokens`."""
    return SimpleNamespace(
        req_id=req_id,
        prompt_token_ids=[0] * prompt,
        prompt_len=prompt,
        num_computed_tokens=computed,
        prefill_token_ids=None if prefill_tokens is None else [0] * prefill_tokens,
    )


def step(scheduled, new_reqs=(), cached=(), resumed=(), finished=(), drafts=None, outputs=None, tokens=None):
    """`cached`: (request, computed) pairs; `outputs`: output tokens of a cached request."""
    return SimpleNamespace(
        num_scheduled_tokens=dict(scheduled),
        scheduled_new_reqs=list(new_reqs),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r for r, _ in cached],
            num_computed_tokens=[c for _, c in cached],
            resumed_req_ids=set(resumed),
            num_output_tokens=[(outputs or {}).get(r, 0) for r, _ in cached],
            all_token_ids=tokens or {},
        ),
        finished_req_ids=set(finished),
        scheduled_spec_decode_tokens=drafts or {},
    )


def kinds(batch):
    return dict(zip(batch.req_ids, map(str, classify(batch).rows), strict=True))


def test_a_chunked_prompt_is_followed_to_its_decode():
    table = PrefillTable()
    seen = []
    for scheduled, arrivals, cached in (
        ({"a": 16}, [new("a", 40)], []),
        ({"a": 16}, [], [("a", 16)]),
        ({"a": 8}, [], [("a", 32)]),
        ({"a": 1}, [], [("a", 40)]),
    ):
        batch = Batch.from_vllm_scheduler(step(scheduled, arrivals, cached), table)
        seen.append(kinds(batch)["a"])
        assert batch.is_prefilling.tolist() == [seen[-1] != "decode"]
        assert batch.seq_lens.tolist() == [cached[0][1] + scheduled["a"] if cached else 16]
    assert seen == ["causal_prefill", "chunked_prefill", "chunked_prefill", "decode"]


def test_a_prefix_hit_computed_at_once_is_an_extend_and_in_chunks_is_not():
    table = PrefillTable()
    batch = Batch.from_vllm_scheduler(step({"a": 8, "b": 4}, [new("a", 40, 32), new("b", 40, 32)]), table)
    assert kinds(batch) == {"a": "extend", "b": "chunked_prefill"}
    batch = Batch.from_vllm_scheduler(step({"a": 1, "b": 4}, [], [("a", 40), ("b", 36)]), table)
    assert kinds(batch) == {"a": "decode", "b": "chunked_prefill"}


def test_v1_resume_prefills_the_regenerated_output_too_but_keeps_the_prompt_for_its_flag():
    table = PrefillTable()
    Batch.from_vllm_scheduler(step({"a": 20}, [new("a", 20)]), table)
    resumed = step({"a": 22}, cached=[("a", 0)], resumed=["a"], outputs={"a": 10})
    batch = Batch.from_vllm_scheduler(resumed, table)
    assert kinds(batch) == {"a": "causal_prefill"}
    assert table["a"] == 30
    batch = Batch.from_vllm_scheduler(step({"a": 8}, cached=[("a", 22)], outputs={"a": 10}), table)
    assert kinds(batch) == {"a": "chunked_prefill"}
    assert batch.is_prefilling.tolist() == [False]  # V1 compares with the prompt: 22 >= 20
    assert kinds(Batch.from_vllm_scheduler(step({"a": 1}, cached=[("a", 30)]), table)) == {"a": "decode"}


def test_v1_resume_with_a_prefix_hit_is_an_extend():
    table = PrefillTable()
    Batch.from_vllm_scheduler(step({"a": 20}, [new("a", 20)]), table)
    resumed = step({"a": 14}, cached=[("a", 16)], resumed=["a"], tokens={"a": [0] * 30})
    assert kinds(Batch.from_vllm_scheduler(resumed, table)) == {"a": "extend"}


def test_v2_resume_comes_as_a_new_request_and_its_flag_covers_the_regenerated_output():
    table = PrefillTable()
    Batch.from_vllm_scheduler(step({"a": 20}, [new("a", 20, prefill_tokens=20)]), table)
    resumed = step({"a": 22}, [new("a", 20, prefill_tokens=30)])
    resumed.preempted_req_ids = {"a"}
    Batch.from_vllm_scheduler(resumed, table)
    batch = Batch.from_vllm_scheduler(step({"a": 8}, cached=[("a", 22)]), table)
    assert kinds(batch) == {"a": "chunked_prefill"}
    assert batch.is_prefilling.tolist() == [True]


def test_older_shape_with_one_resume_flag_a_row():
    table = PrefillTable()
    Batch.from_vllm_scheduler(step({"a": 20}, [new("a", 20)]), table)
    resumed = step({"a": 30}, cached=[("a", 0)], outputs={"a": 10})
    del resumed.scheduled_cached_reqs.resumed_req_ids
    resumed.scheduled_cached_reqs.resumed_from_preemption = [True]
    Batch.from_vllm_scheduler(resumed, table)
    assert table["a"] == 30


def test_finished_requests_are_dropped_also_by_a_step_without_work():
    table = PrefillTable()
    Batch.from_vllm_scheduler(step({"a": 20, "b": 3}, [new("a", 20), new("b", 3)]), table)
    empty = Batch.from_vllm_scheduler(step({}, finished=["a"]), table)
    assert len(empty) == 0
    assert "a" not in table
    assert len(table) == 1
    # the same name may come back in the very step that reports its end
    Batch.from_vllm_scheduler(step({"b": 7}, [new("b", 7)], finished=["b"]), table)
    assert table["b"] == 7


def test_a_long_life_does_not_grow_the_table():
    table = PrefillTable()
    for i in range(2000):
        Batch.from_vllm_scheduler(step({f"r{i}": 1}, [new(f"r{i}", i + 1)], finished=[f"r{i - 1}"]), table)
    assert len(table) == 1
    assert table["r1999"] == 2000
    crowd = [new(f"c{i}", i + 1) for i in range(700)]
    batch = Batch.from_vllm_scheduler(step({r.req_id: 1 for r in crowd}, crowd), table)
    assert batch.prefill_lens.tolist() == list(range(1, 701))


def test_a_request_whose_admission_nobody_saw_is_taken_as_prefilled():
    table = PrefillTable()
    batch = Batch.from_vllm_scheduler(step({"a": 1, "b": 9}, cached=[("a", 30), ("b", 4)]), table)
    assert classify(batch).rows == [RowKind.DECODE, RowKind.EXTEND]
    assert classify(batch).coarse
    assert batch.is_prefilling.tolist() == [False, False]


def test_rows_follow_the_step_or_the_runner_in_any_order():
    table = PrefillTable()
    arrivals = [new("n", 5), new("m", 6)]
    cached = [("a", 10), ("b", 20)]
    scheduled = {"m": 2, "b": 3, "n": 4, "a": 1}
    batch = Batch.from_vllm_scheduler(step(scheduled, arrivals, cached), table)
    assert list(batch.req_ids) == ["m", "b", "n", "a"]
    assert batch.query_lens.tolist() == [2, 3, 4, 1]
    assert batch.computed_lens.tolist() == [0, 20, 0, 10]
    batch = Batch.from_vllm_scheduler(step(scheduled, arrivals, cached), table, req_ids=["a", "b", "m", "n"])
    assert batch.query_lens.tolist() == [1, 3, 2, 4]
    assert batch.computed_lens.tolist() == [10, 20, 0, 0]
    assert batch.prefill_lens.tolist() == [-1, -1, 6, 5]
    for wrong in (["a"], ["a", "b", "m", "x"], ["a", "a", "b", "m"]):
        with pytest.raises(BadInput, match="req_ids: expected the requests of num_scheduled_tokens"):
            Batch.from_vllm_scheduler(step(scheduled, arrivals, cached), table, req_ids=wrong)


def test_a_plain_dict_serves_as_the_table():
    table = {}
    batch = Batch.from_vllm_scheduler(step({"a": 8, "b": 16}, [new("a", 40, 32), new("b", 40)]), table)
    assert kinds(batch) == {"a": "extend", "b": "causal_prefill"}
    assert table == {"a": 40, "b": 40}
    batch = Batch.from_vllm_scheduler(step({"b": 16}, cached=[("b", 16)], finished=["a"]), table)
    assert kinds(batch) == {"b": "chunked_prefill"}
    assert table == {"b": 40}
    resumed = step({"b": 44}, cached=[("b", 0)], resumed=["b"], outputs={"b": 4})
    Batch.from_vllm_scheduler(resumed, table)
    assert table == {"b": 44}


def test_a_plain_dict_follows_a_request_that_is_preempted_twice():
    table = {}
    Batch.from_vllm_scheduler(step({"a": 10}, [new("a", 10)]), table)
    for outputs in (3, 5):
        prefill = 10 + outputs
        resumed = step({"a": prefill}, cached=[("a", 0)], resumed=["a"], outputs={"a": outputs})
        Batch.from_vllm_scheduler(resumed, table)
        assert table == {"a": prefill}
        after = Batch.from_vllm_scheduler(step({"a": 1}, cached=[("a", prefill)]), table)
        assert kinds(after) == {"a": "decode"}


def test_drafts_in_flight_make_the_next_length_an_upper_bound():
    table = PrefillTable()
    Batch.from_vllm_scheduler(step({"a": 10, "b": 10}, [new("a", 10), new("b", 10)]), table)
    first = Batch.from_vllm_scheduler(
        step({"a": 3, "b": 1}, cached=[("a", 10), ("b", 10)], drafts={"a": [-1, -1]}), table
    )
    assert first.inexact is None
    second = Batch.from_vllm_scheduler(
        step({"a": 3, "b": 1}, cached=[("a", 13), ("b", 11)], drafts={"a": [-1, -1]}), table
    )
    assert second.seq_lens.tolist() == [16, 12]
    assert second.seq_lens_lower.tolist() == [14, 12]
    quiet = Batch.from_vllm_scheduler(step({"a": 1, "b": 1}, cached=[("a", 14), ("b", 12)]), table)
    assert quiet.seq_lens_lower.tolist() == [13, 13]
    assert Batch.from_vllm_scheduler(step({"a": 1, "b": 1}, cached=[("a", 15), ("b", 13)]), table).inexact is None


def test_a_preemption_forgets_the_drafts_that_were_in_flight():
    table = PrefillTable()
    Batch.from_vllm_scheduler(step({"a": 10}, [new("a", 10)]), table)
    Batch.from_vllm_scheduler(step({"a": 3}, cached=[("a", 10)], drafts={"a": [-1, -1]}), table)
    resumed = step({"a": 12}, cached=[("a", 0)], resumed=["a"], outputs={"a": 2})
    assert Batch.from_vllm_scheduler(resumed, table).inexact is None


def test_with_synchronous_scheduling_every_length_is_exact():
    table = PrefillTable(steps_in_flight=0)
    Batch.from_vllm_scheduler(step({"a": 3}, [new("a", 10)], drafts={"a": [7, 8]}), table)
    assert Batch.from_vllm_scheduler(step({"a": 3}, cached=[("a", 13)], drafts={"a": [7, 8]}), table).inexact is None


def test_two_steps_in_flight_add_up():
    table = PrefillTable(steps_in_flight=2)
    for computed in (10, 13):
        Batch.from_vllm_scheduler(step({"a": 3}, cached=[("a", computed)], drafts={"a": [-1, -1]}), table)
    batch = Batch.from_vllm_scheduler(step({"a": 3}, cached=[("a", 16)], drafts={"a": [-1, -1]}), table)
    assert batch.seq_lens_lower.tolist() == [15]


@pytest.mark.parametrize(
    ("scheduled", "cached"),
    [
        ({"a": -1}, [("a", 3)]),
        ({"a": 1}, [("a", -3)]),
        ({"a": 2**31}, [("a", 0)]),
        ({"a": 2**30}, [("a", 2**30)]),
        ({"a": "x"}, [("a", 0)]),
    ],
)
def test_implausible_counts_are_refused_with_the_request(scheduled, cached):
    with pytest.raises(BadInput, match=r"num_scheduled_tokens\['a'\]: expected tokens and computed tokens >= 0"):
        Batch.from_vllm_scheduler(step(scheduled, cached=cached), PrefillTable())


def test_a_scheduled_request_that_is_neither_new_nor_cached_is_refused():
    with pytest.raises(BadInput, match="expected each request among the new or the cached ones, not so 'b'"):
        Batch.from_vllm_scheduler(step({"a": 1, "b": 1}, cached=[("a", 3)]), PrefillTable())
