"""Every built-in policy: the exact order in which it evicts, worked out by hand, and what all of them must keep."""

from __future__ import annotations

import random

import pytest

from radix_cache import InvalidArgument, PrefixCache, RadixTree
from radix_cache.policies import BUILT_IN, make_policy

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
}


@pytest.mark.parametrize("policy", ORDERS)
def test_the_order_is_the_rule_s(policy: str) -> None:
    tree = RadixTree(block_size=1, policy=policy)
    for token in (1, 2, 3, 4, 2, 2):
        tree.insert([token], [token])
    tree.release(tree.match_prefix([1]))
    tree.check_integrity()
    assert [tree.evict(1)[0] for _ in range(4)] == ORDERS[policy]


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


def test_ageing_lets_the_past_go() -> None:
    """P = age + hits: leaf 1 has P = 2 from the start; newcomers begin where the last victim ended."""
    tree = RadixTree(block_size=1, policy="lfu-da")
    for _ in range(2):
        tree.insert([1], [1])
    tree.insert([2], [2])  # P = 0 + 1
    assert list(tree.evict(1)) == [2]  # age 1
    tree.insert([3], [3])  # P = 1 + 1, and touched later than leaf 1, which has the same
    assert list(tree.evict(1)) == [1]  # without ageing it would have been 3


@pytest.mark.parametrize("policy", BUILT_IN)
def test_every_policy_keeps_the_books(policy: str) -> None:
    """Random histories of several holders; exact amounts evicted, never what is locked, and an intact tree."""
    draw = random.Random(policy)
    cache = PrefixCache(num_blocks=24, block_size=2, policy=policy)
    held = []
    for _ in range(400):
        tokens = [draw.randrange(3) for _ in range(draw.randrange(1, 9))]
        if held and draw.random() < 0.5:
            cache.release(held.pop(draw.randrange(len(held))))
        elif len(held) < 4:
            lease = cache.match_prefix(tokens, num_tokens=len(tokens))
            cache.insert(lease, tokens)
            held.append(lease)
        before = cache.stats()
        amount = draw.randrange(3)
        assert cache.evict(amount) == min(amount, before.num_evictable_blocks)
        assert cache.stats().num_protected_blocks == before.num_protected_blocks
        cache.check_integrity()
    for lease in held:
        cache.release(lease)
    cache.evict(24)
    assert cache.stats().num_free_blocks == 24


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("slru:protected_hits=0", "not 0"),
        ("slru:protected_hits=x", "not 'x'"),
        ("slru:hits=2", "'hits'"),
        ("slru:protected_hits", "name=value"),
        ("lru:size=3", "'size'|no arguments|takes"),
    ],
)
def test_wrong_parameters_are_named(policy: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        make_policy(policy)
