"""The cut of MLA contexts behind one interface: a C extension where it was built, else its twin in Python."""

from __future__ import annotations

from typing import Protocol

from ..planner.lengths import Int32Array
from . import _mla_context_twin

CHUNK_COLUMNS = 10


class ContextCutter(Protocol):
    """One function; arrays are C-contiguous int32."""

    def cut_contexts(
        self,
        lens: Int32Array,
        query_start_loc: Int32Array,
        budget: int,
        largest: int,
        aligned: int,
        ranks: int,
        interleave: int,
        limit: int,
        /,
    ) -> tuple[bytearray, int, int, int, int, int] | int:
        """(block, chunks, pieces, tokens, tokens of the rank's shard, rows without context), or too many tokens.

        `budget`: rows of workspace on a rank; `largest`: longest piece of a split row; `aligned`: where rows split;
        `limit`: tokens of context, over which their number comes back alone. `block` holds int32 sections:
        table[chunks, 10] (first row, end row, first token, end token, end of the first row's tokens, whether that row
        goes on from the chunk before, context tokens, longest query, longest piece, tokens of the shard),
        starts[pieces], cu_seq_lens[pieces + chunks], query_start_loc[pieces + chunks], token_to_seq[tokens], under DCP
        local_cu_seq_lens[pieces + chunks] and local_token_to_seq[shard tokens], then empty[rows without context, 2].
        """


IMPLEMENTATIONS: dict[str, ContextCutter] = {"python": _mla_context_twin}
try:
    from . import _mla_context
except ImportError:  # built where a compiler was found; everything works without
    pass
else:
    IMPLEMENTATIONS["native"] = _mla_context

active: ContextCutter = IMPLEMENTATIONS.get("native", _mla_context_twin)
