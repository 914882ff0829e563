"""Reuse inside a block, on every route: the cached block behind a match that agrees longest with the prompt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers import Counters, cached, counters
from hypothesis import given
from hypothesis import strategies as st
from routes import Caller, Route

from radix_cache import PrefixCache, RadixTree, pack_tokens
from radix_cache.errors import InvalidArgument
from radix_cache.nearest import num_common_tokens

OpenRoute = Callable[..., Route]


def found(cache: Caller, tokens: list[int], **options: object) -> tuple[int, int | None, int]:
    """Match, end the lease, and return what was matched in whole blocks and in part."""
    lease = cache.match_prefix(tokens, partial=True, **options)
    answer = lease.num_cached_tokens, lease.partial_block_id, lease.num_partial_tokens
    cache.release(lease)
    return answer


class TestPartialBlocks:
    def test_the_block_that_agrees_longest_is_named(self, open_route: OpenRoute) -> None:
        """Behind whole blocks, at the very beginning, within a span and at its end."""
        cache = open_route(num_blocks=16, block_size=4).caller()
        first = cached(cache, [1, 2, 3, 4, 5, 6, 7, 8])
        (other,) = cached(cache, [1, 2, 9, 9])
        assert found(cache, [1, 2, 3, 4, 5, 6, 0, 0, 0]) == (4, first[1], 2)
        assert found(cache, [1, 2, 3, 0]) == (0, first[0], 3)
        assert found(cache, [1, 2, 9]) == (0, other, 3)
        assert found(cache, [1, 2, 3, 4, 0, 6, 7, 8]) == (4, None, 0)
        assert found(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]) == (8, None, 0)
        assert found(cache, []) == (0, None, 0)

    def test_the_cap_holds_for_it_as_well(self, open_route: OpenRoute) -> None:
        """An engine must compute at least the last token of its prompt."""
        cache = open_route(num_blocks=16, block_size=4).caller()
        ids = cached(cache, [1, 2, 3, 4, 5, 6, 7, 8])
        assert found(cache, [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=7) == (4, ids[1], 3)
        assert found(cache, [1, 2, 3, 4, 5], max_tokens=4) == (4, None, 0)

    def test_nothing_is_named_unless_asked_for(self, open_route: OpenRoute) -> None:
        """An engine that does not copy would keep a block for nothing."""
        cache = open_route(num_blocks=16, block_size=4).caller()
        cached(cache, [1, 2, 3, 4])
        lease = cache.match_prefix([1, 2, 3, 9])
        assert (lease.partial_block_id, lease.num_partial_tokens) == (None, 0)
        assert counters(cache.stats()).protected == 0

    def test_it_is_locked_until_the_lease_publishes(self, open_route: OpenRoute) -> None:
        """And not touched: it is no more recent than it was. What follows it in its span is not locked."""
        cache = open_route(num_blocks=16, block_size=2).caller()
        cached(cache, [1, 2, 3, 4, 5, 6])
        cached(cache, [7, 7])
        lease = cache.match_prefix([1, 2, 3, 9], partial=True, num_tokens=4)
        assert (lease.num_cached_tokens, lease.num_partial_tokens) == (2, 1)
        assert counters(cache.stats()) == Counters(free=11, leased=1, cached=4, evictable=2, protected=2)
        assert cache.evict(9) == 2
        assert cache.probe([1, 2, 3, 4]) == 4
        cache.insert(lease, [1, 2, 3, 9])
        assert (lease.partial_block_id, lease.num_partial_tokens) == (None, 0)
        assert counters(cache.stats()) == Counters(free=13, leased=0, cached=3, evictable=1, protected=2)
        cache.release(lease)
        assert cache.evict(1) == 1  # the block that was only copied from goes first
        assert cache.probe([1, 2, 3, 9]) == 4

    def test_it_is_locked_until_the_lease_ends(self, open_route: OpenRoute) -> None:
        """Released, reset or not."""
        cache = open_route(num_blocks=16, block_size=2).caller()
        cached(cache, [1, 2, 3, 4])
        lease = cache.match_prefix([1, 9], partial=True)
        cache.reset()
        assert counters(cache.stats()) == Counters(free=15, leased=0, cached=1, evictable=0, protected=1)
        cache.release(lease)
        assert counters(cache.stats()).free == 16

    def test_a_request_never_fails_for_it(self, open_route: OpenRoute) -> None:
        """Where the block is needed for the request itself, it is evicted like any other, and not named."""
        cache = open_route(num_blocks=3, block_size=2).caller()
        cached(cache, [1, 2, 3, 4])
        lease = cache.match_prefix([1, 9, 9], partial=True, num_blocks=2)
        assert (lease.partial_block_id is None, lease.num_partial_tokens) == (False, 1)
        cache.release(lease)
        cached(cache, [1, 2, 3, 4])
        lease = cache.match_prefix([1, 9, 9], partial=True, num_blocks=3)
        assert (lease.partial_block_id, len(lease.block_table)) == (None, 3)

    def test_a_fork_finds_one_behind_its_parent(self, open_route: OpenRoute) -> None:
        """Its tokens follow what the parent has published."""
        cache = open_route(num_blocks=16, block_size=2).caller()
        ids = cached(cache, [1, 2, 3, 4])
        parent = cache.match_prefix([1, 2])
        fork = cache.match_prefix([3, 9], parent=parent, partial=True)
        assert (fork.num_cached_tokens, fork.partial_block_id, fork.num_partial_tokens) == (2, ids[1], 1)

    def test_what_is_no_flag(self, cache: Caller) -> None:
        """By name."""
        with pytest.raises(InvalidArgument, match="partial is True or False, not 1"):
            cache.match_prefix([1], partial=1)


@given(
    st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=60, unique=True),
    st.lists(st.integers(0, 3), max_size=3),
    st.lists(st.integers(0, 59), max_size=30),
)
def test_many_children_are_searched_like_few(blocks: list[tuple[int, ...]], piece: list[int], gone: list[int]) -> None:
    """The sorted keys of a wide node give what looking at every key gives, while children come and go."""
    cache = PrefixCache(num_blocks=64, block_size=3)
    for number, block in enumerate(blocks):
        cached(cache, list(block))
        if number in gone:
            cache.release(cache.match_prefix([*piece, 9], partial=True))
            cache.evict(1)
    lease = cache.match_prefix([*piece, 9], partial=True, max_tokens=len(piece))
    there = [block for block in blocks if cache.probe(list(block)) == 3]
    packed = pack_tokens(piece)
    most = max((num_common_tokens(pack_tokens(block), packed) for block in there), default=0)
    if len(piece) == 3 and tuple(piece) in there:
        most = 0
    assert lease.num_partial_tokens == most
    cache.check_integrity()


def test_a_tree_alone_has_no_such_thing() -> None:
    """`RadixTree` knows no leases: its callers see the whole blocks."""
    with pytest.raises(TypeError):
        RadixTree(4).match_prefix([1], partial=True)  # type: ignore[call-arg]
