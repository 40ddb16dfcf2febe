"""Row order: refuse the batches that an attention backend would silently mis-serve, and no others."""

from __future__ import annotations

from collections.abc import Sequence

from .classify import ClassifiedRows, classify
from .errors import UnorderedBatch
from .segments import Segment, Split

_HOW = "order the rows first (plan with reorder)"


def refuse_mis_served(batch: ClassifiedRows, split: Split, segments: Sequence[Segment]) -> None:
    """Raise `UnorderedBatch`, naming the row, for a batch whose rows would get the wrong kernel.

    Three-way: a row with context inside the prefill segment, whose kernel reads no cache, loses its context (vLLM's V2
    runner does not sort such rows). Two- and three-way: kernels take the first rows of a segment's arrays, so a padding
    row before a real one shifts the real one out.
    """
    if split == "none" or not segments:
        return
    _refuse_padding_before_rows(batch)
    last = segments[-1]
    if split == "three" and last.name == "prefill":
        first, stop = last.rows
        lost = (batch.computed_lens[first:stop] > 0) & (batch.query_lens[first:stop] > 0)
        if lost.any():
            row = first + int(lost.argmax())
            raise UnorderedBatch(
                f"rows[{row}]: expected no context at or after rows[{first}], where the prefill segment begins, "
                f"got {batch.computed_lens[row]} computed tokens, which its kernel would not read; {_HOW}"
            )


def _refuse_padding_before_rows(batch: ClassifiedRows) -> None:
    if not classify(batch).padded:
        return
    real = batch.query_lens != 0
    row = int(real.argmin())
    if real[row:].any():
        following = row + int(real[row:].argmax())
        raise UnorderedBatch(
            f"rows[{row}]: expected padding rows (query_lens = 0) behind all others, got one before "
            f"rows[{following}]; {_HOW}"
        )
