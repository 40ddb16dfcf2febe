"""Both builders describe the same step; the planned one leaves out what nobody reads."""

import random

import numpy as np
import pytest
import torch
from syncfree.backends.engine.builders import PlannedBuilder, UnplannedBuilder
from syncfree.backends.engine.engine import _in_order
from syncfree.backends.engine.request import Request, Row
from syncfree.backends.engine.staging import Staging

BLOCK = 4


def random_rows(rng):
    rows, blocks = [], list(range(200))
    rng.shuffle(blocks)
    for index in range(rng.randrange(1, 7)):
        computed = rng.choice([0, 0, rng.randrange(1, 20)])
        query_len = rng.choice([1, 1, rng.randrange(1, 12)])
        tokens = [rng.randrange(99) for _ in range(computed + query_len + rng.choice([0, 0, 5]))]
        request = Request(request_id=index, tokens=tokens, prompt_len=len(tokens), max_tokens=1, computed=computed)
        request.prefill_len = rng.choice([computed, len(tokens)])
        request.blocks = [blocks.pop() for _ in range(-(-(computed + query_len) // BLOCK))]
        rows.append(Row(request, query_len))
    return _in_order(rows)


def planned_builder():
    return PlannedBuilder("cpu", BLOCK, max_tokens=80, max_rows=8, max_row_blocks=16)


def test_both_builders_describe_the_same_step():
    rng, planned = random.Random(5), planned_builder()
    for _ in range(300):
        rows, batch = random_rows(rng)
        theirs, ours = UnplannedBuilder("cpu", BLOCK).build(rows, batch), planned.build(rows, batch)
        assert list(ours.segments) == list(theirs.segments)
        for name in ("input_ids", "positions", "slot_mapping", "sample_tokens"):
            assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name
        if ours.query_start_loc is not None:
            assert ours.query_start_loc.tolist() == theirs.query_start_loc.tolist()
        if ours.seq_lens is not None:
            stop = len(ours.seq_lens)
            assert ours.seq_lens.tolist() == theirs.seq_lens[:stop].tolist()
            width = ours.block_table.shape[1]
            assert ours.block_table.tolist() == theirs.block_table[:stop, :width].tolist()


def test_a_slot_is_where_the_block_table_puts_the_position():
    rows, batch = random_rows(random.Random(8))
    step = planned_builder().build(rows, batch)
    slots = iter(step.slot_mapping.tolist())
    for row in rows:
        for position in range(row.request.computed, row.seq_len):
            assert next(slots) == row.request.blocks[position // BLOCK] * BLOCK + position % BLOCK


@pytest.mark.parametrize(
    ("computed", "query_len", "absent"),
    [(9, 1, {"query_start_loc"}), (0, 6, {"seq_lens", "block_table"}), (8, 6, set())],
)
def test_planned_leaves_out_what_no_kernel_of_the_step_reads(computed, query_len, absent):
    total = computed + query_len
    request = Request(request_id=0, tokens=[1] * total, prompt_len=total, max_tokens=1, computed=computed)
    request.blocks = list(range(-(-total // BLOCK)))
    rows, batch = _in_order([Row(request, query_len)])
    step = planned_builder().build(rows, batch)
    assert {name for name in ("query_start_loc", "seq_lens", "block_table") if getattr(step, name) is None} == absent


def test_staging_keeps_shapes_values_and_alignment():
    staging = Staging("cpu", 64, slots=2)
    for start in range(5):
        fields = {"a": np.arange(start, start + 3, dtype=np.int32), "b": np.full((2, 5), start, dtype=np.int32)}
        views = staging.upload({**fields, "empty": np.zeros(0, dtype=np.int32)})
        for name, array in fields.items():
            assert torch.equal(views[name], torch.from_numpy(array))
            assert views[name].storage_offset() % 4 == 0
        assert views["empty"].shape == (0,)
