"""Planned builders against vLLM 0.32's own on random batches: every field that a kernel reads is equal."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent))
import planned_sweep  # noqa: E402

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("setting", planned_sweep.FA_SETTINGS)
def test_flash_attention(setting, monkeypatch):
    seen = planned_sweep.flash_attention(monkeypatch, setting, seed=1, batches=300)
    assert seen["served"] > (50 if "shuffle" in setting else 150)
    if "shuffle" not in setting:
        assert seen["extend"] > 50


@pytest.mark.parametrize("setting", planned_sweep.MLA_SETTINGS)
def test_latent_attention(setting, monkeypatch):
    seen = planned_sweep.latent_attention(monkeypatch, setting, seed=2, batches=300)
    assert seen["served"] > 150
    assert seen["context"] > 30
    assert seen["decode on the host"] > 50


def test_the_sweep_finds_a_wrong_value(monkeypatch):
    """The comparison can fail: one element of one planned array is changed."""
    from syncfree.backends import aiter_fa

    right = aiter_fa.context_chunks

    def wrong(step):
        chunks = right(step)
        return chunks._replace(starts=chunks.starts + 1)

    monkeypatch.setattr(aiter_fa, "context_chunks", wrong)
    with pytest.raises(AssertionError, match="chunk_starts"):
        planned_sweep.flash_attention(monkeypatch, "plain", seed=1, batches=60)
