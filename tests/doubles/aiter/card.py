"""The card that schedules are made for, and how data reach it."""

from collections import Counter
from dataclasses import dataclass

import torch

CALLS = Counter()


@dataclass
class Card:
    gfx: str = "gfx950"
    num_cu: int = 256


CARD = Card()


def configure(gfx="gfx950", num_cu=256):
    """Choose the card; schedules made later are for it."""
    CARD.gfx, CARD.num_cu = gfx, num_cu


def check(good, text):
    """As aiter's own checks: a RuntimeError that names the argument."""
    if not good:
        raise RuntimeError(f"aiter: {text}")


def check_int32(name, tensor, elements):
    check(tensor.dtype == torch.int32, f"{name}: expected int32, got {tensor.dtype}")
    check(tensor.is_contiguous(), f"{name}: expected contiguous")
    check(tensor.numel() >= elements, f"{name}: expected at least {elements} elements, got {tensor.numel()}")


def on_host(tensor):
    """A tensor's data without asking the device: of the simulated one too. None on a real one."""
    hidden = getattr(tensor, "_host", None)
    if hidden is not None:
        return hidden
    return tensor if tensor.device.type == "cpu" else None


def launch(tensor):
    """One launch on the device of `tensor`, whatever it is; nothing is changed."""
    if tensor.device.type != "cpu":
        tensor.view(torch.int32).add_(0) if tensor.dtype != torch.int32 else tensor.add_(0)
