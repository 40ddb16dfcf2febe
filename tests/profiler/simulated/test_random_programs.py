"""Random small torch programs give the same tensors on the simulated device as on the CPU."""

import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from syncfree.profiler import simulated_device

torch = pytest.importorskip("torch")
F = torch.nn.functional

# Each takes the tensor to work on, another one of the pool, three small numbers and the device.
PURE = [
    lambda x, y, a, b, c, d: x + a,
    lambda x, y, a, b, c, d: x * y,
    lambda x, y, a, b, c, d: 3 - x,
    lambda x, y, a, b, c, d: x / (a + 1),
    lambda x, y, a, b, c, d: x // (a + 1),
    lambda x, y, a, b, c, d: -x.float(),
    lambda x, y, a, b, c, d: x.to([torch.float32, torch.int64, torch.int32, torch.bool, torch.float64][a % 5]),
    lambda x, y, a, b, c, d: x > a,
    lambda x, y, a, b, c, d: (x > a) & (x < b),
    lambda x, y, a, b, c, d: x.t() if x.dim() == 2 else x.flatten(),
    lambda x, y, a, b, c, d: x.reshape(-1),
    lambda x, y, a, b, c, d: x[a:],
    lambda x, y, a, b, c, d: x[..., ::2],
    lambda x, y, a, b, c, d: x[a % max(len(x), 1)],
    lambda x, y, a, b, c, d: x.unsqueeze(a % (x.dim() + 1)),
    lambda x, y, a, b, c, d: x.unsqueeze(0).expand(b + 1, *x.shape),
    lambda x, y, a, b, c, d: x.squeeze(),
    lambda x, y, a, b, c, d: x.sum(),
    lambda x, y, a, b, c, d: x.sum(a % x.dim()),
    lambda x, y, a, b, c, d: x.float().mean(-1, keepdim=True),
    lambda x, y, a, b, c, d: x.max(-1)[b % 2],
    lambda x, y, a, b, c, d: x.argmax(),
    lambda x, y, a, b, c, d: x.cumsum(a % x.dim()),
    lambda x, y, a, b, c, d: x.float().softmax(-1),
    lambda x, y, a, b, c, d: x.sort(-1, descending=bool(a % 2), stable=True)[b % 2],
    lambda x, y, a, b, c, d: x.topk(1 + a % 2)[0],
    lambda x, y, a, b, c, d: x.clamp(a, b),
    lambda x, y, a, b, c, d: torch.where(x > a, x, y),
    lambda x, y, a, b, c, d: torch.where(x > a, x, 0),
    lambda x, y, a, b, c, d: torch.cat((x, y)),
    lambda x, y, a, b, c, d: torch.stack((x, x), a % 2),
    lambda x, y, a, b, c, d: x.float() @ y.float(),
    lambda x, y, a, b, c, d: F.linear(x.float(), y.float()),
    lambda x, y, a, b, c, d: F.layer_norm(x.float(), x.shape[-1:]),
    lambda x, y, a, b, c, d: F.gelu(x.float()),
    lambda x, y, a, b, c, d: F.pad(x, (a, b)),
    lambda x, y, a, b, c, d: F.one_hot(x.long() % 4 + 0),
    lambda x, y, a, b, c, d: x[torch.tensor([a, b], device=d) % max(len(x), 1)],
    lambda x, y, a, b, c, d: x[torch.tensor([a, b]) % max(len(x), 1)],
    lambda x, y, a, b, c, d: x[[0, 0]],
    lambda x, y, a, b, c, d: x[x > a],
    lambda x, y, a, b, c, d: x.nonzero(),
    lambda x, y, a, b, c, d: torch.unique(x),
    lambda x, y, a, b, c, d: torch.masked_select(x, x > a),
    lambda x, y, a, b, c, d: torch.repeat_interleave(x.flatten(), x.flatten().long() % 3),
    lambda x, y, a, b, c, d: x.repeat_interleave(a + 1, dim=0),
    lambda x, y, a, b, c, d: torch.bincount(x.flatten().long() % 5, minlength=a),
    lambda x, y, a, b, c, d: x.index_select(0, torch.tensor([0], device=d)),
    lambda x, y, a, b, c, d: x.gather(0, torch.zeros_like(x, dtype=torch.int64)),
    lambda x, y, a, b, c, d: x.scatter(0, torch.zeros_like(x, dtype=torch.int64), 1),
    lambda x, y, a, b, c, d: x.masked_fill(x > a, b),
    lambda x, y, a, b, c, d: torch.isin(x, y),
    lambda x, y, a, b, c, d: torch.arange(a + int(x.flatten()[0] > 2), device=d),
    lambda x, y, a, b, c, d: torch.full((a, b + 1), c, device=d),
    lambda x, y, a, b, c, d: torch.tensor(x.flatten()[:3].tolist(), device=d),
    lambda x, y, a, b, c, d: torch.zeros_like(x),
    lambda x, y, a, b, c, d: x.new_full((a + 1,), b),
    lambda x, y, a, b, c, d: torch.rand(a + 1, b + 1, device=d),
    lambda x, y, a, b, c, d: torch.randint(0, 9, (a + 1,), device=d),
    lambda x, y, a, b, c, d: x.clone(),
    lambda x, y, a, b, c, d: x.cpu().clone().to(d),
    lambda x, y, a, b, c, d: x.view(torch.int32) if x.element_size() == 4 else x,
    lambda x, y, a, b, c, d: x.diagonal() if x.dim() == 2 else x,
    lambda x, y, a, b, c, d: x.unbind(0)[a % len(x)],
    lambda x, y, a, b, c, d: x.chunk(2)[0],
    lambda x, y, a, b, c, d: torch.add(x, 1, out=torch.empty(0, dtype=x.dtype, device=d)),
    lambda x, y, a, b, c, d: torch.tril(torch.ones(a + 1, a + 1, device=d)),
    lambda x, y, a, b, c, d: torch.searchsorted(torch.arange(5, device=d), x.long()),
    lambda x, y, a, b, c, d: x.float().std(-1),
    lambda x, y, a, b, c, d: x.roll(a).flip(0),
]
# These write into a tensor of the pool, or into what it is a view of.
WRITES = [
    lambda x, y, a, b, c, d: x.add_(a),
    lambda x, y, a, b, c, d: x.mul_(y),
    lambda x, y, a, b, c, d: x.fill_(a),
    lambda x, y, a, b, c, d: x.copy_(y),
    lambda x, y, a, b, c, d: x.clamp_(min=a),
    lambda x, y, a, b, c, d: x.zero_(),
    lambda x, y, a, b, c, d: x.masked_fill_(x > a, b),
    lambda x, y, a, b, c, d: x.__setitem__(0, a),
    lambda x, y, a, b, c, d: x.__setitem__(slice(a), b),
    lambda x, y, a, b, c, d: x.__setitem__((Ellipsis, 0), b),
    lambda x, y, a, b, c, d: x.__setitem__(x > a, b),
    lambda x, y, a, b, c, d: x.__setitem__([0], a),
    lambda x, y, a, b, c, d: x.__setitem__(torch.tensor([0], device=d), y[:1]),
    lambda x, y, a, b, c, d: x[1:].add_(1),
    lambda x, y, a, b, c, d: x.index_fill_(0, torch.tensor([0], device=d), a),
    lambda x, y, a, b, c, d: x.index_put_((torch.tensor([0, 0], device=d),), x.new_ones(()), accumulate=True),
    lambda x, y, a, b, c, d: x.scatter_add_(0, torch.zeros_like(x, dtype=torch.int64), x.clone()),
    lambda x, y, a, b, c, d: x.unsqueeze_(0),
    lambda x, y, a, b, c, d: x.squeeze_(),
    lambda x, y, a, b, c, d: x.t_(),
    lambda x, y, a, b, c, d: x.resize_(1, min(b, x.numel())),
    lambda x, y, a, b, c, d: torch.cumsum(x, 0, out=x),
    lambda x, y, a, b, c, d: torch.sub(x, 1, out=y),
]
STATEMENTS = PURE + WRITES
FAULTS = (ZeroDivisionError, RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)

numbers = st.integers(0, 4)
statement = st.tuples(
    st.integers(0, len(STATEMENTS) - 1), st.integers(0, 9), st.integers(0, 9), numbers, numbers, numbers
)


def execute(program, device):
    """Every tensor the program made, as CPU tensors, and the kind of every statement's failure."""
    torch.manual_seed(0)
    pool = [
        torch.arange(12, device=device).view(3, 4),
        torch.rand(3, 4, device=device),
        torch.arange(6, dtype=torch.int32, device=device),
        torch.rand(4, device=device) > 0.5,
    ]
    outcomes = []
    for index, left, right, a, b, c in program:
        try:
            made = STATEMENTS[index](pool[left % len(pool)], pool[right % len(pool)], a, b, c, device)
        except FAULTS as error:
            outcomes.append(type(error))
            continue
        outcomes.append(None)
        if isinstance(made, torch.Tensor) and made.numel() < 4096:
            pool.append(made)
    return [tensor.cpu() for tensor in pool], outcomes, [(t.shape, t.stride(), t.dtype) for t in pool]


@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(statement, min_size=1, max_size=12), st.booleans())
def test_the_same_tensors_as_on_the_cpu(program, inference):
    with warnings.catch_warnings(), torch.inference_mode(inference):
        warnings.simplefilter("ignore")
        wanted, failures, layouts = execute(program, "cpu")
        with simulated_device() as device:
            got, simulated_failures, simulated_layouts = execute(program, device)
    assert simulated_failures == failures
    assert simulated_layouts == layouts
    for left, right in zip(wanted, got, strict=True):
        torch.testing.assert_close(right, left, rtol=0, atol=0, equal_nan=True)
