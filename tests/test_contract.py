"""The contract of match, allocate and insert on every route: what each returns, changes and leaves alone."""

from __future__ import annotations

import pytest
from helpers import Counters, cached, counters
from routes import Caller

from radix_cache.errors import InvalidArgument, InvalidBlocks, InvalidTokens, PoolExhausted


class TestMatchPrefix:
    def test_finds_locks_and_allocates_in_one_step(self, cache: Caller) -> None:
        """The table has the cached blocks first, then private ones up to the target."""
        ids = cached(cache, [1, 2, 3, 4])
        lease = cache.match_prefix([1, 2, 3, 4, 5], max_tokens=4, num_tokens=7)
        assert (lease.num_cached_tokens, lease.num_published_tokens) == (4, 4)
        assert list(lease.block_table)[:2] == ids
        assert counters(cache.stats()) == Counters(free=4, leased=2, cached=2, evictable=0, protected=2)
        assert cache.stats().num_leases == 1

    def test_allocates_up_to_the_target(self, cache: Caller) -> None:
        """Positions [0, num_tokens), cached ones included; num_blocks private ones; with both, whichever is fewer."""
        cached(cache, [1, 2, 3, 4])
        by_tokens = [(None, None, 0), (0, None, 0), (4, None, 0), (5, None, 1), (6, None, 1), (9, None, 3)]
        by_blocks = [(None, 0, 0), (None, 2, 2), (9, 2, 2), (5, 2, 1), (2, 2, 0), (9, 0, 0)]
        for num_tokens, num_blocks, added in by_tokens + by_blocks:
            lease = cache.match_prefix([1, 2, 3, 4, 5, 6], num_tokens=num_tokens, num_blocks=num_blocks)
            assert len(lease.block_table) == 2 + added, (num_tokens, num_blocks)
            assert counters(cache.stats()).leased == added
            cache.release(lease)

    def test_max_tokens_caps(self, cache: Caller) -> None:
        """The lock is no wider than the match."""
        cached(cache, [1, 2, 3, 4])
        for cap, expected in [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (2**40, 4)]:
            lease = cache.match_prefix([1, 2, 3, 4], max_tokens=cap)
            assert lease.num_cached_tokens == expected, cap
            assert counters(cache.stats()).protected == expected // 2
            cache.release(lease)

    def test_over_nothing_holds_its_own_blocks_alone(self, cache: Caller) -> None:
        """And over nothing at all it still is a lease that has to be released."""
        lease = cache.match_prefix([])
        assert (list(lease.block_table), lease.num_cached_tokens) == ([], 0)
        assert cache.stats().num_leases == 1
        cache.release(lease)
        assert cache.stats().num_leases == 0

    def test_evicts_others_but_never_its_own_match(self, cache: Caller) -> None:
        """A request must not lose the prefix that it just found."""
        mine = cached(cache, [1, 2, 3, 4])
        cached(cache, [7, 7, 8, 8])
        lease = cache.match_prefix([1, 2, 3, 4], num_blocks=5)
        assert list(lease.block_table)[:2] == mine
        assert counters(cache.stats()) == Counters(free=0, leased=5, cached=3, evictable=1, protected=2)
        assert cache.probe([7, 7, 8, 8]) == 2

    def test_that_cannot_be_met_changes_nothing(self, cache: Caller) -> None:
        """Its own match is no room, nothing is evicted, nothing touched, nothing held."""
        cached(cache, [1, 2, 3, 4])
        cached(cache, [9, 9])
        before = cache.stats()
        with pytest.raises(PoolExhausted) as caught:
            cache.match_prefix([1, 2, 3, 4, 5], num_blocks=7)
        assert (caught.value.needed, caught.value.available) == (7, 6)
        assert isinstance(caught.value, MemoryError)
        assert counters(cache.stats()) == counters(before)
        assert cache.stats().num_leases == 0
        assert cache.evict(1) == 1
        assert (cache.probe([1, 2, 3, 4]), cache.probe([9, 9])) == (2, 2), "the failed match counted as a use"

    def test_counts_its_own_part_of_a_longer_path_as_taken(self, cache: Caller) -> None:
        """Also where it ends in the middle of what was cached in one go, locked in part already or not."""
        cached(cache, [1, 2, 3, 4, 5, 6])
        with pytest.raises(PoolExhausted, match="7 blocks needed, 6 available"):
            cache.match_prefix([1, 2, 3, 4, 9], num_blocks=7)
        held = cache.match_prefix([1, 2])
        with pytest.raises(PoolExhausted, match="7 blocks needed, 6 available"):
            cache.match_prefix([1, 2, 3, 4, 9], num_blocks=7)
        cache.release(held)
        assert len(cache.match_prefix([1, 2, 3, 4, 9], num_blocks=6).block_table) == 8

    def test_takes_a_name_of_ones_own_once(self, cache: Caller) -> None:
        """A second lease of the same name would share its blocks."""
        lease = cache.match_prefix([1, 2], num_tokens=2, lease_id="mine")
        assert lease.lease_id == "mine"
        with pytest.raises(InvalidArgument, match="mine"):
            cache.match_prefix([1, 2], lease_id="mine")
        cache.release("mine")
        cache.release(cache.match_prefix([1, 2], lease_id="mine"))

    def test_names_leases_itself(self, cache: Caller) -> None:
        """With ids that nobody can guess."""
        ids = {cache.match_prefix([]).lease_id for _ in range(50)}
        assert len(ids) == 50
        assert min(map(len, ids)) >= 22


class TestAllocate:
    def test_says_the_target_so_a_repeat_changes_nothing(self, cache: Caller) -> None:
        """The answer is what was added."""
        lease = cache.match_prefix([1, 2, 3], num_tokens=3)
        added = cache.allocate(lease, num_tokens=8)
        assert len(added) == 2
        assert list(cache.allocate(lease, num_tokens=8)) == list(cache.allocate(lease, num_tokens=1)) == []
        assert list(lease.block_table)[2:] == list(added)

    def test_by_blocks_or_by_both(self, cache: Caller) -> None:
        """With both, whichever asks for fewer."""
        for num_tokens, num_blocks, added in [(None, 3, 3), (None, 0, 0), (9, 2, 2), (3, 2, 1), (2, 2, 0)]:
            lease = cache.match_prefix([1, 2], num_tokens=2)
            assert len(cache.allocate(lease, num_tokens=num_tokens, num_blocks=num_blocks)) == added
            cache.release(lease)

    def test_needs_a_number(self, cache: Caller) -> None:
        """Growing by nothing in particular is a mistake of the caller."""
        lease = cache.match_prefix([1, 2], num_tokens=2)
        with pytest.raises(InvalidArgument):
            cache.allocate(lease)

    def test_that_cannot_be_met_changes_nothing(self, cache: Caller) -> None:
        """All or none."""
        cached(cache, [1, 2, 3, 4])
        lease = cache.match_prefix([5, 6], num_tokens=2)
        before = counters(cache.stats())
        with pytest.raises(PoolExhausted, match="8 blocks needed, 7 available"):
            cache.allocate(lease, num_blocks=8)
        assert (counters(cache.stats()), len(lease.block_table)) == (before, 1)
        assert len(cache.allocate(lease, num_blocks=7)) == 7

    def test_is_no_use_of_the_lease(self, cache: Caller) -> None:
        """Growing refreshes nothing: the published blocks keep their age."""
        lease = cache.match_prefix([1, 2], num_tokens=2)
        cache.insert(lease, [1, 2])
        cached(cache, [9, 9])
        cache.allocate(lease, num_tokens=4)
        cache.release(lease)
        cache.evict(1)
        assert (cache.probe([1, 2]), cache.probe([9, 9])) == (0, 2)


class TestInsert:
    def test_publishes_whole_blocks_and_keeps_the_ragged_tail(self, cache: Caller) -> None:
        """The tail stays private until it is full."""
        lease = cache.match_prefix([1, 2, 3], num_tokens=4)
        table = list(lease.block_table)
        result = cache.insert(lease, [1, 2, 3])
        assert (result.num_cached_tokens, list(result.block_ids), list(result.redundant_block_ids)) == (
            0,
            table[:1],
            [],
        )
        assert lease.num_published_tokens == 2
        assert counters(cache.stats()) == Counters(free=6, leased=1, cached=1, evictable=0, protected=1)
        assert list(cache.insert(lease, [1, 2, 3, 4]).block_ids) == table
        assert list(lease.block_table) == table

    def test_makes_duplicates_redundant(self, cache: Caller) -> None:
        """The second writer is pointed to the first one's blocks and keeps its own until it gives them back."""
        first = cache.match_prefix([1, 2, 3, 4], num_tokens=4)
        second = cache.match_prefix([1, 2, 3, 4, 5, 6], num_tokens=6)
        ids, own = list(first.block_table), list(second.block_table)
        cache.insert(first, [1, 2, 3, 4])
        result = cache.insert(second, [1, 2, 3, 4, 5, 6])
        assert (result.num_cached_tokens, list(result.redundant_block_ids)) == (4, own[:2])
        assert list(result.block_ids) == list(second.block_table) == ids + own[2:]
        assert list(first.block_table) == ids
        assert counters(cache.stats()) == Counters(free=3, leased=2, cached=3, evictable=0, protected=3)
        cache.free(second, own[1:2])
        assert counters(cache.stats()).leased == 1
        cache.release(second)
        assert counters(cache.stats()) == Counters(free=5, leased=0, cached=3, evictable=1, protected=2)

    def test_grows_the_lock_over_what_others_had(self, cache: Caller) -> None:
        """Whoever's blocks became canonical: they are read by this request now."""
        lease = cache.match_prefix([1, 2, 3, 4], num_tokens=4)
        cached(cache, [1, 2, 3, 4])
        assert counters(cache.stats()).evictable == 2
        cache.insert(lease, [1, 2, 3, 4])
        assert counters(cache.stats()) == Counters(free=4, leased=2, cached=2, evictable=0, protected=2)

    def test_at_an_offset(self, cache: Caller) -> None:
        """Only the new part is said, or some of the old again; the answer is about what was said."""
        lease = cache.match_prefix([1, 2], num_tokens=8)
        table = list(lease.block_table)
        cache.insert(lease, [1, 2, 3, 4])
        result = cache.insert(lease, [3, 4, 5, 6], offset=2)
        assert (result.num_cached_tokens, list(result.block_ids)) == (4, table[1:3])
        result = cache.insert(lease, [7, 8], offset=6)
        assert (result.num_cached_tokens, list(result.block_ids)) == (6, table[3:])
        result = cache.insert(lease, [3, 4], offset=2)
        assert (result.num_cached_tokens, list(result.block_ids)) == (4, table[1:2])
        assert (lease.num_published_tokens, cache.probe([1, 2, 3, 4, 5, 6, 7, 8])) == (8, 8)

    def test_at_an_impossible_offset(self, cache: Caller) -> None:
        """A gap, or the middle of a block: nothing is published."""
        lease = cache.match_prefix([1, 2], num_tokens=8)
        cache.insert(lease, [1, 2, 3, 4])
        for offset in (1, 3, 6, 2**40):
            with pytest.raises(InvalidArgument, match="offset"):
                cache.insert(lease, [5, 6], offset=offset)
        assert lease.num_published_tokens == 4
        assert counters(cache.stats()).cached == 2

    def test_that_contradicts_what_is_published(self, cache: Caller) -> None:
        """Also in the ragged tail: what is published is never rewritten, and the caller has lost track."""
        lease = cache.match_prefix([1, 2, 3, 4], num_tokens=8)
        cache.insert(lease, [1, 2, 3, 4])
        before = counters(cache.stats())
        for tokens, offset in [([1, 9, 3, 4, 5, 6], 0), ([9, 4, 5, 6], 2), ([1, 2, 9], 0), ([9], 0), ([9], 2)]:
            with pytest.raises(InvalidTokens):
                cache.insert(lease, tokens, offset=offset)
            assert (counters(cache.stats()), lease.num_published_tokens) == (before, 4)

    def test_beyond_the_table(self, cache: Caller) -> None:
        """Blocks come from the lease's table; there are none for these tokens."""
        lease = cache.match_prefix([1, 2, 3, 4], num_tokens=4)
        with pytest.raises(InvalidBlocks):
            cache.insert(lease, [1, 2, 3, 4, 5, 6])
        assert counters(cache.stats()).cached == 0
        cache.insert(lease, [1, 2, 3, 4, 5])

    @pytest.mark.parametrize(("tokens", "offset"), [([3, 4], 2), ([5], 4), ([], 4)])
    def test_touches_its_whole_path_whatever_the_offset(self, cache: Caller, tokens: list[int], offset: int) -> None:
        """A running request keeps its beginning young."""
        lease = cache.match_prefix([1, 2, 3, 4], num_tokens=6)
        cache.insert(lease, [1, 2, 3, 4])
        cached(cache, [9, 9])
        cache.insert(lease, tokens, offset=offset)
        cache.release(lease)
        cache.evict(1)
        assert (cache.probe([9, 9]), cache.probe([1, 2, 3, 4])) == (0, 4)

    def test_touches_no_more_than_it_covers(self, cache: Caller) -> None:
        """What is published beyond the tokens given keeps its age."""
        lease = cache.match_prefix([1, 2, 3, 4], num_tokens=4)
        cache.insert(lease, [1, 2, 3, 4])
        cached(cache, [9, 9])
        cache.insert(lease, [1, 2])
        cache.release(lease)
        cache.evict(2)
        assert (cache.probe([1, 2, 3, 4]), cache.probe([9, 9])) == (2, 0)
