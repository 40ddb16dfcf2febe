"""Errors inside a backward pass come out as they were raised, and the process lives on."""

import threading
import traceback

import pytest
from syncfree.profiler import simulated_device

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:simulated device")


@pytest.fixture
def device():
    with simulated_device() as device:
        yield device


def leaf(device):
    return torch.ones(4, device=device, requires_grad=True)


def failing_hook(gradient):
    raise ValueError("a hook of the user's")


def run_with_hook(device):
    product = leaf(device) * 2
    product.register_hook(failing_hook)
    product.sum().backward()


def test_an_error_in_a_hook(device):
    with pytest.raises(ValueError, match="a hook of the user's") as caught:
        run_with_hook(device)
    assert "failing_hook" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert torch.ones(3, device=device).sum().item() == 3


def test_a_hook_that_returns_no_tensor(device):
    product = leaf(device) * 2
    product.register_hook(lambda gradient: 3.0)
    with pytest.raises(TypeError, match="hook returned 'float'"):
        torch.autograd.grad(product.sum(), product)


def test_an_error_in_a_function_of_the_users(device):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Fails.apply(leaf(device)).sum().backward()


def test_a_wait_while_capturing(device):
    """The gradient of a boolean mask reads its count: an error in an operator that the engine itself calls."""
    x, mask = leaf(device), torch.tensor([True, False, True, False], device=device)
    chosen = x[mask].sum()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"), torch.cuda.graph(graph):
        chosen.backward()


def test_an_error_inside_a_backward_inside_a_backward(device):
    seen = []

    def outer(gradient):
        with pytest.raises(ValueError), torch.enable_grad():
            run_with_hook(device)
        seen.append(True)

    product = leaf(device) * 2
    product.register_hook(outer)
    product.sum().backward()
    assert seen == [True]


def test_on_a_helper_thread(device):
    caught = []

    def work():
        try:
            run_with_hook(device)
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(caught) == 1
