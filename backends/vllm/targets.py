"""What is wrapped in vLLM, and where: names as found in 0.26 and 0.32.

Model runner V1 is `vllm.v1.worker.gpu_model_runner` (the CPU runner inherits it), V2 `vllm.v1.worker.gpu.model_runner`.
Phases: `build` makes what the forward reads (inputs, slot mappings, attention metadata); `forward` runs the model, in
V1 with the logits (V2 computes them in `sample`); `sample` samples and drafts; `output` fetches what was sampled; the
rest of a step is `other`. Nothing is wrapped that torch.compile traces: a hook's state would become a guard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from .imports import Hook
from .mail import METHOD, exchange
from .watch import (
    wrap_allowed,
    wrap_context,
    wrap_execute,
    wrap_forward,
    wrap_output,
    wrap_phase,
    wrap_ready,
    wrap_sample,
)

Wrap = Callable[[Any], Any]


def _phase(name: str) -> Wrap:
    return lambda original: wrap_phase(original, name)


def _methods(cls: str, required: dict[str, Wrap], optional: dict[str, Wrap]) -> Hook:
    """Wrap methods of one class; those in `optional` may be missing in a vLLM that we were not tested on."""

    def hook(module: ModuleType) -> None:
        owner = getattr(module, cls)
        missing = [name for name in required if name not in owner.__dict__]
        if missing:
            raise AttributeError(f"{cls} has no {missing[0]}: this vLLM is not one that syncfree knows")
        for name, wrap in {**required, **optional}.items():
            original = owner.__dict__.get(name)
            if original is not None and not hasattr(original, "__syncfree__"):
                setattr(owner, name, wrap(original))

    return hook


def _function(name: str, wrap: Wrap, spread: bool = True) -> Hook:
    """Wrap a module's function; with `spread` also where other modules of vLLM imported it by name before us."""

    def hook(module: ModuleType) -> None:
        original = getattr(module, name)
        if hasattr(original, "__syncfree__"):
            return
        wrapped = wrap(original)
        setattr(module, name, wrapped)
        for other in list(sys.modules.values()) if spread else ():
            if getattr(other, "__name__", "").startswith("vllm.v1.worker.gpu") and vars(other).get(name) is original:
                setattr(other, name, wrapped)

    return hook


_OUTPUT = {"__init__": _phase("output"), "get_output": wrap_output}


def _outputs(*classes: str) -> Hook:
    hooks = [_methods(cls, {}, _OUTPUT) for cls in classes]

    def hook(module: ModuleType) -> None:
        for each, cls in zip(hooks, classes, strict=True):
            if hasattr(module, cls):
                each(module)

    return hook


def _allowed(module: ModuleType) -> None:
    original = getattr(module, "gpu_sync_allowed", None)
    if original is not None and not hasattr(original, "__syncfree__"):
        module.gpu_sync_allowed = wrap_allowed(original)  # type: ignore[attr-defined]


def _reachable(module: ModuleType) -> None:
    """A method that `collective_rpc` can call by its name; see endpoint.py."""
    setattr(module.WorkerBase, METHOD, exchange)


def _both(*hooks: Hook) -> Hook:
    def hook(module: ModuleType) -> None:
        for each in hooks:
            each(module)

    return hook


_runner_v1 = _methods(
    "GPUModelRunner",
    {"execute_model": wrap_execute, "sample_tokens": wrap_sample},
    {
        "initialize_kv_cache": wrap_ready,
        "_prepare_inputs": _phase("build"),
        "_get_slot_mappings": _phase("build"),
        "_build_attention_metadata": _phase("build"),
        "_model_forward": wrap_forward,
        "_bookkeeping_sync": _phase("output"),
        "_get_valid_sampled_token_count": _phase("output"),
    },
)
_runner_v2 = _methods(
    "GPUModelRunner",
    {"execute_model": wrap_execute, "sample_tokens": wrap_sample},
    {
        "initialize_kv_cache": wrap_ready,
        "prepare_inputs": _phase("build"),
        "prepare_attn": _phase("build"),
        "pool": wrap_sample,
    },
)
# Eager and piecewise forwards of V2 run inside this context, with no method of their own; a full graph has one.
_forward_v2 = _function("set_forward_context", lambda original: wrap_context(original, "forward"), spread=False)

# Where it is used outside code that torch.compile traces. Not in the sampler: there it looks at its caller's frame.
_ALLOWING = (
    "vllm.v1.worker.mamba_utils",
    "vllm.v1.attention.backends.utils",
    "vllm.v1.attention.backends.flashinfer",
    "vllm.v1.attention.backends.rocm_aiter_fa",
    "vllm.v1.attention.backends.mla.rocm_aiter_mla",
    "vllm.v1.attention.backends.mla.rocm_aiter_mla_sparse",
)

HOOKS: dict[str, Hook] = {
    "vllm.v1.worker.worker_base": _reachable,
    **dict.fromkeys(_ALLOWING, _allowed),
    "vllm.v1.worker.gpu_model_runner": _both(
        _runner_v1, _allowed, _outputs("AsyncGPUModelRunnerOutput", "AsyncGPUPoolingModelRunnerOutput")
    ),
    "vllm.v1.worker.gpu.model_runner": _both(_runner_v2, _forward_v2),
    "vllm.v1.worker.gpu.async_utils": _outputs("AsyncOutput", "AsyncPoolingOutput"),
    "vllm.v1.worker.gpu.attn_utils": _function("build_attn_metadata", _phase("build")),
    "vllm.v1.worker.gpu.cudagraph_utils": _methods("ModelCudaGraphManager", {}, {"run_fullgraph": _phase("forward")}),
}


def _wrapped() -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, original) of everything that is wrapped now."""
    for name, module in list(sys.modules.items()):
        if name not in HOOKS and not name.startswith("vllm.v1.worker.gpu"):
            continue
        classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name]
        for owner in (module, *classes):
            for attribute, value in list(vars(owner).items()):
                if getattr(value, "__syncfree__", False):
                    yield owner, attribute, value.__wrapped__


def hooked() -> bool:
    """Whether anything of vLLM is wrapped in this process."""
    return next(_wrapped(), None) is not None


def unhook() -> None:
    """Put every original back."""
    workers = getattr(sys.modules.get("vllm.v1.worker.worker_base"), "WorkerBase", None)
    if workers is not None and hasattr(workers, METHOD):
        delattr(workers, METHOD)
    for owner, attribute, original in _wrapped():
        setattr(owner, attribute, original)
