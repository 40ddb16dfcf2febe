"""These pass: nothing on the step path waits for the device."""

import pytest
import torch
from lengths.builder import build
from syncfree.profiler import assert_sync_free


def test_building_does_not_wait(sync_device):
    with assert_sync_free():
        metadata = build([9, 70, 33], sync_device)
    assert metadata.max_seq_len == 70
    assert metadata.starts.tolist() == [0, 9, 79, 112]


@pytest.mark.sync_budget(syncs=0, launches=4, batch_class="decode", phase="build")
def test_a_decode_step_keeps_its_budget(sync_profiler, sync_device):
    keys = torch.ones(128, 4, device=sync_device)
    for step in range(3):
        with sync_profiler.step(batch_class="decode"):
            with sync_profiler.phase("build"):
                metadata = build([9 + step, 70, 33], sync_device)
            with sync_profiler.phase("forward"):
                keys[metadata.starts[:-1].long()].sum(0)


def test_a_known_wait_is_on_the_allow_list(sync_profiler, sync_device, monkeypatch):
    monkeypatch.setenv("LENGTHS_DEBUG", "1")
    with sync_profiler.step(batch_class="decode"), sync_profiler.phase("build"):
        build([9, 70, 33], sync_device)
