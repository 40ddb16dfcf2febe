"""What the planner has to know about one of vLLM's builders, and the checks before it plans for one."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from ....errors import BadInput
from ....planner.backend import Backend
from ....planner.batch import Batch
from ....planner.environment import VLLM_RELEASES, Environment, Limits, read_version
from ....planner.plan import MetadataPlan
from .staging import Staging


class Unserved(Exception):
    """This step is left to vLLM on purpose: nothing went wrong, nothing is logged."""


class Adapter(Protocol):
    """Between one builder class of vLLM and one declared backend."""

    backend: Backend
    needs_aiter: bool
    rules: ClassVar[dict[str, str]]  # fields whose planned value need not be equal: see `compare`

    def settings(self, builder: Any) -> tuple[Environment, Limits]:
        """Where this builder's plans run, from what its `__init__` read from vLLM's configuration."""
        ...

    def read(self, metadata: Any, name: str) -> Any:
        """vLLM's value of a planned field; `NotImplemented` where it keeps none under a name."""
        ...

    def prepare(self, builder: Any, environment: Environment) -> None:
        """Refuse (`BadInput`) a builder that cannot be served, once."""
        ...

    def materialise(
        self, builder: Any, plan: MetadataPlan, batch: Batch, common: Any, staging: Staging, environment: Environment
    ) -> Any:
        """vLLM's own metadata object, made from the plan. May raise `Unserved` or anything else: vLLM serves then."""
        ...


def installed_release() -> str:
    """Major.minor of the vLLM in this process. Raises `BadInput` for one whose builders no plan was compared with."""
    version = str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))
    major, minor, _ = read_version("vllm", version)
    if (major, minor) not in VLLM_RELEASES:
        known = " or ".join(f"{a}.{b}" for a, b in VLLM_RELEASES)
        raise BadInput(f"vllm: expected {known}, whose builders the plans were compared with, got {version}")
    return f"{major}.{minor}"


def require_aiter() -> None:
    """Raises `BadInput` where aiter cannot be imported."""
    if "aiter" not in sys.modules and importlib.util.find_spec("aiter") is None:
        raise BadInput("aiter: expected it installed beside vLLM, found none")


def first(*getters: Callable[[], Any]) -> Any:
    """The first of these that does not fail on a missing attribute; None if all do."""
    for getter in getters:
        try:
            return getter()
        except AttributeError:
            continue
    return None


@functools.cache  # asked in every step
def field_names(cls: Any) -> frozenset[str]:
    """Fields of one of vLLM's metadata dataclasses, which differ by release."""
    return frozenset(field.name for field in dataclasses.fields(cls))


def dtype_name(dtype: Any) -> str:
    """The planner's name of a torch dtype. Raises `BadInput`."""
    known = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
    if str(dtype) not in known:
        raise BadInput(f"dtype: expected bfloat16 or float16, got {dtype}")
    return known[str(dtype)]


def cache_dtype_name(cache_dtype: str, model: str) -> str:
    """The planner's name of vLLM's `cache_dtype`. Raises `BadInput`."""
    if cache_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        return "fp8"
    named = {"auto": model, "bfloat16": "bf16", "float16": "fp16"}
    if cache_dtype not in named:
        raise BadInput(f"cache_dtype: expected auto, bfloat16, float16 or fp8, got {cache_dtype}")
    return named[cache_dtype]


def card() -> dict[str, Any]:
    """gfx target and compute units of the card in use; empty where it is no AMD card."""
    import torch

    if torch.version.hip is None or not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"gfx": properties.gcnArchName.split(":")[0], "num_cu": int(properties.multi_processor_count)}


def aiter_version() -> str | None:
    """aiter's version where its package tells one; None (the newest known) where it does not."""
    from importlib.metadata import PackageNotFoundError, version

    for name in ("amd-aiter", "aiter"):
        try:
            found = version(name)
            read_version("aiter", found)
        except (PackageNotFoundError, BadInput):
            continue
        return found
    return None


def common_environment(builder: Any) -> dict[str, Any]:
    """What every builder's environment has from vLLM's configuration."""
    config = builder.vllm_config
    dtype = dtype_name(config.model_config.dtype)
    return {
        **card(),
        "vllm": installed_release(),
        "aiter": aiter_version(),
        "dtype": dtype,
        "kv_dtype": cache_dtype_name(str(config.cache_config.cache_dtype), dtype),
        "full_graphs": bool(config.compilation_config.cudagraph_mode.has_full_cudagraphs()),
        "dcp_world_size": int(config.parallel_config.decode_context_parallel_size),
    }


def common_limits(builder: Any) -> dict[str, Any]:
    """What every builder's limits have from vLLM's configuration."""
    config = builder.vllm_config
    sizes = first(lambda: config.compilation_config.cudagraph_capture_sizes)
    return {
        "max_num_seqs": int(config.scheduler_config.max_num_seqs),
        "max_num_batched_tokens": int(config.scheduler_config.max_num_batched_tokens),
        "graph_sizes": tuple(sizes) if sizes else None,
    }


def drafts_in_flight(builder: Any) -> int | None:
    """Drafts that may be rejected after the host wrote its lengths: 0 where scheduling is synchronous."""
    scheduler = first(lambda: builder.vllm_config.scheduler_config)
    return None if getattr(scheduler, "async_scheduling", True) else 0
