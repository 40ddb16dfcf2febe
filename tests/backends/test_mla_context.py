"""Chunks of MLA contexts, both layouts, against a walk that takes one token step at a time."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from syncfree.backends import mla_cutting
from syncfree.backends.mla_context import MAX_CONTEXT_TOKENS, even_chunks, packed_chunks
from syncfree.planner import BadInput, Batch, Environment, Limits, UnorderedBatch
from syncfree.planner.backend import Step
from syncfree.planner.segments import Segment

# The cutter fixture only swaps a module attribute: it holds for all examples of a test.
relaxed = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["python", "native"])
def cutter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs once with the twin, once with the C extension."""
    if request.param not in mla_cutting.IMPLEMENTATIONS:
        pytest.skip("the C extension is not built here (no compiler at install time)")
    monkeypatch.setattr(mla_cutting, "active", mla_cutting.IMPLEMENTATIONS[request.param])
    return request.param


def step_of(
    query: list[int], context: list[int], block: int, workspace: int, ranks: int = 1, interleave: int = 1
) -> Step:
    batch = Batch.from_lengths(query, [q + c for q, c in zip(query, context, strict=True)])
    environment = Environment(dcp_world_size=ranks, dcp_interleave=interleave)
    limits = Limits(block_size=block, workspace_tokens=workspace)
    return Step(batch, {"prefill": Segment("prefill", (0, len(query)), (0, batch.num_tokens))}, environment, limits)


def shard_rows(tokens: int, ranks: int, interleave: int) -> int:
    return math.ceil(tokens / (ranks * interleave)) * interleave


def walk(
    context: list[int], block: int, workspace: int, ranks: int, interleave: int
) -> list[list[tuple[int, int, int]]]:
    """Chunks of (row, start, tokens): grow each piece by one aligned step while the rank's rows fit."""
    aligned = math.lcm(block, ranks * interleave) if ranks > 1 else block
    budget = workspace // ranks
    chunks: list[list[tuple[int, int, int]]] = []
    row, start = 0, 0
    while row < len(context):
        if context[row] == 0:
            row += 1
            continue
        chunk: list[tuple[int, int, int]] = []
        used = 0
        while row < len(context) and context[row]:

            def cost(end: int, start: int = start) -> int:
                if ranks == 1:
                    return end - start
                return shard_rows(end, ranks, interleave) - shard_rows(start, ranks, interleave)

            if used + cost(context[row]) <= budget:
                chunk.append((row, start, context[row] - start))
                used += cost(context[row])
                row, start = row + 1, 0
                continue
            end = start
            while end + aligned < context[row] and used + cost(end + aligned) <= budget:
                if end + aligned - start > workspace // aligned * aligned:
                    break
                end += aligned
            if end > start:
                chunk.append((row, start, end - start))
                start = end
            break
        chunks.append(chunk)
    return chunks


@st.composite
def contexts(draw: st.DrawFn) -> dict[str, Any]:
    ranks = draw(st.sampled_from([1, 1, 2, 3]))
    interleave = draw(st.sampled_from([1, 4])) if ranks > 1 else 1
    block = draw(st.sampled_from([1, 4, 16]))
    aligned = math.lcm(block, ranks * interleave) if ranks > 1 else block
    workspace = aligned * draw(st.integers(1, 12)) + draw(st.sampled_from([0, 0, 1]))
    rows = draw(st.integers(1, 8))
    lengths = st.one_of(st.just(0), st.integers(1, 3 * workspace), st.sampled_from([aligned, workspace]))
    context = draw(st.lists(lengths, min_size=rows, max_size=rows).filter(any))
    query = draw(st.lists(st.integers(1, 9), min_size=rows, max_size=rows))
    return {
        "query": query,
        "context": context,
        "block": block,
        "workspace": workspace,
        "ranks": ranks,
        "interleave": interleave,
    }


@pytest.mark.usefixtures("cutter")
@relaxed
@given(case=contexts())
def test_032_packs_rows_and_splits_the_one_that_crosses_the_end(case: dict[str, Any]) -> None:
    chunks = packed_chunks(step_of(**case))
    expected = walk(*(case[name] for name in ("context", "block", "workspace", "ranks", "interleave")))
    query = np.concatenate([[0], np.cumsum(case["query"])]).tolist()
    at = tokens = local_at = 0
    assert len(chunks.rows) == len(expected)
    for i, pieces in enumerate(expected):
        rows, starts, lengths = (list(column) for column in zip(*pieces, strict=True))
        assert chunks.rows[i] == [rows[0], rows[-1] + 1]
        assert chunks.tokens[i] == [query[rows[0]], query[rows[-1] + 1]]
        assert chunks.continuation_token_end[i] == query[rows[0] + 1]
        assert chunks.is_continuation[i] == (starts[0] > 0)
        assert chunks.num_context_tokens[i] == sum(lengths)
        assert chunks.max_seq_len[i] == max(lengths)
        assert chunks.max_query_len[i] == max(case["query"][row] for row in rows)
        bounds = slice(at + i, at + i + len(rows) + 1)
        assert chunks.cu_seq_lens[bounds].tolist() == [0, *np.cumsum(lengths).tolist()]
        assert chunks.query_start_loc[bounds].tolist() == [query[row] - query[rows[0]] for row in [*rows, rows[-1] + 1]]
        order = [j for j, length in enumerate(lengths) for _ in range(length)]
        assert chunks.token_to_seq[tokens : tokens + len(order)].tolist() == order
        if case["ranks"] == 1:
            assert chunks.starts[at : at + len(rows)].tolist() == starts
        else:
            shard = [case["ranks"], case["interleave"]]
            begins = [shard_rows(start, *shard) for start in starts]
            sizes = [shard_rows(start + n, *shard) - b for start, n, b in zip(starts, lengths, begins, strict=True)]
            assert chunks.starts[at : at + len(rows)].tolist() == chunks.local_starts[i] == begins
            assert chunks.local_seq_lens[i] == sizes
            assert chunks.local_cu_seq_lens[bounds].tolist() == [0, *np.cumsum(sizes).tolist()]
            assert chunks.num_local_tokens[i] == sum(sizes) <= case["workspace"] // case["ranks"]
            local = [j for j, size in enumerate(sizes) for _ in range(size)]
            assert chunks.local_token_to_seq[local_at : local_at + len(local)].tolist() == local
            assert [sum(held) for held in chunks.local_lens_allranks[i]] == [case["context"][row] for row in rows]
            local_at += len(local)
        at, tokens = at + len(rows), tokens + len(order)
    empty = [[query[row], query[row + 1]] for row, length in enumerate(case["context"]) if length == 0]
    assert chunks.empty_tokens == empty


@relaxed
@given(case=contexts())
def test_026_gives_every_row_with_context_the_same_share(case: dict[str, Any]) -> None:
    case["context"] = sorted(case["context"], key=lambda length: length == 0)
    ranks, interleave, block = case["ranks"], case["interleave"], case["block"]
    with_context = sum(length > 0 for length in case["context"])
    share = case["workspace"] // with_context // block * block
    step = step_of(**case)
    if share == 0 or share % ranks:
        with pytest.raises(BadInput, match=r"workspace_tokens|block_size"):
            even_chunks(step)
        return
    chunks = even_chunks(step)
    count = math.ceil(max(case["context"]) / share)
    lengths = [[max(0, min(length - i * share, share)) for length in case["context"]] for i in range(count)]
    assert chunks.cu_seq_lens.tolist() == [[0, *np.cumsum(part).tolist()] for part in lengths]
    assert chunks.chunk_total_token == [sum(part) for part in lengths]
    assert chunks.max_seq_lens == [max(part) for part in lengths]
    assert chunks.has_empty_context == [0 in part for part in lengths]
    assert chunks.prefill_tokens_with_context == sum(case["query"][:with_context])
    width = max(sum(part) for part in lengths)
    order = [[row for row, length in enumerate(part) for _ in range(length)] for part in lengths]
    assert chunks.token_to_seq.tolist() == [[*part, *[0] * (width - len(part))] for part in order]
    if ranks == 1:
        assert chunks.starts.tolist() == [[i * share] * len(case["context"]) for i in range(count)]
        assert chunks.seq_tot == chunks.chunk_total_token
        return
    piece = shard_rows(share, ranks, interleave)
    padded = [shard_rows(length, ranks, interleave) for length in case["context"]]
    local = [[max(0, min(length - i * piece, piece)) for length in padded] for i in range(count)]
    assert chunks.chunk_size == piece
    assert chunks.starts.tolist() == [[i * piece] * len(padded) for i in range(count)]
    assert chunks.local_chunk_seq_lens == local
    assert chunks.seq_tot == [sum(part) for part in local]
    assert chunks.local_cu_seq_lens.tolist() == [[0, *np.cumsum(part).tolist()] for part in local]
    assert chunks.cu_seq_lens_lst == chunks.cu_seq_lens.tolist()
    assert [sum(held) for held in chunks.local_lens_allranks] == case["context"]


@pytest.mark.usefixtures("cutter")
def test_tokens_are_dealt_out_over_ranks_an_interleave_at_a_time() -> None:
    chunks = packed_chunks(step_of([1], [11], 1, 64, ranks=2, interleave=4))
    # Tokens 0..3 and 8..10 lie on rank 0, tokens 4..7 on rank 1; both gather padded rows.
    assert chunks.local_lens_allranks == [[[7, 4]]]
    assert chunks.local_seq_lens == [[8]]


def test_026_refuses_context_behind_a_row_without() -> None:
    """It merges the context of the first rows only, so many as have any: the last one here would lose its own."""
    step = step_of([3, 2, 4], [50, 0, 60], 16, 1024)
    with pytest.raises(UnorderedBatch, match=r"rows\[2\]: expected no context behind a row without"):
        even_chunks(step)
    assert even_chunks(step_of([3, 4, 2], [50, 60, 0], 16, 1024)).prefill_tokens_with_context == 7


@pytest.mark.usefixtures("cutter")
def test_a_workspace_under_one_aligned_step_is_refused() -> None:
    with pytest.raises(BadInput, match=r"workspace_tokens: expected at least 64, .* got 63"):
        packed_chunks(step_of([1], [100], 64, 63))
    with pytest.raises(BadInput, match=r"workspace_tokens: expected at least 32, .* got 31"):
        even_chunks(step_of([1, 1], [100, 100], 16, 31))


@pytest.mark.usefixtures("cutter")
def test_more_context_than_can_be_staged_is_refused() -> None:
    with pytest.raises(BadInput, match=rf"^seq_lens\[0\]: expected at most {MAX_CONTEXT_TOKENS} tokens of context"):
        packed_chunks(step_of([1, 1], [2**30, 2**30], 16, 65536))


@pytest.mark.usefixtures("cutter")
def test_arrays_that_do_not_fit_together_are_refused() -> None:
    lens, query = np.array([5, 6], np.int32), np.array([0, 1], np.int32)
    with pytest.raises(ValueError, match="do not fit together"):
        mla_cutting.active.cut_contexts(lens, query, 64, 64, 16, 1, 1, 1000)
    with pytest.raises(ValueError, match="do not fit together"):
        mla_cutting.active.cut_contexts(lens, np.array([0, 1, 2], np.int32), 8, 8, 16, 1, 1, 1000)
