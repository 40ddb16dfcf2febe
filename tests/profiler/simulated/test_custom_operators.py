"""Custom operators whose kernel is a Python function: what it does on the device is counted."""

import pytest
from syncfree.profiler import Profiler, simulated_device

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:simulated device")
NAMESPACE = "syncfree_test_custom_operators"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
OPERATORS = getattr(torch.ops, NAMESPACE)


@torch.library.custom_op(f"{NAMESPACE}::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()  # the wait


@torch.library.custom_op(f"{NAMESPACE}::clear", mutates_args=("x",), device_types="cuda")
def clear(x: torch.Tensor, mask: torch.Tensor) -> None:
    x[mask.nonzero().squeeze(1)] = torch.tensor([0.0], device="cuda")


@clear.register_kernel("cpu")
def clear_on_cpu(x, mask):
    x.masked_fill_(mask, -1.0)


LIBRARY.define("only_cuda(Tensor x) -> Tensor")
LIBRARY.impl("only_cuda", lambda x: x + int(x.sum()), "CUDA")
LIBRARY.define("only_cpu(Tensor x) -> Tensor")
LIBRARY.impl("only_cpu", lambda x: x + int(x.sum()), "CPU")
LIBRARY.define("composite(Tensor x) -> Tensor")
LIBRARY.impl("composite", lambda x: x + int(x.sum()), "CompositeImplicitAutograd")
LIBRARY.define("nowhere(Tensor x) -> Tensor")


def syncs_of(run, *tensors):
    with simulated_device() as device:
        tensors = [tensor.to(device) for tensor in tensors]
        with Profiler() as profiler, profiler.step():
            result = run(*tensors)
        return profiler.report, tensors if result is None else result.cpu()


@pytest.mark.parametrize("name", ["scaled", "only_cuda", "only_cpu", "composite"])
@pytest.mark.parametrize("inference", [False, True])
def test_a_wait_inside_is_seen_with_its_line(name, inference):
    def run(x):
        with torch.inference_mode(inference):
            return getattr(OPERATORS, name)(x)

    report, result = syncs_of(run, torch.ones(4))
    assert report.steps[0].syncs.d2h == 1
    assert report.sites[0].file == __file__
    assert result.tolist() == [4.0 if name == "scaled" else 5.0] * 4


def test_the_kernel_for_the_device_runs_and_names_it():
    report, (x, _) = syncs_of(clear, torch.ones(3), torch.tensor([True, False, True]))
    assert (report.steps[0].syncs.d2h, report.steps[0].syncs.h2d) == (1, 1)
    assert x._host.tolist() == [0.0, 1.0, 0.0]


def test_cpu_tensors_take_the_kernel_for_the_cpu():
    with simulated_device():
        x = torch.ones(3)
        clear(x, torch.tensor([True, False, True]))
        assert x.tolist() == [-1.0, 1.0, -1.0]


def test_without_any_kernel_the_error_says_so():
    with simulated_device() as device, pytest.raises(NotImplementedError, match=r"simulated device: .*nowhere"):
        OPERATORS.nowhere(torch.ones(3, device=device))


def test_gradients_are_the_operators_own():
    with simulated_device() as device:
        x = torch.ones(3, device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match="register_autograd"):
            scaled(x).sum().backward()
