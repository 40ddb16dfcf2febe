"""One `Batch` a step: builders that are handed the same lengths share it, and with it the plan."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ....errors import BadInput
from ....planner import Batch

KEPT = 4  # builders of one step differ by threshold or causality at most


class Batches:
    """Batches by content. vLLM reuses and changes its tensors in place, so identity would prove nothing."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], Batch] = OrderedDict()

    def of(self, common: Any, threshold: int, short_extends: bool, drafts: int | None) -> Batch:
        """The batch of a `CommonAttentionMetadata`, from its host members. Raises `BadInput`."""
        starts, bounds = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound
        if bounds is None or starts is None:
            missing = "query_start_loc_cpu" if starts is None else "seq_lens_cpu_upper_bound"
            raise BadInput(f"{missing}: expected a tensor on the host, got None")
        flags, causal = common.is_prefilling, getattr(common, "causal", True)
        key = (
            threshold,
            short_extends,
            drafts,
            common.num_reqs,
            common.num_actual_tokens,
            common.max_seq_len,
            causal if isinstance(causal, bool) else None,
            starts.numpy().tobytes(),
            bounds.numpy().tobytes(),
            None if flags is None else flags.numpy().tobytes(),
        )
        batch = self._kept.get(key)
        if batch is None:
            batch = Batch.from_vllm_metadata(
                common,
                decode_threshold=threshold,
                short_extends_as_decodes=short_extends,
                drafts_in_flight=drafts,
            )
            self._kept[key] = batch
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return batch


BATCHES = Batches()
