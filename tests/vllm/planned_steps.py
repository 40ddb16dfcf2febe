"""Run a real in-process vLLM engine under `SYNCFREE_PLANNER`, with the plugin registered first as in a server.

usage: planned_steps.py MODEL_DIR NUM_BLOCKS [--rounds N] [--waves N] [--aiter] [--triton-mla] [--wrong-lengths]
    [--inspect]   (prints one JSON object)

All requests of a wave are queued at its start: long prompts that are cut, prompts with a common prefix, and more
decodes than the cache holds, so that some are preempted and resumed. `--aiter` also hands every step to vLLM's AITER
builders and compares the plans with what they make. `--triton-mla`, for a model with latent attention, has TRITON_MLA's
builder make the metadata that vLLM's CPU kernels read. `--wrong-lengths` has every planned decode miss its newest
token: tokens have to change. `--inspect` records a few steps through the agent.
"""

import argparse
import hashlib
import itertools
import json
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench" / "gpu"))
import controls
from syncfree.backends.vllm import register

register()

from syncfree.backends.vllm import watch  # noqa: E402
from syncfree.backends.vllm.planned.tally import TALLY  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: E402

SEEN = Counter()


def watch_steps():
    execute = GPUModelRunner.execute_model

    def execute_model(self, scheduler_output, *args, **kwargs):
        if scheduler_output.total_num_scheduled_tokens:
            SEEN["steps"] += 1
            cached = scheduler_output.scheduled_cached_reqs
            SEEN["resumed"] += len(cached.resumed_req_ids)
            SEEN["preempted"] += len(scheduler_output.preempted_req_ids or ())
            SEEN["prefix_hits"] += sum(r.num_computed_tokens > 0 for r in scheduler_output.scheduled_new_reqs)
            tokens = scheduler_output.num_scheduled_tokens
            ongoing = zip(cached.req_ids, cached.num_output_tokens, strict=True)
            SEEN["chunks"] += sum(not output and tokens[req_id] > 1 for req_id, output in ongoing)
        return execute(self, scheduler_output, *args, **kwargs)

    GPUModelRunner.execute_model = execute_model


def waves(rounds):
    """Prompts with output lengths."""
    for turn in range(rounds):
        rng = random.Random(turn)
        prefix = "".join(rng.choice("abcdefgh ") for _ in range(768))

        def text(n, rng=rng):
            return "".join(rng.choice("abcdefgh ") for _ in range(n))

        mixed = []
        for i in range(120):
            kind = i % 4
            prompt = (prefix if kind == 2 else "") + text((20, 1200, 0, 16)[kind] + rng.randint(1, 30))
            mixed.append((prompt, (4, 4, 4, 220)[kind]))
        yield mixed
        yield [(prefix + text(rng.randint(1, 30)), 2 + 6 * i) for i in range(40)]
        yield [(text(rng.randint(1, 40)), 3) for _ in range(12)]


class AiterShadows:
    """vLLM's own AITER builders beside the engine's, in shadow: the plans for them on a real scheduler's steps."""

    def __init__(self):
        import planned_builders as builders
        import pytest
        from planned_sweep import fa_builder, mla_batches, mla_builder
        from syncfree.planner import Environment, Limits

        self.tallies = {}
        patches = pytest.MonkeyPatch()
        environment = Environment()
        mla_builder.install(patches, environment, mla_batches._schedule)
        builders.put_in_aiter(patches, environment.gfx, environment.num_cu)
        patches.setattr(fa_builder.upstream, "torch", fa_builder.TorchWithoutPinning())
        limits = Limits(max_num_seqs=1024, max_num_batched_tokens=4096, num_kv_heads=2, block_size=32)
        latent = Limits(max_num_seqs=1024, max_num_batched_tokens=4096, workspace_tokens=1024, block_size=32)
        self.shadows = []
        for make, sizes in ((builders.fa, limits), (builders.mla, latent)):
            tally = self.tallies[make.__name__] = builders.tally_of("shadow")
            self.shadows.append(builders.planned(make, sizes, environment, 1, tally))

    def watch_builds(self):
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

        build = CPUAttentionMetadataBuilder.build

        def shadowed(builder, common_prefix_len, common_attn_metadata, fast_build=False):
            for shadow in self.shadows:
                shadow.build(0, self.ordered(common_attn_metadata))
            return build(builder, common_prefix_len, common_attn_metadata, fast_build)

        CPUAttentionMetadataBuilder.build = shadowed

    @staticmethod
    def ordered(common):
        """The rows as a runner of these builders orders them; the CPU's does not."""
        import fa_builder
        from syncfree.planner import Batch, classify

        batch = Batch.from_vllm_metadata(common)
        order = classify(batch).order
        return common if order is None else fa_builder.metadata_of(batch.take(order))

    def figures(self):
        return {
            name: {
                "compared": tally.compared,
                "mismatches": tally.mismatches,
                "first": tally.first_mismatch,
                "fallbacks": tally.fallbacks,
            }
            for name, tally in self.tallies.items()
        }


def build_by_triton_mla():
    """CPU_MLA with the builder of TRITON_MLA: metadata of one class, so that the CPU's kernels read what it makes.

    vLLM turns chunking and prefix hits off for latent attention on the CPU, though its kernels gather contexts.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

    CPUMLABackend.get_builder_cls = staticmethod(TritonMLABackend.get_builder_cls)
    platform = type(current_platform)
    check = platform.check_and_update_config.__func__

    def check_and_update_config(cls, config):
        scheduler, cache = config.scheduler_config, config.cache_config
        asked = (scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching)
        check(cls, config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching = asked

    platform.check_and_update_config = classmethod(check_and_update_config)
    return {"attention_config": {"backend": "CPU_MLA"}}


def inspected(run):
    """The planner's part of the report of what runs meanwhile."""
    recorder = watch.current().recorder
    session = recorder.start("auto")
    run()
    session.close()
    session.advance()
    recorder.detach(session)
    report = session.recording.build()
    figures = report.planner
    return {
        "mode": figures.mode,
        "mismatches": figures.mismatches,
        "unread": figures.unread,
        "first_mismatch": figures.first_mismatch,
        "steps": len(report.steps),
        "notes": [note.text for note in report.notes if note.kind == "planner"],
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("blocks", type=int)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--aiter", action="store_true")
    parser.add_argument("--waves", type=int, default=None, help="no more than so many")
    parser.add_argument("--wrong-lengths", action="store_true")
    parser.add_argument("--triton-mla", action="store_true")
    parser.add_argument("--inspect", action="store_true")
    options = parser.parse_args()
    watch_steps()
    controls.weights_that_matter()
    if options.wrong_lengths:
        controls.wrong_lengths()
    aiter = AiterShadows() if options.aiter else None
    more = build_by_triton_mla() if options.triton_mla else {}
    llm = LLM(
        options.model,
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=256,
        max_num_seqs=64,
        enable_prefix_caching=True,
        disable_log_stats=True,
        num_gpu_blocks_override=options.blocks,
        **more,
    )
    if aiter is not None:
        aiter.watch_builds()
    tokens, by_wave, last = hashlib.sha256(), [], set()

    def run(wave):
        params = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for _, count in wave]
        for output in llm.generate([prompt for prompt, _ in wave], params, use_tqdm=False):
            told = list(output.outputs[0].token_ids)
            last.add(told[-1])
            tokens.update(str(told).encode())

    for wave in itertools.islice(waves(options.rounds), options.waves):
        run(wave)
        by_wave.append(tokens.hexdigest())
    result = {
        "mode": TALLY.mode,
        "tokens": tokens.hexdigest(),
        "by_wave": by_wave,
        "different_last_tokens": len(last),
        "seen": dict(SEEN),
        "planned": TALLY.planned,
        "compared": TALLY.compared,
        "mismatches": TALLY.mismatches,
        "first_mismatch": TALLY.first_mismatch,
        "fallbacks": TALLY.fallbacks,
        "aiter": None if aiter is None else aiter.figures(),
        "report": inspected(lambda: run([("x" * 40, 12)])) if options.inspect else None,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
