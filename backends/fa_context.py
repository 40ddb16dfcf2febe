"""What AITER FA gathers of an extend's context: chunks that fit the workspace, or the sliding window."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import BadInput
from ..planner import rows as passes
from ..planner.backend import Step
from ..planner.lengths import Int32Array

CONTEXT_TOKENS = 32 * 1024  # tokens of context gathered at once, upstream's _CP_TOKENS_PER_ITER_ROCM
MAX_STAGED_TOKENS = 2**28  # an int32 each is staged: one GiB, far past any cache


class ContextChunks(NamedTuple):
    """The context of all extends, cut so that one round of gathering fits the workspace.

    Every extend gets the same share of the workspace. int32; C chunks, E extends, T tokens in the fullest chunk.
    """

    cu_seq_lens: Int32Array  # (C, E + 1) first token of each extend in each chunk
    starts: Int32Array  # (C, E) first context token of each chunk
    token_to_batch: Int32Array  # (C, T) extend of each token; E behind a chunk's last token
    max_seq_lens: list[int]
    totals: list[int]


def context_chunks(step: Step) -> ContextChunks:
    """Cut the extends' context into chunks. Source: vLLM 0.32, `AiterFlashAttentionMetadataBuilder.build`."""
    context = step.batch.computed_lens[step.rows("extend")]
    extends = context.size
    share = CONTEXT_TOKENS // extends
    if share == 0:  # padding rows do not count against max_num_seqs, but take a share each
        raise BadInput(f"query_lens: expected at most {CONTEXT_TOKENS} rows in the extend segment, got {extends}")
    count = -(-int(np.maximum.reduce(context)) // share)
    if count * CONTEXT_TOKENS > MAX_STAGED_TOKENS:
        widest = max(extends, int(np.minimum(context, share).sum(dtype=np.int64)))
        if count * widest > MAX_STAGED_TOKENS:
            row = step.rows("extend").start + int(context.argmax())
            raise BadInput(
                f"seq_lens[{row}]: expected contexts of at most {MAX_STAGED_TOKENS} tokens, chunks times the fullest, "
                f"got {count} x {widest}"
            )
    starts = np.empty((count, extends), dtype=np.int32)
    cu_seq_lens = np.empty((count, extends + 1), dtype=np.int32)
    longest = np.empty(count, dtype=np.int32)
    passes.active.even_chunks(context, share, starts, cu_seq_lens, longest)
    totals = cu_seq_lens[:, -1].tolist()
    # upstream compares [chunks, extends, tokens] element by element for this
    token_to_batch = passes.token_to_row(cu_seq_lens, max(totals, default=0))
    return ContextChunks(cu_seq_lens, starts, token_to_batch, longest.tolist(), totals)


class Windows(NamedTuple):
    """What the sliding window leaves visible of each extend's sequence, int32."""

    cu_seqlens: Int32Array  # (E + 1,)
    seq_starts: Int32Array  # (E,)
    token_to_batch: Int32Array  # (tokens,)
    max_seqlens: int
    total_tokens: int


def windows(step: Step) -> Windows:
    """Visible tokens of each extend: the window before its first query, and its queries."""
    assert step.limits.sliding_window is not None
    rows = step.rows("extend")
    query, seq = step.batch.query_lens[rows], step.batch.seq_lens[rows]
    # upstream's window is (W - 1, 0) and it adds one more
    visible = np.minimum(seq.astype(np.int64), query.astype(np.int64) + step.limits.sliding_window)
    total = int(visible.sum())
    if total > MAX_STAGED_TOKENS:
        row = rows.start + int(visible.argmax())
        raise BadInput(
            f"seq_lens[{row}]: expected <= {MAX_STAGED_TOKENS} tokens inside the windows of all extends, got {total}"
        )
    lengths = visible.astype(np.int32)
    cu_seqlens = np.zeros(lengths.size + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    return Windows(cu_seqlens, seq - lengths, passes.token_to_row(cu_seqlens, total), int(lengths.max()), total)
