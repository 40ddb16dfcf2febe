"""vLLM's TRITON_MLA builder: its decodes are the engine's own tensors, its prefills come from one staged copy."""

from __future__ import annotations

from typing import Any, ClassVar

from ....errors import BadInput
from ....planner.batch import Batch
from ....planner.environment import Environment, Limits
from ....planner.plan import MetadataPlan
from ... import mla_triton
from . import mla_metadata
from .adapter import common_environment, common_limits
from .mla_decode_build import upstream_decode
from .staging import Staging


class TritonLatentAttention:
    """See `adapter.Adapter`."""

    backend = mla_triton.BACKEND
    needs_aiter = False
    rules: ClassVar[dict[str, str]] = {}

    def settings(self, builder: Any) -> tuple[Environment, Limits]:
        limits = Limits(
            **common_limits(builder),
            num_heads=int(builder.num_heads),
            num_kv_heads=1,
            block_size=int(builder.page_size),
            workspace_tokens=int(builder.chunked_prefill_workspace_size),
        )
        return Environment(**common_environment(builder)), limits

    def prepare(self, builder: Any, environment: Environment) -> None:
        del environment
        if builder.q_data_type != builder.model_config.dtype:
            raise BadInput(f"q_data_type: expected that of the model, got {builder.q_data_type}")
        mla_metadata.check_prefill_backend(builder)

    def read(self, metadata: Any, name: str) -> Any:
        part, _, rest = name.partition(".")
        if part == "common":
            value = getattr(metadata, rest, None)
            return NotImplemented if value is None and rest == "causal" else value
        if part == "decode":
            return getattr(metadata.decode, rest, None)
        return mla_metadata.read_prefill(metadata, rest)

    def materialise(
        self, builder: Any, plan: MetadataPlan, batch: Batch, common: Any, staging: Staging, environment: Environment
    ) -> Any:
        del batch
        tensors = staging.upload(plan.host_arrays())
        segments = {s.name: (s.rows[1] - s.rows[0], s.tokens[1] - s.tokens[0]) for s in plan.segments}
        decodes, prefills = segments.get("decode", (0, 0)), segments.get("prefill", (0, 0))
        decode = upstream_decode(builder, common, *decodes) if decodes[0] else None
        prefill = None
        if prefills[0]:
            prefill = mla_metadata.prefill(builder, plan, common, tensors, decodes[0], environment)
        return mla_metadata.whole(builder, plan, common, decodes, prefills[0], prefill, decode)
