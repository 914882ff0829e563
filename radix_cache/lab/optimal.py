"""The offline optimum: what a cache could find that knew all requests to come. A bound, not a policy for production.

The block whose next use is farthest goes first, and a block whose own next use is farther than that of all others is
not kept at all (Belady, IBM Systems Journal 1966; Mattson's MIN with bypass). A block's descendants are never used
before it is, so the farthest block is always a leaf and prefixes need no rule of their own. This is exact for the block
hit rate, since all blocks cost the same; for token hit rates it is a very good policy and no proven bound, because the
ragged last block of a prompt counts fewer tokens.

Blocks need not be told apart. All cached blocks that request n uses next lie on the path of n, and since they are there
together with their ancestors they are the beginning of it. So it is enough to know *how many* blocks wait for each
request: request n hits exactly that many, and what is evicted from them is evicted from their end.

Being used means being looked up. Where a trace has outputs, a block that a later request computes anew before anyone
looks it up is worth nothing until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from radix_cache.lab.blocks import BlockTrace, Runs
from radix_cache.lab.hits import ReplayResult, Tally
from radix_cache.lab.requests import Request
from radix_cache.operations import check_count

__all__ = ["block_optimal", "optimal", "plan_ahead"]

Plan = list[list[tuple[int, int]]]


def optimal(requests: Iterable[Request], num_blocks: int, block_size: int = 16) -> ReplayResult:
    """Return what a cache of ``num_blocks`` could have found at most. O(blocks), then O(requests * log requests).

    ``num_evicted_blocks`` does not count blocks that were never kept; ``num_calls`` is the number of requests.
    Raises `InvalidArgument` for fewer than one block.
    """
    trace = BlockTrace.of(requests, block_size)
    return block_optimal(trace, plan_ahead(trace), num_blocks)


def plan_ahead(trace: BlockTrace) -> Plan:
    """Return for each request how many of its blocks wait for which later request, from the start of its path on.

    Good for any capacity. What nobody looks up again is left out: it is at the end.
    """
    runs = Runs(trace)
    plan: Plan = []
    for number in range(len(trace) - 1, -1, -1):
        stretches = runs.of(number, trace.path(number))
        looked_up = [(user, min(end, trace.num_lookups[user]) - begin) for user, begin, end in stretches]
        plan.append([(user, num_blocks) for user, num_blocks in reversed(looked_up) if num_blocks > 0])
    plan.reverse()
    return plan


def block_optimal(
    trace: BlockTrace, plan: Plan, num_blocks: int, clock: Callable[[], float] = time.perf_counter
) -> ReplayResult:
    """`optimal` of what is a `BlockTrace` already, with what `plan_ahead` made of it."""
    start = clock()
    waiting = _Waiting(len(trace), check_count(num_blocks, "num_blocks", 1))
    tally = Tally(trace.block_size)
    for number, later in enumerate(plan):
        num_hits = waiting.take(number)
        tally.add_row(
            trace.num_tokens[number],
            trace.num_lookups[number],
            num_hits * trace.block_tokens[number],
            num_hits,
        )
        for user, num_wanted in later:
            if waiting.keep(user, num_wanted) < num_wanted:
                break
    return tally.result(waiting.num_evicted, len(trace), clock() - start)


class _Waiting:
    """How many cached blocks wait for each request to come."""

    def __init__(self, num_requests: int, num_blocks: int) -> None:
        self.num_evicted = 0
        self._room = num_blocks
        self._counts = [0] * num_requests
        self._latest: list[int] = []  # a heap of the requests waited for, negated; those that came stay in it

    def take(self, number: int) -> int:
        """Request ``number`` is here: return how many blocks waited for it."""
        count, self._counts[number] = self._counts[number], 0
        self._room += count
        return count

    def keep(self, user: int, num_wanted: int) -> int:
        """Let up to ``num_wanted`` more blocks wait for ``user``, at the cost of later users; return how many."""
        if num_wanted > self._room:
            self._evict(user, num_wanted - self._room)
        num_kept = min(num_wanted, self._room)
        if num_kept and not self._counts[user]:
            heappush(self._latest, -user)
        self._counts[user] += num_kept
        self._room -= num_kept
        return num_kept

    def _evict(self, user: int, num_missing: int) -> None:
        latest, counts = self._latest, self._counts
        while num_missing and latest and -latest[0] > user:
            last = -latest[0]
            num_evicted = min(counts[last], num_missing)
            counts[last] -= num_evicted
            num_missing -= num_evicted
            self._room += num_evicted
            self.num_evicted += num_evicted
            if not counts[last]:
                heappop(latest)
