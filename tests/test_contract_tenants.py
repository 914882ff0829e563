"""Several tenants on one pool, on every route: limits of namespaces, pins, and the figures of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers import Counters, cached, counters
from routes import Caller, Route

from radix_cache import EvictionPolicy, NamespaceLimit, PrefixCache
from radix_cache.errors import InvalidArgument, LeaseExpired, PoolExhausted, UnknownLease

A, A_LORA, B = ("a",), ("a", "lora"), ("b",)
OpenRoute = Callable[..., Route]


class TestLimits:
    def test_a_tenant_at_its_limit_evicts_its_own(self, open_route: OpenRoute) -> None:
        """Cached and leased blocks count alike, in all namespaces under the prefix; others lose nothing."""
        cache = open_route(num_blocks=10, block_size=1, limits={A: NamespaceLimit(max_blocks=4)}).caller()
        cached(cache, [1, 2, 3], B)
        cached(cache, [1, 2], A)
        cached(cache, [1, 2], A_LORA)
        lease = cache.match_prefix([7], A, num_blocks=1)
        assert [cache.probe([1, 2], A), cache.probe([1, 2], A_LORA), cache.probe([1, 2, 3], B)] == [1, 2, 3]
        assert counters(cache.stats()) == Counters(free=3, leased=1, cached=6, evictable=6, protected=0)
        cache.release(lease)

    def test_beyond_its_limit_nothing_is_had_or_evicted(self, open_route: OpenRoute) -> None:
        """The refusal says what is left to it; a running lease is held to it as well."""
        cache = open_route(num_blocks=10, block_size=1, limits={A: NamespaceLimit(max_blocks=4)}).caller()
        cached(cache, [1, 2], A)
        held = cache.match_prefix([1, 2], A, num_blocks=1)
        for refused in (
            lambda: cache.match_prefix([5], A_LORA, num_blocks=2),
            lambda: cache.allocate(held, num_blocks=2),
        ):
            with pytest.raises(PoolExhausted) as error:
                refused()
            assert (error.value.needed, error.value.available) == (2, 1)
            assert "max_blocks of its namespaces is 4" in str(error.value)
        assert counters(cache.stats()) == Counters(free=7, leased=1, cached=2, evictable=0, protected=2)
        cache.release(cache.match_prefix([5], A_LORA, num_blocks=1))
        cache.release(held)

    def test_its_own_match_is_no_room(self, open_route: OpenRoute) -> None:
        """What the request is about to use is not evicted for it."""
        cache = open_route(num_blocks=10, block_size=1, limits={A: NamespaceLimit(max_blocks=3)}).caller()
        cached(cache, [1, 2], A)
        with pytest.raises(PoolExhausted) as error:
            cache.match_prefix([1, 2, 3, 4], A, num_tokens=4)
        assert (error.value.needed, error.value.available) == (2, 1)
        assert cache.probe([1, 2], A) == 2

    def test_others_cannot_flush_the_reserved_minimum(self, open_route: OpenRoute) -> None:
        """B takes what is free and what A has beyond its minimum, the least recently used of it, and no more."""
        cache = open_route(num_blocks=6, block_size=1, limits={A: NamespaceLimit(min_blocks=2)}).caller()
        cached(cache, [1, 2], A)
        cached(cache, [3, 4], A)
        with pytest.raises(PoolExhausted) as error:
            cache.match_prefix([9], B, num_blocks=5)
        assert error.value.available == 4
        lease = cache.match_prefix([9], B, num_blocks=4)
        assert (cache.probe([1, 2], A), cache.probe([3, 4], A)) == (0, 2)
        with pytest.raises(PoolExhausted):
            cache.allocate(lease, num_blocks=1)
        cache.release(lease)

    def test_it_may_be_evicted_for_its_own(self, open_route: OpenRoute) -> None:
        """A minimum protects against others, not against oneself."""
        cache = open_route(num_blocks=4, block_size=1, limits={A: NamespaceLimit(min_blocks=4)}).caller()
        cached(cache, [1, 2, 3, 4], A)
        cache.release(cache.match_prefix([7], A, num_blocks=4))
        assert cache.probe([1, 2, 3, 4], A) == 0

    def test_the_operator_may_evict_all_of_it_last(self, open_route: OpenRoute) -> None:
        """`evict` is an order and takes exactly what it says; what is kept for somebody goes last."""
        cache = open_route(num_blocks=6, block_size=1, limits={A: NamespaceLimit(min_blocks=2)}).caller()
        cached(cache, [1, 2, 3], A)
        cached(cache, [4, 5, 6], B)
        assert cache.evict(4) == 4
        assert (cache.probe([1, 2, 3], A), cache.probe([4, 5, 6], B)) == (2, 0)
        assert cache.evict(9) == 2

    def test_the_longest_prefix_counts(self, open_route: OpenRoute) -> None:
        """A narrower limit takes its namespaces out of the wider one."""
        limits = {A: NamespaceLimit(max_blocks=1), A_LORA: NamespaceLimit(max_blocks=2)}
        cache = open_route(num_blocks=6, block_size=1, limits=limits).caller()
        cached(cache, [1], A)
        cached(cache, [1, 2], A_LORA)
        assert (cache.probe([1], A), cache.probe([1, 2], A_LORA)) == (1, 2)
        with pytest.raises(PoolExhausted):
            cache.match_prefix([1], ("a", "other"), num_blocks=2)

    def test_what_cannot_be_kept_is_refused(self) -> None:
        """With the numbers."""
        for limits, text in (
            ({A: NamespaceLimit(min_blocks=5), B: NamespaceLimit(min_blocks=5)}, "10 together, and the pool has 8"),
            ({A: NamespaceLimit(max_blocks=0)}, "max_blocks is at least 1"),
            ({A: NamespaceLimit(max_blocks=3, min_blocks=4)}, "min_blocks is at least 0 and at most 3, not 4"),
            ({A: 5}, "a limit is a NamespaceLimit, not int"),
            ({"a": NamespaceLimit()}, "namespace is a tuple of strings"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                PrefixCache(num_blocks=8, limits=limits)  # type: ignore[arg-type]

    def test_each_share_has_an_order_of_the_policy(self) -> None:
        """Orders of another policy than recency are compared by its score."""
        cache = PrefixCache(6, 1, policy="lfu", limits={A: NamespaceLimit(min_blocks=1)})
        for namespace, tokens, times in ((A, [1], 3), (A, [2], 1), (B, [1], 2), (B, [2], 4)):
            for _ in range(times):
                cached(cache, tokens, namespace)
        cache.evict(2)
        assert [cache.probe([1], A), cache.probe([2], A), cache.probe([1], B), cache.probe([2], B)] == [1, 0, 0, 1]
        cache.check_integrity()

    def test_a_limit_that_never_binds_changes_no_order(self) -> None:
        """An age is of the pool: a tenant that has turned it over many times must not shut out a new one."""
        for policy in ("lru", "lfu", "lfu-da", "pgdsf", "two-hit", "priority", "workload-aware"):
            orders = []
            for limits in ({}, {A: NamespaceLimit(max_blocks=10)}):
                cache = PrefixCache(10, 1, policy=policy, limits=limits, clock=lambda: 0.0)
                for number in range(200):
                    cached(cache, [number % 150], A)
                    cached(cache, [number % 7], B)
                orders.append([cache.probe([token], name) for name in (A, B) for token in range(150)])
                cache.check_integrity()
            assert orders[0] == orders[1], policy

    def test_a_policy_with_one_order_is_refused(self) -> None:
        """With what it lacks."""

        class OneOrder(EvictionPolicy):
            name = "one-order"
            touch = add = discard = lambda self, leaf: None
            victim = candidates = lambda self: None

        PrefixCache(8, policy=OneOrder())  # type: ignore[abstract]
        with pytest.raises(InvalidArgument, match="'one-order' keeps one order"):
            PrefixCache(8, policy=OneOrder(), limits={A: NamespaceLimit(max_blocks=3)})  # type: ignore[abstract]


class TestPins:
    def test_a_pin_keeps_a_prefix_without_a_request(self, open_route: OpenRoute) -> None:
        """It is there after any pressure, and gone when it is unpinned."""
        cache = open_route(num_blocks=8, block_size=2).caller()
        ids = cached(cache, [1, 2, 3, 4])
        pin = cache.pin([1, 2, 3, 4, 5], 3600)
        assert (pin.num_cached_tokens, list(pin.block_table), pin.is_pin) == (4, ids, True)
        assert cache.evict(99) == 0
        assert counters(cache.stats()) == Counters(free=6, leased=0, cached=2, evictable=0, protected=2)
        stats = cache.stats()
        assert (stats.num_pins, stats.num_pinned_blocks, stats.num_leases) == (1, 2, 1)
        cache.unpin(pin)
        assert cache.evict(99) == 2
        with pytest.raises(UnknownLease):
            cache.unpin(pin)
        assert cache.stats().num_pins == cache.stats().num_pinned_blocks == 0

    @pytest.mark.parametrize("ttl_s", [None, 5])
    def test_it_ends_by_itself(self, open_route: OpenRoute, ttl_s: float | None) -> None:
        """After its own time, whether or not leases run out, and whoever goes on calling."""
        route = open_route(num_blocks=8, block_size=1, lease_ttl_s=ttl_s)
        cache = route.caller("engine")
        cached(cache, [1, 2])
        pin = cache.pin([1, 2], 20)
        route.advance(19)
        assert cache.evict(9) == 0
        cache.renew(pin, ttl_s=10)
        route.advance(9.5)
        assert cache.evict(9) == 0
        cache.heartbeat()
        route.advance(1)
        assert cache.evict(9) == 2
        with pytest.raises(LeaseExpired):
            cache.unpin(pin)
        assert cache.stats().counters["num_expired_leases"] == 0  # those are of engines that died

    def test_a_share_of_the_pool_is_all_that_pins_keep(self, open_route: OpenRoute) -> None:
        """A block under two pins counts twice; what goes beyond is refused and locks nothing."""
        cache = open_route(num_blocks=12, block_size=1, pin_share=0.25).caller()
        cached(cache, [1, 2])
        cache.pin([1, 2], 60)
        with pytest.raises(PoolExhausted) as error:
            cache.pin([1, 2], 60)
        assert (error.value.needed, error.value.available) == (2, 1)
        assert "pins keep at most 3 blocks (pin_share)" in str(error.value)
        assert cache.pin([9], 60).num_cached_tokens == 0
        assert cache.stats().num_pinned_blocks == 3
        with pytest.raises(PoolExhausted):
            cache.pin([9], 60)  # also pins of nothing come to an end

    def test_only_a_pin_is_unpinned(self, cache: Caller) -> None:
        """A wrong id must not end a request whose kernels write."""
        lease = cache.match_prefix([1, 2], num_tokens=2)
        with pytest.raises(InvalidArgument, match="is no pin"):
            cache.unpin(lease)
        assert counters(cache.stats()).leased == 1
        cache.release(lease)

    def test_it_has_no_blocks_of_its_own(self, open_route: OpenRoute) -> None:
        """A request can fork from it instead."""
        cache = open_route(num_blocks=8, block_size=1).caller()
        cached(cache, [1, 2])
        pin = cache.pin([1, 2], 60)
        with pytest.raises(InvalidArgument, match="is a pin"):
            cache.allocate(pin, num_blocks=1)
        with pytest.raises(InvalidArgument, match="is a pin"):
            cache.insert(pin, [1, 2])
        assert cache.stats().counters["num_lookups"] == 1
        lease = cache.match_prefix([3], parent=pin, num_tokens=3)
        assert lease.num_cached_tokens == 2
        cache.insert(lease, [1, 2, 3])
        cache.release(lease)
        cache.unpin(pin)
        assert cache.probe([1, 2, 3]) == 3

    def test_a_reset_ends_what_it_forgets(self, open_route: OpenRoute) -> None:
        """Else blocks that nobody can match would be kept for an hour; a pin of something else stays."""
        cache = open_route(num_blocks=12, block_size=1).caller()
        for tokens in ([1, 2], [5]):
            cached(cache, tokens, A)
        kept, gone = cache.pin([5], 3600, A), cache.pin([1, 2], 3600, A)
        cache.reset(A, [1])
        assert (cache.probe([1, 2], A), cache.stats().num_pins) == (1, 1)
        with pytest.raises(UnknownLease):
            cache.unpin(gone)
        assert cache.evict(9) == 1
        cache.unpin(kept)

    def test_in_a_batch(self, open_route: OpenRoute) -> None:
        """Pinned, forked from and unpinned in one message."""
        cache = open_route(num_blocks=8, block_size=1).caller("E")
        cached(cache, [1, 2])
        with cache.batch() as batch:
            pin = batch.pin([1, 2], 60)
            fork = batch.match_prefix([3], parent=pin, num_tokens=3)
            ended = batch.unpin(pin)
        assert pin.result().num_cached_tokens == fork.result().num_cached_tokens == 2
        assert ended.result() is None
        assert cache.stats().num_pins == 0

    @pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf"), None, "60", True])
    def test_a_time_that_is_none_is_refused(self, cache: Caller, ttl_s: object) -> None:
        """By name."""
        with pytest.raises(InvalidArgument, match="ttl_s"):
            cache.pin([1], ttl_s)


class TestFigures:
    def test_each_namespace_has_its_own(self, open_route: OpenRoute) -> None:
        """Blocks by state, leases, requests, reuse, evictions; a namespace that is empty is forgotten."""
        cache = open_route(num_blocks=12, block_size=2).caller()
        cached(cache, [1, 2, 3, 4], A)
        cached(cache, [1, 2, 3, 4, 5, 6], A)
        cached(cache, [1, 2], A_LORA)
        lease = cache.match_prefix([1, 2, 9, 9], A, num_tokens=6)
        (first, second) = cache.namespace_stats(A)
        assert (first.namespace, second.namespace) == (A, A_LORA)
        assert (first.num_cached_blocks, first.num_evictable_blocks, first.num_protected_blocks) == (3, 2, 1)
        assert (first.num_leased_blocks, first.num_leases) == (2, 1)
        assert (first.num_requests, first.num_queried_tokens, first.num_hit_tokens) == (2, 10, 4)
        assert first.hit_rate == pytest.approx(0.4)
        assert (first.num_near_miss_tokens, first.evicted_age, first.evicted_idle) == (0, 0, 0)
        assert (second.num_requests, second.hit_rate) == (1, 0.0)
        cache.release(lease)
        assert cache.evict(3) == 3
        assert [(stats.namespace, stats.num_evicted_blocks) for stats in cache.namespace_stats()] == [(A, 2)]
        cache.evict(9)
        assert cache.namespace_stats() == []

    def test_before_there_is_anything_to_divide_by(self, cache: Caller) -> None:
        """No ratio at all, and none out of matches alone."""
        stats = cache.stats()
        assert (stats.hit_rate, stats.mean_evicted_age, stats.mean_evicted_idle) == (None, None, None)
        for tokens in ([], [1], [1, 2, 3]):
            cache.release(cache.match_prefix(tokens))
        assert cache.stats().hit_rate is None

    def test_lookups_that_are_tried_again_are_no_reuse(self, open_route: OpenRoute) -> None:
        """Three matches that find no room and one that comes through: four lookups, one request of two hit tokens."""
        cache = open_route(num_blocks=3, block_size=1).caller()
        cached(cache, [1, 2])
        for _ in range(3):
            lease = cache.match_prefix([1, 2, 3])
            with pytest.raises(PoolExhausted):
                cache.allocate(lease, num_blocks=2)
            cache.release(lease)
        lease = cache.match_prefix([1, 2, 3], num_tokens=3)
        cache.insert(lease, [1, 2, 3])
        cache.release(lease)
        counted = cache.stats().counters
        assert (counted["num_lookups"], counted["num_lookup_hit_tokens"]) == (5, 8)
        assert (counted["num_requests"], counted["num_queried_tokens"], counted["num_hit_tokens"]) == (2, 5, 2)

    def test_a_request_without_a_prompt_counts_when_it_inserts(self, open_route: OpenRoute) -> None:
        """However little its match asked for."""
        cache = open_route(num_blocks=4, block_size=2).caller()
        lease = cache.match_prefix([], num_tokens=4)
        cache.insert(lease, [])
        assert cache.stats().counters["num_requests"] == 0
        for _ in range(2):
            cache.insert(lease, [1, 2, 3, 4])
        counted = cache.stats().counters
        assert (counted["num_requests"], counted["num_queried_tokens"]) == (1, 0)

    def test_near_misses_are_what_rounding_costs(self, open_route: OpenRoute) -> None:
        """Tokens behind the match that agree with a cached block and do not fill it."""
        cache = open_route(num_blocks=12, block_size=4).caller()
        cached(cache, list(range(8)))

        def near(tokens: list[int]) -> int:
            before = cache.stats().counters["num_near_miss_tokens"]
            cache.release(cache.match_prefix(tokens))
            return int(cache.stats().counters["num_near_miss_tokens"] - before)

        assert near([0, 1, 2, 3, 4, 5, 6, 7]) == 0
        assert near([0, 1, 2, 3, 4, 5, 9, 9]) == 2
        assert near([0, 1, 2, 3, 4, 5, 6]) == 3
        assert near([0, 1]) == 2
        assert near([0, 1, 9, 9, 9]) == 2
        assert near([9, 1, 2, 3]) == 0
        assert near([0, 1, 2, 3, 9]) == 0

    def test_how_old_and_how_idle_evicted_blocks_were(self, open_route: OpenRoute) -> None:
        """Counted in matches and inserts that touched something since."""
        cache = open_route(num_blocks=12, block_size=1).caller()
        cached(cache, [1, 2])  # touched once, at its insert: time 1
        for _ in range(3):
            cache.release(cache.match_prefix([1]))  # times 2 to 4: the second block has been idle since 1
        assert cache.evict(1) == 1
        assert (cache.stats().mean_evicted_age, cache.stats().mean_evicted_idle) == (3.0, 3.0)
        assert cache.evict(1) == 1
        assert (cache.stats().mean_evicted_age, cache.stats().mean_evicted_idle) == (3.0, 1.5)
