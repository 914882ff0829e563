"""The hit rate of LRU at every capacity, from one pass over a trace.

LRU over unit blocks that are evicted leaf by leaf is a stack algorithm (Mattson et al., IBM Systems Journal 1970): what
a cache of C blocks holds is always the top C of one list. Each request finds its blocks in that list and puts its path
on top, the deepest block first, so the root ends up highest. A block was a hit for all capacities from its depth in the
list on. Two things make this exact for prefixes: a block lies below all of its ancestors, so hits are contiguous from
the start of a prompt by themselves; and of a path longer than C, the top C is its beginning, which is what fits.

The list itself is never built. A block's depth is how many blocks were used more recently, which a Fenwick tree over
requests counts, and a whole stretch of a path that was last used by one request lies together (see
`radix_cache.lab.blocks`). So a request costs O(stretches * log requests), not O(blocks * log blocks).

What it is not: the curve of any other policy, nor of requests that overlap in time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from radix_cache.lab.blocks import BlockTrace, Runs
from radix_cache.lab.hits import Hits
from radix_cache.lab.requests import Request
from radix_cache.operations import MAX_TOKENS, check_count

__all__ = ["Curve", "HitCurve", "block_curve", "lru_curve"]


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Hits at each capacity; index ``c`` of an array is a cache of ``c`` blocks, the last index all different blocks.

    In the curve of a sample the figures are scaled up, and rounded.
    """

    num_requests: int
    num_prompt_tokens: int
    num_prompt_blocks: int
    hit_requests: array[int]
    hit_tokens: array[int]
    hit_blocks: array[int]

    def at(self, num_blocks: int) -> Hits:
        """Return the hits of a cache of ``num_blocks``. O(1). Raises `InvalidArgument` for fewer than none."""
        at = min(check_count(num_blocks, "num_blocks", most=MAX_TOKENS), len(self.hit_blocks) - 1)
        return Hits(
            self.num_requests,
            self.num_prompt_tokens,
            self.num_prompt_blocks,
            self.hit_requests[at],
            self.hit_tokens[at],
            self.hit_blocks[at],
        )


@dataclass(frozen=True, slots=True)
class Curve:
    """LRU at every capacity, over all requests and over the last half of them.

    num_blocks: different blocks in the trace: a larger cache finds no more.
    """

    num_blocks: int
    whole: HitCurve
    last_half: HitCurve


def lru_curve(requests: Iterable[Request], block_size: int = 16) -> Curve:
    """Return what `radix_cache.lab.replay` with LRU would count at each capacity, exactly.

    block_size: tokens in a block, of traces of token ids. O(blocks) once, then O(requests * log requests); holds 4
    bytes for each block of each request, and a dict of the different ones.
    """
    return block_curve(BlockTrace.of(requests, block_size))


def block_curve(trace: BlockTrace) -> Curve:
    """`lru_curve` of what is a `BlockTrace` already."""
    middle = len(trace) // 2
    first, second = _Depths(trace.num_blocks), _Depths(trace.num_blocks)
    runs, used = Runs(trace), _Counts(len(trace))
    for number in range(len(trace)):
        depths = first if number < middle else second
        path, num_lookups = trace.path(number), trace.num_lookups[number]
        for before, begin, end in runs.of(number, path):
            num_above = used.total - used.up_to(before)
            used.add(before, begin - end)
            if begin < num_lookups:
                depths.add(trace, number, num_above, begin, min(end, num_lookups))
        used.add(number, len(path))
    return Curve(trace.num_blocks, _summed(trace, 0, first, second), _summed(trace, middle, second))


class _Counts:
    """A Fenwick tree: counts by number, and their sums from 0 on in O(log n)."""

    def __init__(self, size: int) -> None:
        self.total = 0
        self._size = size
        self._sums = [0] * (size + 1)

    def add(self, number: int, count: int) -> None:
        self.total += count
        at, sums, size = number + 1, self._sums, self._size
        while at <= size:
            sums[at] += count
            at += at & -at

    def up_to(self, number: int) -> int:
        """Return the sum of the counts of 0 to ``number``."""
        at, sums, total = number + 1, self._sums, 0
        while at:
            total += sums[at]
            at &= at - 1
        return total


class _Depths:
    """How many blocks, tokens and requests were found at each depth of the list, as differences between depths."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [0] * (num_blocks + 2)
        self.tokens = [0] * (num_blocks + 2)
        self.ragged = [0] * (num_blocks + 2)  # at a depth, not from it on
        self.requests = [0] * (num_blocks + 2)

    def add(self, trace: BlockTrace, number: int, num_above: int, begin: int, end: int) -> None:
        """Blocks ``begin`` to ``end`` of a request were found below ``num_above`` others, one under the other."""
        top, below, size = num_above + 1, num_above + 1 + end - begin, trace.block_tokens[number]
        self.blocks[top] += 1
        self.blocks[below] -= 1
        self.tokens[top] += size
        self.tokens[below] -= size
        if end == trace.num_lookups[number]:
            self.ragged[below - 1] += trace.last_tokens[number] - size
        if not begin:
            self.requests[top] += 1


def _summed(trace: BlockTrace, start: int, *parts: _Depths) -> HitCurve:
    def merged(name: str) -> list[int]:
        columns = [getattr(part, name) for part in parts]
        return columns[0] if len(columns) == 1 else list(map(sum, zip(*columns, strict=True)))

    tokens = map(int.__add__, accumulate(merged("tokens")), merged("ragged"))
    return HitCurve(
        len(trace) - start,
        sum(trace.num_tokens[start:]),
        sum(trace.num_lookups[start:]),
        array("q", accumulate(merged("requests")))[:-1],
        array("q", accumulate(tokens))[:-1],
        array("q", accumulate(accumulate(merged("blocks"))))[:-1],
    )
