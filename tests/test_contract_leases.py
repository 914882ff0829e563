"""The contract of free, fork, reset and of what is answered, on every route."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import Counters, assert_fresh_int32, cached, counters, packed
from routes import Caller

from radix_cache.errors import InvalidArgument, InvalidBlocks, StaleLease, UnknownLease


class TestFree:
    def test_takes_the_tail_and_redundant_blocks_together(self, cache: Caller) -> None:
        """In any order, in one call."""
        first, second = (cache.match_prefix([1, 2], num_tokens=6) for _ in range(2))
        cache.insert(first, [1, 2])
        redundant = list(cache.insert(second, [1, 2]).redundant_block_ids)
        table = list(second.block_table)
        cache.free(second, [table[2], *redundant, table[1]])
        assert list(second.block_table) == table[:1]
        assert counters(cache.stats()) == Counters(free=5, leased=2, cached=1, evictable=0, protected=1)
        cache.free(second, [])

    def test_refuses_anything_else_whole(self, cache: Caller) -> None:
        """A published block is read by others, a hole has no table; the good ids of a bad call stay."""
        other = cache.match_prefix([7], num_tokens=2)
        lease = cache.match_prefix([1, 2, 3, 4], num_tokens=8)
        cache.insert(lease, [1, 2])
        table = list(lease.block_table)
        refused = {
            "published": table[:1],
            "middle": table[2:3],
            "twice": [table[3], table[3]],
            "another's": list(other.block_table),
            "free": [min(set(range(8)) - {*table, *other.block_table})],
            "unknown": [2**31 - 1],
            "with a good one": [table[3], table[1]],
        }
        before = counters(cache.stats())
        for what, ids in refused.items():
            with pytest.raises(InvalidBlocks):
                cache.free(lease, ids)
            assert (counters(cache.stats()), list(lease.block_table)) == (before, table), what

    def test_gives_ids_to_those_who_waited_longest(self, cache: Caller) -> None:
        """A late engine does the least harm."""
        lease = cache.match_prefix([], num_blocks=8)
        table = list(lease.block_table)
        for place in (7, 6, 5):
            cache.free(lease, table[place : place + 1])
        again = cache.match_prefix([], num_blocks=2)
        assert list(again.block_table) == [table[7], table[6]]


class TestFork:
    def test_shares_whole_blocks_and_copies_the_ragged_one(self, cache: Caller) -> None:
        """The prompt is what the parent has published, then the tokens."""
        parent = cache.match_prefix([1, 2, 3], ("m",), num_tokens=4)
        cache.insert(parent, [1, 2, 3])
        child = cache.match_prefix([3, 7], parent=parent, num_tokens=4)
        assert child.namespace == ("m",)
        assert (child.num_cached_tokens, list(child.block_table)[:1]) == (2, list(parent.block_table)[:1])
        assert child.block_table[1] != parent.block_table[1]
        cache.insert(child, [3, 7], offset=2)
        cache.release(parent)
        assert cache.probe([1, 2, 3, 7], ("m",)) == 4
        assert counters(cache.stats()).protected == 2

    def test_matches_on_below_the_parent(self, cache: Caller) -> None:
        """What somebody else published there is found."""
        cached(cache, [1, 2, 3, 4, 5, 6])
        parent = cache.match_prefix([1, 2])
        child = cache.match_prefix([3, 4, 9], parent=parent.lease_id)
        assert child.num_cached_tokens == 4
        assert cache.match_prefix([3, 4, 5, 6], parent=parent, max_tokens=4).num_cached_tokens == 4

    def test_refuses_what_contradicts_the_parent(self, cache: Caller) -> None:
        """Below its published length, or in another namespace."""
        parent = cache.match_prefix([1, 2], ("m",), num_tokens=2)
        cache.insert(parent, [1, 2])
        contradictions: list[dict[str, Any]] = [{"max_tokens": 1}, {"max_tokens": 0}, {"namespace": ("other",)}]
        for options in contradictions:
            with pytest.raises(InvalidArgument):
                cache.match_prefix([3], parent=parent, **options)
        assert cache.stats().num_leases == 1
        assert cache.match_prefix([3], parent=parent, namespace=("m",)).num_cached_tokens == 2

    def test_of_a_stale_or_gone_parent(self, cache: Caller) -> None:
        """What it published is not to be matched again."""
        parent = cache.match_prefix([1, 2], num_tokens=2)
        cache.insert(parent, [1, 2])
        cache.reset()
        with pytest.raises(StaleLease) as caught:
            cache.match_prefix([], parent=parent)
        assert caught.value.lease_id == parent.lease_id
        cache.release(parent)
        with pytest.raises(UnknownLease):
            cache.match_prefix([], parent=parent)


class TestObject:
    def test_of_a_lease_that_is_gone_is_not_the_one_that_has_its_name_now(self, cache: Caller) -> None:
        """Names may be chosen, and used again; the old object still means the old lease."""
        old = cache.match_prefix([1], num_blocks=1, lease_id="a")
        cache.release(old)
        new = cache.match_prefix([2], num_blocks=1, lease_id="a")
        for call in (
            lambda: cache.allocate(old, num_blocks=1),
            lambda: cache.insert(old, [1, 1]),
            lambda: cache.free(old, old.block_table),
            lambda: cache.renew(old),
            lambda: cache.match_prefix([3], parent=old),
            lambda: cache.release(old),
        ):
            with pytest.raises(UnknownLease):
                call()
        with cache.batch() as batch:
            refused, grown = batch.allocate(old, num_blocks=1), batch.allocate(new, num_blocks=1)
        with pytest.raises(UnknownLease):
            refused.result()
        assert len(grown.result()) == 1
        assert len(new.block_table) == 2
        assert counters(cache.stats()).leased == 2


class TestReset:
    def test_covers_the_namespaces_that_begin_alike(self, cache: Caller) -> None:
        """A prefix of the tuple, never of a joined string; none of them is all of them."""
        names: list[tuple[str, ...]] = [(), ("m",), ("m", "w7"), ("mw7",)]
        for name in names:
            cached(cache, [1, 2], name)
        cache.reset(("m",))
        assert [cache.probe([1, 2], name) for name in names] == [2, 0, 0, 2]
        cache.reset()
        assert counters(cache.stats()) == Counters(free=8, leased=0, cached=0, evictable=0, protected=0)

    def test_with_tokens_forgets_what_extends_them(self, cache: Caller) -> None:
        """The prefix itself stays, and every older lease of the namespace is stale, whatever its tokens."""
        cached(cache, [1, 2, 3, 4, 5, 6], ("m",))
        elsewhere = cache.match_prefix([9], ("m",), num_tokens=2)
        other = cache.match_prefix([9], ("other",), num_tokens=2)
        cache.reset(("m",), [1, 2])
        assert cache.probe([1, 2, 3, 4, 5, 6], ("m",)) == 2
        with pytest.raises(StaleLease):
            cache.insert(elsewhere, [9, 9])
        cache.insert(other, [9, 9])
        new = cache.match_prefix([9], ("m",), num_tokens=2)
        cache.insert(new, [9, 9])
        assert cache.probe([9, 9], ("m",)) == 2

    def test_keeps_protected_blocks_out_of_the_pool_until_they_are_released(self, cache: Caller) -> None:
        """Somebody reads them; the evictable ones below return at once."""
        cached(cache, [1, 2, 3, 4, 5, 6])
        lease = cache.match_prefix([1, 2, 3, 4])
        table = list(lease.block_table)
        cache.reset()
        assert counters(cache.stats()) == Counters(free=6, leased=0, cached=2, evictable=0, protected=2)
        assert cache.evict(9) == 0
        cached(cache, [1, 2, 3, 4])
        assert list(cache.match_prefix([1, 2, 3, 4], lease_id="new").block_table) != table
        assert list(lease.block_table) == table
        cache.release(lease)
        assert counters(cache.stats()) == Counters(free=6, leased=0, cached=2, evictable=0, protected=2)


class TestAnswers:
    def test_are_fresh_writable_arrays(self, cache: Caller) -> None:
        """Writing to them, or a view that is held, neither reaches the cache nor fails a later call."""
        other = cache.match_prefix([1, 2], num_tokens=2)
        lease = cache.match_prefix([1, 2, 3], num_tokens=4)
        cache.insert(other, [1, 2])
        result = cache.insert(lease, [1, 2, 3])
        added = cache.allocate(lease, num_tokens=6)
        expected = list(lease.block_table)
        answers = [lease.block_table, result.block_ids, result.redundant_block_ids, added]
        for ids in answers:
            assert_fresh_int32(ids)
        views = [memoryview(ids) for ids in answers] + [np.frombuffer(ids, dtype=np.int32) for ids in answers]
        views += [torch.frombuffer(ids, dtype=torch.int32) for ids in answers]
        cache.allocate(lease, num_tokens=8)
        for view in views:
            view[0] = 99
        table = list(lease.block_table)
        assert table[:3] == expected
        cache.insert(lease, [1, 2, 3, 4])
        cache.free(lease, table[2:])
        assert list(lease.block_table) == table[:2]
        cache.release(lease)

    def test_are_the_same_for_every_form_of_tokens(self, cache: Caller) -> None:
        """What one engine inserted as a list another finds as a tensor."""
        tokens = [1, 2, 3, 2**32 - 1]
        ids = cached(cache, tokens)
        forms = [tokens, tuple(tokens), packed(tokens), np.array(tokens, dtype=np.uint32), torch.tensor(tokens)]
        for form in forms:
            lease = cache.match_prefix(form)
            assert list(lease.block_table) == ids
            assert cache.insert(lease, form).num_cached_tokens == 4
            assert cache.probe(form) == 4
            cache.reset(("elsewhere",), form)
            cache.release(lease)
