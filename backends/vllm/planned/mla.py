"""vLLM's ROCM_AITER_MLA builder: `AiterMLAMetadata` from a plan."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from ....errors import BadInput
from ....planner.batch import Batch
from ....planner.environment import Environment, Limits
from ....planner.plan import MetadataPlan
from ... import aiter_mla, mla_decode
from . import mla_metadata
from .adapter import common_environment, common_limits
from .mla_decode_build import PlannedDecode, check_scheduler, decode_arrays, upstream_decode
from .staging import Staging

WORK = ("work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
UPSTREAM_WORK = {"work_metadata_ptrs": "work_meta_data", "work_info": "work_info_set"}


class LatentAttention:
    """See `adapter.Adapter`."""

    backend = aiter_mla.BACKEND
    needs_aiter = True
    rules: ClassVar[dict[str, str]] = {
        "decode.min_kv_seq_len": "at_most",
        **{f"prefill.fp8_ps.{name}": "prefix" for name in WORK},
    }

    def settings(self, builder: Any) -> tuple[Environment, Limits]:
        import vllm.envs as envs

        heads = str(getattr(envs, "VLLM_ROCM_AITER_MLA_ASM_PADDING", "auto")).lower()
        environment = Environment(
            **common_environment(builder),
            mla_persistent_max_batch=int(os.environ.get("AITER_MLA_DECODE_PERSISTENT_MAX_BATCH", "32")),
            mla_small_heads=heads,  # type: ignore[arg-type]
            kv_cache_bytes=getattr(builder, "_kv_cache_bytes", None),
        )
        limits = Limits(
            **common_limits(builder),
            num_heads=int(builder.num_heads),
            num_kv_heads=1,
            block_size=int(builder.page_size),
            workspace_tokens=int(builder.chunked_prefill_workspace_size),
        )
        return environment, limits

    def prepare(self, builder: Any, environment: Environment) -> None:
        if environment.dcp_world_size > 1:
            raise BadInput("decode_context_parallel_size: expected 1; contexts dealt out over ranks are left to vLLM")
        gathered = int(builder.num_heads)
        launched = int(builder._num_attention_heads)
        if environment.release >= (0, 32) and launched != mla_decode.padded_heads(gathered):
            raise BadInput(
                f"num_heads: expected {gathered} launched as a multiple of 16, this aiter launches {launched}"
            )
        mla_metadata.check_prefill_backend(builder)
        check_scheduler()

    def read(self, metadata: Any, name: str) -> Any:
        part, _, rest = name.partition(".")
        if name in ("common.seq_lens", "common.block_table", "decode.uni_seqlen_qo"):
            return NotImplemented
        if part == "common":
            return getattr(metadata, rest, None)
        if part == "decode":
            if rest in UPSTREAM_WORK or rest in WORK:
                return getattr(metadata, UPSTREAM_WORK.get(rest, rest), None)
            return getattr(metadata.decode, rest, None)
        if rest.startswith("fp8_ps."):
            last = rest.partition(".")[2]
            return getattr(metadata, f"fp8_prefill_{UPSTREAM_WORK.get(last, last)}", None)
        return mla_metadata.read_prefill(metadata, rest)

    def materialise(
        self, builder: Any, plan: MetadataPlan, batch: Batch, common: Any, staging: Staging, environment: Environment
    ) -> Any:
        arrays = plan.host_arrays()
        planned = decode_arrays(builder, plan, batch, environment)
        if planned is not None:
            arrays |= planned.arrays
        tensors = staging.upload(arrays)
        segments = {s.name: (s.rows[1] - s.rows[0], s.tokens[1] - s.tokens[0]) for s in plan.segments}
        decodes, prefills = segments.get("decode", (0, 0)), segments.get("prefill", (0, 0))
        decode = _decode(builder, plan, common, tensors, planned, decodes) if decodes[0] else None
        prefill = None
        if prefills[0]:
            prefill = mla_metadata.prefill(builder, plan, common, tensors, decodes[0], environment)
        metadata = mla_metadata.whole(builder, plan, common, decodes, prefills[0], prefill, decode)
        if decode is not None and decode.has_persistent_metadata:
            for name in ("work_meta_data", "work_indptr", "work_info_set", *WORK[2:]):
                setattr(metadata, name, getattr(builder, f"_mla_{name}"))
        if "prefill.fp8_ps.work_info" in plan:
            _fp8(builder, plan, metadata, tensors)
        return metadata


def _decode(
    builder: Any,
    plan: MetadataPlan,
    common: Any,
    tensors: dict[str, Any],
    planned: PlannedDecode | None,
    size: tuple[int, int],
) -> Any:
    if planned is None:
        return upstream_decode(builder, common, *size)
    return planned.build(builder, plan, common, tensors)


def _fp8(builder: Any, plan: MetadataPlan, metadata: Any, tensors: dict[str, Any]) -> None:
    """Keys lie in the order of the queries: 0, 1, 2, ... is made once, for the longest batch."""
    import torch

    starts = tensors["prefill.query_start_loc"]
    total = int(plan["prefill.query_start_loc"].value[-1])
    indices = getattr(builder, "_syncfree_kv_indices", None)
    if indices is None or indices.numel() < total:
        most = max(total, 1 << (total - 1).bit_length() if total else 1)
        indices = builder._syncfree_kv_indices = torch.arange(most, dtype=torch.int32, device=builder.device)
    metadata.fp8_prefill_qo_indptr = metadata.fp8_prefill_kv_indptr = starts
    metadata.fp8_prefill_kv_indices = indices[:total]
    metadata.fp8_prefill_max_q_len = plan["prefill.max_query_len"].value
    metadata.fp8_prefill_num_partial_tiles = plan["prefill.fp8_ps.num_partial_tiles"].value
    for name in WORK:
        setattr(metadata, f"fp8_prefill_{UPSTREAM_WORK.get(name, name)}", tensors[f"prefill.fp8_ps.{name}"])
