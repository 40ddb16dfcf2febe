"""Run a real in-process vLLM engine with the plugin: same answers as without it, steps as the builder sees them.

usage: plugin_steps.py MODEL_DIR NUM_BLOCKS   (prints one JSON object; needs the environment variables of the test)

vLLM is imported before the plugin is registered here, the other order of a server.
"""

import json
import sys

from live_steps import waves
from syncfree.backends.vllm import register, watch
from vllm import LLM, SamplingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

BUILT = []


def watch_builds():
    build = CPUAttentionMetadataBuilder.build

    def noted(self, common_prefix_len, common_attn_metadata, fast_build=False):
        m = common_attn_metadata
        context = m.seq_lens_cpu_upper_bound[: m.num_reqs] - m.query_start_loc_cpu.diff()
        BUILT.append((m.num_reqs, m.num_actual_tokens, bool((context > 0).any())))
        return build(self, common_prefix_len, common_attn_metadata, fast_build)

    CPUAttentionMetadataBuilder.build = noted


def answers(llm):
    """Fixed prompts, one after the other, so that no batch differs; the prefix cache is emptied first."""
    llm.reset_prefix_cache()
    found = []
    for prompt in ("hello there", "a b c d e f g h " * 60, "once upon a time " * 10, "x"):
        (output,) = llm.generate(
            [prompt], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True), use_tqdm=False
        )
        found.append(list(output.outputs[0].token_ids))
    return found


def recorded(run):
    """The steps that the plugin records while `run` runs."""
    recorder = watch.current().recorder
    session = recorder.start("auto")
    run()
    session.close()
    session.advance()
    recorder.detach(session)
    return session.recording


def main():
    model, blocks = sys.argv[1], int(sys.argv[2])
    llm = LLM(
        model,
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=256,
        max_num_seqs=64,
        enable_prefix_caching=True,
        disable_log_stats=True,
        num_gpu_blocks_override=blocks,
    )
    result = {"without": answers(llm), "without_again": answers(llm)}
    register()
    register()
    result["loaded"] = answers(llm)
    recording = []
    kept = recorded(lambda: recording.extend(answers(llm)))
    result["recording"], result["steps_of_answers"] = recording, len(kept.steps)

    watch_builds()

    def work():
        for wave in waves():
            params = [SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True) for _, tokens in wave]
            llm.generate([prompt for prompt, _ in wave], params, use_tqdm=False)

    steps = recorded(work).steps
    ours = [(s.num_reqs, s.num_tokens, s.batch_class != "causal_prefill" or s.mixed) for s in steps]
    result["built"], result["steps"] = len(BUILT), len(steps)
    result["different"] = [(i, a, b) for i, (a, b) in enumerate(zip(ours, BUILT, strict=False)) if a != b][:5]
    result["classes"] = sorted({s.batch_class for s in steps})
    result["phases"] = sorted({tuple(dict.fromkeys(p.name for p in s.phases)) for s in steps})
    result["notes"] = [note.text for note in kept.notes]
    result["switched_off"] = watch.switched_off()
    result["agent"] = {"listens": watch.current().agent.error is None, "path": str(watch.current().agent.path)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
