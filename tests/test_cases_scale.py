"""Faults that other caches had only when they grew: the cases of `test_cases` about cost and depth."""

from __future__ import annotations

import copy
import gc
import pickle
import time

import pytest
from helpers import counters, packed

from radix_cache import PrefixCache, RadixTree


def _one_token_prompts(first: int, amount: int) -> list[bytes]:
    whole = packed(range(first, first + amount))
    return [whole[at : at + 4] for at in range(0, len(whole), 4)]


def _seconds_for_turnover(num_leaves: int, num_locked: int) -> float:
    """Return the best time for 1,000 times evicting one leaf and inserting another, among so many leaves."""
    tree = RadixTree(block_size=1)
    held = []
    for leaf, tokens in enumerate(_one_token_prompts(0, num_leaves)):
        tree.insert(tokens, [leaf])
        if leaf < num_locked:
            held.append(tree.match_prefix(tokens))
    times = []
    for turn in range(5):
        prompts = _one_token_prompts(num_leaves + 1_000 * turn, 1_000)
        start = time.process_time()
        for tokens in prompts:
            tree.insert(tokens, tree.evict(1))
        times.append(time.process_time() - start)
    assert tree.num_protected_blocks == len(held)
    return min(times)


@pytest.mark.parametrize("num_locked", [0, 64])
def test_kv20(num_locked: int) -> None:
    """Every evict rebuilds a heap over all leaves (sgl-project/sglang-omni#1723)."""
    assert _seconds_for_turnover(50_000, num_locked) < 3 * _seconds_for_turnover(5_000, num_locked)


def test_kv34() -> None:
    """Recursive helpers overflow on deep trees (sgl-project/sglang#3029)."""
    depth = 5_000
    cache = PrefixCache(num_blocks=depth, block_size=1)
    turns = [cache.match_prefix([0], num_tokens=1)]
    cache.insert(turns[0], [0])
    for token in range(1, depth):
        turns.append(cache.match_prefix([token], parent=turns[-1], num_blocks=1))
        cache.insert(turns[-1], [token], offset=token)
    assert cache.stats().num_nodes == depth
    whole = cache.match_prefix(range(depth))
    assert whole.num_cached_tokens == depth
    assert len(cache.dump(max_nodes=2 * depth)) == depth + 1
    assert str(depth) in repr(cache)
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            duplicate(cache)
    for lease in turns[:-1]:
        cache.release(lease)
    assert cache.stats().num_nodes == counters(cache.stats()).protected == depth
    cache.check_integrity()
    for lease in (turns[-1], whole):
        cache.release(lease)
    assert cache.evict(depth - 1) == depth - 1
    assert cache.probe(range(depth)) == 1
    cache.reset()
    del turns, whole, lease, cache
    gc.collect()
