"""A trace as paths of unit blocks: the form in which a cache's decisions can be found without a cache.

Blocks are numbered by first appearance; a block is its ids *and all before them*, so two requests share exactly a
prefix of their paths. From this follows what `radix_cache.lab.curve` and `radix_cache.lab.optimal` rest on: of the
blocks of one request, those that no later request has touched are the tail of its path. `Runs` keeps where that tail
begins, and so tells the last use of a whole stretch of blocks in one step, where one would otherwise ask each block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from radix_cache.errors import InvalidArgument
from radix_cache.lab.requests import Request
from radix_cache.operations import check_count
from radix_cache.tokens import TOKEN_BYTES, unpack_tokens

__all__ = ["BlockTrace", "Runs"]


@dataclass(slots=True)
class BlockTrace:
    """The requests as paths, in ints: 4 bytes for each block of each request.

    block_size: tokens in a block, of traces of token ids. num_blocks: different blocks. blocks: the paths, one after
    the other. ends: where each ends. num_lookups: how many blocks of each are looked up, the prompt's; the rest is
    output, which is cached only. num_tokens: of the prompts. block_tokens, last_tokens: tokens in a looked up block,
    and in the last one.
    """

    block_size: int = 16
    num_blocks: int = 0
    blocks: array[int] = field(default_factory=lambda: array("I"))
    ends: array[int] = field(default_factory=lambda: array("q"))
    num_lookups: array[int] = field(default_factory=lambda: array("q"))
    num_tokens: array[int] = field(default_factory=lambda: array("q"))
    block_tokens: array[int] = field(default_factory=lambda: array("q"))
    last_tokens: array[int] = field(default_factory=lambda: array("q"))

    @classmethod
    def of(cls, requests: Iterable[Request], block_size: int = 16) -> BlockTrace:
        """Return the paths of ``requests``: one block for each hash id, or for ``block_size`` token ids.

        O(blocks), about 0.2 us each. Raises `InvalidArgument` for a block size below 1.
        """
        trace = cls(check_count(block_size, "block_size", 1))
        numbers: dict[int | tuple[int, bytes], int] = {}
        for request in requests:
            unit = block_size if request.tokens_per_id == 1 else 1
            trace.add(request, request.num_ids // unit, _path(numbers, request.computed, unit))
        trace.num_blocks = len(numbers)
        return trace

    def add(self, request: Request, num_lookups: int, path: Iterable[int], last_tokens: int | None = None) -> None:
        """Append a request whose blocks are known. last_tokens: of its last block, where some are left out."""
        block_tokens = self.block_size if request.tokens_per_id == 1 else request.tokens_per_id
        if last_tokens is None:
            last_tokens = min(request.num_prompt_tokens - (num_lookups - 1) * block_tokens, block_tokens)
        self.blocks.extend(path)
        self.ends.append(len(self.blocks))
        self.num_lookups.append(num_lookups)
        self.num_tokens.append(request.num_prompt_tokens)
        self.block_tokens.append(block_tokens)
        self.last_tokens.append(last_tokens)

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.ends)

    @property
    def num_prompt_blocks(self) -> int:
        """Blocks looked up, by all requests together."""
        return sum(self.num_lookups)

    def path(self, number: int) -> array[int]:
        """Return the blocks of one request."""
        return self.blocks[self.ends[number - 1] if number else 0 : self.ends[number]]

    def capacity(self, text: str) -> int:
        """Return a capacity in blocks: ``"9139"``, or ``"5%"`` of the different blocks, rounded down, at least one.

        Raises `InvalidArgument` for what is neither, and for nothing or less.
        """
        share = text.removesuffix("%")
        try:
            blocks = int(text) if share == text else int(self.num_blocks * float(share) / 100 + 1e-9)
        except (ValueError, OverflowError):
            raise InvalidArgument(f"a capacity is a number of blocks or a percentage, not {text!r}") from None
        if share != text and not float(share) > 0:
            raise InvalidArgument(f"a capacity is more than 0 % of the different blocks, not {text!r}")
        return check_count(blocks if share == text else max(blocks, 1), "capacity", 1)


class Runs:
    """Who used each block last, as requests pass in order, or backwards in time: then it is who uses it next."""

    def __init__(self, trace: BlockTrace) -> None:
        self._user = array("q", [-1]) * trace.num_blocks
        self._begins = array("q", [0]) * len(trace)  # where the blocks begin that a request was the last to use

    def of(self, number: int, path: array[int]) -> Iterator[tuple[int, int, int]]:
        """Yield last user, begin and end of each stretch of ``path`` that was used before, the deepest first; then
        ``number`` is the last user of all of it. To be iterated to its end. O(stretches), and a copy of the path.
        """
        user, begins = self._user, self._begins
        end = self._num_used(path)
        while end:
            before = user[path[end - 1]]
            begin = begins[before]
            yield before, begin, end
            begins[before] = end
            end = begin
        for block in path:
            user[block] = number

    def _num_used(self, path: array[int]) -> int:
        """Return how many blocks were used before: a prefix, so a binary search finds its end."""
        user, low, high = self._user, 0, len(path)
        while low < high:
            middle = (low + high) // 2
            if user[path[middle]] < 0:
                high = middle
            else:
                low = middle + 1
        return low


def _path(numbers: dict[int | tuple[int, bytes], int], ids: bytes, unit: int) -> array[int]:
    """Return the numbers of the blocks of ``ids``, new ones given the next free numbers. The ragged tail has none."""
    path = array("I")
    above = 0  # the number of the block before, plus one
    if unit == 1:
        for one in unpack_tokens(ids):
            above = numbers.setdefault(above << 32 | one, len(numbers)) + 1
            path.append(above - 1)
        return path
    size = unit * TOKEN_BYTES
    for at in range(0, len(ids) - size + 1, size):
        above = numbers.setdefault((above, ids[at : at + size]), len(numbers)) + 1
        path.append(above - 1)
    return path
