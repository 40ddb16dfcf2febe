"""Planning refuses what would be mis-served, and nothing else."""

import numpy as np
import pytest
from syncfree.planner import Batch, UnorderedBatch, classify
from syncfree.planner.order import refuse_mis_served

KERNELS_WITHOUT_CACHE = {"three": {"prefill"}, "two": set(), "none": set()}


def refused(batch, split):
    try:
        refuse_mis_served(batch, split, batch.segments(split))
    except UnorderedBatch:
        return True
    return False


def served_context(batch, split):
    """Context that the kernel of each row's segment reads: a kernel without cache reads none.

    A kernel of a splitting backend is launched over as many leading rows of its segment as there are real ones, which
    is how a captured graph replays: a padding row in between takes the place of the last real one.
    """
    served = [None] * len(batch)
    for segment in batch.segments(split):
        for row in range(*segment.rows):
            served[row] = 0 if segment.name in KERNELS_WITHOUT_CACHE[split] else int(batch.computed_lens[row])
    if split != "none":
        real = int((batch.query_lens > 0).sum())
        served[real:] = [None] * (len(batch) - real)
    return served


@pytest.mark.parametrize("split", ["none", "two", "three"])
def test_a_batch_is_refused_exactly_if_a_row_would_lose_its_place_or_its_context(split):
    rng = np.random.default_rng(3)
    outcomes = {True: 0, False: 0}
    for _ in range(20_000):
        count = int(rng.integers(1, 7))
        query, computed = rng.integers(0, 5, count), rng.integers(0, 3, count)
        batch = Batch.from_lengths(query, query + computed, decode_threshold=int(rng.integers(1, 4)))
        served = served_context(batch, split)
        wrong = any(q and served[i] != c for i, (q, c) in enumerate(zip(query, computed, strict=True)))
        assert refused(batch, split) == wrong, (query, computed, batch.decode_threshold)
        outcomes[wrong] += 1
        order = classify(batch).order
        assert not refused(batch if order is None else batch.take(order), split)
    assert outcomes[False] > 1000
    assert outcomes[True] > 1000 or split == "none"


def test_the_refusal_names_the_row():
    batch = Batch.from_lengths([1, 10, 50], [9, 10, 90])
    with pytest.raises(UnorderedBatch, match=r"^rows\[2\]: expected no context at or after rows\[1\], .* got 40"):
        refuse_mis_served(batch, "three", batch.segments("three"))
    padded = Batch.from_lengths([1, 0, 1], [9, 0, 9])
    with pytest.raises(UnorderedBatch, match=r"^rows\[1\]: expected padding rows .* got one before rows\[2\]"):
        refuse_mis_served(padded, "two", padded.segments("two"))


def test_mis_served_upstream_batch_loses_the_context_of_its_extend():
    """[decode, fresh prefill of 10, extend of 50] splits into (1, 0, 2): the extend would be served without context."""
    batch = Batch.from_lengths([1, 10, 50], [9, 10, 90])
    assert [(s.name, s.rows) for s in batch.segments("three")] == [("decode", (0, 1)), ("prefill", (1, 3))]
    assert classify(batch).order == [0, 2, 1]
