"""What all MLA metadata of vLLM's have in common: the whole, and its prefill part."""

from __future__ import annotations

import sys
from typing import Any

from ....errors import BadInput
from ....planner.environment import Environment
from ....planner.plan import MetadataPlan
from . import mla_context
from .adapter import field_names

# Prefill backends of vLLM's that are handed lengths on the host, which no plan makes, or wait for them.
READS_HOST_LENGTHS = ("trtllm", "tokenspeed", "flashinfer")


def check_prefill_backend(builder: Any) -> None:
    """Refuse (`BadInput`) a builder whose prefills read lengths on the host."""
    backend = type(builder._prefill_backend).__name__.lower()
    if any(name in backend for name in READS_HOST_LENGTHS):
        raise BadInput(f"prefill backend: expected one that reads no host lengths, got {backend}")


def whole(
    builder: Any, plan: MetadataPlan, common: Any, decodes: tuple[int, int], prefills: int, prefill: Any, decode: Any
) -> Any:
    """vLLM's metadata object. `decodes`: rows and tokens."""
    known = field_names(builder.metadata_cls)
    values = {
        "num_reqs": common.num_reqs,
        "max_query_len": common.max_query_len,
        "max_seq_len": common.max_seq_len,
        "num_actual_tokens": plan.num_tokens,
        "query_start_loc": common.query_start_loc,
        "slot_mapping": common.slot_mapping,
        "head_dim": builder.model_config.get_head_size(),
        "num_decodes": decodes[0],
        "num_decode_tokens": decodes[1],
        "num_prefills": prefills,
        "causal": True,
        "prefill": prefill,
        "decode": decode,
    }
    return builder.metadata_cls(**{name: value for name, value in values.items() if name in known})


def prefill(
    builder: Any, plan: MetadataPlan, common: Any, tensors: dict[str, Any], start: int, environment: Environment
) -> Any:
    """vLLM's `MLACommonPrefillMetadata` of the rows from `start` on."""
    module = sys.modules[builder.upstream.__mro__[1].__module__]  # where the common builder is
    cls = module.MLACommonPrefillMetadata
    made = cls(
        block_table=common.block_table_tensor[start:],
        query_start_loc=tensors["prefill.query_start_loc"],
        max_query_len=plan["prefill.max_query_len"].value,
        chunked_context=mla_context.make(cls, builder, plan, tensors, environment),
        output_dtype=builder.model_config.dtype,
        q_data_type=builder.q_data_type,
        prefill_backend=builder._prefill_backend,
    )
    builder._prefill_backend.prepare_metadata(made)
    return made


def read_prefill(metadata: Any, name: str) -> Any:
    """vLLM's value of `prefill.<name>`."""
    if name.startswith("chunked_context."):
        context = getattr(metadata.prefill, "chunked_context", None)
        return None if context is None else mla_context.read(context, name.partition(".")[2])
    return getattr(metadata.prefill, name, None)
