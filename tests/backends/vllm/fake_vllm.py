"""Makes modules with the names and shapes of vLLM's that the plugin wraps: `install()`, then import as from vLLM."""

import sys
from types import ModuleType, SimpleNamespace


class Cached(SimpleNamespace):
    def __init__(self, **rows):
        super().__init__(
            req_ids=list(rows), num_computed_tokens=list(rows.values()), resumed_req_ids=set(), num_output_tokens=[]
        )


def schedule(tokens, new=(), cached=None, finished=()):
    """A `SchedulerOutput`. `tokens`: request -> tokens; `new`: (request, prompt length, computed) each."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r, prompt_len=p, num_computed_tokens=c, prefill_token_ids=None) for r, p, c in new
        ],
        scheduled_cached_reqs=Cached(**(cached or {})),
        num_scheduled_tokens=dict(tokens),
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens={},
        finished_req_ids=set(finished),
    )


RUNNER_V1 = """
from contextlib import nullcontext


def gpu_sync_allowed(first_only=False):
    return nullcontext()


class AsyncGPUModelRunnerOutput:
    def __init__(self):
        pass

    def get_output(self):
        return "tokens"


class GPUModelRunner:
    def __init__(self):
        self.state = None
        self.fail = None
        self.asynchronous = False

    def initialize_kv_cache(self, config):
        return "cache"

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        if self.fail:
            raise self.fail
        if not scheduler_output.total_num_scheduled_tokens:
            return "empty"
        self._prepare_inputs()
        self._build_attention_metadata()
        self._model_forward()
        self.state = scheduler_output
        return None

    def sample_tokens(self, grammar_output):
        self.state = None
        self._bookkeeping_sync()
        return AsyncGPUModelRunnerOutput() if self.asynchronous else "tokens"

    def _prepare_inputs(self):
        pass

    def _build_attention_metadata(self):
        pass

    def _model_forward(self):
        pass

    def _bookkeeping_sync(self):
        with gpu_sync_allowed():
            self.fetch()

    def fetch(self):
        pass
"""

RUNNER_V2 = """
from contextlib import contextmanager
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.async_utils import AsyncOutput


@contextmanager
def set_forward_context():
    yield "context"


class GPUModelRunner:
    decode_query_len = 3

    def initialize_kv_cache(self, config):
        return "cache"

    def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False):
        if not dummy_run:
            self.prepare_inputs()
        build_attn_metadata()
        with set_forward_context() as context:
            assert context == "context"
        return None

    def sample_tokens(self, grammar_output):
        return AsyncOutput()

    def prepare_inputs(self):
        pass
"""

ATTENTION = "def build_attn_metadata():\n    return 'metadata'\n"
ASYNC = (
    "class AsyncOutput:\n    def __init__(self):\n        pass\n    def get_output(self):\n        return 'tokens'\n"
)

SOURCES = {
    "vllm": "__version__ = '0.32.0'\n",
    "vllm.v1": "",
    "vllm.v1.worker": "",
    "vllm.v1.worker.gpu": "",
    "vllm.v1.worker.gpu_model_runner": RUNNER_V1,
    "vllm.v1.worker.gpu.attn_utils": ATTENTION,
    "vllm.v1.worker.gpu.async_utils": ASYNC,
    "vllm.v1.worker.gpu.model_runner": RUNNER_V2,
}


def install(**changed):
    """Put the modules into `sys.modules`, each before those that import it. `changed`: other sources by last name."""
    for name, source in SOURCES.items():
        module = ModuleType(name)
        sys.modules[name] = module
        exec(changed.get(name.rsplit(".", 1)[-1], source), vars(module))
