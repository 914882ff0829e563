"""A pretended GPU: one number for each token slot of the block pool, in a file that every engine maps.

The number at a position depends on the token there and on the number before it, read from memory, as real KV depends
on all that is attended to. So one block handed out twice, or one that was cached under the wrong tokens, spoils every
number behind it, and `check` finds it.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

_MASK = 2**64 - 1
_START = 0x9E3779B97F4A7C15
_NUM_WORDS = 32_000


def _mix(state: int, token: int) -> int:
    return ((state ^ token) * 6364136223846793005 + 1442695040888963407) & _MASK


def _word(state: int, seed: int) -> int:
    return ((state >> 33) + seed) % _NUM_WORDS


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """Return what `KVMemory.sample` would after computing all of ``tokens``: a perfect draft model."""
    state = _START
    for token in tokens:
        state = _mix(state, token)
    return _word(state, seed)


class KVMemory:
    """The pool's memory. path: a file that `create` made."""

    def __init__(self, path: Path, block_size: int) -> None:
        with path.open("r+b") as file:
            self._slots = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        self._block_size = block_size

    @staticmethod
    def create(path: Path, num_blocks: int, block_size: int) -> None:
        with path.open("wb") as file:
            file.truncate(8 * num_blocks * block_size)

    def slot(self, block_table: Sequence[int], position: int) -> int:
        """Where the KV of a position is: this is what a kernel does with a block table."""
        return block_table[position // self._block_size] * self._block_size + position % self._block_size

    def compute(self, block_table: Sequence[int], tokens: Sequence[int], start: int, stop: int) -> None:
        """Write the KV of positions [start, stop), from the tokens there and the KV before them."""
        state = self._slots[self.slot(block_table, start - 1)] if start else _START
        for position in range(start, stop):
            state = _mix(state, tokens[position])
            self._slots[self.slot(block_table, position)] = state

    def sample(self, block_table: Sequence[int], num_tokens: int, seed: int = 0) -> int:
        """Return the token that follows the first ``num_tokens``, whose KV is there."""
        return _word(self._slots[self.slot(block_table, num_tokens - 1)], seed)

    def check(self, block_table: Sequence[int], tokens: Sequence[int]) -> int:
        """Raise unless the table holds the KV of just these tokens; return how many were looked at."""
        state = _START
        for position, token in enumerate(tokens):
            state = _mix(state, token)
            if self._slots[self.slot(block_table, position)] != state:
                block = block_table[position // self._block_size]
                raise AssertionError(f"position {position} of {len(tokens)}: block {block} holds other KV")
        return len(tokens)
