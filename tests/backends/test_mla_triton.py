"""Plans of vLLM's TRITON_MLA, without vLLM: what is planned on which route, what is left out, what is refused."""

import pytest
from syncfree.backends.attention import attention_backend
from syncfree.planner import BadInput, Batch, Environment, InexactBatch, Limits, Planner, SkippedField

BACKEND = attention_backend("triton_mla")
LIMITS = Limits(workspace_tokens=2048)
MIXED = ([1, 1, 16, 20], [50, 60, 90, 20])


def plan_of(query, seq, *, vllm="0.32", limits=LIMITS, **about):
    return Planner(BACKEND, Environment(vllm=vllm), limits).plan(Batch.from_lengths(query, seq, **about))


def test_a_decode_reads_the_engines_own_tensors_and_copies_nothing():
    plan = plan_of([1, 1, 1], [9, 70, 300])
    assert plan.routes == {"decode": "decode_attention_fwd"}
    assert {name: field.source for name, field in plan.fields.items()} == {
        "common.num_actual_tokens": "host",
        "common.slot_mapping": "device",
        "common.max_seq_len": "host",
        "decode.block_table": "device",
        "decode.seq_lens": "device",
    }
    assert plan["common.max_seq_len"].value == 300
    assert (plan.cost.syncs, plan.cost.h2d_copies, plan.cost.launches) == (0, 0, 0)


def test_drafts_are_a_row_a_token_in_032_and_prefills_in_026():
    plan = plan_of([4, 4], [90, 70], decode_threshold=4)
    assert plan.routes == {"decode": "decode_attention_fwd (a row a token)"}
    assert plan["common.causal"].value is True
    assert list(plan_of([4, 4], [90, 70], decode_threshold=4, vllm="0.26").routes) == ["prefill"]


@pytest.mark.parametrize(
    ("vllm", "planned", "other"),
    [("0.32", "request_slice", "seq_tot"), ("0.26", "seq_tot", "request_slice")],
)
def test_context_is_laid_out_as_the_release_lays_it_out(vllm, planned, other):
    plan = plan_of(*MIXED, vllm=vllm)
    assert f"prefill.chunked_context.{planned}" in plan
    assert plan["prefill.block_table"].shape == (2, None)
    with pytest.raises(SkippedField, match="cuts contexts differently"):
        plan[f"prefill.chunked_context.{other}"]
    assert plan.cost.h2d_copies == 1


def test_a_prefill_without_context_reads_no_pages():
    plan = plan_of([16, 20], [16, 20])
    with pytest.raises(SkippedField, match="reads the new keys and values, not the cache"):
        plan["prefill.block_table"]
    with pytest.raises(SkippedField, match="only a decode chooses its number of splits by it"):
        plan["common.max_seq_len"]


@pytest.mark.parametrize(("query", "tokens"), [([1, 1, 0], 2), ([4, 4, 0], 8), ([4, 4, 0], 9)])
def test_padding_rows_without_their_tokens_are_refused_in_032(query, tokens):
    seq = [q and 50 for q in query]
    with pytest.raises(BadInput, match=rf"{tokens} tokens do not fill 3 rows of equal length"):
        plan_of(query, seq, decode_threshold=4, num_tokens=tokens)
    longest = max(query)
    assert plan_of(query, seq, decode_threshold=4, num_tokens=3 * longest)["decode.seq_lens"].shape == (3,)


def test_bounds_are_enough_for_a_decode_and_not_for_context():
    bounds = {"seq_lens_lower": [47, 60], "decode_threshold": 4}
    assert plan_of([4, 4], [50, 60], **bounds)["common.max_seq_len"].value == 60
    with pytest.raises(InexactBatch, match=r"seq_lens\[0\]: expected an exact length"):
        plan_of([16, 4], [50, 60], **bounds)


@pytest.mark.parametrize(
    ("environment", "limits", "said"),
    [
        ({"dcp_world_size": 2}, {}, "dcp_world_size: expected 1 for triton_mla"),
        ({"kv_sharing": True}, {}, "kv_sharing: expected false"),
        ({"attention_sinks": True}, {}, "attention_sinks: expected false"),
        ({}, {"num_kv_heads": 2}, "num_kv_heads: expected 1"),
        ({}, {"block_size": 24}, "block_size: expected a multiple of 16"),
        ({}, {"sliding_window": 64}, "sliding_window: expected none"),
    ],
)
def test_what_the_kernels_cannot_serve_is_refused_before_any_batch(environment, limits, said):
    with pytest.raises(BadInput, match=said):
        Planner(BACKEND, Environment(**environment), Limits(**limits))
