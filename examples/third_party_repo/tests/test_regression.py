"""This one fails on purpose: it shows what a regression looks like. Delete it when you copy this repo."""

import torch
from lengths.builder import build_from_device
from syncfree.profiler import assert_sync_free


def test_building_from_device_lengths_does_not_wait(sync_device):
    seq_lens = torch.tensor([9, 70, 33], dtype=torch.int32, device=sync_device)
    with assert_sync_free():
        build_from_device(seq_lens)
