"""The chunked context of MLA prefills, in the shape that each vLLM release keeps it."""

from __future__ import annotations

from typing import Any

from ....planner.environment import Environment
from ....planner.plan import MetadataPlan

PART = "prefill.chunked_context."
BY_SLICE = ("request_slice", "token_slice")
COLUMNS = (
    *BY_SLICE,
    "continuation_token_end",
    "is_continuation",
    "num_context_tokens",
    "max_query_len",
    "max_seq_len",
)


def make(cls: Any, builder: Any, plan: MetadataPlan, tensors: dict[str, Any], environment: Environment) -> Any:
    """vLLM's `ChunkedContextMetadata`; None where no row has context. `cls`: its `MLACommonPrefillMetadata`."""
    if PART + "starts" not in plan:
        return None
    if environment.release == (0, 26):
        return _even(cls, builder, plan, tensors)
    return _packed(cls, builder, plan, tensors)


def _even(cls: Any, builder: Any, plan: MetadataPlan, tensors: dict[str, Any]) -> Any:
    """0.26: matrices of chunks by rows. No kernel reads `seq_lens`."""
    lists = ("seq_tot", "max_seq_lens", "chunk_total_token", "has_empty_context", "prefill_tokens_with_context")
    return cls.ChunkedContextMetadata(
        cu_seq_lens=tensors[PART + "cu_seq_lens"],
        starts=tensors[PART + "starts"],
        token_to_seq=tensors[PART + "token_to_seq"],
        seq_lens=None,
        workspace=builder.chunked_prefill_workspace,
        **{name: plan[PART + name].value for name in lists},
    )


def _packed(cls: Any, builder: Any, plan: MetadataPlan, tensors: dict[str, Any]) -> Any:
    """0.32: one object a chunk, its tensors slices of what was copied. No kernel here reads lengths on the host."""
    rows = zip(*(plan[PART + name].value for name in COLUMNS), strict=True)
    starts, cu_seq_lens = tensors[PART + "starts"], tensors[PART + "cu_seq_lens"]
    query_start_loc, token_to_seq = tensors[PART + "query_start_loc"], tensors[PART + "token_to_seq"]
    chunks, row, bound, token = [], 0, 0, 0
    for index, (requests, tokens, end, continues, context, longest_query, longest) in enumerate(rows):
        count = requests[1] - requests[0]
        chunks.append(
            cls.ContextChunk(
                index=index,
                request_slice=slice(*requests),
                token_slice=slice(*tokens),
                continuation_token_end=end,
                is_continuation=continues,
                num_context_tokens=context,
                query_start_loc=query_start_loc[bound : bound + count + 1],
                max_query_len=longest_query,
                cu_seq_lens=cu_seq_lens[bound : bound + count + 1],
                starts=starts[row : row + count],
                max_seq_len=longest,
                seq_lens=None,
                token_to_seq=token_to_seq[token : token + context],
                all_rows_active=False,
                num_local_context_tokens=context,
            )
        )
        row, bound, token = row + count, bound + count + 1, token + context
    return cls.ChunkedContextMetadata(
        context_lens=None,
        workspace=builder.chunked_prefill_workspace,
        chunks=chunks,
        context_lens_list=None,
        empty_token_slices=[slice(*part) for part in plan[PART + "empty_token_slices"].value],
    )


def read(context: Any, name: str) -> Any:
    """vLLM's value of `prefill.chunked_context.<name>`: 0.32 keeps one object a chunk, a plan keeps columns."""
    chunks = getattr(context, "chunks", None)
    if chunks is None or name in ("workspace", "context_lens", "context_lens_list"):
        return getattr(context, name, None)
    if name == "num_chunks":
        return len(chunks)
    if name == "empty_token_slices":
        return [[part.start, part.stop] for part in context.empty_token_slices]
    column = [getattr(chunk, name, None) for chunk in chunks]
    if all(value is None for value in column):
        return None
    if name in BY_SLICE:
        return [[part.start, part.stop] for part in column if part is not None]
    return _joined(column) if hasattr(column[0], "dim") else column


def _joined(parts: list[Any]) -> Any:
    import torch

    # On a GPU this is one launch, in shadow mode only.
    return torch.cat(parts) if len(parts) > 1 else parts[0]
