"""Copies that wait although they were asked not to."""

from types import SimpleNamespace

import pytest
import torch
from syncfree.profiler.calls import Call, Direction, Role
from syncfree.profiler.collectors.transfers import TensorWrappers, TransfersCollector, silent_wait

MB = 1 << 20


def tensor(device, *, pinned=False, contiguous=True, nbytes=64):
    return SimpleNamespace(
        device=SimpleNamespace(type=device), is_pinned=lambda: pinned, is_contiguous=lambda: contiguous, nbytes=nbytes
    )


@pytest.mark.parametrize(
    ("target", "source", "non_blocking", "waits"),
    [
        (tensor("cpu"), tensor("cuda"), True, Direction.D2H),
        (tensor("cpu", pinned=True), tensor("cuda"), True, None),
        (tensor("cpu", pinned=True, contiguous=False), tensor("cuda"), True, Direction.D2H),
        (tensor("cpu"), tensor("cuda"), False, None),  # makes a sync call: others see it
        (tensor("cuda"), tensor("cpu", nbytes=4 * MB), True, Direction.H2D),
        (tensor("cuda"), tensor("cpu", nbytes=4 * MB - 1), True, None),
        (tensor("cuda"), tensor("cpu", nbytes=9 * MB, pinned=True), True, None),
        (tensor("cuda"), tensor("cuda"), True, None),
        (tensor("cpu"), tensor("cpu"), True, None),
    ],
)
def test_which_copies_wait_silently(target, source, non_blocking, waits):
    assert silent_wait(target, source, non_blocking) is waits


def methods():
    return {name: getattr(torch.Tensor, name) for name in ("copy_", "to", "cpu", "cuda")}


def test_the_methods_of_tensor_are_put_back():
    before, own = methods(), dict(vars(torch.Tensor))
    collector = TransfersCollector()
    collector.start()
    assert methods() != before
    x = torch.ones(3)
    assert x.to(torch.float64, non_blocking=True).dtype is torch.float64
    assert torch.zeros(3).copy_(x, non_blocking=True).sum() == 3
    collector.stop()
    assert methods() == before
    assert dict(vars(torch.Tensor)) == own
    assert (collector.notes(), collector.drain()) == ([], [])


def test_who_wraps_after_us_keeps_working_and_is_left_alone():
    collector, before = TransfersCollector(), torch.Tensor.to
    collector.start()
    inner = torch.Tensor.to

    def outer(self, *args, **kwargs):
        return inner(self, *args, **kwargs)

    torch.Tensor.to = outer
    try:
        collector.stop()
        assert torch.Tensor.to is outer
        assert torch.ones(2).to(torch.int32).tolist() == [1, 1]
    finally:
        del torch.Tensor.to
    assert torch.Tensor.to is before


def test_a_silent_wait_is_noted_with_its_line(monkeypatch):
    monkeypatch.setattr("syncfree.profiler.collectors.transfers.silent_wait", lambda *_: Direction.D2H)
    collector = TransfersCollector()
    collector.start()
    meta = torch.empty(4, device="meta")
    for _ in range(3):
        torch.empty(4).to("meta", non_blocking=True)
    collector.stop()
    assert meta.device.type == "meta"
    (note,) = collector.notes()
    assert (note.kind, note.count, note.file) == ("blind", 3, __file__)


def test_a_failing_look_switches_itself_off_and_never_reaches_the_program(monkeypatch):
    def broken(*_):
        raise RuntimeError("odd tensor")

    monkeypatch.setattr("syncfree.profiler.collectors.transfers.silent_wait", broken)
    collector = TransfersCollector()
    collector.start()
    assert torch.empty(4).to("meta").device.type == "meta"
    assert torch.empty(4).to("meta").device.type == "meta"
    collector.stop()
    assert [n.kind for n in collector.notes()] == ["disabled"]


def test_the_call_says_what_it_was():
    seen: list[Call] = []
    wrappers = TensorWrappers(seen.append)
    source, target = tensor("cuda", nbytes=40), tensor("cpu")
    wrappers._look("copy_", target, target, (source, True), {}, 0)
    (call,) = seen
    assert (call.api, call.role, call.direction, call.nbytes) == ("Tensor.copy_", Role.COPY, Direction.D2H, 40)
    assert (call.blocking, call.pageable) == (True, True)
