"""Blocks of the KV cache: who holds which, and which hold a known prefix."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ...planner import BadInput


def hash_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Names a full block by its content and everything before it; two equal names mean equal keys and values."""
    return hashlib.blake2b(parent + np.asarray(tokens, dtype=np.int64).tobytes(), digest_size=16).digest()


class BlockPool:
    """Reference counts, a free list (least recently freed first) and the prefix cache.

    A freed block keeps its content and its name until it is handed out again, so a later prompt may still hit it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise BadInput(f"num_blocks, block_size: expected >= 1, got {num_blocks}, {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))
        self._holders = [0] * num_blocks
        self._block_named: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks of undefined content, or None (and nothing taken) if there are too few."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
            name = self._name_of.pop(block, None)
            if name is not None:
                del self._block_named[name]
        return taken

    def share(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `names`, held once more each."""
        shared: list[int] = []
        for name in names:
            block = self._block_named.get(name)
            if block is None:
                break
            self._holders[block] += 1
            self._free.pop(block, None)
            shared.append(block)
        return shared

    def name(self, block: int, name: bytes) -> None:
        """Make a block that is now fully computed known to the prefix cache; the first of equal blocks stays known."""
        if name not in self._block_named and block not in self._name_of:
            self._block_named[name] = block
            self._name_of[block] = name

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a request's blocks, its last first: a prefix is worth more than what follows it."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
