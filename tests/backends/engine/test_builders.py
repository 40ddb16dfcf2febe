"""Both builders describe the same step; the planned one leaves out what nobody reads."""

import random
from unittest.mock import patch

import numpy as np
import pytest
import torch
from syncfree.backends.engine.builders import PlannedBuilder, UnplannedBuilder
from syncfree.backends.engine.engine import _in_order
from syncfree.backends.engine.request import Request, Row
from syncfree.backends.engine.staging import Staging
from syncfree.planner import Limits
from syncfree.profiler import simulated_device

BLOCK = 4
SEGMENT_FIELDS = ("max_query_len", "max_seq_len", "query_start_loc", "seq_lens", "block_table")


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
    return PlannedBuilder("cpu", Limits(block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=80), max_row_blocks=16)


def test_both_builders_describe_the_same_step():
    rng, planned = random.Random(5), planned_builder()
    for _ in range(300):
        rows, batch = random_rows(rng)
        theirs, ours = UnplannedBuilder("cpu", BLOCK).build(rows, batch), planned.build(rows, batch)
        for name in ("input_ids", "positions", "slot_mapping", "sample_tokens"):
            assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name
        assert len(ours.segments) == len(theirs.segments)
        for mine, full in zip(ours.segments, theirs.segments, strict=True):
            assert (mine.name, mine.tokens) == (full.name, full.tokens)
            for name in SEGMENT_FIELDS:
                if getattr(mine, name) is not None:
                    assert torch.equal(torch.as_tensor(getattr(mine, name)), torch.as_tensor(getattr(full, name)))


def test_a_slot_is_where_the_block_table_puts_the_position():
    rows, batch = random_rows(random.Random(8))
    step = planned_builder().build(rows, batch)
    slots = iter(step.slot_mapping.tolist())
    for row in rows:
        for position in range(row.request.computed, row.seq_len):
            assert next(slots) == row.request.blocks[position // BLOCK] * BLOCK + position % BLOCK


@pytest.mark.parametrize(
    ("computed", "query_len", "name", "present", "uploaded"),
    [
        (9, 1, "decode", {"max_seq_len", "seq_lens", "block_table"}, {"decode.seq_lens", "block_table"}),
        (0, 6, "prefill", {"max_query_len", "query_start_loc"}, {"prefill.query_start_loc"}),
        (
            8,
            6,
            "extend",
            set(SEGMENT_FIELDS),
            {"extend.query_start_loc", "extend.seq_lens", "block_table"},
        ),
    ],
)
def test_planned_leaves_out_what_no_kernel_of_the_segment_reads(computed, query_len, name, present, uploaded):
    total = computed + query_len
    request = Request(request_id=0, tokens=[1] * total, prompt_len=total, max_tokens=1, computed=computed)
    request.blocks = list(range(-(-total // BLOCK)))
    rows, batch = _in_order([Row(request, query_len)])
    builder = planned_builder()
    with patch.object(builder.staging, "upload", wraps=builder.staging.upload) as upload:
        (segment,) = builder.build(rows, batch).segments
    assert set(upload.call_args.args[0]) == uploaded | {
        "input_ids",
        "sample_tokens",
        "slot_mapping",
        "common.positions",
    }
    assert segment.name == name
    assert {field for field in SEGMENT_FIELDS if getattr(segment, field) is not None} == present


def test_the_staging_block_holds_the_largest_step():
    tokens, rows = 80, 8
    requests = [
        Request(request_id=i, tokens=[1] * 64, prompt_len=64, max_tokens=1, computed=64 - tokens // rows)
        for i in range(rows)
    ]
    for index, request in enumerate(requests):
        request.blocks = list(range(16 * index, 16 * index + 16))
    step = planned_builder().build(*_in_order([Row(request, tokens // rows) for request in requests]))
    assert len(step.input_ids) == tokens


def test_staging_keeps_shapes_values_and_alignment():
    staging = Staging("cpu", 64, slots=2)
    for start in range(5):
        fields = {"a": np.arange(start, start + 3, dtype=np.int32), "b": np.full((2, 5), start, dtype=np.int32)}
        views = staging.upload({**fields, "empty": np.zeros(0, dtype=np.int32)})
        for name, array in fields.items():
            assert torch.equal(views[name], torch.from_numpy(array))
            assert views[name].storage_offset() % 4 == 0
        assert views["empty"].shape == (0,)


class UnfinishedCopy:
    """An event of a copy that is still on its way until somebody waits for it."""

    def __init__(self):
        self.waited = 0

    def query(self):
        return self.waited > 0

    def synchronize(self):
        self.waited += 1

    def record(self):
        pass


def test_a_host_block_is_not_overwritten_while_its_copy_is_on_its_way():
    with simulated_device() as device:
        staging = Staging(device, 64, slots=2)
        fields = {"a": np.arange(8, dtype=np.int32)}
        staging.upload(fields)
        staging.upload(fields)
        event = staging._copied[0] = UnfinishedCopy()
        views = staging.upload({"a": np.arange(8, 16, dtype=np.int32)})
        assert event.waited == staging.forced_waits == 1
        assert views["a"].tolist() == list(range(8, 16))
        staging.upload(fields)
        assert staging.forced_waits == 1
