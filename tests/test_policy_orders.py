"""Every built-in policy: the exact order in which it evicts, worked out by hand. What all of them must keep is in
test_policy_contract.py; those that go by hints follow in test_policy_hints.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_cache import Hints, PrefixCache, RadixTree
from radix_cache.policies import BUILT_IN, LFUDA, FlopAware, TwoHit

# Four one-block leaves come as 1, 2, 3, 4; then 2 is inserted twice more, then 1 is matched.
ORDERS = {
    "lru": [3, 4, 2, 1],
    "lfu": [3, 4, 1, 2],  # hits count inserts: 1, 3, 1, 1
    "fifo": [1, 2, 3, 4],
    "filo": [4, 3, 2, 1],
    "mru": [1, 2, 4, 3],
    "slru": [3, 4, 1, 2],
    "slru:protected_hits=4": [3, 4, 2, 1],  # nothing has four hits, so it is LRU
    "lfu-da": [3, 4, 1, 2],
    "two-hit": [3, 4, 1, 2],  # only 2 was inserted by more than one request
    "pgdsf": [3, 4, 1, 2],  # all cost the same, so it is lfu-da
    # Without hints these are LRU: all have one priority, are safe, of one kind, equally deep, and due at no known time.
    "priority": [3, 4, 2, 1],
    "tlru": [3, 4, 2, 1],
    "workload-aware": [3, 4, 2, 1],
    "flop-aware": [3, 4, 2, 1],
    "steps-to-execution": [3, 4, 2, 1],
}


def order(tree: RadixTree) -> list[int]:
    """Evict all, block by block."""
    return [tree.evict(1)[0] for _ in range(tree.num_evictable_blocks)]


def insert(tree: RadixTree, *tokens: int, hints: Hints | None = None) -> None:
    """Insert blocks of one token, whose ids are those tokens."""
    tree.insert(tokens, tokens, hints=hints)


def match(tree: RadixTree, *tokens: int, hints: Hints | None = None) -> None:
    """Match and release."""
    tree.release(tree.match_prefix(tokens, hints=hints))


@pytest.mark.parametrize("policy", ORDERS)
def test_the_order_is_the_rule_s(policy: str) -> None:
    tree = RadixTree(block_size=1, policy=policy)
    for token in (1, 2, 3, 4, 2, 2):
        insert(tree, token)
    match(tree, 1)
    tree.check_integrity()
    assert order(tree) == ORDERS[policy]


def test_every_built_in_policy_has_an_order_here() -> None:
    assert {name.partition(":")[0] for name in ORDERS} == set(BUILT_IN)


def test_a_request_counts_once_in_however_many_chunks() -> None:
    """Two requests that publish [1] once weigh more than one that publishes [2] in three chunks."""
    cache = PrefixCache(num_blocks=8, block_size=1, policy="lfu")
    for _ in range(2):
        lease = cache.match_prefix([1], num_tokens=1)
        cache.insert(lease, [1])
        cache.release(lease)
    chunked = cache.match_prefix([2, 2, 2], num_tokens=3)
    for stop in (1, 2, 3):
        cache.insert(chunked, [2, 2, 2][:stop])
    cache.release(chunked)
    cache.check_integrity()
    assert cache.evict(3) == 3
    assert (cache.probe([1]), cache.probe([2])) == (1, 0)


def test_lfu_da_lets_the_past_go() -> None:
    """P = age + hits: leaf 1 has P = 2 from the start; newcomers begin where the last victim ended."""
    tree = RadixTree(block_size=1, policy="lfu-da")
    insert(tree, 1)
    insert(tree, 1)
    insert(tree, 2)  # P = 0 + 1
    assert list(tree.evict(1)) == [2]  # age 1
    insert(tree, 3)  # P = 1 + 1, and touched later than leaf 1, which has the same
    assert list(tree.evict(1)) == [1]  # without ageing it would have been 3


def test_lfu_da_ages_by_what_is_evicted_only() -> None:
    """To be asked for a victim, as when one of several orders is chosen from, is not yet to lose it."""
    policy = LFUDA()
    tree = RadixTree(block_size=1, policy=policy)
    insert(tree, 1)
    assert policy.victim() is not None
    assert policy.saved() == 0
    tree.evict(1)
    assert policy.saved() == 1


class TestTwoHit:
    def test_a_second_request_counts_though_the_first_one_s_blocks_are_gone(self) -> None:
        tree = RadixTree(block_size=1, policy="two-hit")
        insert(tree, 1, 2, 3)
        assert order(tree) == [3, 2, 1]  # remembered
        insert(tree, 1, 2, 4)  # 1, 2: twice; 4: once
        insert(tree, 5)  # once, later
        tree.check_integrity()
        assert tree.num_nodes == 3, "what was seen before ends in a node of its own"
        assert order(tree) == [4, 5, 2, 1]

    def test_a_prefix_is_more_than_its_last_block(self) -> None:
        """The same token behind others, or elsewhere, was not seen before."""
        tree = RadixTree(block_size=1, policy="two-hit")
        insert(tree, 1, 7)
        order(tree)
        insert(tree, 2, 7)
        tree.insert([1, 7], [8, 9], namespace=("a",))
        insert(tree, 3)
        assert order(tree) == [7, 2, 9, 8, 3], "as touched: none was seen twice"

    def test_its_memory_is_bounded_and_forgets_the_oldest(self) -> None:
        policy = TwoHit(ghost_blocks=1)
        tree = RadixTree(block_size=1, policy=policy)
        insert(tree, 1, 2)
        assert order(tree) == [2, 1]
        assert len(policy.saved()) == 1  # block 1, which went last
        insert(tree, 1, 2)  # 1: twice, 2: once
        insert(tree, 3)
        assert order(tree) == [2, 3, 1]

    def test_blocks_of_many_tokens(self) -> None:
        """Of a prompt of which one block was seen, and half of another, one block was seen."""
        tree = RadixTree(block_size=2, policy="two-hit")
        tree.insert([1, 1, 2, 2], [1, 2])
        order(tree)
        tree.insert([1, 1, 2, 3], [1, 3])
        tree.insert([9, 9], [9])
        assert order(tree) == [3, 9, 1]

    def test_what_a_reset_forgets_is_not_remembered(self) -> None:
        tree = RadixTree(block_size=1, policy="two-hit")
        insert(tree, 1)
        tree.reset()
        insert(tree, 1)
        insert(tree, 2)
        assert order(tree) == [1, 2]

    def test_a_leaf_that_goes_in_pieces(self) -> None:
        """1,000 blocks, evicted in uneven pieces around other calls: each is known by its own prefix afterwards."""
        tree = RadixTree(block_size=1, policy="two-hit")
        insert(tree, *range(1000))
        for num_blocks in (1, 300, 7, 500):
            tree.evict(num_blocks)
            match(tree, *range(60))
        order(tree)
        insert(tree, *range(1000), 5000)
        assert order(tree) == [5000, *range(999, -1, -1)]
        insert(tree, *range(1001))
        tree.evict(1)
        assert tree.num_nodes == 1, "all 1,000 were seen, the last one was not"


def test_pgdsf_weighs_hits_by_cost() -> None:
    """P = clock + hits * cost of a token; here 1 s at the beginning and twice that at position 4."""
    tree = RadixTree(block_size=1, policy="pgdsf:token_s=1,attention_tokens=4")
    # A position's class stands for its middle: 1 -> 1 + 0.75 * 2 / 4 = 1.375, 4 to 7 -> 1 + 0.75 * 8 / 4 = 2.5.
    insert(tree, 1, 2, 3, 4)  # P = 2.5
    insert(tree, 9)  # P = 1.375
    insert(tree, 8)
    insert(tree, 8)  # P = 2 * 1.375 = 2.75
    assert list(tree.evict(1)) == [9]  # clock 1.375
    insert(tree, 7)  # P = 1.375 + 1.375 = 2.75, later than 8
    assert order(tree) == [4, 3, 2, 1, 8, 7]


class TestFlopAware:
    def three(self, alpha: float) -> RadixTree:
        """Return a tree of a short leaf (1), then a deep one (10 to 17), then a short one (2)."""
        tree = RadixTree(block_size=1, policy=FlopAware(alpha, attention_tokens=4))
        insert(tree, 1)
        insert(tree, *range(10, 18))
        insert(tree, 2)
        return tree

    @pytest.mark.parametrize(
        ("alpha", "expected"),
        [
            # 1 / (4 - last) = 1/3, 1/2, 1, scaled: 0, 1/4, 1. Costs 1.375, 4, 1.375, scaled: 0, 1, 0.
            (0, [1, 17, 2]),  # 0, 1/4, 1
            (0.5, [1, 17, 2]),  # 0, 3/4, 1
            (2, [1, 2, 17]),  # 0, 9/4, 1; then 2 for the deep one, 1 for the other
        ],
    )
    def test_computation_against_recency(self, alpha: float, expected: list[int]) -> None:
        evicted = order(self.three(alpha))
        assert [block_id for block_id in evicted if block_id in (1, 2, 17)] == expected

    def test_the_weight_is_found_by_replaying(self) -> None:
        """A long prompt comes back after each 9 short ones that never do; with LRU it is gone by then."""

        def hits(policy: FlopAware) -> int:
            cache = PrefixCache(num_blocks=24, block_size=1, policy=policy)
            found = 0
            for number in range(400):
                tokens = range(16) if number % 10 == 0 else [1000 + number, 0]
                lease = cache.match_prefix(tokens, num_tokens=len(tokens))
                found += lease.num_cached_tokens
                cache.insert(lease, tokens)
                cache.release(lease)
            cache.check_integrity()
            return found

        tuned = FlopAware(window=50, attention_tokens=4)
        assert hits(FlopAware(0, attention_tokens=4)) == 6 * 39, "18 blocks of others leave 6 of the 24"
        assert hits(FlopAware(1, attention_tokens=4)) == 16 * 39
        assert 6 * 39 < hits(tuned) < 16 * 39
        assert tuned.saved()[1][0] > 0


class Blocks:
    """The naive model: each block a record of its own, the smallest score found by a scan of all that have no child."""

    def __init__(self, policy: str, num_blocks: int) -> None:
        self.policy = policy
        self.num_blocks = num_blocks
        self.hits: dict[tuple[int, ...], int] = {}
        self.last: dict[tuple[int, ...], int] = {}
        self.score: dict[tuple[int, ...], float] = {}
        self.age: float = 0
        self.seen: dict[tuple[int, ...], int] = {}
        self.now = 0

    def touch(self, prefixes: Iterable[tuple[int, ...]], counts: int) -> None:
        self.now += 1
        for prefix in prefixes:
            before = self.seen.get(prefix, 0) if self.policy == "two-hit" else 0
            self.hits[prefix] = self.hits.get(prefix, before) + counts
            self.last[prefix] = self.now
            hits = self.hits[prefix]
            self.score[prefix] = {
                "lru": 0,
                "lfu": hits,
                "slru": hits >= 2,
                "two-hit": hits >= 2,
                "lfu-da": self.age + hits,
            }[self.policy]

    def play(self, tokens: list[int]) -> int:
        """Match, evict for the rest, insert; return how many blocks were there."""
        prefixes = [tuple(tokens[:stop]) for stop in range(1, len(tokens) + 1)]
        found = [prefix for prefix in prefixes if prefix in self.hits]
        if found:
            self.touch(found, counts=0)
        while len(self.hits) + len(prefixes) - len(found) > self.num_blocks:
            self.evict(set(found))
        self.touch(prefixes, counts=1)
        return len(found)

    def evict(self, kept: set[tuple[int, ...]]) -> None:
        parents = {prefix[:-1] for prefix in self.hits}
        leaves = [prefix for prefix in self.hits if prefix not in parents and prefix not in kept]
        victim = min(leaves, key=lambda prefix: (self.score[prefix], self.last[prefix]))
        self.seen[victim] = self.hits.pop(victim)
        self.age = self.score.pop(victim)


@given(
    st.sampled_from(["lru", "lfu", "slru", "two-hit", "lfu-da"]),
    st.integers(5, 14),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=40),
)
def test_nodes_of_many_blocks_go_as_if_each_block_were_one(
    policy: str, num_blocks: int, prompts: list[list[int]]
) -> None:
    cache, model = PrefixCache(num_blocks, block_size=1, policy=policy), Blocks(policy, num_blocks)
    for tokens in prompts:
        lease = cache.match_prefix(tokens, num_tokens=len(tokens))
        cache.insert(lease, tokens)
        cache.release(lease)
        assert lease.num_cached_tokens == model.play(tokens)
    assert cache.stats().num_cached_blocks == len(model.hits)
    assert all(cache.probe(prefix) == len(prefix) for prefix in model.hits)
