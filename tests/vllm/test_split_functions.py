"""Segments and order against vLLM's own functions, on tens of thousands of batches, odd ones in plenty."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from syncfree.planner import Batch, PrefillTable, classify, rows

torch = pytest.importorskip("torch")
backend = pytest.importorskip("vllm.v1.attention.backend")
split_functions = pytest.importorskip("vllm.v1.attention.backends.utils")

pytestmark = pytest.mark.vllm

IMPLEMENTATIONS = sorted(rows.IMPLEMENTATIONS)
BATCHES = 40_000


@pytest.fixture(params=IMPLEMENTATIONS, autouse=True)
def implementation(request, monkeypatch):
    monkeypatch.setattr(rows, "active", rows.IMPLEMENTATIONS[request.param])


@dataclasses.dataclass
class Case:
    query: np.ndarray
    computed: np.ndarray
    flags: np.ndarray
    threshold: int
    num_tokens: int

    def batch(self, **extra):
        return Batch.from_lengths(
            self.query,
            self.query + self.computed,
            is_prefilling=self.flags,
            decode_threshold=self.threshold,
            num_tokens=self.num_tokens,
            **extra,
        )

    def metadata(self):
        """What vLLM's functions read of a `CommonAttentionMetadata`."""
        starts = np.concatenate([[0], np.cumsum(self.query)])
        rows_ = len(self.query)
        query_start_loc = torch.tensor(starts, dtype=torch.int32)
        seq_lens = torch.tensor(self.query + self.computed, dtype=torch.int32)
        return backend.CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=torch.full((rows_,), -1),
            num_reqs=rows_,
            num_actual_tokens=self.num_tokens,
            max_query_len=int(self.query.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=torch.zeros(0),
            slot_mapping=torch.zeros(0),
            is_prefilling=torch.tensor(self.flags),
            seq_lens_cpu_upper_bound=seq_lens,
        )


def random_case(rng):
    threshold = int(rng.integers(1, 5))
    count = int(rng.integers(1, 9 if rng.random() < 0.9 else 80))
    style = rng.integers(0, 4)
    if style == 0:  # every length near the threshold
        query = rng.integers(0, threshold + 3, count)
        computed = rng.integers(0, 3, count)
    elif style == 1:  # uniform queries, as a speculative decode has them
        query = np.full(count, rng.integers(1, threshold + 2))
        computed = rng.integers(0, 40, count)
    else:
        query = np.where(rng.random(count) < 0.5, rng.integers(1, threshold + 1, count), rng.integers(1, 60, count))
        computed = np.where(rng.random(count) < 0.3, 0, rng.integers(0, 90, count))
    flags = rng.random(count) < 0.4
    if style == 3:  # in vLLM's order
        region = np.where(computed == 0, 3, np.where(query > threshold, 2, flags.astype(int)))
        order = np.argsort(region, kind="stable")
        query, computed, flags = query[order], computed[order], flags[order]
    if rng.random() < 0.3:  # graph padding: rows without tokens behind the others
        pad = int(rng.integers(1, 5))
        query = np.concatenate([query, np.zeros(pad, dtype=query.dtype)])
        computed = np.concatenate([computed, rng.integers(0, 3, pad) * (rng.random() < 0.3)])
        flags = np.concatenate([flags, np.zeros(pad, dtype=bool)])
    if rng.random() < 0.15:  # rows without tokens anywhere
        query = query * (rng.random(len(query)) < 0.7)
    total = int(query.sum())
    tokens = total + (int(rng.integers(0, 20)) if rng.random() < 0.3 else 0)
    return Case(query, computed, flags, threshold, tokens)


def counts(segments, names):
    """(rows of each name, tokens of each name), as vLLM's functions return them."""
    found = {s.name: s for s in segments}
    rows_ = [found[name].rows[1] - found[name].rows[0] if name in found else 0 for name in names]
    tokens = [found[name].tokens[1] - found[name].tokens[0] if name in found else 0 for name in names]
    return (*rows_, *tokens)


def assert_contiguous(segments, case):
    row = token = 0
    for segment in segments:
        assert segment.rows[0] == row < segment.rows[1]
        assert segment.tokens[0] == token <= segment.tokens[1]
        row, token = segment.rows[1], segment.tokens[1]
    assert (row, token) == (len(case.query), case.num_tokens)


def test_segments_are_what_vllm_splits():
    rng = np.random.default_rng(7)
    for number in range(BATCHES):
        case = random_case(rng)
        metadata, batch = case.metadata(), case.batch()
        expected = split_functions.split_decodes_prefills_and_extends(metadata, decode_threshold=case.threshold)
        segments = batch.segments(split="three")
        assert_contiguous(segments, case)
        assert counts(segments, ("decode", "extend", "prefill")) == tuple(int(x) for x in expected), (number, case)
        for query_lens in ("single", "uniform", "varlen"):
            threshold = 1 if query_lens == "single" else case.threshold
            for short in (True, False):
                expected = split_functions.split_decodes_and_prefills(
                    metadata,
                    decode_threshold=threshold,
                    require_uniform=query_lens != "varlen",
                    treat_short_extends_as_decodes=short,
                )
                segments = batch.segments(split="two", query_lens=query_lens, short_extends_as_decodes=short)
                assert_contiguous(segments, case)
                found = counts(segments, ("decode", "prefill"))
                assert found == tuple(int(x) for x in expected), (number, query_lens, short, case)


class InputBatch:
    """What `reorder_batch_to_split_decodes_and_prefills` reads of the runner's batch, and its swaps."""

    def __init__(self, query, computed, flags):
        self.req_ids = [f"r{i}" for i in range(len(query))]
        self.num_computed_tokens_cpu = computed.astype(np.int32)
        self.num_prompt_tokens = (computed + flags).astype(np.int32)

    def swap_states(self, a, b):
        self.req_ids[a], self.req_ids[b] = self.req_ids[b], self.req_ids[a]
        for array in (self.num_computed_tokens_cpu, self.num_prompt_tokens):
            array[[a, b]] = array[[b, a]]


def test_order_is_the_one_vllm_makes():
    """Same regions in the same places; vLLM's swaps are not stable inside one, so requests compare by region."""
    rng = np.random.default_rng(11)
    for number in range(BATCHES):
        case = random_case(rng)
        present = case.query > 0  # the runner orders before it pads
        query, computed, flags = case.query[present], case.computed[present], case.flags[present]
        if not len(query):
            continue
        batch = Batch.from_lengths(query, query + computed, is_prefilling=flags, decode_threshold=case.threshold)
        runner = InputBatch(query, computed, flags)
        scheduled = SimpleNamespace(num_scheduled_tokens={f"r{i}": int(q) for i, q in enumerate(query)})
        moved = split_functions.reorder_batch_to_split_decodes_and_prefills(runner, scheduled, case.threshold)
        order = classify(batch).order
        assert (order is not None) == moved, (number, case)
        if order is None:
            continue

        def region(i, query=query, computed=computed, flags=flags, threshold=case.threshold):
            return 3 if computed[i] == 0 else 2 if query[i] > threshold else int(flags[i])

        assert sorted(order) == list(range(len(query)))
        assert [region(i) for i in order] == [region(int(r[1:])) for r in runner.req_ids], (number, case)
        assert all(a < b for a, b in itertools.pairwise(order) if region(a) == region(b))


def test_a_batch_from_metadata_is_the_batch_from_lengths():
    rng = np.random.default_rng(13)
    for _ in range(5_000):
        case = random_case(rng)
        batch = Batch.from_vllm_metadata(case.metadata(), decode_threshold=case.threshold, drafts_in_flight=0)
        plain = case.batch()
        assert batch.query_lens.tolist() == plain.query_lens.tolist()
        assert batch.seq_lens.tolist() == plain.seq_lens.tolist()
        assert batch.num_tokens == plain.num_tokens
        assert batch.segments("three") == plain.segments("three")
        assert classify(batch).rows == classify(plain).rows
        assert classify(batch).coarse == classify(plain).coarse
        assert batch.inexact is None


def test_micro_batches_are_what_vllm_splits():
    from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

    rng = np.random.default_rng(17)
    cut = 0
    for _ in range(3_000):
        count = int(rng.integers(1, 8))
        query, computed = rng.integers(1, 9, count), rng.integers(0, 20, count)
        padding = int(rng.integers(0, 4))
        case = Case(query, computed, computed == 0, 2, int(query.sum()) + padding)
        if case.num_tokens < 2:
            continue
        edge = int(rng.integers(1, case.num_tokens))
        starts = np.concatenate([[0], np.cumsum(query)])
        slices = []
        for start, stop in ((0, edge), (edge, case.num_tokens)):
            rows_ = [i for i in range(count) if starts[i] < stop and starts[i + 1] > start]
            if rows_:
                slices.append(UBatchSlice(slice(rows_[0], rows_[-1] + 1), slice(start, stop)))
        for part, metadata in zip(slices, split_attn_metadata(slices, case.metadata()), strict=True):
            ours = case.batch().micro_batch(part.token_slice.start, part.token_slice.stop)
            theirs = Batch.from_vllm_metadata(metadata, decode_threshold=2, drafts_in_flight=0)
            assert ours.query_lens.tolist() == theirs.query_lens.tolist()
            assert ours.seq_lens.tolist() == theirs.seq_lens.tolist()
            assert (ours.num_tokens, ours.max_seq_len) == (theirs.num_tokens, theirs.max_seq_len)
            assert ours.segments("three") == theirs.segments("three")
            cut += len(ours.query_lens) and ours.query_lens.sum() < query[part.request_slice].sum()
    assert cut > 500


def test_steps_of_both_runners_are_read_from_the_real_classes():
    """The names this package reads of vLLM's own dataclasses: V2 resumes a request as a new one."""
    output = pytest.importorskip("vllm.v1.core.sched.output")

    def step(new=(), cached=(), **scheduled):
        made = output.SchedulerOutput.make_empty()
        made.num_scheduled_tokens = scheduled
        made.scheduled_new_reqs = list(new)
        made.scheduled_cached_reqs = output.CachedRequestData(
            req_ids=[r for r, *_ in cached],
            resumed_req_ids={r for r, _, outputs in cached if outputs},
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(cached),
            num_computed_tokens=[c for _, c, _ in cached],
            num_output_tokens=[o for *_, o in cached],
        )
        return made

    def new(req_id, prompt, computed, prefill=None):
        tokens = None if prefill is None else [0] * prefill
        return output.NewRequestData(req_id, [0] * prompt, [], None, None, ([],), computed, None, None, None, tokens)

    table = PrefillTable()
    Batch.from_vllm_scheduler(step([new("v1", 20, 0), new("v2", 20, 16, 20)], v1=20, v2=4), table)
    batch = Batch.from_vllm_scheduler(step([new("v2", 20, 0, 26)], [("v1", 0, 6)], v1=22, v2=22), table)
    assert batch.prefill_lens.tolist() == [26, 26]
    batch = Batch.from_vllm_scheduler(step([], [("v1", 22, 0), ("v2", 22, 0)], v1=4, v2=4), table)
    assert [str(kind) for kind in classify(batch).rows] == ["chunked_prefill"] * 2
    assert batch.is_prefilling.tolist() == [False, True]


def test_metadata_never_reads_a_device_member():
    """`seq_lens` of these cases is filled with -1: a batch that read it would be refused."""
    case = Case(np.array([1, 4]), np.array([8, 0]), np.array([False, True]), 1, 5)
    batch = Batch.from_vllm_metadata(case.metadata())
    assert batch.seq_lens.tolist() == [9, 4]
    metadata = case.metadata().replace(seq_lens_cpu_upper_bound=torch.zeros(2, dtype=torch.int32, device="meta"))
    with pytest.raises(ValueError, match="seq_lens_cpu_upper_bound: expected a tensor on the host, got one on meta"):
        Batch.from_vllm_metadata(metadata)
    with pytest.raises(ValueError, match="seq_lens_cpu_upper_bound: expected a tensor on the host, got None"):
        Batch.from_vllm_metadata(case.metadata().replace(seq_lens_cpu_upper_bound=None))


def test_metadata_of_speculative_decodes_gives_bounds_unless_told_otherwise():
    case = Case(np.array([3, 3, 8]), np.array([8, 1, 4]), np.array([False, False, True]), 3, 14)
    batch = Batch.from_vllm_metadata(case.metadata(), decode_threshold=3)
    assert batch.seq_lens.tolist() == [11, 4, 12]
    assert batch.seq_lens_lower.tolist() == [9, 4, 12]
    assert Batch.from_vllm_metadata(case.metadata(), decode_threshold=3, drafts_in_flight=0).inexact is None
