"""Random batches through vLLM's builders and the planned ones: in unplanned, `on` and `shadow` mode.

usage: planned_sweep.py [--batches N] [--seed S] [--only SWEEP]   (prints one JSON object; `--seed`: where one ended)

SIGTERM ends it behind the group under way, with its JSON. One thread: tensors are small, and more threads only wait.
"""

import argparse
import json
import logging
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import fa_builder
import mla_builder
import planned_builders as builders
import test_aiter_fa_fields as fa_batches
import test_aiter_mla_fields as mla_batches
import triton_mla_builder
import vllm
from syncfree.backends import mla_kernels
from syncfree.planner import Batch, Planner

FA_SETTINGS = fa_batches.SETTINGS
MLA_SETTINGS = {name: kept for name, kept in mla_batches.SETTINGS.items() if kept[0].dcp_world_size == 1}
SHARDED_SETTINGS = {name: kept for name, kept in mla_batches.SETTINGS.items() if kept[0].dcp_world_size > 1}
TRITON_MLA_SETTINGS = triton_mla_builder.SETTINGS
WORK = {f"decode.{name}" for name in mla_kernels.WORK_BUFFERS}
FROM_QO_INDPTR = WORK | {"decode.qo_indptr"}
THRESHOLDS = range(1, 5)
REFUSALS = {"UnorderedBatch", "InexactBatch", "BadInput"}  # anything else that makes vLLM serve is a fault of ours
# What the builders' buffers hold: twice the rows of a batch and more. aiter's sizes are those of blocks of the longest
# query; with folded heads a shorter one makes more tiles (32 heads, fp8: one tile a row of 4 tokens, two of 3).
ROWS = 256
GROUP = 1_000
SHADOW_BUILDS_EVERY = 16  # batches: in the others the planned builder in shadow is handed what vLLM's has made


class Pair:
    """vLLM's builder and the planned one, with everything equal, and the planned one in shadow."""

    def __init__(self, make, limits, environment, threshold, **settings):
        self.adapter = builders.ADAPTERS[make]()
        self.tallies = {mode: builders.tally_of(mode) for mode in ("on", "shadow")}
        self.theirs = make(limits, environment, threshold, **settings)
        self.ours = builders.planned(make, limits, environment, threshold, self.tallies["on"], **settings)
        self.shadow = builders.planned(make, limits, environment, threshold, self.tallies["shadow"], **settings)
        owners = (self.theirs, self.ours)
        found = [getattr(builder, f"_mla_{name}", None) for builder in owners for name in builders.WORK[1:]]
        self.made = None  # the last that the planned builder made
        self._work = [buffer for buffer in found if buffer is not None]

    def check(self, number, batch, common, seen):
        """The plan; None where the planner leaves the batch to vLLM. Raises AssertionError."""
        builders.AITER.CALLS.pop("undefined", None)
        for buffer in self._work:  # a schedule leaves what lies behind its end as it was
            buffer.zero_()
        handed, tally = common(), self.tallies["on"]
        planned = tally.planned
        ours = self.made = self.ours.build(0, handed)
        if tally.planned == planned:
            assert {kind.rpartition(" ")[2] for kind in tally.fallbacks} <= REFUSALS, (
                _told(number, batch),
                tally.fallbacks,
            )
            seen.update(tally.fallbacks or ["left to vLLM on purpose"])
            tally.fallbacks.clear()
            return None
        _, plan = self.ours._attached.plan(self.ours, handed)
        theirs = self.theirs.build(0, common())
        wrong = builders.differences(self.adapter, plan, theirs, ours)
        wrong = [found for found in wrong if not self._known(found[0], plan, batch)]
        assert not wrong, (_told(number, batch), wrong)
        self._check_shadow(number, batch, handed, theirs)
        _count(seen, plan, batch)
        return plan

    def _check_shadow(self, number, batch, handed, theirs):
        if number % SHADOW_BUILDS_EVERY == 0:
            vars(self.shadow).pop("_upstream_build", None)
        else:
            self.shadow._upstream_build = lambda *_: theirs
        self.shadow.build(0, handed)
        self.tallies["shadow"].fallbacks.clear()
        assert not self.tallies["shadow"].mismatches, (_told(number, batch), self.tallies["shadow"].first_mismatch)

    def _known(self, name, plan, batch):
        """Where vLLM's own is undefined: what it asks of aiter, or, in eager mode, padding rows past the query.

        Of those rows vLLM's qo_indptr counts a token each, and so does the schedule that is made from it.
        """
        if builders.AITER.CALLS["undefined"] and name in WORK:
            return True
        segment = plan.segment("decode")
        if name not in FROM_QO_INDPTR or segment is None or self.ours._attached.environment.full_graphs:
            return False
        return plan["decode.max_qo_len"].value == 1 and bool((batch.query_lens[: segment.rows[1]] == 0).any())


def _told(number, batch):
    return number, batch.query_lens.tolist(), batch.seq_lens.tolist(), batch.num_tokens, batch.decode_threshold


def _count(seen, plan, batch):
    seen["served"] += 1
    for segment in plan.segments:
        seen[segment.name] += 1
    seen["padding rows"] += bool((batch.query_lens == 0).any())
    seen["padding tokens"] += batch.num_tokens > int(batch.query_start_loc[-1])
    seen["draft blocks"] += "decode" in plan.routes and plan.segments[0].max_query_len > 1
    seen["decodes alone"] += [segment.name for segment in plan.segments] == ["decode"]
    seen["not in order"] += plan.order is not None


def _rows(rng):
    """Mostly few; now and then enough for the routes that change with the number of rows."""
    return int(rng.integers(1, 25) if rng.random() < 0.9 else rng.integers(25, 90))


def _latent_batch(rng, threshold):
    """Rows of all kinds, or, in one batch of five, decodes alone: live rows, then a graph's padding."""
    if rng.random() < 0.8:
        return mla_batches.random_batch(rng, _rows(rng), threshold, 1_500)
    rows, length = _rows(rng), int(rng.integers(1, threshold + 1))
    padding = int(rng.integers(1, 9)) if rng.random() < 0.5 else 0
    query = np.array([length] * rows + [0] * padding)
    computed = np.append(rng.integers(1, 1_500, rows), np.zeros(padding, dtype=int))
    tokens = length * (rows + padding) if rng.random() < 0.7 else length * rows
    flags = np.zeros(rows + padding, dtype=bool)
    return Batch.from_lengths(
        query, query + computed, is_prefilling=flags, decode_threshold=threshold, num_tokens=tokens
    )


class Pairs:
    """A pair for each threshold, with synchronous scheduling (exact lengths) and without (decodes by bounds)."""

    def __init__(self, make, limits, environment, thresholds=THRESHOLDS, **settings):
        self._thresholds = thresholds
        self._made = {
            (threshold, synchronous): Pair(make, limits, environment, threshold, synchronous=synchronous, **settings)
            for threshold in thresholds
            for synchronous in (True, False)
        }

    def draw(self, rng, seen):
        """(pair, threshold): a third of the batches has bounds."""
        threshold, synchronous = int(rng.choice(self._thresholds)), bool(rng.random() < 2 / 3)
        seen["bounded"] += not synchronous
        return self._made[threshold, synchronous], threshold


def flash_attention(monkeypatch, setting, seed, batches):
    """Counts of what was seen; raises AssertionError at the first difference."""
    environment, limits = FA_SETTINGS[setting]
    builders.put_in_aiter(monkeypatch, environment.gfx, environment.num_cu)
    monkeypatch.setattr(fa_builder.upstream, "torch", fa_builder.TorchWithoutPinning())
    monkeypatch.setattr(
        fa_builder.upstream.rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: environment.shuffle_kv
    )
    pairs = Pairs(builders.fa, limits, environment)
    rng, seen = np.random.default_rng(seed), Counter()
    for number in range(batches):
        pair, threshold = pairs.draw(rng, seen)
        batch = fa_batches.random_batch(rng, _rows(rng), 6, threshold, 1_500)
        batch = fa_batches.ordered(rng, batch)
        pair.check(number, batch, lambda batch=batch: fa_builder.metadata_of(batch), seen)
    return seen


def latent_attention(monkeypatch, setting, seed, batches):
    """Counts of what was seen; raises AssertionError at the first difference."""
    environment, limits = MLA_SETTINGS[setting]
    limits = msgspec.structs.replace(limits, max_num_seqs=ROWS)
    mla_builder.install(monkeypatch, environment, mla_batches._schedule)
    builders.put_in_aiter(monkeypatch, environment.gfx, environment.num_cu)
    pairs = Pairs(builders.mla, limits, environment, rows=ROWS)
    rng, seen = np.random.default_rng(seed), Counter()
    for number in range(batches):
        pair, threshold = pairs.draw(rng, seen)
        batch = _latent_batch(rng, threshold)
        plan = pair.check(number, batch, lambda batch=batch: mla_builder.metadata_of(batch, environment), seen)
        if plan is None:
            continue
        seen["context"] += "prefill.chunked_context.starts" in plan
        if "decode" not in plan.routes:
            continue
        seen["decode on the host"] += 1
        if environment.full_graphs:
            _check_graph_buffers(pair, batch)
    return seen


def _check_graph_buffers(pair, batch):
    """What a replayed graph of any size reads: the whole of both buffers."""
    for name in ("qo_indptr", "paged_kv_indptr"):
        theirs, ours = getattr(pair.theirs, name), getattr(pair.ours, name)
        assert torch.equal(theirs, ours), (name, batch.query_lens, batch.seq_lens, batch.num_tokens)


def sharded_latent_attention(monkeypatch, setting, seed, batches):
    """Plans under decode context parallelism, which planned builders leave to vLLM, against what vLLM makes."""
    environment, limits = SHARDED_SETTINGS[setting]
    limits = msgspec.structs.replace(limits, max_num_seqs=ROWS)
    calls = mla_builder.install(monkeypatch, environment, mla_batches._schedule)
    planners = {t: Planner(mla_batches.BACKEND, environment, limits) for t in THRESHOLDS}
    made = {t: mla_builder.make_builder(limits, environment, t, ROWS) for t in THRESHOLDS}
    rng, seen = np.random.default_rng(seed), Counter()
    for number in range(batches):
        threshold = int(rng.integers(1, 5))
        batch = _latent_batch(rng, threshold)
        if not mla_batches.is_served(batch, environment):
            seen["refused: dcp"] += 1
            continue
        plan = planners[threshold].plan(batch)
        wrong = mla_batches.compare(plan, batch, made[threshold], calls, environment)
        assert not wrong, (_told(number, batch), wrong)
        _count(seen, plan, batch)
        seen["sharded context"] += "prefill.chunked_context.local_starts" in plan
    return seen


def triton_latent_attention(monkeypatch, setting, seed, batches):
    """Counts of what was seen; raises AssertionError at the first difference."""
    environment, limits = TRITON_MLA_SETTINGS[setting]
    limits = triton_mla_builder.limits_for(limits, ROWS)
    triton_mla_builder.install(monkeypatch)
    pairs = Pairs(triton_mla_builder.make_builder, limits, environment, triton_mla_builder.THRESHOLDS)
    rng, seen = np.random.default_rng(seed), Counter()
    for number in range(batches):
        pair, threshold = pairs.draw(rng, seen)
        batch = _latent_batch(rng, threshold)
        common = mla_builder.metadata_of(batch, environment)
        plan = pair.check(number, batch, lambda common=common: common, seen)
        if plan is not None:
            _check_decode(pair, plan, common)
            seen["context"] += "prefill.chunked_context.starts" in plan
    return seen


def _check_decode(pair, plan, common):
    """Decode fields are the engine's own tensors, and as many rows of them as the plan says."""
    if "decode" not in plan.routes:
        return
    made, rows = pair.made.decode, plan["decode.seq_lens"].shape[0]
    assert made.seq_lens.data_ptr() == common.seq_lens.data_ptr()
    assert made.block_table.data_ptr() == common.block_table_tensor.data_ptr()
    assert (len(made.seq_lens), len(made.block_table)) == (rows, rows)


SWEEPS = (
    *((flash_attention, name) for name in FA_SETTINGS),
    *((latent_attention, name) for name in MLA_SETTINGS),
    *((sharded_latent_attention, name) for name in SHARDED_SETTINGS),
    *((triton_latent_attention, name) for name in TRITON_MLA_SETTINGS),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first group of 1,000 batches")
    parser.add_argument("--only", help="this sweep alone, as triton_latent_attention")
    options = parser.parse_args()
    sweeps = [kept for kept in SWEEPS if options.only in (None, kept[0].__name__)]
    torch.set_num_threads(1)
    logging.getLogger("syncfree").setLevel(logging.ERROR)  # fallbacks are counted
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    began, done, total = time.monotonic(), 0, Counter()
    group = options.seed
    while done < options.batches and not stop:
        sweep, name = sweeps[group % len(sweeps)]
        with pytest.MonkeyPatch.context() as monkeypatch:
            total.update(sweep(monkeypatch, name, seed=10_000 + group, batches=GROUP))
        done, group = done + GROUP, group + 1
        if group % 5 == 0:
            print(f"{done} batches, next --seed {group}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    told = {"vllm": vllm.__version__, "batches": done, "next_seed": group, "mismatches": 0, "seen": total}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
