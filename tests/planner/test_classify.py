"""Kinds, classes and order against a brute-force twin written from the definitions, on both row implementations."""

from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syncfree.planner import BatchClass, RowKind, classify, rows
from syncfree.planner.batch import Batch

IMPLEMENTATIONS = sorted(rows.IMPLEMENTATIONS)


@contextmanager
def running(implementation):
    before, rows.active = rows.active, rows.IMPLEMENTATIONS[implementation]
    try:
        yield
    finally:
        rows.active = before


def test_the_native_passes_are_built_here():
    if "native" not in rows.IMPLEMENTATIONS:
        pytest.skip("no compiler was found at install time: only the NumPy passes are tested")
    assert rows.active is rows.IMPLEMENTATIONS["native"]


SMALL = st.integers(0, 6)


@st.composite
def described_rows(draw, min_size=0):
    """Rows as dicts, with lengths near one another so that every boundary is hit."""
    count = draw(st.integers(min_size, 12))
    out = []
    for _ in range(count):
        query, computed = draw(SMALL), draw(SMALL)
        out.append(
            {
                "query": query,
                "computed": computed,
                "prefill": draw(st.one_of(st.none(), st.integers(0, 12))),
                "cached": draw(st.one_of(st.none(), SMALL)),
                "flag": draw(st.booleans()),
            }
        )
    return out


def brute_force_kind(row, threshold, *, prefill_known, cached_known, flags_known):
    query, computed = row["query"], row["computed"]
    prefill = row["prefill"] if prefill_known else None
    cached = row["cached"] if cached_known else None
    if query == 0:
        return "padding"
    if computed == 0:
        return "causal_prefill"
    if prefill is not None:
        done = computed >= prefill
    elif flags_known:
        done = not row["flag"]
    else:
        done = True
    if done:
        return "decode" if query <= threshold else "extend"
    if prefill is not None and query + computed >= prefill and cached is not None and computed == cached:
        return "extend"
    return "chunked_prefill"


def brute_force_class(kinds):
    for name in ("chunked_prefill", "extend", "causal_prefill", "decode"):
        if name in kinds:
            return name
    return "empty"


def make(rows_, threshold, prefill_known, cached_known, flags_known):
    return Batch.from_lengths(
        [r["query"] for r in rows_],
        [r["query"] + r["computed"] for r in rows_],
        prefill_lens=[r["prefill"] for r in rows_] if prefill_known else None,
        cached_lens=[r["cached"] for r in rows_] if cached_known else None,
        is_prefilling=[r["flag"] for r in rows_] if flags_known else None,
        decode_threshold=threshold,
    )


KNOWLEDGE = st.tuples(st.booleans(), st.booleans(), st.booleans())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=400, deadline=None)
@given(described_rows(), st.integers(1, 4), KNOWLEDGE)
def test_kinds_and_class_follow_the_definitions(implementation, described, threshold, knowledge):
    known = dict(zip(("prefill_known", "cached_known", "flags_known"), knowledge, strict=True))
    expected = [brute_force_kind(row, threshold, **known) for row in described]
    with running(implementation):
        found = classify(make(described, threshold, *knowledge))
        assert [str(kind) for kind in found.rows] == expected
        assert found.batch_class == brute_force_class(expected)
        others = set(expected) - {"padding", "decode"}
        assert found.mixed == ("decode" in expected and bool(others))
        assert found.graph_eligible == (set(expected) - {"padding"} == {"decode"})


def brute_force_region(row, threshold, prefill_known, flags_known):
    if row["query"] == 0:
        return 4
    if row["computed"] == 0:
        return 3
    if row["query"] > threshold:
        return 2
    if flags_known:
        return 1 if row["flag"] else 0
    if prefill_known and row["prefill"] is not None:
        return 1 if row["computed"] < row["prefill"] else 0
    return 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=400, deadline=None)
@given(described_rows(), st.integers(1, 4), st.booleans(), st.booleans())
def test_order_is_the_stable_sort_into_regions(implementation, described, threshold, prefill_known, flags_known):
    regions = [brute_force_region(row, threshold, prefill_known, flags_known) for row in described]
    expected = sorted(range(len(described)), key=lambda i: regions[i])
    with running(implementation):
        batch = make(described, threshold, prefill_known, False, flags_known)
        order = classify(batch).order
        assert order == (None if regions == sorted(regions) else expected)
        if order is not None:
            assert classify(batch.take(order)).order is None
            assert classify(batch.take(order)).rows == [classify(batch).rows[i] for i in order]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=300, deadline=None)
@given(described_rows(min_size=1), st.integers(1, 4), KNOWLEDGE)
def test_a_class_is_coarse_only_if_what_is_unknown_could_change_it(implementation, described, threshold, knowledge):
    """Coarse means: completing the unknown prefill data in some way turns extend into chunked, or the reverse."""
    prefill_known, cached_known, _ = knowledge
    with running(implementation):
        found = classify(make(described, threshold, *knowledge))
        if found.batch_class not in ("extend", "chunked_prefill"):
            assert not found.coarse
            return
        certain = {
            str(kind)
            for row, kind in zip(described, found.rows, strict=True)
            if kind in ("extend", "chunked_prefill") and not _open(row, prefill_known, cached_known)
        }
        guessed = any(
            kind in ("extend", "chunked_prefill") and _open(row, prefill_known, cached_known)
            for row, kind in zip(described, found.rows, strict=True)
        )
        assert found.coarse == (guessed and "chunked_prefill" not in certain)


def _open(row, prefill_known, cached_known):
    prefill = row["prefill"] if prefill_known else None
    cached = row["cached"] if cached_known else None
    if prefill is None:
        return True
    return row["computed"] < prefill <= row["query"] + row["computed"] and cached is None


def test_a_prompt_chunked_from_zero_is_a_causal_prefill_then_chunks_then_decodes():
    chunks = [(16, 16), (16, 32), (8, 40), (1, 41)]
    kinds = [
        classify(Batch.from_lengths([query], [seq], prefill_lens=[40], cached_lens=[0])).rows[0]
        for query, seq in chunks
    ]
    assert kinds == [RowKind.CAUSAL_PREFILL, RowKind.CHUNKED_PREFILL, RowKind.CHUNKED_PREFILL, RowKind.DECODE]


def test_the_whole_uncached_rest_of_a_prompt_at_once_is_an_extend():
    batch = Batch.from_lengths([8], [40], prefill_lens=[40], cached_lens=[32])
    assert classify(batch).batch_class is BatchClass.EXTEND
    assert not classify(batch).coarse


def test_a_fresh_one_token_prompt_is_a_causal_prefill_and_no_graph_may_serve_it():
    found = classify(Batch.from_lengths([1, 1], [9, 1], prefill_lens=[4, 1], cached_lens=[0, 0]))
    assert found.rows == [RowKind.DECODE, RowKind.CAUSAL_PREFILL]
    assert found.batch_class is BatchClass.CAUSAL_PREFILL
    assert found.mixed
    assert not found.graph_eligible


def test_no_rows_and_only_padding_are_empty():
    assert classify(Batch.from_lengths([], [])).batch_class is BatchClass.EMPTY
    found = classify(Batch.from_lengths([0, 0], [0, 0], num_tokens=2))
    assert found.batch_class is BatchClass.EMPTY
    assert found.order is None
    assert not found.graph_eligible


def test_member_names_are_the_upper_case_values():
    for enum in (RowKind, BatchClass):
        assert all(member.name == member.value.upper() for member in enum)
