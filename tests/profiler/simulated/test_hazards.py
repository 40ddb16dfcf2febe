"""A copy into pinned memory that the host reads before anything proved it complete."""

import threading
from pathlib import Path

import numpy as np
import pytest
from syncfree.profiler import Profiler, simulated_device

torch = pytest.importorskip("torch")


class Bench:
    """A device tensor, pinned memory of its size, and an event."""

    def __init__(self, device):
        self.device = torch.arange(64, device=device)
        self.pinned = torch.empty(64, dtype=torch.int64, pin_memory=True)
        self.event = torch.cuda.Event()

    def fetch(self):
        self.pinned.copy_(self.device, non_blocking=True)
        return self.pinned

    def start(self):
        return self.device.to("cpu", non_blocking=True)


@pytest.fixture
def bench():
    with simulated_device() as device:
        yield Bench(device)


def watched(function):
    """(hazard notes, kinds of sync) of one call."""
    with Profiler() as profiler, profiler.step():
        function()
    kinds = [site.kind for site in profiler.report.sites for _ in range(site.count)]
    return [note for note in profiler.report.notes if note.kind == "hazard"], kinds


READS = {
    "sum": lambda y: y.sum(),
    "tolist": lambda y: y.tolist(),
    "item": lambda y: y[3].item(),
    "int": lambda y: int(y[3]),
    "numpy": lambda y: y.numpy(),
    "asarray": lambda y: np.asarray(y),
    "add": lambda y: y + 1,
    "clone": lambda y: y.clone(),
    "repr": lambda y: repr(y),
    "copy": lambda y: torch.empty(64, dtype=torch.int64).copy_(y),
    "stack": lambda y: torch.stack([y, y]),
    "view then read": lambda y: y.view(8, 8)[1:].max(),
    "any": lambda y: bool((y == 3).any()),
    "inference": lambda y: torch.inference_mode()(y.sum)(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("begin", [Bench.fetch, Bench.start])
def test_a_read_without_a_wait_is_a_hazard(bench, begin, read):
    def unsafe():
        y = begin(bench)
        READS[read](y)

    [note], kinds = watched(unsafe)
    assert kinds == []
    assert note.file == __file__
    assert note.line in range(unsafe.__code__.co_firstlineno - 80, unsafe.__code__.co_firstlineno + 4)
    assert str(Path(__file__)) + ":" in note.text


def test_the_note_names_the_line_that_reads_and_the_line_that_copies(bench):
    def unsafe():
        y = bench.device.to("cpu", non_blocking=True)
        return y.sum()

    [note], _ = watched(unsafe)
    first = unsafe.__code__.co_firstlineno
    assert note.line == first + 2
    assert f"{__file__}:{first + 1}" in note.text


def by_event(bench):
    bench.fetch()
    bench.event.record()
    bench.event.synchronize()
    return bench.pinned.sum()


def by_event_on_one_line(bench):
    return bench.fetch(), bench.event.record(), bench.event.synchronize(), bench.pinned.tolist()


def by_stream(bench):
    y = bench.start()
    torch.cuda.current_stream().synchronize()
    return y.tolist()


def by_device(bench):
    y = bench.start()
    torch.cuda.synchronize()
    return y.tolist()


def by_another_read(bench):
    y = bench.start()
    bench.device.sum().item()
    return y.tolist()


def by_event_of_a_side_stream(bench):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = bench.start()
        bench.event.record(side)
    bench.event.synchronize()
    return y.tolist()


def by_order_between_streams(bench):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = bench.start()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.current_stream().synchronize()
    return y.tolist()


def by_thread(bench):
    y = bench.start()
    bench.event.record()
    thread = threading.Thread(target=bench.event.synchronize)
    thread.start()
    thread.join()
    return y.tolist()


def by_polling(bench):
    y = bench.start()
    bench.event.record()
    while not bench.event.query():
        pass
    return y.tolist()


@pytest.mark.parametrize(
    ("wait", "kinds"),
    [
        (by_event, ["event"]),
        (by_event_on_one_line, ["event"]),
        (by_stream, ["stream"]),
        (by_device, ["device"]),
        (by_another_read, ["d2h"]),
        (by_event_of_a_side_stream, ["event"]),
        (by_order_between_streams, ["stream"]),
        (by_polling, []),
    ],
)
def test_a_wait_between_is_no_hazard(bench, wait, kinds):
    hazards, found = watched(lambda: wait(bench))
    assert hazards == []
    assert found == kinds


def test_a_wait_on_another_thread_is_no_hazard(bench):
    hazards, _ = watched(lambda: by_thread(bench))
    assert hazards == []


def wrong_event(bench):
    bench.event.record()
    y = bench.start()
    bench.event.synchronize()
    return y.tolist()


def wrong_stream(bench):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = bench.start()
    torch.cuda.current_stream().synchronize()
    return y.tolist()


@pytest.mark.parametrize(("wait", "lines"), [(wrong_event, 4), (wrong_stream, 5)])
def test_waiting_for_something_else_leaves_the_hazard(bench, wait, lines):
    [note], _ = watched(lambda: wait(bench))
    assert note.line == wait.__code__.co_firstlineno + lines


def test_looking_at_shape_and_taking_views_is_no_read(bench):
    def harmless():
        y = bench.start()
        return y.shape, y.is_pinned(), y.view(8, 8), y[:4], y.numel(), len(y), y.dtype

    assert watched(harmless)[0] == []


def test_a_hazard_is_reported_once_a_line_with_its_count(bench):
    def unsafe():
        for _ in range(3):
            bench.start().sum()

    [note], _ = watched(unsafe)
    assert note.count == 3


def test_pageable_and_blocking_copies_are_no_hazard(bench):
    def blocking():
        pageable = torch.empty(64, dtype=torch.int64)
        pageable.copy_(bench.device, non_blocking=True)
        bench.pinned.copy_(bench.device)
        return pageable.sum(), bench.pinned.sum()

    assert watched(blocking) == ([], ["d2h", "d2h"])
