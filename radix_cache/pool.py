"""The block pool: which physical block ids are free, and proof that nobody frees what is not theirs.

Ids are handed out longest-free first, so that an engine that is late (it was told that a block is gone, and its kernel
still writes) does the least harm. Free ids are kept as the packed pieces in which they came back, and the ones never
used yet as one number: start-up costs nothing a block, a full cache next to nothing, and no id becomes a Python integer
on its way.

`FreeList` trusts its caller. `radix_cache.executor` can be trusted: ids reach it only out of the free list, a lease's
books or the tree, and it counts each of them apart. `BlockPool` is for everybody else, and checks each id.
"""

from __future__ import annotations

from array import array
from collections import deque

from radix_cache.errors import IntegrityError, InvalidBlocks, PoolExhausted
from radix_cache.operations import check_count
from radix_cache.tokens import BlockIds, as_block_ids

__all__ = ["BlockPool", "FreeList"]

_ID_BYTES = 4
_MERGED_BYTES = 4096  # pieces are joined up to this size, so that single blocks do not cost an object each


class FreeList:
    """The free ones of the block ids [num_reserved_blocks, num_blocks), as packed int32, longest-free first.

    num_usable_blocks: how many there are in all. num_free_blocks: how many are free now.
    """

    def __init__(self, num_blocks: int, num_reserved_blocks: int = 0) -> None:
        self.num_blocks = check_count(num_blocks, "num_blocks", 1)
        self.num_reserved_blocks = check_count(num_reserved_blocks, "num_reserved_blocks", 0, self.num_blocks - 1)
        self.num_free_blocks = self.num_usable_blocks = self.num_blocks - self.num_reserved_blocks
        self._num_touched = self.num_reserved_blocks  # ids from here on were never handed out
        self._pieces: deque[bytes] = deque()
        self._num_taken_bytes = 0  # of the first piece

    def take(self, num_blocks: int) -> bytes:
        """Take ``num_blocks`` ids; the caller knows that so many are free. O(num_blocks), a memcpy for each piece."""
        self.num_free_blocks -= num_blocks
        missing = num_blocks * _ID_BYTES
        taken = b""
        if self._num_touched < self.num_blocks:
            taken = self._take_untouched(num_blocks)
            missing -= len(taken)
        while missing:
            first, begin = self._pieces[0], self._num_taken_bytes
            end = begin + missing
            if end < len(first):
                self._num_taken_bytes = end
                return taken + first[begin:end]
            self._pieces.popleft()
            self._num_taken_bytes = 0
            taken += first[begin:]
            missing = end - len(first)
        return taken

    def _take_untouched(self, num_blocks: int) -> bytes:
        """Take up to ``num_blocks`` of the ids that were never handed out."""
        start = self._num_touched
        self._num_touched = stop = min(start + num_blocks, self.num_blocks)
        return array("i", range(start, stop)).tobytes()

    def give(self, block_ids: bytes) -> None:
        """Take back ids that are in use. O(1), or a memcpy of a few blocks."""
        pieces = self._pieces
        self.num_free_blocks += len(block_ids) // _ID_BYTES
        if len(pieces) > 1 and len(pieces[-1]) + len(block_ids) <= _MERGED_BYTES:
            pieces[-1] += block_ids
        elif block_ids:
            pieces.append(block_ids)

    def check_integrity(self) -> set[int]:
        """Return the free ids; raise `IntegrityError` if one appears twice, is out of range, or the count is off."""
        packed = b"".join(self._pieces)[self._num_taken_bytes :]
        listed = [*memoryview(packed).cast("i"), *range(self._num_touched, self.num_blocks)]
        free = set(listed)
        if len(free) != len(listed):
            raise IntegrityError("a block is free twice")
        if len(free) != self.num_free_blocks:
            raise IntegrityError(f"{len(free)} blocks are free, the count says {self.num_free_blocks}")
        if free and not self.num_reserved_blocks <= min(free) <= max(free) < self.num_blocks:
            raise IntegrityError("a block is free that is not of this pool")
        return free


class BlockPool(FreeList):
    """A pool on its own, for those who run the tree standalone: hands out block ids and checks each that comes back.

    Ids below ``num_reserved_blocks`` are never handed out (padding rows of CUDA graphs write to block 0). Raises
    `InvalidArgument` where fewer than one block is left to hand out.

    >>> pool = BlockPool(num_blocks=4, num_reserved_blocks=1)
    >>> ids = pool.allocate(2)
    >>> list(ids)
    [1, 2]
    >>> pool.free(ids)
    >>> list(pool.allocate(3))
    [3, 1, 2]
    """

    def __init__(self, num_blocks: int, num_reserved_blocks: int = 0) -> None:
        super().__init__(num_blocks, num_reserved_blocks)
        self._in_use = bytearray(self.num_blocks)

    def allocate(self, num_blocks: int) -> array[int]:
        """Take ``num_blocks`` free blocks and return their ids, longest-free first, as a fresh int32 array.

        Raises `PoolExhausted`, and takes none, if fewer are free. O(num_blocks).
        """
        num_blocks = check_count(num_blocks, "num_blocks")
        if num_blocks > self.num_free_blocks:
            raise PoolExhausted(num_blocks, self.num_free_blocks)
        ids = array("i", self.take(num_blocks))
        for block_id in ids:
            self._in_use[block_id] = 1
        return ids

    def free(self, block_ids: BlockIds) -> None:
        """Take back blocks that `allocate` handed out.

        Raises `InvalidBlocks`, and takes back none, if one is free already, named twice, reserved or not of this pool.
        O(number of ids).
        """
        ids = as_block_ids(block_ids)
        seen: set[int] = set()
        for block_id in ids:
            if block_id >= self.num_blocks or not self._in_use[block_id] or block_id in seen:
                raise self._refusal(block_id, is_twice=block_id in seen)
            seen.add(block_id)
        for block_id in ids:
            self._in_use[block_id] = 0
        self.give(ids.tobytes())

    def is_in_use(self, block_id: int) -> bool:
        """Tell whether `allocate` handed the block out and `free` has not taken it back. O(1)."""
        return 0 <= block_id < self.num_blocks and bool(self._in_use[block_id])

    def _refusal(self, block_id: int, *, is_twice: bool) -> InvalidBlocks:
        if not self.num_reserved_blocks <= block_id < self.num_blocks:
            usable = f"[{self.num_reserved_blocks}, {self.num_blocks})"
            return InvalidBlocks(f"block {block_id} is not in this pool, whose ids are {usable}", block_id)
        return InvalidBlocks(f"block {block_id} is {'named twice' if is_twice else 'free already'}", block_id)

    def check_integrity(self) -> set[int]:
        """Return the free ids; raise `IntegrityError` if one is marked as in use, or as `FreeList` does.
        O(num_blocks).
        """
        free = super().check_integrity()
        if any(self._in_use[block_id] for block_id in free):
            raise IntegrityError("a free block is marked as in use")
        if sum(self._in_use) + len(free) != self.num_usable_blocks:
            raise IntegrityError(f"{sum(self._in_use)} in use + {len(free)} free != {self.num_usable_blocks}")
        return free
