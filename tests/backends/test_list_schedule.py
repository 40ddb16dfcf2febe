"""The ends of a grid's programs, settled many at once, against a heap that takes them one by one."""

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syncfree.backends import list_schedule


def one_by_one(durations, slots):
    """Exact, in float64: the definition."""
    free = [0.0] * slots
    for duration in durations:
        heapq.heapreplace(free, free[0] + float(duration))
    return sorted(free)


quarters = st.integers(1, 4000).map(lambda n: n / 4)


@st.composite
def grids(draw):
    """Parts as a kernel has them: runs of equal programs, a remainder, empty ones; or anything at all."""
    runs = draw(
        st.lists(st.tuples(quarters, st.integers(1, 64), quarters, st.integers(0, 40)), min_size=1, max_size=40)
    )
    loose = draw(st.lists(quarters, max_size=200))
    parts = [[whole] * count + [rest] + [0.25] * empty for whole, count, rest, empty in runs]
    return np.array([part for run in parts for part in run] + loose, np.float32)


@settings(deadline=None)
@given(grids(), st.integers(1, 300))
def test_the_ends_are_those_of_a_heap(durations, slots):
    got = list_schedule.last_ends(durations, slots)
    assert got.tolist() == one_by_one(durations, slots)


@pytest.mark.parametrize("slots", [3, 132, 264])
@pytest.mark.parametrize("kind", ["random", "alike", "long last", "long first", "two sizes"])
def test_they_are_where_several_chunks_are_settled_one_after_the_other(slots, kind):
    rng = np.random.default_rng(slots)
    count = list_schedule.EXACT
    assert count > 2 * list_schedule.AT_ONCE
    durations = {
        "random": rng.integers(1, 900, count) / 4,
        "alike": np.full(count, 16.5),
        "long last": np.append(np.full(count - 1, 1.25), 4000.0),
        "long first": np.append(4000.0, rng.integers(1, 9, count - 1) / 4),
        "two sizes": np.where(rng.random(count) < 0.2, 128.5, 16.5),
    }[kind].astype(np.float32)
    assert list_schedule.last_ends(durations, slots).tolist() == one_by_one(durations, slots)


@pytest.mark.parametrize("seed", range(12))
def test_of_a_grid_too_large_to_be_exact_the_last_end_is_off_by_less_than_the_longest_program(seed):
    rng = np.random.default_rng(seed)
    count = list_schedule.EXACT + int(rng.integers(400, 20_000))
    durations = (rng.integers(1, 400, count) / 4).astype(np.float32)
    durations[rng.integers(0, count, seed % 4)] = 1000.0
    slots = int(rng.choice([66, 132, 264]))
    wanted, got = one_by_one(durations, slots), list_schedule.last_ends(durations, slots)
    assert abs(float(got[-1]) - wanted[-1]) < float(durations.max())
    assert float(got.sum()) == pytest.approx(float(durations.sum()), rel=1e-3)


def test_programs_too_different_to_settle_are_left_to_the_heap(monkeypatch):
    monkeypatch.setattr(list_schedule, "ROUNDS", 1)
    durations = np.where(np.arange(900) % 7 == 0, 500.0, 0.25).astype(np.float32)
    assert list_schedule.last_ends(durations, 20).tolist() == one_by_one(durations, 20)


def test_fewer_programs_than_slots_leave_slots_without_any():
    assert list_schedule.last_ends(np.array([3, 1], np.float32), 4).tolist() == [0, 0, 1, 3]
    assert list_schedule.last_ends(np.zeros(0, np.float32), 2).tolist() == [0, 0]
