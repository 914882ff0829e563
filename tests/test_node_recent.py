"""The shortcut of a walk, `Node.recent`: what it leads to is always in the tree, and nothing lives on because of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from helpers import cached

from radix_cache import PrefixCache, RadixTree
from radix_cache.node import Node


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Nodes have to die by reference count alone."""
    gc.disable()
    yield
    gc.enable()


def tree_of(*prompts: list[int]) -> tuple[RadixTree, Node]:
    """A tree of prompts and the root, every shortcut set by a probe."""
    tree, first = RadixTree(block_size=1), 0
    for prompt in prompts:
        tree.insert(prompt, list(range(first, first + len(prompt))))
        first += len(prompt)
    for prompt in prompts:
        assert tree.probe(prompt) == len(prompt)
    return tree, tree._index.roots[()]


def test_an_evicted_child_is_not_found() -> None:
    prompts = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    tree, root = tree_of(*prompts)
    (shared,) = root.children.values()  # type: ignore[union-attr]
    assert (root.recent, len(shared.children)) == (shared, 3)  # type: ignore[arg-type]
    assert tree.probe([1, 2, 3]) == 3
    for found in ([2, 3, 3], [2, 2, 3], [2, 2, 2], [1, 1, 1], [0, 0, 0]):  # what the shortcut leads to goes first
        tree.evict(1)
        assert [tree.probe(prompt) for prompt in prompts] == found
        tree.check_integrity()


def test_what_a_reset_forgot_is_not_found() -> None:
    tree, _ = tree_of([1, 2, 3], [1, 2, 4])
    match = tree.match_prefix([1, 2, 3])
    tree.reset(tokens=[1, 2])
    assert tree.probe([1, 2, 3]) == 2
    tree.insert([1, 2, 3], [10, 11, 12])
    assert list(tree.match_prefix([1, 2, 3]).block_ids)[2] == 12
    tree.release(match)
    tree.reset()
    assert tree.probe([1, 2, 3]) == 0
    tree.check_integrity()


def test_it_follows_cuts_and_joins() -> None:
    """The upper half of a cut is what a parent leads to; a node that two have become is the lower of them."""
    tree, root = tree_of([1, 2, 3, 4])
    whole = root.recent
    tree.release(tree.match_prefix([1, 2]))
    assert root.recent is not whole
    assert root.recent is not None
    assert root.recent.children is not None
    tree.check_integrity()
    tree.release(tree.match_prefix([1, 2, 3, 4]))
    assert (tree.num_nodes, root.recent) == (1, whole)
    assert tree.probe([1, 2, 3, 4]) == 4
    tree.check_integrity()


@pytest.mark.parametrize("num_children", [8, 9, 3000])
def test_one_of_many_is_not_guessed(num_children: int) -> None:
    """It would be wrong nearly always; and nothing is left of a guess from when they were few."""
    tree, root = tree_of(*([token, 1] for token in range(num_children)))
    assert (root.recent is None) is (num_children > 8)
    assert all(tree.probe([token, 1, 2]) == 2 for token in (num_children - 1, 0, 5, 5))
    tree.evict(2 * num_children)
    assert tree.num_nodes == 0


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("end", ["evict", "reset", "reset below"])
def test_nothing_lives_on_because_of_it(end: str) -> None:
    """Neither a leaf nor a whole branch."""
    cache = PrefixCache(num_blocks=64, block_size=1)
    for prompt in ([1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6]):
        cached(cache, prompt)
        cache.probe(prompt)
    root = cache._executor.index.roots[()]
    lease = cache.match_prefix([1, 2])
    assert num_alive(root) == cache.stats().num_nodes == 5
    cache.probe([1, 2, 3])
    cache.evict(1)
    assert num_alive(root) == cache.stats().num_nodes == 4
    if end == "evict":
        cache.evict(64)
    else:
        cache.reset(tokens=[1, 2] if end == "reset below" else None)
    assert num_alive(root) == cache.stats().num_nodes == 1
    cache.release(lease)
    cache.check_integrity()


def num_alive(root: Node) -> int:
    """How many nodes below ``root`` have not died."""
    return sum(type(thing) is Node and thing.root is root for thing in gc.get_objects())
