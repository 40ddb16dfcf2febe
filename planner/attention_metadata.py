"""Reading vLLM's `CommonAttentionMetadata`: its host members only, never a tensor that may lie on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from . import rows as passes
from .errors import BadInput
from .lengths import Int32Array, read_count

Made = TypeVar("Made")


def read_metadata(
    make: Callable[..., Made],
    common: Any,
    *,
    decode_threshold: int,
    short_extends_as_decodes: bool,
    drafts_in_flight: int | None,
) -> Made:
    """See `Batch.from_vllm_metadata`."""
    rows = int(common.num_reqs)
    starts = _host_array("query_start_loc_cpu", common.query_start_loc_cpu, rows + 1)
    bounds = _host_array("seq_lens_cpu_upper_bound", common.seq_lens_cpu_upper_bound, rows)
    block = np.empty((3, rows), dtype=np.int32)  # the runner reuses its buffers for the next step
    total = passes.active.unpack(_int32(starts), _int32(bounds), block)
    if total < 0:
        row = -2 - total
        raise BadInput(
            f"seq_lens_cpu_upper_bound[{row}]: expected >= the query length >= 0, "
            f"got {bounds[row]} for a query of {int(starts[row + 1]) - int(starts[row])}"
        )
    query, seq, computed = block
    flags = common.is_prefilling
    prefilling = None if flags is None else np.array(_host_array("is_prefilling", flags, rows), dtype=np.bool_)
    drafts = decode_threshold - 1 if drafts_in_flight is None else read_count("drafts_in_flight", drafts_in_flight, 0)
    tokens = int(common.num_actual_tokens)
    if tokens < total:
        raise BadInput(f"num_actual_tokens: expected >= query_start_loc_cpu[{rows}] = {total}, got {tokens}")
    causal = getattr(common, "causal", True)
    longest = int(np.maximum.reduce(seq)) if rows else 0
    return make(
        query,
        seq,
        computed,
        decode_threshold=decode_threshold,
        short_extends_as_decodes=short_extends_as_decodes,
        num_tokens=tokens,
        is_prefilling=prefilling,
        seq_lens_lower=_lower_bounds(query, seq, computed, prefilling, drafts),
        max_seq_len=max(longest, int(common.max_seq_len)),
        causal=causal if isinstance(causal, bool) else None,
    )


def _lower_bounds(
    query: Int32Array, seq: Int32Array, computed: Int32Array, prefilling: npt.NDArray[np.bool_] | None, drafts: int
) -> Int32Array | None:
    """Prefill rows are exact; a decode row may have had `drafts` rejected, but keeps a token of context."""
    if drafts == 0 or not seq.size:
        return None
    bounded = (computed > 0) & (query > 0)
    if prefilling is not None:
        bounded &= ~prefilling
    if not bounded.any():
        return None
    lower: Int32Array = np.where(bounded, np.maximum(seq - drafts, query + 1), seq).astype(np.int32)
    return lower


def _host_array(name: str, tensor: Any, size: int) -> npt.NDArray[Any]:
    if tensor is None:
        raise BadInput(
            f"{name}: expected a tensor on the host, got None; its device twin cannot be read without a sync"
        )
    array: npt.NDArray[Any]
    try:
        array = tensor.numpy()  # refuses a tensor that is not on the host
    except AttributeError:
        array = np.asarray(tensor)
    except (TypeError, RuntimeError) as error:
        raise BadInput(f"{name}: expected a tensor on the host, got one on {tensor.device}") from error
    if array.ndim != 1 or array.size < size:
        raise BadInput(f"{name}: expected at least {size} elements for num_reqs, got shape {list(array.shape)}")
    return array if array.size == size else array[:size]


def _int32(array: npt.NDArray[Any]) -> Int32Array:
    return np.ascontiguousarray(array, dtype=np.int32)
