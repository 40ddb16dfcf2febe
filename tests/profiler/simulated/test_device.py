"""The context: what is on the device inside, and that everything is as before outside."""

import concurrent.futures
import copy
import io
import sys
import threading

import pytest
from syncfree.profiler import Profiler, simulated_device
from syncfree.profiler.simulated import is_active

torch = pytest.importorskip("torch")

WATCHED = [
    torch,
    torch.cuda,
    torch.cuda.memory,
    torch.cuda.streams,
    torch.cuda.graphs,
    torch.cuda.nvtx,
    torch.cuda.random,
    torch.cuda.profiler,
    torch.accelerator,
    torch.autograd,
    torch.autograd.graph,
    torch.nested,
    torch.utils.dlpack,
    torch.amp.autocast_mode.autocast,
    threading.Thread,
    concurrent.futures.ThreadPoolExecutor,
    concurrent.futures.Future,
]


# On a machine with a GPU, opening the device warns of what it costs the process.
pytestmark = pytest.mark.filterwarnings("ignore:simulated device")


def state_of_the_process():
    spaces = [dict(vars(owner)) for owner in WATCHED]
    modes = (torch.overrides._get_current_function_mode_stack(), torch._C._len_torch_dispatch_stack())
    settings = (
        torch._C._only_lift_cpu_tensors(),
        torch.autograd.is_multithreading_enabled(),
        sys.modules.get("triton"),
    )
    return spaces, modes, settings


def same(left, right):
    return left[1:] == right[1:] and all(
        a.keys() == b.keys() and all(a[name] is b[name] for name in a) for a, b in zip(left[0], right[0], strict=True)
    )


@pytest.fixture
def device():
    with simulated_device() as opened:
        yield opened


def test_everything_is_restored_also_after_an_error():
    with simulated_device():
        pass  # registering the backend, once a process, is not undone
    before = state_of_the_process()
    with simulated_device():
        assert not same(state_of_the_process(), before)
    assert same(state_of_the_process(), before)
    with pytest.raises(ZeroDivisionError), simulated_device():
        torch.ones(1, device="cuda").item() / 0
    assert same(state_of_the_process(), before)
    assert not is_active()


def test_contexts_follow_one_another_but_do_not_nest(device):
    assert is_active()
    with pytest.raises(RuntimeError, match="already open"), simulated_device():
        pass
    assert torch.ones(2, device=device).sum().item() == 2


def test_a_tensor_outlives_its_context():
    with simulated_device():
        x = torch.arange(3, device="cuda")
    assert x.cpu().tolist() == [0, 1, 2]
    with simulated_device() as device:
        assert (x + torch.ones(3, device=device)).tolist() == [1, 2, 3]


@pytest.mark.parametrize("name", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0])
def test_every_name_of_the_device_means_it(device, name):
    host = torch.arange(4)
    for made in (
        torch.zeros(4, device=name),
        torch.tensor([1, 2], device=name),
        torch.as_tensor([1], device=name),
        torch.empty_like(host, device=name),
        host.new_zeros(3, device=name),
        host.to(name),
        host.to(name, torch.float32),
        host.to(device=name),
        host.cuda(name),
        host.cuda(),
        torch.nn.Linear(2, 2, device=name).weight,
        torch.nn.Linear(2, 2).to(name).bias,
        torch.nn.Linear(2, 2).cuda().bias,
    ):
        assert made.is_cuda
        assert not made.is_cpu
        assert made.device == torch.device("cuda", 0) == device
    assert host.device.type == "cpu"
    assert not host.is_cuda


def test_default_devices(device):
    with torch.device("cuda"):
        assert torch.zeros(2).is_cuda
        assert torch.tensor([1, 2]).is_cuda
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).is_cuda
        assert torch.tensor([1, 2]).is_cuda
        assert torch.get_default_device() == device
    finally:
        torch.set_default_device(None)
    assert torch.zeros(2).device.type == "cpu"


def test_a_device_tensor_prints_as_on_cuda(device):
    x = torch.arange(4, device=device).view(2, 2)
    assert repr(x) == "tensor([[0, 1],\n        [2, 3]], device='cuda:0')"
    assert f"{x[1, 1]}" == "3"
    assert repr(torch.nn.Parameter(torch.zeros(1, device=device))).startswith("Parameter containing:\ntensor([0.]")
    assert x.type() == "torch.cuda.LongTensor"


def test_copies_of_objects_stay_on_the_device(device):
    x = torch.arange(4, device=device)
    layer = torch.nn.Linear(2, 2, device=device)
    deep = copy.deepcopy(layer)
    assert deep.weight.is_cuda
    assert isinstance(deep.weight, torch.nn.Parameter)
    assert deep.weight.requires_grad
    shared = copy.copy(x)
    shared.add_(1)
    assert x.tolist() == [1, 2, 3, 4]
    buffer = io.BytesIO()
    torch.save({"x": x, "state": layer.state_dict()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert loaded["x"].is_cuda
    assert torch.equal(loaded["state"]["weight"], layer.weight)
    buffer = io.BytesIO()
    torch.save([torch.ones(2)], buffer)
    buffer.seek(0)
    assert torch.load(buffer, map_location="cuda")[0].is_cuda


def test_data_of_a_parameter_can_be_replaced(device):
    layer = torch.nn.Linear(2, 2, device=device)
    layer.weight.data = torch.ones(3, 2, dtype=torch.bfloat16, device=device)
    assert layer.weight.shape == (3, 2)
    assert layer.weight.sum().item() == 6
    with pytest.raises(NotImplementedError, match="new Parameter"):
        torch.nn.Linear(2, 2).weight.data = torch.ones(2, 2, device=device)


def test_views_share_memory_and_in_place_metadata_follows(device):
    x = torch.zeros(2, 3, device=device)
    x[1].fill_(2)
    x.t_()
    assert x.shape == (3, 2)
    assert x.stride() == (1, 3)
    x[0, 0] = 7
    assert x.tolist() == [[7, 2], [0, 2], [0, 2]]
    out = torch.empty(0, device=device)
    torch.add(x, 1, out=out)
    assert out.shape == (3, 2)


def test_backward_runs(device):
    layer = torch.nn.Linear(3, 1, device=device)
    layer(torch.ones(2, 3, device=device)).sum().backward()
    assert layer.weight.grad.tolist() == [[2, 2, 2]]


def test_normal_tensors_in_inference_mode(device):
    weight = torch.arange(6.0, device=device).view(2, 3)
    with torch.inference_mode():
        assert weight.t().contiguous().view(-1).tolist() == [0, 3, 1, 4, 2, 5]
        weight.view(-1)[0] = 9
    assert weight[0, 0].item() == 9


def test_generators(device):
    generator = torch.Generator(device=device)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.Generator(), torch.Generator)
    one = torch.rand(4, device=device, generator=generator.manual_seed(5))
    assert torch.equal(one, torch.rand(4, device=device, generator=generator.manual_seed(5)))
    torch.cuda.manual_seed_all(3)
    first = torch.rand(4, device=device)
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(4, device=device))


def test_memory_is_accounted(device):
    before = torch.cuda.memory_allocated()
    x = torch.empty(1 << 20, dtype=torch.float32, device=device)
    assert torch.cuda.memory_allocated() - before == 4 << 20
    view = x[10:]
    del x
    assert torch.cuda.memory_allocated() - before == 4 << 20
    del view
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_reserved() > 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    assert total - free == torch.cuda.memory_reserved()


def test_pinned_memory(device):
    made = (
        torch.empty(4, pin_memory=True),
        torch.tensor([1, 2], pin_memory=True),
        torch.zeros(4).pin_memory(),
        torch.ones(3, device=device).to("cpu", non_blocking=True),
        torch.empty_like(torch.ones(3, device=device), device="cpu", pin_memory=True),
        torch.ones(3).new_empty(2, pin_memory=True),
    )
    for tensor in made:
        assert tensor.is_pinned()
        assert tensor[1:].is_pinned()
    assert not torch.zeros(4).is_pinned()
    assert not torch.ones(3, device=device).is_pinned()
    assert not torch.ones(3, device=device).cpu().is_pinned()
    tensor = torch.ones(4096)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel() * 4, 0))
    assert tensor.is_pinned()


REFUSED = {
    "another ordinal": (lambda d: torch.zeros(2, device="cuda:1"), RuntimeError, "invalid device ordinal"),
    "another ordinal of cuda()": (lambda d: torch.zeros(2, device=d).cuda(1), RuntimeError, "invalid device ordinal"),
    "two devices": (lambda d: torch.ones(2, device=d) + torch.ones(2), RuntimeError, "on the same device"),
    "pinning device memory": (lambda d: torch.ones(2, device=d).pin_memory(), RuntimeError, "only dense CPU"),
    "sparse": (lambda d: torch.eye(3, device=d).to_sparse(), NotImplementedError, "strided"),
    "nested": (lambda d: torch.nested.nested_tensor([[1.0]], device=d), NotImplementedError, "nested"),
    "dlpack": (lambda d: torch.utils.dlpack.to_dlpack(torch.ones(2, device=d)), BufferError, "DLPack"),
    "from dlpack": (lambda d: torch.from_dlpack(torch.ones(2, device=d)), BufferError, "DLPack"),
    "autocast": (lambda d: torch.autocast("cuda").__enter__(), NotImplementedError, "autocast"),
    "memory pools": (lambda d: torch.cuda.MemPool(), NotImplementedError, "MemPool"),
    "numpy": (lambda d: torch.ones(2, device=d).numpy(), TypeError, "copy the tensor to host memory"),
    "more memory than there is": (
        lambda d: torch.empty(1 << 50, dtype=torch.uint8, device=d),
        torch.OutOfMemoryError,
        "out of memory",
    ),
    "a kernel that only CUDA has": (
        lambda d: torch.nn.LSTM(2, 2, device=d)(torch.ones(1, 2, device=d)),
        NotImplementedError,
        "cannot be computed on the CPU",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_done_is_refused_clearly(device, what):
    act, error, text = REFUSED[what]
    with pytest.raises(error, match=text):
        act(device)


def test_compiled_code_runs_operator_by_operator(device):
    @torch.compile
    def double(x):
        return x * 2

    assert double(torch.ones(2, device=device)).tolist() == [2, 2]


def test_importing_the_package_loads_no_torch():
    import subprocess

    code = "import sys, syncfree.profiler.simulated as s; s.is_active(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_checkpoint_of_the_device_loads_as_torch_loads_by_default(device):
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(3, device=device)}, buffer)
    for place, on_device in ((None, True), ("cpu", False), ("cuda", True), ({"cuda:0": "cpu"}, False)):
        buffer.seek(0)
        with Profiler() as profiler, profiler.step():
            loaded = torch.load(buffer, map_location=place)["w"]
        assert loaded.is_cuda is on_device
        assert profiler.report.steps[0].syncs.h2d == on_device
        assert loaded.tolist() == [1.0] * 3


def test_tensor_subclasses_are_refused(device):
    class Own(torch.Tensor):
        pass

    with pytest.raises(NotImplementedError, match=r"simulated device: tensor subclasses are not supported.*Own"):
        torch.ones(3, device=device).as_subclass(Own)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.cuda.utilization(),
        lambda: torch.cuda.memory._record_memory_history(),
        lambda: torch.cuda.memory.list_gpu_processes(),
    ],
)
def test_what_asks_a_driver_says_that_there_is_none(device, call):
    with pytest.raises(NotImplementedError, match=r"simulated device: torch.cuda"):
        call()


def test_only_the_one_device_can_be_set(device):
    torch.cuda.set_device("cuda:0")
    torch.cuda.set_device(-1)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(1)


def test_random_states_of_all_devices(device):
    states = torch.cuda.get_rng_state_all()
    first = torch.rand(3, device=device).tolist()
    torch.cuda.set_rng_state_all(states)
    assert torch.rand(3, device=device).tolist() == first


def test_lengths_of_segments_are_checked_on_the_host(device):
    data, lengths = torch.ones(8, device=device), torch.tensor([3, 5], device=device)
    with Profiler() as profiler:
        with profiler.step():
            torch.segment_reduce(data, "sum", lengths=lengths)
        with profiler.step():
            torch.segment_reduce(data, "sum", lengths=lengths, unsafe=True)
    assert [step.syncs.total for step in profiler.report.steps] == [2, 0]


def test_a_collective_is_one_launch_with_a_note(device):
    import torch.distributed as dist

    if not dist.is_available() or dist.is_initialized():
        pytest.skip("needs torch.distributed, not yet in use")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(4, device=device)
        with Profiler() as profiler, profiler.step():
            dist.all_reduce(x)
        assert profiler.report.steps[0].launches.kernels == 1
        assert [note.kind for note in profiler.report.notes if "allreduce" in note.text] == ["blind"]
    finally:
        dist.destroy_process_group()


def test_pinned_memory_is_pinned_through_any_tensor_on_it(device):
    pinned = torch.zeros(8, pin_memory=True)
    again = torch.from_numpy(pinned.numpy()[2:])
    assert again.is_pinned()
    x = torch.ones(6, device=device)
    with Profiler() as profiler, profiler.step():
        again.copy_(x, non_blocking=True)
    assert profiler.report.steps[0].syncs.total == 0
    del pinned, again
    assert not torch.zeros(8).is_pinned()
