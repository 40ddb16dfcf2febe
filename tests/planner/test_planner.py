"""Plans from a declaration: minimal, explained, refused where they must be, and reused only where that is sound."""

import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syncfree.planner import (
    BadInput,
    Batch,
    Environment,
    InexactBatch,
    Limits,
    MetadataPlan,
    Planner,
    SkippedField,
    UnorderedBatch,
)
from syncfree.planner import planner as planner_module
from syncfree.planner.backend import Backend, Field, Kernel, Route


def small_backend(**changes):
    """Two segments; `decode` reads a device field and a bound, `prefill` an exact array."""
    declared = {
        "name": "small",
        "upstream": "SMALL",
        "split": "two",
        "routes": (
            Route("decode", (Kernel("wide", {"decode.lens": "lens"}),), lambda step: len(step.batch) > 2),
            Route("decode", (Kernel("narrow", {"decode.lens": "lens", "decode.longest": "n"}),)),
            Route("prefill", (Kernel("dense", {"prefill.ends": "ends", "prefill.work": "scratch"}),)),
        ),
        "shared": (Route("all", (Kernel("write", {"common.tokens": "n"}),)),),
        "fields": (
            Field("common.tokens", "host", "int", lambda step: step.batch.num_tokens),
            Field("decode.lens", "device", "int32", shape=lambda step: (step["decode"].rows[1],)),
            Field(
                "decode.longest",
                "host",
                "int",
                lambda step: step["decode"].max_seq_len(step.batch),
                lengths="upper",
                unread="the wide kernel does not need it",
            ),
            Field(
                "prefill.ends",
                "host",
                "int32",
                lambda step: step.batch.seq_lens[step.rows("prefill")].copy(),
                lengths="exact",
            ),
            Field(
                "prefill.work",
                "persistent",
                "float32",
                shape=lambda step: (step.limits.max_num_seqs, 2),
                launches=3,
            ),
        ),
        "never_read": {"common.legacy": "removed long ago"},
    }
    return Backend(**(declared | changes))


def test_a_plan_is_what_the_kernels_on_its_routes_read():
    plan = Planner(small_backend(), limits=Limits(max_num_seqs=8)).plan(Batch.from_lengths([1, 5], [9, 20]))
    assert plan.routes == {"decode": "narrow", "prefill": "dense"}
    assert {name: field.consumer for name, field in plan.fields.items()} == {
        "common.tokens": "write(n)",
        "decode.lens": "narrow(lens)",
        "decode.longest": "narrow(n)",
        "prefill.ends": "dense(ends)",
        "prefill.work": "dense(scratch)",
    }
    assert plan.skipped == {"common.legacy": "removed long ago"}
    assert plan["decode.longest"].value == 9
    assert plan["prefill.ends"].value.tolist() == [20]
    assert plan["decode.lens"].shape == (1,)
    cost = plan.cost
    assert (cost.syncs, cost.h2d_copies, cost.h2d_bytes, cost.launches, cost.persistent_bytes) == (0, 1, 4, 3, 64)
    assert list(plan.host_arrays()) == ["prefill.ends"]


def test_another_route_leaves_out_what_it_does_not_read_and_says_why():
    plan = Planner(small_backend()).plan(Batch.from_lengths([1, 1, 1], [9, 20, 30]))
    assert plan.routes == {"decode": "wide"}
    assert plan.skipped["decode.longest"] == "the wide kernel does not need it"
    assert plan.skipped["prefill.ends"] == "no prefill rows in this batch"
    assert plan.cost.h2d_copies == 0
    with pytest.raises(SkippedField, match=r"^decode\.longest: left out: the wide kernel does not need it$"):
        plan["decode.longest"]
    with pytest.raises(SkippedField, match=r"^common\.legacy: left out: removed long ago$"):
        plan["common.legacy"]
    with pytest.raises(KeyError, match=r"decode\.nothing: no field of small"):
        plan["decode.nothing"]
    assert "decode.lens" in plan
    assert "decode.longest" not in plan


def test_a_batch_without_rows_needs_nothing():
    plan = Planner(small_backend()).plan(Batch.from_lengths([], []))
    assert plan.fields == {}
    assert plan.segments == []
    assert set(plan.skipped.values()) == {"no rows in this batch", "removed long ago"}
    assert plan.batch_class == "empty"
    assert not plan.graph_eligible


def test_a_fresh_prompt_no_longer_than_the_threshold_is_never_graph_eligible():
    planner = Planner(small_backend())
    for threshold in range(1, 5):
        for query in range(1, threshold + 1):
            batch = Batch.from_lengths([threshold, query], [50, query], decode_threshold=threshold)
            plan = planner.plan(batch)
            assert [s.name for s in plan.segments] == ["decode"]
            assert not plan.graph_eligible
    assert planner.plan(Batch.from_lengths([1, 1, 0], [5, 6, 0], num_tokens=4)).graph_eligible


def test_an_unordered_batch_is_refused_or_ordered_when_asked():
    planner = Planner(small_backend())
    batch = Batch.from_lengths([1, 0, 7, 1], [9, 0, 7, 5])
    with pytest.raises(UnorderedBatch, match=r"^rows\[1\]: expected padding rows"):
        planner.plan(batch)
    plan = planner.plan(batch, reorder=True)
    assert plan.reordered
    assert plan.order == [0, 3, 2, 1]
    assert [str(kind) for kind in plan.rows] == ["decode", "decode", "causal_prefill", "padding"]
    assert plan["prefill.ends"].value.tolist() == [7, 0]
    fine = planner.plan(Batch.from_lengths([7, 1], [7, 5]))
    assert (fine.reordered, fine.order) == (False, [1, 0])


def test_exact_fields_of_rows_known_by_bounds_are_refused_or_left_to_the_device():
    batch = Batch.from_lengths([1, 5], [9, 20], seq_lens_lower=[7, 18])
    with pytest.raises(
        InexactBatch, match=r"^seq_lens\[1\]: expected an exact length, which prefill\.ends .* 18 to 20$"
    ):
        Planner(small_backend()).plan(batch)
    fields = tuple(
        Field(f.name, f.source, f.dtype, f.value, f.shape, "exact", from_device=True) if f.name == "prefill.ends" else f
        for f in small_backend().fields
    )
    plan = Planner(small_backend(fields=fields)).plan(batch)
    assert (plan["prefill.ends"].source, plan["prefill.ends"].value) == ("device", None)
    assert plan["decode.longest"].value == 9  # an upper bound serves
    assert plan.cost.h2d_copies == 0


def test_a_batch_that_no_kernel_serves_is_refused_with_the_reason():
    routes = (Route("decode", when=lambda step: True, refuse="no kernel for this query length"),)
    broken = small_backend(
        routes=(*routes, *small_backend().routes),
    )
    with pytest.raises(BadInput, match=r"^small: decode segment: no kernel for this query length$"):
        Planner(broken).plan(Batch.from_lengths([1], [5]))


def test_batches_over_the_limits_are_refused_with_the_row():
    planner = Planner(small_backend(), limits=Limits(max_num_seqs=2, max_num_batched_tokens=10))
    with pytest.raises(BadInput, match=r"^query_lens\[2\]: expected at most 2 rows \(limits\.max_num_seqs\), got 3"):
        planner.plan(Batch.from_lengths([1, 1, 1], [2, 2, 2]))
    with pytest.raises(BadInput, match=r"^query_lens\[1\]: expected at most 10 tokens in the batch .* got 11"):
        planner.plan(Batch.from_lengths([5, 6], [5, 6]))
    planner.plan(Batch.from_lengths([1, 1, 0, 0], [2, 2, 0, 0], num_tokens=16))  # graph padding may exceed both


def test_settings_that_nobody_plans_with_any_more_are_forgotten():
    batch = Batch.from_lengths([1], [9])
    before = len(planner_module._SETTINGS)
    for heads in range(100, 150):
        Planner(small_backend(), limits=Limits(num_heads=heads)).plan(batch.take([0]))
    gc.collect()
    assert len(planner_module._SETTINGS) <= before + 1


def test_builders_with_equal_settings_share_one_plan_of_a_batch_and_others_do_not():
    backend = small_backend()
    batch = Batch.from_lengths([1, 5], [9, 20])
    first = Planner(backend, Environment(), Limits()).plan(batch)
    assert Planner(backend, Environment(), Limits()).plan(batch) is first
    assert Planner(backend, Environment(gfx="gfx942"), Limits()).plan(batch) is not first
    assert Planner(backend, Environment(), Limits(max_num_seqs=9)).plan(batch)["prefill.work"].shape == (9, 2)
    namesake = small_backend(never_read={"common.other": "another declaration of the same name"})
    assert "common.other" in Planner(namesake, Environment(), Limits()).plan(batch).skipped


def test_a_declaration_that_contradicts_itself_is_refused_when_it_is_made():
    fields = small_backend().fields
    with pytest.raises(TypeError, match="declared twice"):
        small_backend(fields=(*fields, fields[0]))
    with pytest.raises(TypeError, match=r"read undeclared fields \['prefill\.ends', 'prefill\.work'\]"):
        small_backend(fields=fields[:3])
    with pytest.raises(TypeError, match=r"no kernel reads \['common\.idle'\]"):
        small_backend(fields=(*fields, Field("common.idle", "device")))
    with pytest.raises(TypeError, match="a host field has a value"):
        small_backend(fields=(Field("common.tokens", "host", "int"), *fields[1:]))


LENGTHS = st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 2))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.lists(LENGTHS, max_size=4), st.integers(1, 2), st.booleans(), st.booleans()), max_size=8))
def test_a_planner_with_a_memory_plans_as_one_without(steps):
    """Steps near one another, so that kinds, lengths, bounds, padding and order change one at a time."""
    backend = small_backend()
    kept = Planner(backend)
    for rows, threshold, reorder, bounded in steps:
        query = [q for q, _, _ in rows]
        seq = [q + c for q, c, _ in rows]
        lower = [max(q, s - slack) for (q, _, slack), s in zip(rows, seq, strict=True)] if bounded else None
        batches = [
            Batch.from_lengths(query, seq, decode_threshold=threshold, seq_lens_lower=lower, num_tokens=12)
            for _ in range(2)
        ]
        outcomes = []
        for planner, batch in zip((kept, Planner(backend)), batches, strict=True):
            try:
                outcomes.append(planner.plan(batch, reorder=reorder))
            except BadInput as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def test_growing_decodes_keep_everything_but_their_lengths():
    planner = Planner(small_backend())
    first = planner.plan(Batch.from_lengths([1, 1], [9, 20]))
    again = planner.plan(Batch.from_lengths([1, 1], [9, 20]))
    assert again is first
    grown = planner.plan(Batch.from_lengths([1, 1], [10, 21]))
    assert grown["decode.longest"].value == 21
    assert grown["decode.lens"] is first["decode.lens"]
    assert grown.segments[0].max_seq_len == 21
    bounded = planner.plan(Batch.from_lengths([1, 1], [10, 21], seq_lens_lower=[9, 21]))
    assert bounded["decode.longest"].value == 21


def test_a_plan_in_bytes_is_the_same_plan_and_bytes_of_other_versions_are_refused():
    plan = Planner(small_backend()).plan(Batch.from_lengths([1, 5], [9, 20]))
    data = plan.to_bytes()
    again = MetadataPlan.from_bytes(data)
    assert again == plan
    assert again["prefill.ends"].value.dtype == np.int32
    assert again.rows == plan.rows
    other = Planner(small_backend()).plan(Batch.from_lengths([1, 5], [9, 21]))
    assert MetadataPlan.from_bytes(other.to_bytes()) != plan
    with pytest.raises(BadInput, match=r"^plan bytes: expected version syncfree\.plan/1, got b'syncfree\.plan/9'"):
        MetadataPlan.from_bytes(data.replace(b"plan/1", b"plan/9", 1))
    for size in (0, 5, 16, 17, len(data) // 2, len(data) - 1):
        with pytest.raises(BadInput, match="plan bytes: expected"):
            MetadataPlan.from_bytes(data[:size])
    with pytest.raises(BadInput, match="plan bytes: expected a whole"):
        MetadataPlan.from_bytes(data + b"x")


def test_a_plan_cannot_be_changed():
    plan = Planner(small_backend()).plan(Batch.from_lengths([1, 5], [9, 20]))
    with pytest.raises(AttributeError):
        plan.mixed = False
    with pytest.raises(AttributeError):
        plan["common.tokens"].value = 3
    with pytest.raises(ValueError, match="read-only"):
        plan["prefill.ends"].value[0] = 3  # the next step's plan may share it


def test_a_planner_with_its_own_threshold_plans_the_same_batch_as_its_builder_would():
    batch = Batch.from_lengths([3, 3], [9, 20])
    backend = small_backend()
    target = Planner(backend).plan(batch)
    draft = Planner(backend, decode_threshold=3).plan(batch)
    assert [s.name for s in target.segments] == ["prefill"]
    assert [s.name for s in draft.segments] == ["decode"]
    assert Planner(backend, decode_threshold=3).plan(batch) is draft


def test_micro_batches_have_plans_of_their_own():
    batch = Batch.from_lengths([1, 10], [9, 30])
    planner = Planner(small_backend())
    whole, second = planner.plan(batch), planner.plan(batch.micro_batch(6, 11))
    assert whole["prefill.ends"].value.tolist() == [30]
    assert second["prefill.ends"].value.tolist() == [30]
    assert planner.plan(batch.micro_batch(0, 6))["prefill.ends"].value.tolist() == [25]
    assert planner.plan(batch) == whole
    assert planner.plan(batch.micro_batch(6, 11)) is second


def test_a_name_in_place_of_a_backend_is_refused_with_the_way_to_one():
    with pytest.raises(BadInput, match=r"backend: expected a Backend.*attention_backend.*'aiter_fa'"):
        Planner("aiter_fa")
