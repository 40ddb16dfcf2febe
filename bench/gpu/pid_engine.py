"""A vLLM engine that serves itself, with nothing of syncfree in it: what `pid_vllm.py` attaches to.

    python3 bench/gpu/pid_engine.py MODEL_DIR [--tp 2] [--seed N] [--cpu] [--driver LIB]

Steps without an end on requests of its own: short prompts, prompts past the token budget, prefix hits, decodes. Of each
step it keeps when it began, how long it took, and, in the scheduler's own words, its batch class, requests and tokens.
Prints `ready` once it is warm; each file name on its standard input gets the steps since the last one; it ends with it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import queue
import random
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_settings import ENGINE, ON_GPU, VARIABLES

SETTINGS = VARIABLES | {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # no NVLink multicast, by whatever way: it can take a shared host's GPUs out of service
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
WARM_STEPS = 300
KEEP = 200_000


def build(options: argparse.Namespace):
    os.environ.update(SETTINGS)
    from vllm import LLM

    about: dict[str, object] = dict(ENGINE)
    if not options.cpu:
        import vllm.v1.worker.gpu_worker as worker

        worker.kernel_warmup = lambda *a, **k: None  # imports every model's, which needs compiled ops left out here
        about |= {**ON_GPU, "async_scheduling": False, "attention_config": {"backend": "TRITON_ATTN"}}
    if options.tp > 1:
        about |= {
            "tensor_parallel_size": options.tp,
            "distributed_executor_backend": "mp",
            "disable_custom_all_reduce": True,
        }
    return LLM(model=str(options.model), **about).llm_engine


class Book:
    """What the engine itself knows of its steps; wraps its executor's `execute_model`, as any engine could."""

    def __init__(self, core) -> None:
        self.steps: list[dict[str, object]] = []
        self.about: dict[str, object] | None = None
        self.prompts: dict[str, tuple[int, int]] = {}  # request -> prompt length, computed when it was admitted
        execute = core.model_executor.execute_model

        def execute_model(scheduled, *args, **kwargs):
            self.about = self.read(scheduled)
            return execute(scheduled, *args, **kwargs)

        core.model_executor.execute_model = execute_model

    def read(self, scheduled) -> dict[str, object] | None:
        computed: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            self.prompts[new.req_id] = (len(new.prompt_token_ids), new.num_computed_tokens)
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        tokens = scheduled.num_scheduled_tokens
        if not scheduled.total_num_scheduled_tokens:
            return None
        kinds = {self.kind(name, tokens[name], computed[name]) for name in tokens}
        order = ("chunked_prefill", "extend", "causal_prefill", "decode")
        return {
            "class": next(kind for kind in order if kind in kinds),
            "reqs": len(tokens),
            "tokens": scheduled.total_num_scheduled_tokens,
        }

    def kind(self, name: str, query: int, computed: int) -> str:
        prompt, at_first = self.prompts[name]
        if computed == 0:
            return "causal_prefill"
        if computed >= prompt:
            return "decode"
        return "extend" if computed == at_first and computed + query >= prompt else "chunked_prefill"

    def note(self, began: float, ended: float) -> None:
        about, self.about = self.about, None
        if about is not None and len(self.steps) < KEEP:
            self.steps.append({"at": began, "ms": (ended - began) * 1e3, **about})


class Load:
    """Requests without end, no two of the same length in a row."""

    def __init__(self, engine, model: Path, seed: int) -> None:
        self.engine, self.count = engine, 0
        self.random = random.Random(seed)
        self.words = json.loads((model / "config.json").read_text())["vocab_size"] - 3
        self.prefix = [(5 * i) % self.words + 3 for i in range(512)]

    def add(self) -> None:
        from vllm import SamplingParams

        self.count += 1
        kind = self.count % 4
        length = (24, 600, 40, 12)[kind] + self.random.randrange(12)
        own = [self.random.randrange(self.words) + 3 for _ in range(length)]  # never seen before: no other prefix hits
        prompt = self.prefix + own if kind == 2 else own
        params = SamplingParams(
            max_tokens=self.random.randrange(6, 14), ignore_eos=True, detokenize=False, temperature=0.0
        )
        self.engine.add_request(f"r{self.count}", {"prompt_token_ids": prompt}, params)

    def feed(self) -> None:
        waiting = self.engine.get_num_unfinished_requests()
        if waiting < 2 or (waiting < 6 and self.random.random() < 0.2):
            self.add()


def pretend(path: str):
    """Calls of a driver that does nothing, one launch and one waiting copy a step: where there is no GPU."""
    import torch
    import torch.profiler

    real, cpu = torch.profiler.profile, [torch.profiler.ProfilerActivity.CPU]
    torch.profiler.profile = lambda activities, **more: real(activities=cpu, **more)
    driver = ctypes.CDLL(path)
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_name = lambda *args: "a driver that does nothing"
    torch.cuda.synchronize = lambda *args: None

    def calls(*args: object) -> None:
        driver.cuLaunchKernel(*[ctypes.c_long(1)] * 11)
        driver.cuMemcpyDtoHAsync_v2(*map(ctypes.c_long, (0x2000, 0x1000, 64, 7)))
        driver.cuStreamSynchronize(ctypes.c_long(7))

    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--driver", help="a library to make driver calls in, before each forward")
    options = parser.parse_args()
    began = time.monotonic()
    engine = build(options)
    core = engine.engine_core.engine_core
    book, load = Book(core), Load(engine, options.model, options.seed)
    if options.driver and options.tp == 1:  # other ranks are processes of their own
        runner = core.model_executor.driver_worker.worker.model_runner
        runner.model.register_forward_pre_hook(pretend(options.driver))
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: [*map(asked.put, sys.stdin), asked.put("")], daemon=True).start()
    count = 0
    while True:
        load.feed()
        before = time.monotonic()
        engine.step()
        book.note(before, time.monotonic())
        count += 1
        if count == WARM_STEPS:
            found = importlib.util.find_spec("syncfree")
            print("ready", json.dumps(about_us(time.monotonic() - began, found is not None)), flush=True)
        if not asked.empty():
            line = asked.get().strip()
            if not line:
                break
            fresh, book.steps = book.steps, []
            Path(line).write_text(json.dumps(fresh))
            print("written", flush=True)
    engine.engine_core.shutdown()
    os._exit(0)


def about_us(seconds: float, prepared: bool) -> dict[str, object]:
    import torch
    import vllm

    return {
        "up_s": round(seconds, 1),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": torch.cuda.get_device_name(0) if torch.version.cuda and torch.cuda.is_available() else "cpu",
        "syncfree_installed": prepared,
        "syncfree_variables": sorted(name for name in os.environ if name.startswith("SYNCFREE")),
        "syncfree_loaded": sorted(name for name in sys.modules if name.split(".")[0] == "syncfree"),
    }


if __name__ == "__main__":
    main()
