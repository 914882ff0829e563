"""The block pool: which physical block ids are free, and proof that nobody frees what is not theirs.

Ids are handed out longest-free first, so that an engine that is late (it was told that a block is gone, and its kernel
still writes) does the least harm. Free ids are kept as the arrays in which they came back, and the ones never used yet
as one number, so a pool costs one byte a block when all are in use and start-up costs nothing a block.
"""

from __future__ import annotations

from array import array
from collections import deque

from radix_cache.errors import IntegrityError, InvalidBlocks, PoolExhausted
from radix_cache.operations import check_count
from radix_cache.tokens import BlockIds, as_block_ids

__all__ = ["BlockPool"]

_MERGE_BELOW = 1024


class BlockPool:
    """Physical block ids [num_reserved_blocks, num_blocks), each free or in use.

    Raises `InvalidArgument` where fewer than one block is left to hand out. Ids below ``num_reserved_blocks`` are never
    handed out (padding rows of CUDA graphs write to block 0).
    """

    def __init__(self, num_blocks: int, num_reserved_blocks: int = 0) -> None:
        self.num_blocks = check_count(num_blocks, "num_blocks", 1)
        self.num_reserved_blocks = check_count(num_reserved_blocks, "num_reserved_blocks", 0, num_blocks - 1)
        self.num_free_blocks = self.num_usable_blocks = self.num_blocks - self.num_reserved_blocks
        self._in_use = bytearray(self.num_blocks)
        self._num_touched = self.num_reserved_blocks  # ids from here on were never handed out
        self._freed: deque[array[int]] = deque()
        self._num_taken = 0  # of the first array in _freed

    def allocate(self, num_blocks: int) -> array[int]:
        """Take ``num_blocks`` free blocks and return their ids, longest-free first, as a fresh int32 array.

        Raises `PoolExhausted`, and takes none, if fewer are free. O(num_blocks).
        """
        num_blocks = check_count(num_blocks, "num_blocks")
        if num_blocks > self.num_free_blocks:
            raise PoolExhausted(num_blocks, self.num_free_blocks)
        start = self._num_touched
        self._num_touched = stop = min(start + num_blocks, self.num_blocks)
        ids = array("i", range(start, stop))
        while len(ids) < num_blocks:
            ids.extend(self._take(num_blocks - len(ids)))
        in_use = self._in_use
        for block_id in ids:
            in_use[block_id] = 1
        self.num_free_blocks -= num_blocks
        return ids

    def _take(self, most: int) -> array[int]:
        """Take up to ``most`` ids from the array that was freed first."""
        first, start = self._freed[0], self._num_taken
        if start + most < len(first):
            self._num_taken = start + most
            return first[start : start + most]
        self._freed.popleft()
        self._num_taken = 0
        return first[start:]

    def free(self, block_ids: BlockIds) -> None:
        """Take back blocks that `allocate` handed out.

        Raises `InvalidBlocks`, and takes back none, if one is free already, named twice, reserved or not of this pool.
        O(number of ids).
        """
        ids = as_block_ids(block_ids) if type(block_ids) is not array or block_ids.typecode != "i" else block_ids[:]
        in_use = self._in_use
        done = 0
        try:
            for block_id in ids:
                if not in_use[block_id] or block_id < 0:
                    break
                in_use[block_id] = 0
                done += 1
        except IndexError:
            pass
        if done < len(ids):
            for block_id in ids[:done]:
                in_use[block_id] = 1
            raise self._refusal(ids[done], ids[:done])
        self.num_free_blocks += done
        if self._freed and done + len(self._freed[-1]) < _MERGE_BELOW:
            self._freed[-1].extend(ids)
        elif done:
            self._freed.append(ids)

    def _refusal(self, block_id: int, before: array[int]) -> InvalidBlocks:
        if not self.num_reserved_blocks <= block_id < self.num_blocks:
            usable = f"[{self.num_reserved_blocks}, {self.num_blocks})"
            return InvalidBlocks(f"block {block_id} is not in this pool, whose ids are {usable}", block_id)
        why = "named twice" if block_id in before else "free already"
        return InvalidBlocks(f"block {block_id} is {why}", block_id)

    def is_in_use(self, block_id: int) -> bool:
        """Tell whether `allocate` handed the block out and `free` has not taken it back. O(1)."""
        return 0 <= block_id < self.num_blocks and bool(self._in_use[block_id])

    def check_integrity(self) -> None:
        """Walk every free id; raise `IntegrityError` if one is in use, appears twice, or the sums are off.
        O(num_blocks).
        """
        free = array("i", range(self._num_touched, self.num_blocks))
        for number, ids in enumerate(self._freed):
            free.extend(ids if number else ids[self._num_taken :])
        if len(set(free)) != len(free):
            raise IntegrityError("a block is free twice")
        if any(self._in_use[block_id] for block_id in free):
            raise IntegrityError("a free block is marked as in use")
        if len(free) != self.num_free_blocks:
            raise IntegrityError(f"{len(free)} blocks are free, the count says {self.num_free_blocks}")
        if sum(self._in_use) + len(free) != self.num_usable_blocks:
            raise IntegrityError(f"{sum(self._in_use)} in use + {len(free)} free != {self.num_usable_blocks}")
