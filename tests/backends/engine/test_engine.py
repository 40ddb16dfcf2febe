"""The engine's answers equal those of a dense generation without cache, batching or metadata."""

from functools import cache
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from syncfree.backends.engine import Engine, EngineConfig, ModelConfig
from syncfree.backends.engine.model import TinyTransformer, rms_norm
from syncfree.planner.errors import BadInput

MODEL = ModelConfig(vocab_size=64, hidden_size=32, head_size=8, intermediate_size=48, max_model_len=128)
BUILDERS = ("unplanned", "planned")


@cache
def weights() -> TinyTransformer:
    return TinyTransformer(MODEL, device="cpu", dtype=torch.float64, seed=0)


def rotate_densely(x, positions):
    half = MODEL.head_size // 2
    angle = positions[:, None] * MODEL.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.view_as_complex(torch.stack((x[..., :half], x[..., half:]), -1)) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat((turned.real, turned.imag), -1)


def dense_logits(tokens):
    """Logits [count, vocab] after each of `tokens`, by one dense causal pass over all of them."""
    model, count = weights(), len(tokens)
    positions = torch.arange(count, dtype=torch.float64)
    x = model.embedding[list(tokens)]
    hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
    group = MODEL.num_heads // MODEL.num_kv_heads
    for layer in model.layers:
        parts = (rms_norm(x) @ layer.qkv).split(MODEL.qkv_sizes, dim=-1)
        q, k, v = (part.view(count, -1, MODEL.head_size).transpose(0, 1) for part in parts)
        q, k = rotate_densely(q, positions), rotate_densely(k, positions)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = (q @ k.transpose(1, 2) / MODEL.head_size**0.5).masked_fill(hidden, float("-inf"))
        x = x + (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1) @ layer.out
        gate, up = (rms_norm(x) @ layer.gate_up).chunk(2, dim=-1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer.down
    return rms_norm(x) @ model.head


def make_engine(builder, **sizes):
    sizes = {"num_blocks": 32, "block_size": 4, "token_budget": 16, "max_num_seqs": 4, **sizes}
    config = EngineConfig(builder=builder, model=MODEL, **sizes)
    return Engine(config, device="cpu", dtype=torch.float64)


def serve(engine, requests):
    """Serve `(prompt, max_tokens)` pairs; check every step's logits densely. Returns the classes of the steps."""
    handles = [engine.add_request(prompt, max_tokens) for prompt, max_tokens in requests]
    sampled_from = {handle: [] for handle in handles}
    forward, commit = engine.model.forward, engine.scheduler.commit
    latest = []

    def remember_logits(step, cache):
        latest[:] = [forward(step, cache)]
        return latest[0]

    def file_logits(rows, tokens):
        for row, logits in zip([row for row in rows if row.samples], latest[0], strict=True):
            sampled_from[row.request].append(logits)
        return commit(rows, tokens)

    classes = []
    with patch.object(engine.model, "forward", remember_logits), patch.object(engine.scheduler, "commit", file_logits):
        while engine.step() is not None:
            classes.append(engine.last_classification.batch_class.value)
    for handle, (prompt, max_tokens) in zip(handles, requests, strict=True):
        wanted = dense_logits(handle.tokens)[len(prompt) - 1 : -1]
        assert handle.tokens[: len(prompt)] == list(prompt)
        assert len(handle.output) == max_tokens
        assert handle.output == wanted.argmax(-1).tolist()
        torch.testing.assert_close(torch.stack(sampled_from[handle]), wanted, rtol=1e-9, atol=1e-9)
    return classes


@st.composite
def workloads(draw):
    prefixes = draw(st.lists(st.lists(st.integers(0, 63), min_size=4, max_size=24), min_size=1, max_size=2))
    requests = []
    for _ in range(draw(st.integers(1, 7))):
        prefix = draw(st.sampled_from([[], *prefixes]))
        tail = draw(st.lists(st.integers(0, 63), min_size=1, max_size=14))
        requests.append((prefix + tail, draw(st.integers(1, 6))))
    block_size = draw(st.sampled_from([1, 2, 4, 5]))
    longest = max(len(prompt) + max_tokens for prompt, max_tokens in requests)
    num_blocks = -(-longest // block_size) + draw(st.integers(0, 12))  # few enough for preemption to be common
    sizes = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "token_budget": draw(st.integers(1, 40)),
        "max_num_seqs": draw(st.integers(1, 5)),
    }
    return requests, sizes


@settings(max_examples=80, deadline=None)
@given(workloads())
def test_random_workloads_get_the_dense_answers_from_both_builders(workload):
    requests, sizes = workload
    for builder in BUILDERS:
        engine = make_engine(builder, **sizes)
        serve(engine, requests)
        assert engine.scheduler.pool.num_free == sizes["num_blocks"]


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_prompt_longer_than_the_budget_is_prefilled_in_chunks(builder):
    prompt = [(7 * i) % 64 for i in range(50)]
    classes = serve(make_engine(builder), [(prompt, 5)])
    assert classes == ["causal_prefill"] + ["chunked_prefill"] * 3 + ["decode"] * 4


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_known_prefix_is_not_computed_again(builder):
    engine = make_engine(builder)
    prefix = [(5 * i + 1) % 64 for i in range(13)]
    serve(engine, [(prefix, 2)])
    classes = serve(engine, [([*prefix, 9, 8, 7], 4), (prefix, 4)])
    assert engine.scheduler.num_cached_tokens == 12 + 12
    assert classes[0] == "extend"


@pytest.mark.parametrize("builder", BUILDERS)
def test_running_out_of_blocks_preempts_and_recomputes(builder):
    engine = make_engine(builder, num_blocks=8, token_budget=64)
    serve(engine, [([(11 * i + j) % 64 for i in range(8)], 12) for j in range(3)])
    assert engine.scheduler.num_preemptions > 0


def test_the_logits_depend_on_every_token_of_the_prompt():
    # Otherwise a cache that serves the wrong block would go unnoticed by the tests above.
    prompt = [(7 * i) % 64 for i in range(40)]
    logits = dense_logits(prompt)[-1]
    for index in range(40):
        changed = [*prompt[:index], (prompt[index] + 1) % 64, *prompt[index + 1 :]]
        assert (dense_logits(changed)[-1] - logits).abs().max() > 1e-4, index


def test_decodes_keep_running_beside_a_long_prefill():
    engine = make_engine("planned")
    short = engine.add_request([1, 2, 3], 12)
    engine.step()
    engine.add_request(list(range(60)), 2)
    engine.step()
    assert engine.last_classification.batch_class.value == "causal_prefill"
    engine.step()
    assert engine.last_classification.batch_class.value == "chunked_prefill"
    assert engine.last_classification.mixed
    assert len(short.output) == 3


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "said"),
    [
        ([], 1, "expected >= 1 token each"),
        ([1], 0, "expected >= 1 token each"),
        ([1, 64], 1, r"prompt\[1\]: expected 0 to 63, got 64"),
        ([1] * 120, 9, "expected <= 128, got 129"),
        ([1] * 100, 21, r"request 0: expected prompt \+ max_tokens <= 120, got 121"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(prompt, max_tokens, said):
    with pytest.raises(BadInput, match=said):
        make_engine("planned", num_blocks=30).add_request(prompt, max_tokens)


def test_an_unknown_builder_is_refused():
    with pytest.raises(BadInput, match="expected unplanned or planned, got 'x'"):
        make_engine("x")
