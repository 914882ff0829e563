"""Policies that go by hints: the exact order in which each evicts, with the sum worked out by hand."""

from __future__ import annotations

import math
from itertools import count

import pytest
from helpers import Clock
from test_policy_orders import insert, match, order

from radix_cache import Hints, PrefixCache, RadixTree
from radix_cache.policies import EvictionPolicy, Priority, StepsToExecution, WorkloadAware
from radix_cache.policies.kinds import OTHER


def timed_tree(policy: EvictionPolicy, clock: Clock) -> RadixTree:
    """Return a tree whose policy reads ``clock``."""
    policy.clock = clock
    return RadixTree(block_size=1, policy=policy)


class TestPriority:
    def test_the_order_is_sglang_s(self) -> None:
        """P = (priority, last)."""
        tree = RadixTree(block_size=1, policy="priority")
        for token, priority in ((1, 5), (2, 0), (3, 9), (4, 0)):
            insert(tree, token, hints=Hints(priority))
        insert(tree, 2)
        insert(tree, 2)
        match(tree, 1)
        assert order(tree) == [4, 2, 1, 3]  # (0, 4), (0, 6), (5, 7), (9, 3)

    def test_the_highest_of_all_requests_counts_and_a_cut_inherits_it(self) -> None:
        tree = RadixTree(block_size=1, policy="priority")
        insert(tree, 1, 2, 3, hints=Hints(9))
        insert(tree, 1, 2, 4)  # 1, 2: 9 still; 4: 0
        insert(tree, 7, hints=Hints(5))
        insert(tree, 8, hints=Hints(-1))
        match(tree, 3, 3)
        assert order(tree) == [8, 4, 7, 3, 2, 1]  # -1; 0; 5; 9 last touched at 1; 9 last touched at 2

    def test_a_match_can_raise_it_and_one_without_hints_says_nothing(self) -> None:
        tree = RadixTree(block_size=1, policy="priority:default=3")
        insert(tree, 1, hints=Hints(-5))
        insert(tree, 2)
        insert(tree, 3, hints=Hints(2))
        match(tree, 1)
        match(tree, 3, hints=Hints(4))
        assert order(tree) == [1, 2, 3]  # -5, 3, 4

    def cache(self, clock: Clock, default: int = 0) -> PrefixCache:
        """Return a cache with prompts 1 and 2 of priority 0 and 5, and 9 for 10 seconds for prompt 3, held until 8."""
        cache = PrefixCache(num_blocks=8, block_size=1, policy=Priority(default), clock=clock)
        for token, hints in ((3, Hints(9, 10)), (2, Hints(5)), (1, Hints(0))):
            lease = cache.match_prefix([token], num_tokens=1, hints=hints)
            cache.insert(lease, [token])
            if token != 3:
                cache.release(lease)
            else:
                held = lease
        clock.advance(8)
        cache.release(held)
        return cache

    @pytest.mark.parametrize(
        ("seconds", "default", "expected"),
        [
            (9.9, 0, [1, 2, 3]),  # 0, 5, 9: its clock began at the release
            (10, 0, [1, 3, 2]),  # 0, then 0 at the back, 5
            (10, -1, [3, 1, 2]),  # the default comes before 0
            (10, 5, [1, 2, 3]),  # 5 at the back comes after 5
        ],
    )
    def test_one_with_an_end_becomes_the_default_at_the_back(
        self, seconds: float, default: int, expected: list[int]
    ) -> None:
        clock = Clock()
        cache = self.cache(clock, default)
        clock.advance(seconds)
        cache.check_integrity()
        gone = []
        while len(gone) < 3:
            cache.evict(1)
            gone += [token for token in (1, 2, 3) if token not in gone and not cache.probe([token])]
        assert gone == expected

    def test_what_is_held_has_no_end(self) -> None:
        """A second request that holds it when the first one's time is up starts the clock anew with its own release."""
        clock = Clock()
        cache = self.cache(clock)
        lease = cache.match_prefix([3], hints=Hints(9, 10))
        clock.advance(30)
        cache.release(lease)
        clock.advance(9)
        assert cache.evict(2) == 2
        assert cache.probe([3]) == 1
        clock.advance(1)
        lease = cache.match_prefix([4], num_tokens=1, hints=Hints(1))
        cache.insert(lease, [4])
        cache.release(lease)
        cache.evict(1)
        assert (cache.probe([3]), cache.probe([4])) == (0, 1)

    def test_a_lower_one_counts_again_when_the_higher_has_ended(self) -> None:
        clock = Clock()
        tree = timed_tree(Priority(), clock)
        insert(tree, 1, hints=Hints(4))
        insert(tree, 1, hints=Hints(9, 1))
        insert(tree, 2, hints=Hints(3))
        insert(tree, 3, hints=Hints(6))
        clock.advance(1)
        assert order(tree) == [2, 1, 3]  # 3, 4, 6

    def test_one_that_ended_unnoticed_does_not_hide_a_new_one(self) -> None:
        clock = Clock()
        tree = timed_tree(Priority(), clock)
        insert(tree, 1, hints=Hints(9, 1))
        clock.advance(2)
        insert(tree, 1, hints=Hints(5, 1))
        insert(tree, 2, hints=Hints(4))
        insert(tree, 3, hints=Hints(6))
        assert order(tree) == [2, 1, 3]

    def test_a_parent_comes_up_after_its_own_has_ended(self) -> None:
        clock = Clock()
        tree = timed_tree(Priority(), clock)
        insert(tree, 1, 2, hints=Hints(9, 5))
        match(tree, 1)
        insert(tree, 3)
        clock.advance(5)
        assert order(tree) == [3, 2, 1]


class TestTLRU:
    def test_what_is_past_the_kept_part_goes_first(self) -> None:
        """Of L tokens, max(0, L + next - threshold) are kept."""
        tree = RadixTree(block_size=1, policy="tlru:threshold=3,next_prompt_tokens=1")
        insert(tree, 1, 2, 3, 4, 5)  # 5 + 1 - 3 = 3 kept: 4 and 5 are safe
        insert(tree, 6, 7)  # max(0, 2 + 1 - 3) = 0
        insert(tree, 8, 9, hints=Hints(next_prompt_tokens=2))  # 2 + 2 - 3 = 1
        tree.check_integrity()
        assert order(tree) == [5, 4, 7, 6, 9, 3, 2, 1, 8]  # (-1, 1), (-1, 2), (-1, 3), (0, 1), (0, 3)

    def test_whole_blocks_are_kept(self) -> None:
        """Two tokens and a half block more."""
        tree = RadixTree(block_size=2, policy="tlru:threshold=5,next_prompt_tokens=0")
        tree.insert(range(8), [1, 2, 3, 4])  # 8 - 5 = 3 kept: two blocks
        tree.insert([9, 9], [9])
        assert order(tree) == [4, 3, 9, 2, 1]

    def test_what_several_share_is_safe_where_it_is_for_all(self) -> None:
        tree = RadixTree(block_size=1, policy="tlru:threshold=3,next_prompt_tokens=1")
        insert(tree, 1, 2, 3, 4, 5)  # 1, 2, 3 kept
        insert(tree, 1, 2, 6)  # 3 + 1 - 3 = 1 kept of it
        insert(tree, 7, 8, 9, 10)  # 2 kept
        assert order(tree) == [5, 4, 6, 10, 9, 3, 2, 1, 8, 7]  # safe: 1, 2, 3; kept: 1 (then 2, its parent), 3

    def test_a_conversation_that_grows_needs_more(self) -> None:
        tree = RadixTree(block_size=1, policy="tlru:threshold=3,next_prompt_tokens=1")
        insert(tree, 1, 2, 3)  # 1 kept
        insert(tree, 1, 2, 3, 4, 5)  # 3 kept
        insert(tree, 6)
        assert order(tree) == [5, 4, 6, 3, 2, 1]


def test_pgdsf_takes_the_cost_that_is_said() -> None:
    """P = clock + hits * cost of a token, which is ``cost_s`` over all tokens of the insert."""
    tree = RadixTree(block_size=1, policy="pgdsf:token_s=1,attention_tokens=1e18")
    insert(tree, 1, 2, hints=Hints(cost_s=4))  # P = 2
    insert(tree, 3)  # P = 1
    insert(tree, 4, hints=Hints(cost_s=2.5))  # P = 2.5
    assert list(tree.evict(1)) == [3]  # clock 1
    insert(tree, 5, hints=Hints(cost_s=1.25))  # P = 1 + 1.25
    insert(tree, 4)  # P = 1 + 2 * 2.5 = 6: the cost stays known
    assert order(tree) == [2, 1, 5, 4]


def test_pgdsf_takes_the_cost_of_a_prompt_in_chunks_from_the_last_one() -> None:
    cache = PrefixCache(num_blocks=8, block_size=1, policy="pgdsf:attention_tokens=1e18")
    lease = cache.match_prefix([1, 2, 3, 4], num_tokens=4, hints=Hints(cost_s=8))
    cache.insert(lease, [1])  # 8 s a token, it seems
    cache.insert(lease, [1, 2, 3, 4])  # 2 s
    cache.release(lease)
    lease = cache.match_prefix([5], num_tokens=1, hints=Hints(cost_s=3))
    cache.insert(lease, [5])
    cache.release(lease)
    cache.evict(4)
    assert (cache.probe([1]), cache.probe([5])) == (0, 1)


class TestWorkloadAware:
    def test_the_rate_of_a_kind_decides(self) -> None:
        """What comes back soon or never is worth less after a while than what comes back late."""
        clock = Clock()
        tree = timed_tree(WorkloadAware(reuse_s=100, life_s=100), clock)
        api, chat = Hints(request_type="api"), Hints(request_type="chat")
        for at, token, hints in ((0, 1, api), (0, 2, chat), (10, 1, api), (90, 2, chat), (100, 1, api)):
            clock.now = at
            insert(tree, token, hints=hints)
        clock.now = 190
        # One use in 100 s is counted in. api: 3 uses in 100 + 10 + 90 s, idle for 90 s. chat: 2 in 100 + 90, for 100 s.
        api_chance = math.exp(-90 * 3 / 200) * (1 - math.exp(-100 * 3 / 200))
        chat_chance = math.exp(-100 * 2 / 190) * (1 - math.exp(-100 * 2 / 190))
        assert (round(api_chance, 3), round(chat_chance, 3)) == (0.201, 0.227)
        assert order(tree) == [1, 2]  # though 2 was used less recently

    def test_a_kind_is_a_type_and_a_turn(self) -> None:
        """First turns of these conversations come back after 10 s, second turns never do."""
        clock, tokens = Clock(), count(10)
        tree = timed_tree(WorkloadAware(reuse_s=100, life_s=100), clock)
        for number in range(10):
            first, second, hints = next(tokens), next(tokens), Hints(conversation=f"c{number}")
            insert(tree, first, hints=hints)
            clock.advance(10)
            insert(tree, first, second, hints=hints)
        insert(tree, 1, hints=Hints(conversation="new"))
        clock.advance(1)
        match(tree, first, second)
        # Turn 1: 11 uses in 100 + 10 * 10 s. Turn 2: 1 in 100 s. So 1 is likelier to come than what was used later.
        evicted = order(tree)
        assert evicted.index(second) < evicted.index(1)

    def test_what_is_evicted_unused_lowers_the_rate_and_tells_the_life(self) -> None:
        clock = Clock()
        policy = WorkloadAware(reuse_s=100, life_s=100)
        tree = timed_tree(policy, clock)
        insert(tree, 1, hints=Hints(request_type="batch"))
        clock.advance(60)
        tree.evict(1)
        kinds, ends = policy.saved()
        assert kinds[0] == [(OTHER, []), (("batch", 0), [(0, 0, 60.0)])]
        assert ends == [(0, 1, 60.0)]

    def test_the_deeper_goes_first_among_equals(self) -> None:
        tree = timed_tree(WorkloadAware(), Clock())
        insert(tree, 1, 2, 3)
        insert(tree, 4)
        assert order(tree) == [3, 2, 1, 4]
        insert(tree, 4)
        insert(tree, 1, 2, 3)
        assert order(tree) == [3, 2, 1, 4]


class TestStepsToExecution:
    def test_who_runs_next_keeps_its_prompt(self) -> None:
        """P = (known, -due, last)."""
        tree = timed_tree(StepsToExecution(), Clock())
        insert(tree, 1, hints=Hints(next_use=1))
        insert(tree, 2, hints=Hints(next_use=5))
        insert(tree, 3)
        insert(tree, 4, hints=Hints(next_use=2.5))
        assert order(tree) == [3, 2, 4, 1]  # unknown, -5, -2.5, -1

    def test_steps_take_time(self) -> None:
        clock = Clock()
        tree = timed_tree(StepsToExecution(step_s=2), clock)
        insert(tree, 1, hints=Hints(next_use=4))  # due at 8
        clock.advance(5)
        insert(tree, 2, hints=Hints(next_use=2))  # due at 9
        assert order(tree) == [2, 1]

    def test_a_parent_takes_over_what_is_due_sooner(self) -> None:
        tree = timed_tree(StepsToExecution(), Clock())
        insert(tree, 1, 2, hints=Hints(next_use=5))
        insert(tree, 1, 3, hints=Hints(next_use=3))
        insert(tree, 4, hints=Hints(next_use=4))
        assert list(tree.evict(3)) == [2, 4, 3]  # -5, -4, -3; 1 is now due at 3
        insert(tree, 5)
        insert(tree, 6, hints=Hints(next_use=3.5))
        assert order(tree) == [5, 6, 1]  # unknown, -3.5, -3

    def test_who_has_run_is_not_waited_for_on_the_way(self) -> None:
        """The next turn of an agent ends further down; that it was due where the last one ended says nothing more."""
        clock = Clock()
        tree = timed_tree(StepsToExecution(), clock)
        insert(tree, 1, hints=Hints(next_use=2))
        clock.advance(2)
        insert(tree, 1, 2, hints=Hints(next_use=9))  # due at 11
        insert(tree, 3, hints=Hints(next_use=8))  # due at 10
        assert order(tree) == [2, 1, 3]  # 1 takes over 11

    def test_who_does_not_come_is_not_waited_for_for_ever(self) -> None:
        clock = Clock()
        tree = timed_tree(StepsToExecution(grace_steps=2), clock)
        insert(tree, 1, hints=Hints(next_use=1))  # due at 1, not waited for after 3
        insert(tree, 2)
        insert(tree, 3, hints=Hints(next_use=9))
        clock.advance(3)
        assert list(tree.evict(1)) == [2]
        insert(tree, 2)
        clock.advance(0.1)
        assert order(tree) == [1, 2, 3]  # unknown since 1, unknown since 5, due at 9
