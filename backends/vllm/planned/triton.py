"""vLLM's TRITON_ATTN builder: it only hands on what the runner made, so the plan's part is the host's numbers."""

from __future__ import annotations

from typing import Any, ClassVar

from ....errors import BadInput
from ....planner.batch import Batch
from ....planner.environment import Environment, Limits
from ....planner.plan import MetadataPlan
from ... import triton
from .adapter import Unserved, common_environment, common_limits
from .staging import Staging


class TritonAttention:
    """See `adapter.Adapter`."""

    backend = triton.BACKEND
    needs_aiter = False
    rules: ClassVar[dict[str, str]] = {}

    def settings(self, builder: Any) -> tuple[Environment, Limits]:
        limits = Limits(
            **common_limits(builder),
            num_heads=int(builder.num_heads_q),
            num_kv_heads=int(builder.num_heads_kv),
            head_size=int(builder.headdim),
            block_size=int(builder.block_size),
        )
        return Environment(**common_environment(builder)), limits

    def prepare(self, builder: Any, environment: Environment) -> None:
        del environment
        if getattr(builder, "max_seqs_64_segments", 0):
            raise BadInput("softmax segments: expected 16 in every batch, this device also uses 64")
        if getattr(builder, "rswa_window", None) is not None:
            raise BadInput("rswa_window: expected none")

    def read(self, metadata: Any, name: str) -> Any:
        last = name.partition(".")[2]
        if last == "row_causal":
            return metadata.causal if not isinstance(metadata.causal, bool) else None
        value = getattr(metadata, last, None)
        return None if last == "causal" and not isinstance(value, bool) else value

    def materialise(
        self, builder: Any, plan: MetadataPlan, batch: Batch, common: Any, staging: Staging, environment: Environment
    ) -> Any:
        del batch, staging, environment
        if getattr(common, "mm_req_doc_ranges", None) is not None:
            raise Unserved  # ranges of an image's tokens, which no plan knows
        metadata = builder._upstream_build(0, common, False)
        for name in ("num_actual_tokens", "max_query_len", "seq_threshold_3D"):
            setattr(metadata, name, plan[f"common.{name}"].value)
        return metadata
