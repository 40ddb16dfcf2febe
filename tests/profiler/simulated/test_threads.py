"""Helper threads: they have the device too, and their waits are put on a line of the user's."""

import concurrent.futures
import queue
import threading

import pytest
from syncfree.profiler import simulated_device, sites
from syncfree.profiler.collectors.simulated import SimulatedCollector
from syncfree.profiler.counting import count_syncs

torch = pytest.importorskip("torch")


@pytest.fixture
def device():
    with simulated_device() as opened:
        yield opened


def lines_of(function, *args):
    """(line relative to the function's first, kind, thread) of every sync."""
    collector = SimulatedCollector()
    collector.start()
    function(*args)
    collector.stop()
    found = [(sites.blamed(s.call.stack), s.kind, s.call.thread) for s in count_syncs(collector.drain())]
    assert all(frame.file == __file__ for frame, _, _ in found)
    return [(frame.line - function.__code__.co_firstlineno, kind, thread) for frame, kind, thread in found]


def test_factories_work_on_a_thread_started_inside(device):
    made = []
    thread = threading.Thread(
        target=lambda: made.append(torch.zeros(3, device="cuda") + torch.tensor([1], device=device))
    )
    thread.start()
    thread.join()
    assert made[0].is_cuda


def test_pools_older_than_the_context_have_the_device(device):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: torch.zeros(3, device="cuda").is_cuda).result()


def test_a_pool_made_before_and_used_inside():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with simulated_device():
            assert type(pool.submit(torch.zeros, 3, device="cuda").result()).__name__ == "SimTensor"
        assert type(pool.submit(torch.zeros, 3).result()) is torch.Tensor
        if not torch.cuda.is_available():
            with pytest.raises((AssertionError, RuntimeError)):
                pool.submit(torch.zeros, 3, device="cuda").result()


def joins(event):
    event.record()
    thread = threading.Thread(target=event.synchronize)
    thread.start()
    thread.join()


def takes_the_result(event):
    event.record()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(event.synchronize)
        future.result()


def never_joins(event):
    event.record()
    done = threading.Event()
    thread = threading.Thread(target=lambda: None)
    thread.run = lambda: (event.synchronize(), done.set())
    thread.start()
    done.wait()


@pytest.mark.parametrize(("wait", "line"), [(joins, 4), (takes_the_result, 4)])
def test_a_wait_without_user_frames_is_on_the_line_that_waited_for_it(device, wait, line):
    [(found, kind, thread)] = lines_of(wait, torch.cuda.Event())
    assert (found, kind) == (line, "event")
    assert thread != threading.get_native_id()


def test_a_wait_in_the_users_own_frame_is_there(device):
    [(found, _, _)] = lines_of(never_joins, torch.cuda.Event())
    assert found == 4


def test_a_thread_that_was_never_joined_is_on_the_line_that_started_it(device):
    x = torch.ones(3, device=device)

    def starts():
        thread = threading.Thread(target=x.cpu)
        thread.start()
        while thread.is_alive():
            pass

    [(found, kind, _)] = lines_of(starts)
    assert (found, kind) == (2, "d2h")


def test_a_worker_that_lives_on_is_counted_as_its_own_thread(device):
    work, done = queue.Queue(), queue.Queue()

    def serve():
        while (event := work.get()) is not None:
            event.synchronize()
            done.put(threading.get_native_id())

    threading.Thread(target=serve, daemon=True).start()
    idents = []

    def step():
        event = torch.cuda.Event()
        event.record()
        work.put(event)
        idents.append(done.get())

    found = lines_of(lambda: (step(), step()))
    work.put(None)
    assert [(kind, thread) for _, kind, thread in found] == [("event", ident) for ident in idents]


def test_the_current_stream_belongs_to_a_thread(device):
    side = torch.cuda.Stream()
    seen = []
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.cuda.default_stream()]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_an_error_on_a_pool_thread_reaches_the_caller(device):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            future.result()
        assert isinstance(future.exception(), ZeroDivisionError)
