"""Which of many groups with limits has the next leaf to go: the same one that a look at each of them finds, and the
same one as without limits where none binds.
"""

from __future__ import annotations

import random

import pytest
from helpers import cached
from hypothesis import given, settings
from hypothesis import strategies as st
from test_frozen import VERBS, Driver, Step, steps

from radix_cache import NamespaceLimit, PrefixCache
from radix_cache.foremost import Foremost
from radix_cache.node import Node
from radix_cache.operations import Namespace
from radix_cache.policies import BUILT_IN, LRU, EvictionPolicy, ScoredPolicy

BINDING = {
    (): NamespaceLimit(min_blocks=4),
    ("a",): NamespaceLimit(max_blocks=9, min_blocks=2),
    ("a", "b"): NamespaceLimit(min_blocks=3),
}
LOOSE = {("a",): NamespaceLimit(max_blocks=23), ("a", "b"): NamespaceLimit()}
LASTING = [name for name, policy in BUILT_IN.items() if policy.has_lasting_urgency]
TUNED = ["flop-aware:alpha=1.0", "flop-aware:alpha=0.2,attention_tokens=4", "flop-aware:window=3"]


def driver(policy: str, limits: dict[tuple[str, ...], NamespaceLimit]) -> Driver:
    made = Driver(policy, is_limited=False)
    made.settings["limits"] = limits
    made.cache = PrefixCache(**made.settings, clock=made.clock)
    return made


def policy_of(cache: PrefixCache) -> EvictionPolicy:
    policy: EvictionPolicy = cache._executor.index.policy._policy  # type: ignore[attr-defined]
    return policy


def test_most_policies_have_an_urgency_that_lasts() -> None:
    """Those whose scores move with the time do not."""
    assert set(BUILT_IN) - set(LASTING) == {"steps-to-execution", "workload-aware", "flop-aware"}


@pytest.mark.parametrize("policy", LASTING)
@settings(max_examples=settings().max_examples // 4)
@given(history=st.lists(steps, min_size=5, max_size=100))
def test_it_is_what_a_look_at_each_finds(policy: str, history: list[Step]) -> None:
    quick, thorough = driver(policy, BINDING), driver(policy, BINDING)
    policy_of(thorough.cache).has_lasting_urgency = False
    for step in history:
        assert quick.do(step) == thorough.do(step), step
    quick.cache.check_integrity()


@pytest.mark.parametrize("policy", [*BUILT_IN, *TUNED])
@settings(max_examples=settings().max_examples // 4)
@given(history=st.lists(steps, min_size=5, max_size=100))
def test_limits_that_never_bind_change_nothing(policy: str, history: list[Step]) -> None:
    plain, limited = driver(policy, {}), driver(policy, LOOSE)
    for step in history:
        assert plain.do(step) == limited.do(step), step


@pytest.mark.parametrize("policy", [*BUILT_IN, *TUNED])
@pytest.mark.parametrize("limits", [BINDING, LOOSE])
def test_time_may_pass_within_a_call(policy: str, limits: dict[tuple[str, ...], NamespaceLimit]) -> None:
    """A priority that ends while victims are compared is one of the next call; nobody is in another's order."""
    made = driver(policy, limits)
    draw = random.Random(4)

    def moving() -> float:
        made.clock.advance(0.1)
        return made.clock.now

    made.cache._executor.index.policy._policy.clock = moving  # type: ignore[attr-defined]
    for _ in range(500):
        made.do(Step(draw.choice(VERBS), draw.randrange(100), draw.randrange(13), draw.randrange(100)))
    made.cache.check_integrity()


def test_an_eviction_looks_at_few_of_a_thousand_groups() -> None:
    """At those whose first leaf has changed since, whoever it is evicted for, and whether or not their minimum is
    reached.
    """
    num_looks = 0

    class Counting(LRU):
        has_lasting_urgency = True

        def victim(self) -> Node | None:
            nonlocal num_looks
            num_looks += 1
            return super().victim()

    names = [(f"tenant-{number}",) for number in range(1000)]
    limits = {name: NamespaceLimit(min_blocks=1, max_blocks=9) for name in names}
    cache = PrefixCache(3000, 1, policy=Counting(), limits=limits)
    for token in (1, 2, 3):
        for name in names:
            cached(cache, [token], name)
    for name in names[:50]:
        num_looks = 0
        cached(cache, [4], name)
        assert num_looks <= 10
    assert cache.evict(1900) == 1900
    num_looks = 0
    cached(cache, [5], names[0])
    assert cache.evict(10) == 10
    assert num_looks <= 100
    assert cache.evict(9999) == 1091  # the minimums last
    cache.check_integrity()


class TestForemost:
    def test_the_smallest_of_all(self) -> None:
        """Bounds are lowered at once, and raised when they come up."""
        heads: dict[int, int | None] = {0: 5, 1: 3, 2: 4}
        looks: list[int] = []

        def look(number: int) -> int | None:
            looks.append(number)
            return heads[number]

        foremost = Foremost(look)
        assert foremost.first() is None
        for number in heads:
            foremost.lower(number, 1)
        assert foremost.first() == (3, 1)
        looks.clear()
        assert foremost.first() == (3, 1)
        assert looks == [1]
        heads[1] = None
        assert foremost.first() == (4, 2)
        assert 1 not in foremost
        heads[0] = 2
        foremost.lower(0, 2)
        assert foremost.first() == (2, 0)
        assert foremost.leave_out(0) == 2
        assert foremost.first() == (4, 2)

    @given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30) | st.none()), max_size=400))
    def test_any_history_equals_a_scan(self, steps: list[tuple[int, int | None]]) -> None:
        heads: dict[int, int | None] = {}
        foremost = Foremost(heads.get)
        for number, head in steps:
            heads[number] = head
            if head is not None:
                foremost.lower(number, head)
            there = [(head, number) for number, head in heads.items() if head is not None]
            assert foremost.first() == min(there, default=None)

    def test_what_has_been_replaced_is_cleared_away(self) -> None:
        """A policy that takes the newest first lowers a bound at each touch."""
        foremost = Foremost({0: -10_000}.get)
        for urgency in range(10_000):
            foremost.lower(0, -urgency)
        assert len(foremost._heap) < 100


class NewestFirst(ScoredPolicy):
    """A rule of its own on an order that is there."""

    name = "newest-first"

    def score(self, leaf: Node) -> int:
        return leaf.last_access

    def victim(self) -> Node | None:
        return next((leaf for _, _, leaf in reversed(self._order) if not leaf.num_locks), None)


@pytest.mark.parametrize("limits", [{}, {("t",): NamespaceLimit(min_blocks=1)}])
def test_a_victim_of_one_s_own_counts_under_limits(limits: dict[Namespace, NamespaceLimit]) -> None:
    cache = PrefixCache(3, 1, NewestFirst(), limits=limits)
    for token in (1, 2, 3):
        lease = cache.match_prefix([token], num_tokens=1)
        cache.insert(lease, [token])
        cache.release(lease)
    cache.evict(1)
    assert [cache.probe([token]) for token in (1, 2, 3)] == [1, 1, 0]
