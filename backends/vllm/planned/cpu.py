"""vLLM's CPU_ATTN builder, so that `shadow` and `on` also run where there is no GPU."""

from __future__ import annotations

from typing import Any, ClassVar

from ....errors import BadInput
from ....planner.batch import Batch
from ....planner.environment import Environment, Limits
from ....planner.plan import MetadataPlan
from ... import cpu_attn
from .adapter import Unserved, common_environment, common_limits
from .staging import Staging


class CpuAttention:
    """See `adapter.Adapter`."""

    backend = cpu_attn.BACKEND
    needs_aiter = False
    rules: ClassVar[dict[str, str]] = {}

    def settings(self, builder: Any) -> tuple[Environment, Limits]:
        limits = Limits(
            **common_limits(builder),
            num_heads=int(builder.num_heads),
            num_kv_heads=int(builder.num_kv_heads),
            head_size=int(builder.head_dim),
            block_size=int(builder.block_size),
        )
        return Environment(**common_environment(builder)), limits

    def prepare(self, builder: Any, environment: Environment) -> None:
        del environment
        if getattr(builder, "is_encoder_only_attention", False) or getattr(builder, "is_cross_attention", False):
            raise BadInput("attention: expected a decoder's own, got an encoder's or one across to an encoder")

    def read(self, metadata: Any, name: str) -> Any:
        last = name.partition(".")[2]
        if last == "row_causal":
            return getattr(metadata, "dynamic_causal", None)
        return getattr(metadata, last, None)

    def materialise(
        self, builder: Any, plan: MetadataPlan, batch: Batch, common: Any, staging: Staging, environment: Environment
    ) -> Any:
        """vLLM's scheduling for its CPU kernel stays; the lengths come from the staged copy."""
        del environment
        if not isinstance(common.causal, bool):
            raise Unserved
        tensors = staging.upload(plan.host_arrays())
        metadata = builder._upstream_build(0, common, False)
        metadata.num_actual_tokens = plan.num_tokens
        metadata.query_start_loc = tensors["common.query_start_loc"]
        metadata.seq_lens = tensors["common.seq_lens"]
        return metadata
