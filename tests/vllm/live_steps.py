"""Run a real in-process vLLM engine and compare every step's batch with what its metadata builder was given.

usage: live_steps.py MODEL_DIR NUM_BLOCKS   (prints one JSON object; needs the environment variables of the test)
"""

import collections
import json
import random
import sys

from syncfree.planner import Batch, PrefillTable, classify
from vllm import LLM, SamplingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

TABLE = PrefillTable(steps_in_flight=0)  # the CPU platform turns asynchronous scheduling off
SEEN = collections.Counter()
CLASSES = collections.Counter()
DIFFERENCES = []
PENDING = []


def watch_steps():
    execute = GPUModelRunner.execute_model

    def execute_model(self, scheduler_output, *args, **kwargs):
        batch = Batch.from_vllm_scheduler(scheduler_output, TABLE)
        if len(batch):
            SEEN["steps"] += 1
            SEEN["resumed"] += len(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
            SEEN["prefix_hits"] += sum(r.num_computed_tokens > 0 for r in scheduler_output.scheduled_new_reqs)
            CLASSES[str(classify(batch).batch_class)] += 1
            PENDING[:] = [(self, batch)]
        return execute(self, scheduler_output, *args, **kwargs)

    GPUModelRunner.execute_model = execute_model


def watch_builds():
    build = CPUAttentionMetadataBuilder.build

    def checked(self, common_prefix_len, common_attn_metadata, fast_build=False):
        if PENDING:
            compare(*PENDING.pop(), Batch.from_vllm_metadata(common_attn_metadata))
        return build(self, common_prefix_len, common_attn_metadata, fast_build)

    CPUAttentionMetadataBuilder.build = checked


def compare(runner, step, built):
    """Row by row, in the runner's order: tokens, context and prefill flag; then the sums and the class."""
    place = {req_id: i for i, req_id in enumerate(step.req_ids)}
    ours = step.take([place[req_id] for req_id in runner.input_batch.req_ids])
    pairs = {
        "query_lens": (ours.query_lens, built.query_lens),
        "seq_lens": (ours.seq_lens, built.seq_lens),
        "has_context": (ours.computed_lens > 0, built.computed_lens > 0),
        "is_prefilling": (ours.is_prefilling, built.is_prefilling),
    }
    wrong = [name for name, (a, b) in pairs.items() if a.tolist() != b.tolist()]
    if (len(ours), ours.num_tokens) != (len(built), built.num_tokens):
        wrong.append("counts")
    if ours.segments("three") != built.segments("three") or ours.segments("two") != built.segments("two"):
        wrong.append("segments")
    SEEN["compared"] += 1
    SEEN["chunked_rows"] += sum(kind == "chunked_prefill" for kind in classify(ours).rows)
    if wrong and len(DIFFERENCES) < 5:
        DIFFERENCES.append({"step": SEEN["compared"], "wrong": wrong, "ours": repr(ours), "built": repr(built)})
    SEEN["different"] += bool(wrong)


def waves():
    """Prompts with output lengths: a mix that runs the cache out of blocks; prefix hits beside decodes; prompts."""
    rng = random.Random(0)
    letters = "abcdefgh "

    def text(n):
        return "".join(rng.choice(letters) for _ in range(n))

    prefix = text(768)
    mixed = []
    for i in range(120):
        kind = i % 4
        prompt = (prefix if kind == 2 else "") + text((20, 1200, 0, 16)[kind] + rng.randint(1, 30))
        mixed.append((prompt, (4, 4, 4, 220)[kind]))
    yield mixed
    yield [(prefix + text(rng.randint(1, 30)), 2 + 6 * i) for i in range(40)]
    yield [(text(rng.randint(1, 40)), 3) for _ in range(12)]
    yield [(text(8), 300)]  # the scheduler reports the end of a request one step later


def main():
    model, blocks = sys.argv[1], int(sys.argv[2])
    watch_steps()
    watch_builds()
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
    TABLE.__init__(steps_in_flight=0)
    for wave in waves():
        params = [SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True) for _, tokens in wave]
        llm.generate([prompt for prompt, _ in wave], params, use_tqdm=False)
    print(json.dumps({"seen": SEEN, "classes": CLASSES, "differences": DIFFERENCES, "left": len(TABLE)}))


if __name__ == "__main__":
    main()
