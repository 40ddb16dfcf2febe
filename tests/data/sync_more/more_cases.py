"""What a case is, and the inputs that cases share."""

import torch

CASES = {}


class Case:
    """`setup(d)` makes the state on device `d`; `run(s)` is what is measured, again and again on one state."""

    group = ""
    needs = ()

    def __init_subclass__(cls, **kw):
        super().__init_subclass__(**kw)
        CASES[cls.__name__] = cls


def adder(group):
    """A function that adds a case of two functions to `group`."""

    def add(name, setup, run):
        type(name, (Case,), {"group": group, "setup": staticmethod(setup), "run": staticmethod(run)})

    return add


def ints(d, n=64):
    return torch.arange(n, device=d)


def floats(d, *shape):
    return torch.rand(*(shape or (64,)), device=d)


def mask_of(d, n=256):
    return torch.arange(n, device=d) % 3 == 0


def pinned(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, pin_memory=True)


def captured(d):
    x = torch.ones(1024, device=d)
    x.mul_(1.0)
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        y = x.mul(2.0).add_(1.0)
    return g, x, y
