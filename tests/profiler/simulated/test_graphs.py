"""Graph capture and replay: values, counts, and what a capture cannot contain."""

import pytest
from syncfree.profiler import Profiler, simulated_device

torch = pytest.importorskip("torch")


@pytest.fixture
def device():
    with simulated_device() as opened:
        yield opened


def figures(function):
    with Profiler() as profiler, profiler.step():
        function()
    [step] = profiler.report.steps
    return step, profiler.report


def captured(work):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def test_a_capture_does_not_run_and_each_replay_does(device):
    x = torch.ones(4, device=device)
    graph, _ = captured(lambda: x.add_(1))
    assert x.tolist() == [1] * 4
    graph.replay()
    graph.replay()
    assert x.tolist() == [3] * 4


def test_outputs_and_intermediate_tensors_are_filled_by_replay(device):
    x = torch.zeros(2, 3, device=device)
    weight = torch.arange(6.0, device=device).view(3, 2)

    def work():
        hidden = x @ weight
        hidden[0] += 1
        return hidden.relu().sum(0), hidden.to(torch.int32).clone(), torch.cat((hidden, hidden)).argmax(-1)

    graph, results = captured(work)
    for value in (1.0, -2.0, 3.0):
        x.fill_(value)
        graph.replay()
        for made, wanted in zip(results, work(), strict=True):
            assert torch.equal(made, wanted)


def test_a_pinned_input_is_read_at_replay(device):
    host = torch.zeros(4, pin_memory=True)
    x = torch.empty(4, device=device)

    def work():
        x.copy_(host, non_blocking=True)
        return x * 2

    graph, result = captured(work)
    host.fill_(5)
    graph.replay()
    assert result.tolist() == [10] * 4


def test_a_replay_is_one_graph_launch(device):
    x = torch.ones(4, device=device)
    graph, _ = captured(lambda: x.mul_(2).add_(1))
    step, report = figures(lambda: [graph.replay() for _ in range(3)])
    assert (step.launches.graphs, step.launches.kernels, step.launches.captured) == (3, 0, 0)
    assert step.syncs.total == 0
    assert report.totals.kernels_run == 6


def test_what_is_captured_is_not_counted_as_run(device):
    x = torch.ones(4, device=device)
    step, report = figures(lambda: captured(lambda: x.mul_(2).add_(1)))
    assert step.launches.captured == 2
    assert step.launches.kernels == 2  # seed and offset of the generator, before the capture begins
    assert step.syncs.device == step.syncs.total == 1
    assert report.totals.kernels_run == 2


SYNCS = {
    "item": lambda x: x[0].item(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "pageable download": lambda x: torch.empty(4).copy_(x, non_blocking=True),
    "upload": lambda x: torch.tensor([1], device=x.device),
    "device": lambda x: torch.cuda.synchronize(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
}


@pytest.mark.parametrize("what", SYNCS)
def test_a_wait_inside_a_capture_is_an_error_as_on_cuda(device, what):
    x = torch.ones(4, device=device)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        captured(lambda: SYNCS[what](x))
    assert not torch.cuda.is_current_stream_capturing()
    x.add_(1)
    torch.cuda.synchronize()


def test_streams_join_a_capture_by_events(device):
    x, y = torch.ones(4, device=device), torch.ones(4, device=device)
    side = torch.cuda.Stream()

    def work():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        x.add_(y)

    graph, _ = captured(work)
    assert (x.tolist(), y.tolist()) == ([1] * 4, [1] * 4)
    graph.replay()
    assert (x.tolist(), y.tolist()) == ([3] * 4, [2] * 4)


def test_capture_by_hand_and_misuse(device):
    x = torch.ones(4, device=device)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="successful capture"):
        graph.replay()
    with pytest.raises(RuntimeError, match="non-default stream"):
        graph.capture_begin()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool=torch.cuda.graph_pool_handle())
        x.add_(1)
        assert torch.cuda.is_current_stream_capturing()
        graph.capture_end()
    graph.replay()
    assert x.tolist() == [2] * 4
    graph.reset()
    with pytest.raises(RuntimeError, match="successful capture"):
        graph.replay()


def test_graphed_callables(device):
    layer = torch.nn.Linear(4, 4).to(device).requires_grad_(False)
    graphed = torch.cuda.make_graphed_callables(layer, (torch.ones(2, 4, device=device),))
    x = torch.randn(2, 4, device=device)
    wanted = torch.nn.functional.linear(x, layer.weight, layer.bias)
    results = []
    step, _ = figures(lambda: results.append(graphed(x)))
    assert torch.equal(results[0], wanted)
    assert (step.launches.graphs, step.launches.kernels, step.syncs.total) == (1, 0, 0)
