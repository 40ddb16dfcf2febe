"""Batches from plain lengths: what is accepted, what is refused and in which words."""

import subprocess
import sys

import numpy as np
import pytest
from syncfree.planner import BadInput, Batch, classify

REFUSED = [
    ({"query_lens": [1, 1, 1, 40], "seq_lens": [9, 9, 9, 12]}, "seq_lens[3]: expected >= query_lens[3] = 40, got 12"),
    ({"query_lens": [-1], "seq_lens": [3]}, "query_lens[0]: expected >= 0, got -1"),
    ({"query_lens": np.array([4, -2]), "seq_lens": [5, 5]}, "query_lens[1]: expected >= 0, got -2"),
    ({"query_lens": [1], "seq_lens": [2**31]}, "seq_lens[0]: expected <= 2147483647, got 2147483648"),
    ({"query_lens": [1], "seq_lens": np.array([2**40])}, "seq_lens[0]: expected <= 2147483647, got 1099511627776"),
    ({"query_lens": [1], "seq_lens": [10**30]}, "seq_lens[0]: expected <= 2147483647, got " + "1" + "0" * 30),
    (
        {"query_lens": [2**30] * 3, "seq_lens": [2**30] * 3},
        "query_lens: expected a sum <= 2147483647, got 3221225472",
    ),
    ({"query_lens": [1, 2], "seq_lens": [3]}, "seq_lens: expected 2 elements, one for each of query_lens, got 1"),
    ({"query_lens": [float("nan")], "seq_lens": [3]}, "query_lens[0]: expected an integer, got nan"),
    ({"query_lens": [1, 2.0], "seq_lens": [3, 3]}, "query_lens[1]: expected an integer, got 2.0"),
    ({"query_lens": np.array([np.nan]), "seq_lens": [3]}, "query_lens[0]: expected an integer, got"),
    ({"query_lens": [True], "seq_lens": [3]}, "query_lens[0]: expected an integer, got True"),
    ({"query_lens": ["1"], "seq_lens": [3]}, "query_lens[0]: expected an integer, got '1'"),
    ({"query_lens": [[1]], "seq_lens": [3]}, "query_lens[0]: expected an integer, got [1]"),
    ({"query_lens": np.ones((1, 1), dtype=int), "seq_lens": [3]}, "query_lens: expected one dimension, got 2"),
    ({"query_lens": 7, "seq_lens": [3]}, "query_lens: expected one dimension, got 0"),
    ({"query_lens": None, "seq_lens": [3]}, "query_lens: expected one dimension, got 0"),
    ({"query_lens": [1], "seq_lens": [3], "num_tokens": 0}, "num_tokens: expected >= the sum of query_lens = 1, got 0"),
    ({"query_lens": [1], "seq_lens": [3], "decode_threshold": 0}, "decode_threshold: expected 1 to 2147483647, got 0"),
    ({"query_lens": [1], "seq_lens": [3], "decode_threshold": 1.5}, "decode_threshold: expected an integer, got 1.5"),
    ({"query_lens": [1], "seq_lens": [3], "prefill_lens": [-3]}, "prefill_lens[0]: expected >= 0, got -3"),
    ({"query_lens": [1], "seq_lens": [3], "cached_lens": [1, 2]}, "cached_lens: expected 1 elements"),
    ({"query_lens": [1], "seq_lens": [3], "is_prefilling": [2]}, "is_prefilling[0]: expected true or false, got"),
    ({"query_lens": [1], "seq_lens": [3], "is_prefilling": [None]}, "is_prefilling[0]: expected true or false, got"),
    ({"query_lens": [1], "seq_lens": [3], "is_prefilling": []}, "is_prefilling: expected 1 elements"),
    (
        {"query_lens": [1, 1], "seq_lens": [3, 3], "is_prefilling": [True, "x"]},
        "is_prefilling[1]: expected true or false, got 'x'",
    ),
    (
        {"query_lens": [1, 1], "seq_lens": [3, 3], "is_prefilling": [1, 1.0]},
        "is_prefilling[1]: expected true or false, got 1.0",
    ),
    (
        {"query_lens": [1, 1], "seq_lens": [3, 3], "is_prefilling": [True, [True]]},
        "is_prefilling[1]: expected true or false, got [True]",
    ),
    (
        {"query_lens": [1, 1], "seq_lens": [3, 3], "is_prefilling": np.array([1, 5])},
        "is_prefilling[1]: expected true or false, got 5",
    ),
    (
        {"query_lens": [1], "seq_lens": [3], "seq_lens_lower": [4]},
        "seq_lens_lower[0]: expected <= seq_lens[0] = 3, got 4",
    ),
    (
        {"query_lens": [2], "seq_lens": [3], "seq_lens_lower": [1]},
        "seq_lens_lower[0]: expected >= query_lens[0] = 2, got 1",
    ),
    (
        {"query_lens": [1], "seq_lens": [3], "short_extends_as_decodes": False},
        "short_extends_as_decodes: false needs prefill_lens or is_prefilling",
    ),
    (
        {"query_lens": [1], "seq_lens": [3], "short_extends_as_decodes": "no"},
        "short_extends_as_decodes: expected true or false, got 'no'",
    ),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_bad_lengths_are_refused_with_the_element(arguments, text):
    with pytest.raises(BadInput) as caught:
        Batch.from_lengths(**arguments)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_relations_of_prefill_and_cached_lengths_are_not_checked():
    Batch.from_lengths([1], [3], prefill_lens=[1000], cached_lens=[2000])


def test_arrays_are_int32_read_only_copies():
    given = np.array([1, 2], dtype=np.int64)
    batch = Batch.from_lengths(given, [3, 4])
    given[0] = 7
    assert batch.query_lens.tolist() == [1, 2]
    assert batch.query_lens.dtype == np.int32
    assert batch.computed_lens.tolist() == [2, 2]
    assert batch.query_start_loc.tolist() == [0, 1, 3]
    with pytest.raises(ValueError, match="read-only"):
        batch.query_lens[0] = 3


def test_sizes_and_padding():
    batch = Batch.from_lengths([4, 0, 2], [4, 0, 9], num_tokens=16)
    assert (len(batch), batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (3, 16, 4, 9)
    assert Batch.from_lengths([4, 2], [4, 9]).num_tokens == 6


def test_bounds_make_rows_inexact_only_where_they_differ():
    assert Batch.from_lengths([1, 1], [5, 9]).inexact is None
    assert Batch.from_lengths([1, 1], [5, 9], seq_lens_lower=[5, 9]).inexact is None
    assert Batch.from_lengths([1, 1], [5, 9], seq_lens_lower=[5, 8]).inexact.tolist() == [False, True]


def test_taking_rows_in_another_order_takes_everything_along():
    batch = Batch.from_lengths(
        [1, 5], [9, 5], prefill_lens=[4, 5], cached_lens=[0, 0], is_prefilling=[False, True], seq_lens_lower=[8, 5]
    )
    turned = batch.take([1, 0])
    assert turned.query_lens.tolist() == [5, 1]
    assert turned.prefill_lens.tolist() == [5, 4]
    assert turned.is_prefilling.tolist() == [True, False]
    assert turned.seq_lens_lower.tolist() == [5, 8]
    assert turned.num_tokens == batch.num_tokens
    with pytest.raises(BadInput, match="order: expected each of 0 to 1 once"):
        batch.take([0, 0])


def test_importing_the_planner_brings_in_neither_torch_nor_scipy():
    code = (
        "import sys; import syncfree.planner; "
        "heavy = {m.partition('.')[0] for m in sys.modules} & {'torch', 'scipy', 'vllm', 'rich', 'typer', 'zmq'}; "
        "sys.exit(str(sorted(heavy)) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_another_threshold_gives_the_same_rows_seen_by_another_builder_once():
    batch = Batch.from_lengths([2, 3], [9, 30], prefill_lens=[4, 5])
    draft = batch.at_threshold(3)
    assert batch.at_threshold(1) is batch
    assert batch.at_threshold(3) is draft
    assert [str(kind) for kind in classify(batch).rows] == ["extend", "extend"]
    assert [str(kind) for kind in classify(draft).rows] == ["decode", "decode"]
    assert [s.name for s in batch.segments("three")] == ["extend"]
    assert [s.name for s in draft.segments("three")] == ["decode"]


def test_micro_batches_cut_requests_at_their_edges():
    batch = Batch.from_lengths(
        [1, 10, 5], [9, 30, 5], prefill_lens=[4, 30, 5], num_tokens=20, seq_lens_lower=[8, 30, 5]
    )
    first, second = batch.micro_batch(0, 6), batch.micro_batch(6, 20)
    assert batch.micro_batch(0, 6) is first
    assert first.query_lens.tolist() == [1, 5]
    assert first.seq_lens.tolist() == [9, 25]
    assert first.seq_lens_lower.tolist() == [8, 25]
    assert second.query_lens.tolist() == [5, 5]
    assert second.seq_lens.tolist() == [30, 5]
    assert second.computed_lens.tolist() == [25, 0]
    assert (first.num_tokens, second.num_tokens) == (6, 14)
    assert second.prefill_lens.tolist() == [30, 5]
    for start, stop in ((3, 3), (-1, 4), (0, 21)):
        with pytest.raises(BadInput, match="micro_batch: expected 0 <= start < stop <= 20"):
            batch.micro_batch(start, stop)


def test_a_short_row_of_which_nobody_knows_the_prefill_length_is_not_cut_as_a_decode_by_chance():
    batch = Batch.from_lengths([1, 1], [9, 9], prefill_lens=[4, None], short_extends_as_decodes=False)
    assert [str(kind) for kind in classify(batch).rows] == ["decode", "decode"]
    with pytest.raises(BadInput, match=r"^prefill_lens\[1\]: short_extends_as_decodes: false needs it known"):
        batch.segments("two")
    fresh = Batch.from_lengths([1, 1, 7], [9, 1, 20], prefill_lens=[4, None, None], short_extends_as_decodes=False)
    assert [segment.rows for segment in fresh.segments("two")] == [(0, 1), (1, 3)]
    flagged = Batch.from_lengths(
        [1, 1], [9, 9], prefill_lens=[4, None], is_prefilling=[False, False], short_extends_as_decodes=False
    )
    assert [segment.name for segment in flagged.segments("two")] == ["decode"]
