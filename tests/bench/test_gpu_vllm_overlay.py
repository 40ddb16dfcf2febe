"""The stand-ins for vLLM's compiled operators that chunked latent attention needs, beside brute force."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


@pytest.fixture(scope="module")
def ops(load):
    return load("gpu_vllm/overlay/vllm/_C_stable_libtorch.py")


@pytest.mark.parametrize("starts", [None, [3, 0, 16]])
def test_context_is_gathered_from_the_pages_of_its_row(ops, starts):
    cache = torch.randn(12, 4, 6)
    table = torch.randperm(12).view(3, 4).repeat(1, 2).to(torch.int32)[:, :8]
    lens = [5, 0, 9]
    before = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
    owner = torch.tensor([0] * 5 + [2] * 9 + [7, 7], dtype=torch.int32)  # room after the tokens holds anything
    out = torch.full((20, 6), -1.0)
    given = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    ops.gather_and_maybe_dequant_cache(cache, out, table, before, owner, 14, "auto", torch.ones(1), given)
    wanted = [
        cache[table[row, (place + (starts or [0, 0, 0])[row]) // 4], (place + (starts or [0, 0, 0])[row]) % 4]
        for row, count in enumerate(lens)
        for place in range(count)
    ]
    assert torch.equal(out[:14], torch.stack(wanted))
    assert (out[14:] == -1).all()


def test_two_parts_of_attention_are_merged_as_if_it_was_one(ops):
    queries, heads, prefix, suffix, width = 5, 3, 7, 4, 8
    scores, values = torch.randn(heads, queries, prefix + suffix), torch.randn(prefix + suffix, heads, width)
    scores[:, 1, :prefix] = float("-inf")  # a row without context among those with it

    def part(keys):
        these = scores[..., keys]
        weights = these.softmax(-1).nan_to_num(0.0)
        return torch.einsum("hqk,khd->qhd", weights, values[keys]), these.logsumexp(-1)

    (p_out, p_lse), (s_out, s_lse) = part(slice(0, prefix)), part(slice(prefix, None))
    wanted, lse = part(slice(0, None))
    out, out_lse = torch.empty_like(wanted), torch.empty_like(lse)
    ops.merge_attn_states(out, out_lse, p_out, p_lse, s_out, s_lse, 4, None)
    torch.testing.assert_close(out[:4], wanted[:4])
    torch.testing.assert_close(out_lse[:, :4], lse[:, :4])
    assert torch.equal(out[4:], s_out[4:])
    empty = p_lse.clone()
    empty[:, 1] = float("inf")  # vLLM's way to say that there was no context
    again = torch.empty_like(wanted)
    ops.merge_attn_states(again, None, p_out, empty, s_out, s_lse, None, None)
    torch.testing.assert_close(again, wanted)
