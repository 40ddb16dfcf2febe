"""Random batches through vLLM's builders and the planned ones: in unplanned, `on` and `shadow` mode.

usage: planned_sweep.py [--batches N] [--seed S]   (prints one JSON object; batches are numbered, `--seed` restarts)
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import fa_builder
import mla_builder
import planned_builders as builders
import test_aiter_fa_fields as fa_batches
import test_aiter_mla_fields as mla_batches
from syncfree.backends import mla_kernels

FA_SETTINGS = fa_batches.SETTINGS
MLA_SETTINGS = {name: kept for name, kept in mla_batches.SETTINGS.items() if kept[0].dcp_world_size == 1}
WORK = {f"decode.{name}" for name in mla_kernels.WORK_BUFFERS}
THRESHOLDS = range(1, 5)


class Pair:
    """vLLM's builder and the planned one, with everything equal, and the planned one in shadow."""

    def __init__(self, make, limits, environment, threshold):
        self.adapter = builders.ADAPTERS[make]()
        self.tallies = {mode: builders.tally_of(mode) for mode in ("on", "shadow")}
        self.theirs = make(limits, environment, threshold)
        self.ours = builders.planned(make, limits, environment, threshold, self.tallies["on"])
        self.shadow = builders.planned(make, limits, environment, threshold, self.tallies["shadow"])

    def check(self, number, batch, common, seen):
        builders.AITER.CALLS.pop("undefined", None)
        for builder in (self.theirs, self.ours):
            for name in builders.WORK[1:]:  # a schedule leaves what lies behind its end as it was
                getattr(builder, f"_mla_{name}", torch.empty(0)).zero_()
        theirs, ours = self.theirs.build(0, common()), self.ours.build(0, common())
        told = (number, batch.query_lens.tolist(), batch.seq_lens.tolist(), batch.num_tokens, batch.decode_threshold)
        attached = self.ours._attached
        if self.tallies["on"].fallbacks:
            seen.update(self.tallies["on"].fallbacks)
            self.tallies["on"].fallbacks.clear()
            return None
        _, plan = attached.plan(self.ours, common())
        wrong = builders.differences(self.adapter, plan, theirs, ours)
        wrong = [found for found in wrong if not self._known(found[0], plan, batch)]
        assert not wrong, (told, wrong)
        self.shadow.build(0, common())
        self.tallies["shadow"].fallbacks.clear()
        assert not self.tallies["shadow"].mismatches, (told, self.tallies["shadow"].first_mismatch)
        seen["served"] += 1
        for segment in plan.segments:
            seen[segment.name] += 1
        return plan

    def _known(self, name, plan, batch):
        """Where vLLM's own is undefined: what it asks of aiter, or, in eager mode, padding rows past the query."""
        if builders.AITER.CALLS["undefined"] and name in WORK:
            return True
        segment = plan.segment("decode")
        if name != "decode.qo_indptr" or segment is None or self.ours._attached.environment.full_graphs:
            return False
        return plan["decode.max_qo_len"].value == 1 and bool((batch.query_lens[: segment.rows[1]] == 0).any())


def flash_attention(monkeypatch, setting, seed, batches):
    """Counts of what was seen; raises AssertionError at the first difference."""
    environment, limits = FA_SETTINGS[setting]
    builders.put_in_aiter(monkeypatch, environment.gfx, environment.num_cu)
    monkeypatch.setattr(fa_builder.upstream, "torch", fa_builder.TorchWithoutPinning())
    monkeypatch.setattr(
        fa_builder.upstream.rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: environment.shuffle_kv
    )
    pairs = {t: Pair(builders.fa, limits, environment, t) for t in THRESHOLDS}
    rng, seen = np.random.default_rng(seed), Counter()
    for number in range(batches):
        threshold = int(rng.integers(1, 5))
        batch = fa_batches.random_batch(rng, int(rng.integers(1, 25)), 6, threshold, 1_500)
        batch = fa_batches.ordered(rng, batch)
        pairs[threshold].check(number, batch, lambda batch=batch: fa_builder.metadata_of(batch), seen)
    return seen


def latent_attention(monkeypatch, setting, seed, batches):
    """Counts of what was seen; raises AssertionError at the first difference."""
    environment, limits = MLA_SETTINGS[setting]
    mla_builder.install(monkeypatch, environment, mla_batches._schedule)
    builders.put_in_aiter(monkeypatch, environment.gfx, environment.num_cu)
    pairs = {t: Pair(builders.mla, limits, environment, t) for t in THRESHOLDS}
    rng, seen = np.random.default_rng(seed), Counter()
    for number in range(batches):
        threshold = int(rng.integers(1, 5))
        batch = mla_batches.random_batch(rng, int(rng.integers(1, 25)), threshold, 1_500)
        pair = pairs[threshold]
        plan = pair.check(number, batch, lambda batch=batch: mla_builder.metadata_of(batch, environment), seen)
        if plan is None or "decode" not in plan.routes:
            seen["context"] += plan is not None and "prefill.chunked_context.starts" in plan
            continue
        seen["context"] += "prefill.chunked_context.starts" in plan
        seen["decode on the host"] += 1
        if environment.full_graphs:
            _check_graph_buffers(pair, batch)
    return seen


def _check_graph_buffers(pair, batch):
    """What a replayed graph of any size reads: the whole of both buffers."""
    for name in ("qo_indptr", "paged_kv_indptr"):
        theirs, ours = getattr(pair.theirs, name), getattr(pair.ours, name)
        assert bool((theirs == ours).all()), (name, batch.query_lens, batch.seq_lens, batch.num_tokens)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first group of 1,000 batches")
    options = parser.parse_args()
    began, done, total = time.monotonic(), 0, Counter()
    settings = [(flash_attention, name) for name in FA_SETTINGS] + [(latent_attention, name) for name in MLA_SETTINGS]
    group = options.seed
    while done < options.batches:
        sweep, name = settings[group % len(settings)]
        with pytest.MonkeyPatch.context() as monkeypatch:
            total.update(sweep(monkeypatch, name, seed=10_000 + group, batches=1_000))
        done, group = done + 1_000, group + 1
        if group % 5 == 0:
            print(f"{done} batches, next --seed {group}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(json.dumps({"batches": done, "next_seed": group, "mismatches": 0, "seen": total}))


if __name__ == "__main__":
    main()
