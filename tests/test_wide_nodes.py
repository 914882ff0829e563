"""Nodes with very many children: the same tree, whatever holds them."""

import random

import pytest

from radix_cache import RadixTree, index
from radix_cache.node import WideChildren

NUM_CHILDREN = 3000


@pytest.fixture
def wide():
    tree = RadixTree(block_size=1)
    for token in range(NUM_CHILDREN):
        tree.insert([token, token], [2 * token, 2 * token + 1])
    return tree


def test_every_child_is_found_and_goes_in_order(wide):
    children = wide._index.roots[()].children
    assert isinstance(children, WideChildren)
    assert len(children) == NUM_CHILDREN == len(children.values()) == len(children.items())
    wide.check_integrity()
    for token in (0, 1, 1500, NUM_CHILDREN - 1):
        with wide.match_prefix([token, token, 9]) as match:
            assert list(match.block_ids) == [2 * token, 2 * token + 1]
    assert wide.probe([NUM_CHILDREN]) == 0
    assert list(wide.evict(4)) == [5, 4, 7, 6]  # 0 and 1 were touched last
    assert wide.probe([2]) == wide.probe([3]) == 0
    wide.check_integrity()


def test_a_child_is_cut_and_put_back_under_its_key(wide):
    wide.insert([7, 8], [14, 10_000])
    assert wide.probe([7, 7]) == wide.probe([7, 8]) == 2
    assert len(wide._index.roots[()].children) == NUM_CHILDREN
    wide.check_integrity()


def test_the_namespace_vanishes_with_its_last_child(wide):
    assert len(wide.evict(2 * NUM_CHILDREN)) == 2 * NUM_CHILDREN
    assert wide.num_nodes == 0
    wide.check_integrity()
    assert wide.probe([1, 1]) == 0


def test_a_wide_node_is_reset(wide):
    with wide.match_prefix([5, 5]):
        assert len(wide.reset()) == 2 * NUM_CHILDREN - 2
        wide.check_integrity()
    assert wide.num_cached_blocks == 0


def test_random_histories_do_not_depend_on_what_holds_the_children(monkeypatch):
    histories = []
    for limit in (1, 10**9):
        monkeypatch.setattr(index, "MAX_PLAIN_CHILDREN", limit)
        tree, draw, seen = RadixTree(block_size=1), random.Random(7), []
        for step in range(2000):
            tokens = [draw.randrange(6) for _ in range(4)]
            if draw.random() < 0.3:
                seen.append(list(tree.evict(draw.randrange(4))))
            else:
                result = tree.insert(tokens, range(4 * step, 4 * step + 4))
                seen.append((result.num_cached_tokens, list(result.redundant_block_ids)))
        tree.check_integrity()
        histories.append(seen)
    assert histories[0] == histories[1]
