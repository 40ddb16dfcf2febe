"""Sampling, plain operators and linear algebra."""

# One case a line, as a table.

import torch
import torch.nn.functional as F
from more_cases import Case, adder, floats, ints, mask_of

add = adder("sampling")
add("multinomial_5", lambda d: torch.softmax(floats(d, 8, 100), -1), lambda s: torch.multinomial(s, 5))
add("multinomial_replacement", lambda d: torch.softmax(floats(d, 8, 100), -1), lambda s: torch.multinomial(s, 5, replacement=True))
add("multinomial_1d", lambda d: torch.softmax(floats(d, 100), -1), lambda s: torch.multinomial(s, 1))
add("bernoulli", lambda d: floats(d), lambda s: torch.bernoulli(s))
add("bernoulli_p", lambda d: floats(d), lambda s: s.bernoulli_(0.5))
add("normal_inplace", lambda d: floats(d), lambda s: s.normal_())
add("normal_tensors", lambda d: (floats(d), floats(d)), lambda s: torch.normal(s[0], s[1]))
add("normal_float_tensor", lambda d: floats(d), lambda s: torch.normal(0.0, s))
add("normal_tensor_float", lambda d: floats(d), lambda s: torch.normal(s, 1.0))
add("randperm", lambda d: d, lambda s: torch.randperm(100, device=s))
add("randint", lambda d: d, lambda s: torch.randint(0, 9, (100,), device=s))
add("randn", lambda d: d, lambda s: torch.randn(100, device=s))
add("rand_generator", lambda d: (torch.Generator(device=d).manual_seed(1), d), lambda s: torch.rand(100, device=s[1], generator=s[0]))
add("manual_seed", lambda d: d, lambda s: torch.manual_seed(3))
add("poisson", lambda d: floats(d), lambda s: torch.poisson(s))
add("dropout", lambda d: floats(d), lambda s: F.dropout(s, 0.5))
add("gumbel", lambda d: floats(d, 8, 100), lambda s: F.gumbel_softmax(s))
add("argmax_2d", lambda d: floats(d, 8, 1000), lambda s: s.argmax(-1))
add("argmax_tolist", lambda d: floats(d, 8, 1000), lambda s: s.argmax(-1).tolist())
add("topk_small", lambda d: floats(d, 8, 100), lambda s: s.topk(5))
add("sort_2d", lambda d: floats(d, 8, 100), lambda s: s.sort(-1, descending=True))
add("sort_small_1d", lambda d: floats(d, 64), lambda s: s.sort())
add("argsort_stable", lambda d: ints(d) % 4, lambda s: torch.argsort(s, stable=True))
add("argsort_large", lambda d: floats(d, 100000), lambda s: torch.argsort(s))
add("kthvalue", lambda d: floats(d, 8, 100), lambda s: s.kthvalue(3))
add("median", lambda d: floats(d), lambda s: s.median())
add("mode", lambda d: ints(d) % 4, lambda s: s.mode())
add("softmax_log", lambda d: floats(d, 8, 100), lambda s: s.log_softmax(-1))
add("logsumexp", lambda d: floats(d, 8, 100), lambda s: s.logsumexp(-1))


class top_p(Case):
    """Nucleus filter as samplers write it."""

    group = "sampling"

    def setup(d):
        return torch.rand(8, 1000, device=d)

    def run(s):
        ordered, index = s.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1).cumsum(-1)
        drop = probs > 0.9
        drop[:, 0] = False
        ordered.masked_fill_(drop, float("-inf"))
        return ordered.scatter(1, index, ordered).softmax(-1).argmax(-1)


add = adder("plain_ops")
add("layer_norm", lambda d: floats(d, 8, 64), lambda s: F.layer_norm(s, (64,)))
add("rms_norm", lambda d: floats(d, 8, 64), lambda s: F.rms_norm(s, (64,)))
add("gelu", lambda d: floats(d, 8, 64), lambda s: F.gelu(s))
add("silu_mul", lambda d: floats(d, 8, 64), lambda s: F.silu(s[:, :32]) * s[:, 32:])
add("linear_bias", lambda d: (floats(d, 8, 64), floats(d, 32, 64), floats(d, 32)), lambda s: F.linear(*s))
add("linear_3d", lambda d: (floats(d, 2, 8, 64), floats(d, 32, 64)), lambda s: F.linear(*s))
add("bmm", lambda d: floats(d, 4, 8, 8), lambda s: torch.bmm(s, s))
add("einsum", lambda d: floats(d, 4, 8, 8), lambda s: torch.einsum('bij,bjk->bik', s, s))
add("sdpa_bf16", lambda d: floats(d, 1, 4, 16, 64).bfloat16(), lambda s: F.scaled_dot_product_attention(s, s, s))
add("sdpa_causal", lambda d: floats(d, 1, 4, 16, 64).bfloat16(), lambda s: F.scaled_dot_product_attention(s, s, s, is_causal=True))
add("conv1d", lambda d: (floats(d, 1, 4, 16), floats(d, 4, 4, 3)), lambda s: F.conv1d(*s))
add("cat", lambda d: floats(d), lambda s: torch.cat((s, s)))
add("stack", lambda d: floats(d), lambda s: torch.stack((s, s)))
add("sum_all", lambda d: floats(d, 64, 64), lambda s: s.sum())
add("mean_dim", lambda d: floats(d, 64, 64), lambda s: s.mean(-1))
add("var_std", lambda d: floats(d, 64, 64), lambda s: (s.var(-1), s.std(-1)))
add("cumsum_2d", lambda d: floats(d, 8, 64), lambda s: s.cumsum(-1))
add("cumsum_large", lambda d: floats(d, 100000), lambda s: s.cumsum(0))
add("cumprod", lambda d: floats(d), lambda s: s.cumprod(0))
add("cummax", lambda d: floats(d), lambda s: s.cummax(0))
add("tril", lambda d: floats(d, 8, 8), lambda s: s.tril())
add("flip_roll", lambda d: floats(d), lambda s: s.flip(0).roll(2))
add("outer", lambda d: floats(d), lambda s: torch.outer(s, s))
add("cross_entropy", lambda d: (floats(d, 8, 10), ints(d, 8)), lambda s: F.cross_entropy(*s))
add("pad_constant", lambda d: floats(d), lambda s: F.pad(s, (1, 2)))
add("interpolate", lambda d: floats(d, 1, 1, 16), lambda s: F.interpolate(s, scale_factor=2.0))
add("fft", lambda d: floats(d), lambda s: torch.fft.rfft(s))
add("cdist", lambda d: floats(d, 8, 4), lambda s: torch.cdist(s, s))
add("clip_norm", lambda d: floats(d), lambda s: s / s.norm().clamp(min=1.0))
add("inplace_chain", lambda d: floats(d), lambda s: s.add_(1).mul_(2).sub_(3).div_(4))
add("out_variant", lambda d: (floats(d), floats(d)), lambda s: torch.add(s[0], 1, out=s[1]))
add("foreach", lambda d: [floats(d), floats(d)], lambda s: torch._foreach_add(s, 1.0))
add("meshgrid", lambda d: ints(d, 4), lambda s: torch.meshgrid(s, s, indexing='ij'))
add("rope", lambda d: (floats(d, 8, 4, 16), floats(d, 8, 1, 8)), lambda s: torch.cat((s[0][..., :8] * s[1] - s[0][..., 8:] * s[1], s[0][..., 8:] * s[1] + s[0][..., :8] * s[1]), -1))
add("kv_slot_write", lambda d: (floats(d, 64, 4, 16), ints(d, 8), floats(d, 8, 4, 16)), lambda s: s[0].__setitem__(s[1], s[2]))
add("block_table_gather", lambda d: (ints(d).view(8, 8), ints(d, 8)), lambda s: s[0].gather(1, (s[1] // 16).view(8, 1)) * 16 + (s[1] % 16).view(8, 1))


add = adder("linalg")


def EYE(d):
    return torch.eye(16, device=d) * 2


add("cholesky", EYE, lambda s: torch.linalg.cholesky(s))
add("inv_ex", EYE, lambda s: torch.linalg.inv_ex(s))
add("eigh", EYE, lambda s: torch.linalg.eigh(s))
add("svd", EYE, lambda s: torch.linalg.svd(s))
add("svdvals", EYE, lambda s: torch.linalg.svdvals(s))
add("qr", EYE, lambda s: torch.linalg.qr(s))
add("det", EYE, lambda s: torch.linalg.det(s))
add("slogdet", EYE, lambda s: torch.linalg.slogdet(s))
add("pinv", EYE, lambda s: torch.linalg.pinv(s))
add("lstsq", EYE, lambda s: torch.linalg.lstsq(s, s).solution)
add("solve_triangular", EYE, lambda s: torch.linalg.solve_triangular(s, s, upper=True))
add("lu_factor", EYE, lambda s: torch.linalg.lu_factor(s))
add("matrix_rank", EYE, lambda s: torch.linalg.matrix_rank(s))
add("matrix_norm", EYE, lambda s: torch.linalg.matrix_norm(s))
add("matrix_power", EYE, lambda s: torch.linalg.matrix_power(s, 3))
add("torch_inverse", EYE, lambda s: s.inverse())
add("cholesky_solve", EYE, lambda s: torch.cholesky_solve(s, s))


add = adder("plain_ops")
add("fp8_cast", lambda d: floats(d, 16, 16), lambda s: s.to(torch.float8_e4m3fn))
add("gelu_tanh", lambda d: floats(d, 8, 16), lambda s: F.gelu(s, approximate='tanh'))
add("softmax_f32", lambda d: floats(d, 8, 16).bfloat16(), lambda s: F.softmax(s, -1, dtype=torch.float32))
add("glu", lambda d: floats(d, 8, 16), lambda s: F.glu(s))
add("group_norm", lambda d: floats(d, 2, 8, 4), lambda s: F.group_norm(s, 2))
add("addmm_out", lambda d: (floats(d, 8, 8), floats(d, 8, 8)), lambda s: torch.mm(s[0], s[0], out=s[1]))
add("baddbmm", lambda d: floats(d, 4, 8, 8), lambda s: torch.baddbmm(s, s, s))
add("matmul_4d", lambda d: floats(d, 2, 4, 8, 8), lambda s: s @ s.transpose(-1, -2))
add("mv", lambda d: (floats(d, 8, 8), floats(d, 8)), lambda s: s[0] @ s[1])
add("dot", lambda d: floats(d), lambda s: torch.dot(s, s))
add("sdpa_mask", lambda d: (floats(d, 1, 4, 16, 64).bfloat16(), torch.ones(16, 16, device=d, dtype=torch.bool)), lambda s: F.scaled_dot_product_attention(s[0], s[0], s[0], attn_mask=s[1]))
add("sdpa_float32", lambda d: floats(d, 1, 4, 16, 64), lambda s: F.scaled_dot_product_attention(s, s, s))
add("chunk_split_views", lambda d: floats(d, 8, 16), lambda s: (s.chunk(2, -1), s.split(4, -1), s.unbind(0)))
add("masked_softmax", lambda d: (floats(d, 8, 16), mask_of(d, 16)), lambda s: s[0].masked_fill(s[1], float('-inf')).softmax(-1))
add("amax_keepdim", lambda d: floats(d, 8, 16), lambda s: s.amax(-1, keepdim=True))
add("abs_max_scale", lambda d: floats(d, 8, 16), lambda s: (s / (s.abs().amax(-1, keepdim=True) / 448.0)).to(torch.float8_e4m3fn))
add("floor_divide", lambda d: ints(d), lambda s: torch.div(s, 16, rounding_mode='floor'))
add("bitwise", lambda d: ints(d), lambda s: s & 7 | s << 2)
add("expand_contiguous", lambda d: floats(d, 8, 1), lambda s: s.expand(8, 4).contiguous())
add("as_strided", lambda d: floats(d), lambda s: s.as_strided((4, 4), (1, 2)))
add("repeat", lambda d: floats(d), lambda s: s.repeat(3, 2))
add("tile", lambda d: floats(d), lambda s: s.tile(3))
add("hstack_vstack", lambda d: floats(d), lambda s: (torch.hstack((s, s)), torch.vstack((s, s))))
add("index_reduce_amax", lambda d: (floats(d, 8), ints(d, 8), floats(d, 8)), lambda s: s[0].index_reduce_(0, s[1], s[2], 'amax'))
add("view_as_real", lambda d: torch.view_as_complex(floats(d, 8, 2)), lambda s: torch.view_as_real(s * s))
add("polar_rope", lambda d: floats(d, 8, 4), lambda s: torch.polar(torch.ones_like(s), s))
add("inference_item", lambda d: floats(d), lambda s: torch.inference_mode()(lambda: (s * 2).sum().item())())
add("inference_cpu", lambda d: floats(d), lambda s: torch.inference_mode()(lambda: (s * 2).cpu())())
add("inference_upload", lambda d: d, lambda s: torch.inference_mode()(lambda: torch.tensor([1, 2], device=s))())
add("inference_mask", lambda d: floats(d), lambda s: torch.inference_mode()(lambda: s[s > 0.5])())
add("no_grad_item", lambda d: floats(d), lambda s: torch.no_grad()(lambda: s.sum().item())())
add("vmap_sum", lambda d: floats(d, 4, 8), lambda s: torch.vmap(torch.sum)(s))
