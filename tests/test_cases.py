"""Faults that other prefix caches and block pools really had, one test each: tree, pool and leases.

Each test is named after its case; the docstring has the case's title and where it was seen. ``P`` is the block size,
``N`` the number of blocks.
"""

from __future__ import annotations

import threading

import pytest
from helpers import Clock, Counters, cached, counters

from radix_cache import Lease, PrefixCache
from radix_cache.errors import (
    InvalidArgument,
    InvalidBlocks,
    InvalidTokens,
    LeaseExpired,
    PoolExhausted,
    UnknownLease,
)


def alloc(cache: PrefixCache, num_blocks: int) -> Lease:
    """Take private blocks."""
    return cache.match_prefix([], num_blocks=num_blocks)


def test_kv01() -> None:
    """Second writer of the same prefix keeps using blocks that insert already gave back
    (sgl-project/mini-sglang#142).
    """
    cache = PrefixCache(num_blocks=7, block_size=2)
    a, d, c = (cache.match_prefix([1, 2, 3, 4, 5, 6], num_blocks=amount) for amount in (2, 2, 3))
    ids_a, ids_d, ids_c = (list(lease.block_table) for lease in (a, d, c))
    assert cache.insert(a, [1, 2, 3, 4]).num_cached_tokens == 0
    second = cache.insert(d, [1, 2, 3, 4])
    assert (second.num_cached_tokens, list(second.block_ids), list(second.redundant_block_ids)) == (4, ids_a, ids_d)
    third = cache.insert(c, [1, 2, 3, 4, 5, 6])
    assert (third.num_cached_tokens, list(third.redundant_block_ids)) == (4, ids_c[:2])
    assert list(third.block_ids) == list(c.block_table) == ids_a + ids_c[2:]
    assert (list(a.block_table), list(d.block_table)) == (ids_a, ids_a)
    assert not set(alloc(cache, 0).block_table) & set(ids_d), "the writer's own blocks are not in the pool yet"
    for lease, redundant in ((d, ids_d), (c, ids_c[:2])):
        cache.free(lease, redundant)
        with pytest.raises(InvalidBlocks):
            cache.free(lease, redundant)
    for lease in (a, d, c):
        cache.release(lease)
    assert counters(cache.stats()) == Counters(free=4, leased=0, cached=3, evictable=3, protected=0)
    cache.check_integrity()


def test_kv02() -> None:
    """Insert that re-submits ids obtained from match frees the tree's own blocks (sgl-project/sglang#20539)."""
    cache = PrefixCache(num_blocks=4, block_size=2)
    ids = cached(cache, [1, 2, 3, 4])
    lease = cache.match_prefix([1, 2, 3, 4, 5, 6], num_tokens=6)
    assert (lease.num_cached_tokens, list(lease.block_table)[:2]) == (4, ids)
    result = cache.insert(lease, [1, 2, 3, 4, 5, 6])
    assert (result.num_cached_tokens, list(result.redundant_block_ids)) == (4, [])
    cache.release(lease)
    assert counters(cache.stats()) == Counters(free=1, leased=0, cached=3, evictable=3, protected=0)
    cache.check_integrity()


def test_kv03() -> None:
    """Aborting writer frees blocks it has already published to the tree (sgl-project/sglang#38355)."""
    cache = PrefixCache(num_blocks=4, block_size=2)
    writer = cache.match_prefix([1, 2, 3, 4], num_tokens=4)
    ids = list(cache.insert(writer, [1, 2, 3, 4]).block_ids)
    for given in (ids, ids[:1], ids[1:]):
        with pytest.raises(InvalidBlocks):
            cache.free(writer, given)
    cache.release(writer)
    assert counters(cache.stats()).free == 2
    assert not set(alloc(cache, 2).block_table) & set(ids)
    reader = cache.match_prefix([1, 2, 3, 4])
    assert (reader.num_cached_tokens, list(reader.block_table)) == (4, ids)


def test_kv05(clock: Clock) -> None:
    """Request cancelled while the server completes it leaks its blocks for good (vllm-project/vllm-ascend#16662).

    Here the part without a network: the answer is dropped, so nobody knows the lease, a thousand times.
    """
    cache = PrefixCache(num_blocks=5, block_size=1, lease_ttl_s=1, clock=clock)
    cached(cache, [1, 2, 3])
    for _ in range(1_000):
        cache.match_prefix([1, 2, 3], num_blocks=2)
        assert counters(cache.stats()) == Counters(free=0, leased=2, cached=3, evictable=0, protected=3)
        clock.advance(1)
        assert counters(cache.stats()) == Counters(free=2, leased=0, cached=3, evictable=3, protected=0)
    assert cache.stats().counters["num_expired_leases"] == 1_000
    assert cache.evict(3) == 3
    cache.check_integrity()


def test_kv10() -> None:
    """Partial match refreshes the unmatched tail of the node it splits (sgl-project/sglang#24892)."""
    cache = PrefixCache(num_blocks=6, block_size=1)
    cached(cache, [1, 2, 3, 4])
    cached(cache, [9, 8])
    cache.release(cache.match_prefix([1, 2, 5]))
    assert cache.evict(2) == 2
    assert (cache.probe([9, 8]), cache.probe([1, 2, 3, 4])) == (2, 2)


def test_kv16() -> None:
    """Flush with live handles: later release walks a tree that no longer exists (sgl-project/sglang#12107)."""
    cache = PrefixCache(num_blocks=4, block_size=2)
    cached(cache, [1, 2, 3, 4])
    lease = cache.match_prefix([1, 2, 3, 4])
    cache.reset()
    assert counters(cache.stats()) == Counters(free=2, leased=0, cached=2, evictable=0, protected=2)
    cache.check_integrity()
    cache.release(lease)
    assert counters(cache.stats()) == Counters(free=4, leased=0, cached=0, evictable=0, protected=0)
    cache.reset()
    cached(cache, [1, 2, 3, 4])
    with pytest.raises(UnknownLease):
        cache.release(lease)
    assert counters(cache.stats()) == Counters(free=2, leased=0, cached=2, evictable=2, protected=0)
    cache.check_integrity()


def test_kv17() -> None:
    """Double release by one holder drops another holder's pin (LMCache/LMCache#5098)."""
    cache = PrefixCache(num_blocks=3, block_size=1)
    cached(cache, [1, 2, 3], ("tenant",))
    first, second = (cache.match_prefix([1, 2, 3], ("tenant",)) for _ in range(2))
    assert first.lease_id != second.lease_id
    cache.release(first)
    with pytest.raises(UnknownLease):
        cache.release(first)
    assert (cache.evict(3), counters(cache.stats()).protected) == (0, 3)
    cache.release(second)
    assert cache.evict(3) == 3


def test_kv18(clock: Clock) -> None:
    """Lock taken by a lookup whose result nobody uses is never released (LMCache/LMCache#1034)."""
    cache = PrefixCache(num_blocks=3, block_size=1, lease_ttl_s=1, clock=clock)
    cached(cache, [1, 2, 3])
    lease = cache.match_prefix([1, 2, 3])
    clock.advance(0.9)
    cache.renew(lease)
    clock.advance(0.9)
    assert cache.evict(3) == 0, "renewing didn't extend"
    clock.advance(2)
    assert counters(cache.stats()).protected == 0
    assert cache.evict(3) == 3
    assert cache.stats().counters["num_expired_leases"] == 1
    for late in (cache.release, cache.renew):
        with pytest.raises(LeaseExpired):
            late(lease)
    nothing = cache.match_prefix([1, 2, 3])
    assert (nothing.num_cached_tokens, counters(cache.stats()).protected) == (0, 0)
    cache.check_integrity()


def test_kv22() -> None:
    """Admission counts the blocks it is about to lock as free (vllm-project/vllm#11565)."""
    cache = PrefixCache(num_blocks=5, block_size=1)
    cached(cache, [1, 2])
    lease = cache.match_prefix([1, 2, 3, 4, 5, 6])
    assert lease.num_cached_tokens == 2
    with pytest.raises(PoolExhausted) as caught:
        cache.allocate(lease, num_blocks=4)
    assert (caught.value.needed, caught.value.available) == (4, 3)
    assert counters(cache.stats()) == Counters(free=3, leased=0, cached=2, evictable=0, protected=2)
    cache.release(lease)
    with pytest.raises(PoolExhausted, match="4 blocks needed, 3 available"):
        cache.match_prefix([1, 2, 3, 4, 5, 6], num_tokens=6)
    assert counters(cache.stats()) == Counters(free=3, leased=0, cached=2, evictable=2, protected=0)
    assert len(alloc(cache, 4).block_table) == 4


def test_kv23() -> None:
    """Failed multi-block allocation keeps the blocks it had already popped (ovg-project/kvcached#430)."""
    cache = PrefixCache(num_blocks=4, block_size=1)
    cached(cache, [5, 6])
    held = cache.match_prefix([5, 6])
    for amount in (3, 5):
        with pytest.raises(PoolExhausted):
            alloc(cache, amount)
        assert counters(cache.stats()) == Counters(free=2, leased=0, cached=2, evictable=0, protected=2)
    with pytest.raises(InvalidArgument):
        alloc(cache, -1)
    assert list(alloc(cache, 0).block_table) == []
    cache.release(held)
    with pytest.raises(PoolExhausted):
        alloc(cache, 5)
    assert cache.probe([5, 6]) == 2, "it evicted before it noticed that this can't fit"
    assert len(alloc(cache, 2).block_table) == 2


def test_kv25() -> None:
    """Namespace built by joining strings can be forged or collide (sgl-project/sglang#24638)."""
    cache = PrefixCache(num_blocks=8, block_size=1)
    cached(cache, [1, 2], ("a", "bc"))
    others: list[tuple[str, ...]] = [("ab", "c"), ("abc",), ("a", "bc", ""), ("", "a", "bc"), ("a",), (), ("",), ("0",)]
    for name in others:
        assert cache.probe([1, 2], name) == 0
        assert cache.match_prefix([1, 2], name).num_cached_tokens == 0
    assert cache.match_prefix([1, 2], ("a", "bc")).num_cached_tokens == 2
    cache.reset(("a", "bc"))
    assert cache.match_prefix([1, 2], ("a", "bc")).num_cached_tokens == 0
    for name in (("x" * 5_000,), ("x",) * 1_000):
        with pytest.raises(InvalidArgument, match="namespace"):
            cache.match_prefix([1, 2], name)


def test_kv28() -> None:
    """Splitting a locked node forgets the lock on one half (sgl-project/sglang#38138)."""
    cache = PrefixCache(num_blocks=6, block_size=1)
    cached(cache, [1, 2, 3, 4])
    lease = cache.match_prefix([1, 2, 3, 4])
    cached(cache, [1, 2, 9, 9])
    assert counters(cache.stats()) == Counters(free=0, leased=0, cached=6, evictable=2, protected=4)
    assert cache.evict(10) == 2
    cache.release(lease)
    assert counters(cache.stats()) == Counters(free=2, leased=0, cached=4, evictable=4, protected=0)
    assert cache.evict(10) == 4


def test_kv31() -> None:
    """Key that truncates to nothing crashes or swallows a block (sgl-project/sglang#10637)."""
    cache = PrefixCache(num_blocks=3, block_size=4)
    lease = cache.match_prefix([1, 2, 3], num_tokens=3)
    (x,) = lease.block_table
    for tokens in ([1, 2, 3], []):
        result = cache.insert(lease, tokens)
        assert (result.num_cached_tokens, list(result.block_ids), list(result.redundant_block_ids)) == (0, [], [])
    for tokens in ([], [1, 2, 3]):
        empty = cache.match_prefix(tokens)
        assert (empty.num_cached_tokens, list(empty.block_table)) == (0, [])
    assert counters(cache.stats()) == Counters(free=2, leased=1, cached=0, evictable=0, protected=0)
    (y,) = cache.allocate(lease, num_tokens=6)
    assert list(cache.insert(lease, [1, 2, 3, 4, 5, 6]).block_ids) == [x]
    assert list(lease.block_table) == [x, y]
    assert counters(cache.stats()) == Counters(free=1, leased=1, cached=1, evictable=0, protected=1)
    cache.check_integrity()


def test_kv39() -> None:
    """One missing item aborts a batch removal; a lock held across a wait deadlocks (ai-dynamo/dynamo#14652).

    A batch is best effort with an answer each, a free all or nothing; a reset waits for nobody.
    """
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
        cache = PrefixCache(num_blocks=3, block_size=1)
        names = [cache.match_prefix([], num_blocks=1).lease_id, "bogus", cache.match_prefix([], num_blocks=1).lease_id]
        with cache.batch() as step:
            answers = [step.release(names[place]) for place in order]
        for place, answer in zip(order, answers, strict=True):
            if names[place] == "bogus":
                with pytest.raises(UnknownLease):
                    answer.result()
            else:
                answer.result()
        assert counters(cache.stats()).free == 3

    lease = cache.match_prefix([1, 2], ("ns",), num_tokens=3)
    table = list(lease.block_table)
    cache.insert(lease, [1, 2])
    for bogus in ([table[2], 99], [99, table[2]]):
        with pytest.raises(InvalidBlocks):
            cache.free(lease, bogus)
    assert counters(cache.stats()).leased == 1
    dropping = threading.Thread(target=cache.reset, args=(("ns",),), daemon=True)
    dropping.start()
    dropping.join(timeout=60)
    assert not dropping.is_alive(), "dropping a namespace waits for its lease"
    cache.release(lease)
    assert counters(cache.stats()).free == 3


def test_kv40() -> None:
    """Token ids outside 32 bits wrap silently (ModelTC/LightLLM#1554)."""
    cache = PrefixCache(num_blocks=4, block_size=1)
    lease = cache.match_prefix([5], num_tokens=2)
    cache.insert(lease, [5])
    for bad in (2**32 + 5, -1, 2**64, 2**64 + 5, 5.0, True, "5"):
        for call in (cache.match_prefix, cache.probe, lambda tokens: cache.insert(lease, tokens, offset=0)):
            with pytest.raises(InvalidTokens, match="index 0") as caught:
                call([bad])
            assert caught.value.index == 0
    for good in (2**31, 2**32 - 1, 0):
        assert cache.match_prefix([good]).num_cached_tokens == 0
        assert cached(cache, [good])
        assert cache.probe([good]) == 1
        cache.reset(None, [5])
        cache.evict(1)
    for bad in (2**32 + lease.block_table[1], -1, 2**31, 1.0, True, "1"):
        with pytest.raises(InvalidBlocks):
            cache.free(lease, [bad])


def test_kv42() -> None:
    """Admission looks only at free blocks, so a full cache starves every request (InternLM/lmdeploy#4100)."""
    cache = PrefixCache(num_blocks=4, block_size=1)
    cached(cache, [1, 2, 3, 4])
    assert counters(cache.stats()) == Counters(free=0, leased=0, cached=4, evictable=4, protected=0)
    assert len(alloc(cache, 1).block_table) == 1
    held = cache.match_prefix([1, 2, 3, 4])
    assert held.num_cached_tokens == 3
    with pytest.raises(PoolExhausted, match="1 blocks needed, 0 available"):
        alloc(cache, 1)
    cache.release(held)
    assert len(alloc(cache, 1).block_table) == 1


def test_kv43() -> None:
    """Cache called LRU evicts by insertion order (antonellof/ferrox#14). A probe and a release are no use."""
    cache = PrefixCache(num_blocks=5, block_size=1)
    cached(cache, [1, 2])
    reading = cache.match_prefix([1, 2])
    cached(cache, [3, 4])
    cache.release(cache.match_prefix([1, 2]))
    cache.probe([3, 4])
    cache.evict(2)
    assert (cache.probe([1, 2]), cache.probe([3, 4])) == (2, 0)
    cache.release(reading)
    cached(cache, [7])
    assert cache.match_prefix([7, 8]).num_cached_tokens == 1
