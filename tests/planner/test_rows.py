"""The passes over rows: the C extension and its NumPy twin give the same, also for what is refused."""

import numpy as np
import pytest
from syncfree.planner import rows
from syncfree.planner.rows import token_to_row

TWIN = rows.IMPLEMENTATIONS["python"]
NATIVE = rows.IMPLEMENTATIONS.get("native", TWIN)
IMPLEMENTATIONS = sorted(rows.IMPLEMENTATIONS)


@pytest.fixture(params=IMPLEMENTATIONS)
def passes(request, monkeypatch):
    monkeypatch.setattr(rows, "active", rows.IMPLEMENTATIONS[request.param])
    return rows.active


def int32(*values):
    return np.array(values, dtype=np.int32)


def test_describing_rows_is_the_same_in_both_whatever_is_known():
    rng = np.random.default_rng(1)
    for _ in range(4_000):
        count = int(rng.integers(0, 40))

        def lengths(low=-1, count=count):
            return rng.integers(low, 6, count).astype(np.int32) if rng.random() < 0.6 else None

        query, computed = (rng.integers(0, 5, count).astype(np.int32) for _ in range(2))
        flags = rng.random(count) < 0.5 if rng.random() < 0.4 else None
        known = (lengths(), lengths(), lengths(), flags, int(rng.integers(1, 4)))
        made = []
        for implementation in (TWIN, NATIVE):
            codes, regions = np.empty(count, np.uint8), np.empty(count, np.uint8)
            summary = implementation.describe(query, computed, *known, codes, regions)
            made.append((summary, codes.tolist(), regions.tolist()))
        assert made[0] == made[1], (query, computed, known)


def test_cutting_rows_is_the_same_in_both():
    rng = np.random.default_rng(2)
    for _ in range(4_000):
        count = int(rng.integers(0, 12))
        query, computed = (rng.integers(0, 5, count).astype(np.int32) for _ in range(2))
        flags, threshold = rng.random(count) < 0.4, int(rng.integers(1, 5))
        assert TWIN.cut_three(query, computed, threshold) == NATIVE.cut_three(query, computed, threshold)
        for uniform in (True, False):
            for short in (True, False):
                for padding in (True, False):
                    arguments = (query, flags, threshold, uniform, short, padding)
                    assert TWIN.cut_two(*arguments) == NATIVE.cut_two(*arguments), arguments


def test_token_maps_repeat_each_row_and_mark_what_is_behind_the_last(passes):
    assert token_to_row(int32(0, 2, 2, 5), 5).tolist() == [0, 0, 2, 2, 2]
    assert token_to_row(np.stack([int32(0, 1, 3), int32(0, 2, 2)]), 3).tolist() == [[0, 1, 1], [0, 0, 2]]
    assert token_to_row(int32(0), 0).tolist() == []
    assert token_to_row(np.zeros((0, 3), dtype=np.int32), 0).shape == (0, 0)
    for ends, width in ((int32(0, 3, 2), 3), (int32(0, 4), 3), (int32(0, -1), 3)):
        with pytest.raises(ValueError, match="running sums do not fit"):
            token_to_row(ends, width)


def test_chunks_of_equal_shares(passes):
    context = int32(5, 0, 9)
    starts, ends, longest = np.empty((3, 3), np.int32), np.empty((3, 4), np.int32), np.empty(3, np.int32)
    passes.even_chunks(context, 4, starts, ends, longest)
    assert starts.tolist() == [[0] * 3, [4] * 3, [8] * 3]
    assert ends.tolist() == [[0, 4, 4, 8], [0, 1, 1, 5], [0, 0, 0, 1]]
    assert longest.tolist() == [4, 4, 1]


def test_unpacking_a_metadata_names_the_row_that_cannot_be(passes):
    out = np.empty((3, 2), dtype=np.int32)
    assert passes.unpack(int32(0, 3, 4), int32(3, 9), out) == 4
    assert out.tolist() == [[3, 1], [3, 9], [0, 8]]
    assert passes.unpack(int32(0, 3, 2), int32(3, 9), out) == -3
    assert passes.unpack(int32(0, 3, 4), int32(2, 9), out) == -2
    with pytest.raises(ValueError, match="different sizes"):
        passes.unpack(int32(0, 3), int32(3, 9), out)


def test_gathering_tells_unknown_differing_and_repeated_requests(passes):
    table = np.array([[-1, 10, 20], [-1, 0, 5], [-1, 10, 15]], dtype=np.int32)
    slots = {"a": 1, "b": 2}
    out = np.empty((3, 2), dtype=np.int32)
    assert passes.gather(["a", "b"], slots, table, out) == rows.FLAG_DIFFERS
    assert out.tolist() == [[10, 20], [0, 5], [10, 15]]
    assert passes.gather(["a", "x"], slots, table, out) == rows.HAS_UNKNOWN
    assert passes.gather(["a", "a"], slots, table, out) == rows.REPEATED
    assert passes.gather([], slots, table, np.empty((3, 0), dtype=np.int32)) == 0


def test_arrays_of_different_sizes_are_refused_and_nothing_is_written_past_them():
    if NATIVE is TWIN:
        pytest.skip("the NumPy passes raise their own errors")
    short, long = int32(1), int32(1, 2, 3)
    with pytest.raises(ValueError, match="different sizes"):
        NATIVE.describe(long, short, None, None, None, None, 1, np.empty(3, np.uint8), np.empty(3, np.uint8))
    with pytest.raises(ValueError, match="different sizes"):
        NATIVE.cut_three(long, short, 1)
    with pytest.raises(ValueError, match="different sizes"):
        NATIVE.cut_two(long, np.zeros(1, dtype=bool), 1, True, False, False)
    with pytest.raises(ValueError, match="different sizes"):
        NATIVE.read_rows(["a"], {"a": 1}, ["a"], [1], np.empty(2, np.int32))
    with pytest.raises(ValueError, match="different sizes"):
        NATIVE.gather(["a"], {"a": 7}, np.zeros((3, 2), np.int32), np.empty((3, 1), np.int32))
    with pytest.raises(ValueError, match="different sizes"):
        NATIVE.even_chunks(long, 4, np.empty(1, np.int32), np.empty(4, np.int32), np.empty(1, np.int32))
    with pytest.raises(TypeError, match="expected 3 arguments, got 1"):
        NATIVE.cut_three(long)
