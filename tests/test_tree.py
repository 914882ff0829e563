"""The standalone tree: what a match covers, what an insert adopts, what may be evicted and in which order."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from helpers import assert_fresh_int32, packed, tree_counters

from radix_cache.errors import IntegrityError, InvalidArgument, InvalidBlocks, InvalidTokens, UnknownLease
from radix_cache.tree import RadixTree


def matched(tree: RadixTree, tokens: object, namespace: tuple[str, ...] = ()) -> list[int]:
    """Return the ids that a match finds, holding nothing."""
    with tree.match_prefix(tokens, namespace) as match:
        return list(match.block_ids)


class TestMatch:
    def test_whole_blocks_only(self) -> None:
        """A block that agrees in part holds KV of other tokens as well."""
        tree = RadixTree(block_size=2)
        tree.insert([1, 2, 3, 4], [10, 11])
        for tokens, expected in [
            ([1], []),
            ([1, 2, 3], [10]),
            ([1, 2, 3, 4], [10, 11]),
            ([1, 2, 3, 9], [10]),
            ([9], []),
        ]:
            match = tree.match_prefix(tokens)
            assert list(match.block_ids) == expected
            assert match.num_tokens == 2 * len(expected)

    @pytest.mark.parametrize(("cap", "expected"), [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (99, 4), (2**40, 4)])
    def test_max_tokens_caps(self, cap: int, expected: int) -> None:
        """An engine must compute at least the last token of its prompt."""
        tree = RadixTree(block_size=2)
        tree.insert([1, 2, 3, 4], [10, 11])
        assert tree.match_prefix([1, 2, 3, 4], max_tokens=cap).num_tokens == expected
        assert tree.num_protected_blocks == expected // 2

    @pytest.mark.parametrize("cap", [-1, 1.0, True, "2"], ids=repr)
    def test_a_senseless_cap_is_refused(self, cap: object) -> None:
        """The message names the argument, and nothing is held."""
        tree = RadixTree(block_size=2)
        tree.insert([1, 2], [10])
        with pytest.raises(InvalidArgument, match="max_tokens"):
            tree.match_prefix([1, 2], max_tokens=cap)  # type: ignore[arg-type]
        assert tree_counters(tree) == (1, 1, 0)

    @pytest.mark.parametrize("tokens", [[2**32], [-1], [1.5], [True], "a", b"12345"], ids=repr)
    def test_bad_tokens_are_refused_everywhere(self, tokens: object) -> None:
        """Every method that takes tokens checks them, and an error changes nothing."""
        tree = RadixTree(block_size=1)
        tree.insert([1], [5])
        calls = (tree.match_prefix, tree.probe, lambda t: tree.insert(t, [6]), lambda t: tree.reset(None, t))
        for call in calls:
            with pytest.raises(InvalidTokens):
                call(tokens)
        assert (tree_counters(tree), tree.num_nodes) == ((1, 1, 0), 1)

    def test_every_form_of_tokens_finds_the_same(self) -> None:
        """The tree was filled from a list and is asked by engines of all kinds."""
        tree = RadixTree(block_size=2)
        tree.insert([1, 2, 3, 4], [10, 11])
        tokens = [1, 2, 3, 4]
        forms = [tuple(tokens), array("q", tokens), np.array(tokens), torch.tensor(tokens), packed(tokens)]
        forms += [bytearray(packed(tokens)), memoryview(packed(tokens)), np.array(tokens, dtype=np.uint32)]
        assert [matched(tree, form) for form in forms] == [[10, 11]] * len(forms)
        assert [tree.probe(form) for form in forms] == [4] * len(forms)

    def test_ids_are_the_callers_own(self) -> None:
        """Neither writing to an answer nor a view of it reaches the tree or fails a later call."""
        tree = RadixTree(block_size=1)
        result = tree.insert([1, 2, 3], [10, 11, 12])
        with tree.match_prefix([1, 2, 3]) as match:
            views = [np.frombuffer(ids, dtype=np.int32) for ids in (match.block_ids, result.block_ids)]
            assert_fresh_int32(match.block_ids)
            assert_fresh_int32(result.block_ids)
            for view in views:
                view[:] = 77
        tree.insert([1, 2, 3, 4], [10, 11, 12, 13])
        evicted = tree.evict(1)
        assert_fresh_int32(evicted)
        held = memoryview(evicted)
        assert matched(tree, [1, 2, 3]) == [10, 11, 12]
        assert list(held) == [13]
        tree.check_integrity()

    def test_repr_says_what_there_is(self) -> None:
        """For a debugger."""
        tree = RadixTree(block_size=2)
        tree.insert([1, 2], [0])
        match = tree.match_prefix([1, 2])
        assert "1 blocks of 2 tokens, 1 protected" in repr(tree)
        assert "2 tokens, held" in repr(match)
        tree.release(match)
        assert "released" in repr(match)


class TestLocks:
    def test_are_released_once(self) -> None:
        """A second release must not drop the lock of somebody else."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2], [0, 1])
        first, second = tree.match_prefix([1, 2]), tree.match_prefix([1, 2])
        tree.release(first)
        with pytest.raises(UnknownLease, match="not held"):
            tree.release(first)
        assert tree.num_protected_blocks == 2
        tree.release(second)
        assert tree.num_protected_blocks == 0

    def test_belong_to_their_tree(self) -> None:
        """A match of another tree is unknown here and stays held there."""
        here, there = RadixTree(block_size=1), RadixTree(block_size=1)
        there.insert([1], [0])
        match = there.match_prefix([1])
        with pytest.raises(UnknownLease):
            here.release(match)
        assert there.num_protected_blocks == 1
        there.release(match)

    def test_end_with_a_with_block(self) -> None:
        """Also when an exception leaves it, and a release inside is no second one."""
        tree = RadixTree(block_size=1)
        tree.insert([1], [0])
        with pytest.raises(ZeroDivisionError), tree.match_prefix([1]):
            raise ZeroDivisionError
        with tree.match_prefix([1]) as match:
            tree.release(match)
        assert tree.num_protected_blocks == 0

    def test_are_exactly_as_wide_as_the_match(self) -> None:
        """A lock on half of a node leaves the other half evictable."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2, 3, 4], [0, 1, 2, 3])
        match = tree.match_prefix([1, 2])
        assert tree_counters(tree) == (4, 2, 2)
        assert list(tree.evict(9)) == [3, 2]
        tree.release(match)
        assert tree_counters(tree) == (2, 2, 0)

    def test_survive_later_splits(self) -> None:
        """Both halves of a locked node stay locked, and one release frees both."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2, 3, 4], [0, 1, 2, 3])
        match = tree.match_prefix([1, 2, 3, 4])
        tree.insert([1, 2, 9], [0, 1, 9])
        tree.release(tree.match_prefix([1]))
        assert (tree_counters(tree), tree.num_nodes) == ((5, 1, 4), 4)
        tree.check_integrity()
        tree.release(match)
        assert tree_counters(tree) == (5, 5, 0)

    def test_a_match_over_nothing_holds_nothing(self) -> None:
        """It is released like any other."""
        tree = RadixTree(block_size=1)
        match = tree.match_prefix([1, 2])
        assert (match.num_tokens, list(match.block_ids), tree.num_protected_blocks) == (0, [], 0)
        tree.release(match)
        with pytest.raises(UnknownLease):
            tree.release(match)

    def test_do_not_stretch_over_what_is_added_below(self) -> None:
        """A leaf that others hold doesn't grow in place."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2], [0, 1])
        match = tree.match_prefix([1, 2])
        tree.insert([1, 2, 3], [0, 1, 2])
        assert tree_counters(tree) == (3, 1, 2)
        assert list(tree.evict(9)) == [2]
        tree.release(match)
        tree.check_integrity()


class TestInsert:
    def test_says_what_was_there(self) -> None:
        """num_cached_tokens counts, block_ids is canonical, and what is surplus is named."""
        tree = RadixTree(block_size=2)
        first = tree.insert([1, 2, 3, 4], [10, 11])
        assert (first.num_cached_tokens, list(first.block_ids), list(first.redundant_block_ids)) == (0, [10, 11], [])
        second = tree.insert([1, 2, 3, 4, 5, 6], [20, 11, 22])
        assert (second.num_cached_tokens, list(second.block_ids)) == (4, [10, 11, 22])
        assert list(second.redundant_block_ids) == [20]

    def test_never_changes_the_ids_of_a_span(self) -> None:
        """Somebody may be reading them."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2, 3], [0, 1, 2])
        tree.insert([1, 2, 3], [7, 8, 9])
        assert matched(tree, [1, 2, 3]) == [0, 1, 2]
        assert list(tree.evict(9)) == [2, 1, 0]

    def test_leaves_the_ragged_tail_alone(self) -> None:
        """A block that is not full is not adopted, whether or not its id is given."""
        tree = RadixTree(block_size=4)
        result = tree.insert([1, 2, 3], [9])
        assert (list(result.block_ids), tree.num_cached_blocks, tree.num_nodes) == ([], 0, 0)
        assert list(tree.insert([1, 2, 3, 4, 5], [9, 8]).block_ids) == [9]
        assert list(tree.insert([1, 2, 3, 4, 5, 6, 7, 8], [9, 8]).block_ids) == [9, 8]

    def test_of_nothing_is_nothing(self) -> None:
        """No empty node, no namespace without content."""
        tree = RadixTree(block_size=2)
        assert list(tree.insert([], [], ("a",)).block_ids) == []
        assert (tree.num_nodes, tree_counters(tree)) == (0, (0, 0, 0))
        tree.check_integrity()

    @pytest.mark.parametrize(
        ("tokens", "ids", "why"),
        [
            ([1, 2, 3, 4], [5], "fill 2 blocks, and 1 ids"),
            ([1, 2, 3, 4], [5, 6, 7], "fill 2 blocks, and 3 ids"),
            ([1, 2, 3], [5, 6, 7], "fill 1 blocks .or one more, for the ragged tail., and 3"),
            ([1, 2, 3, 4], [5, 5], "block 5 is named twice"),
            ([1, 2, 3, 4], [5, -1], r"not -1"),
            ([1, 2, 3, 4], [5, 2**31], r"below 2\*\*31, not 2147483648"),
            ([1, 2], [11], "block 11 is in the tree already"),
            ([9, 9], [10], "block 10 is in the tree already"),
            ([7, 8, 5, 6], [10, 13], "block 13 is in the tree already"),
        ],
    )
    def test_refuses_ids_that_do_not_fit(self, tokens: list[int], ids: list[int], why: str) -> None:
        """No id is ever in two places of the tree; an error changes nothing."""
        tree = RadixTree(block_size=2)
        tree.insert([7, 8], [10])
        tree.insert([1, 2, 0, 0], [12, 11])
        tree.insert([0, 0], [13])
        before = tree_counters(tree), tree.num_nodes
        with pytest.raises(InvalidBlocks, match=why):
            tree.insert(tokens, ids)
        assert (tree_counters(tree), tree.num_nodes) == before
        tree.check_integrity()

    def test_of_a_locked_path_changes_no_lock(self) -> None:
        """An insert locks nothing and unlocks nothing."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2, 3], [0, 1, 2])
        with tree.match_prefix([1, 2]):
            tree.insert([1, 5], [0, 5])
            assert tree_counters(tree) == (4, 2, 2)

    def test_one_request_block_by_block_makes_one_node(self) -> None:
        """Not a chain of as many nodes as it decoded blocks."""
        tree = RadixTree(block_size=1)
        for length in range(1, 50):
            tree.insert(range(length), range(length))
        assert (tree.num_cached_blocks, tree.num_nodes) == (49, 1)


class TestNamespaces:
    def test_share_nothing(self) -> None:
        """However alike the tokens and the joined names."""
        tree = RadixTree(block_size=1)
        names: list[tuple[str, ...]] = [(), ("",), ("a",), ("a", ""), ("a", "bc"), ("ab", "c"), ("abc",), ("0",)]
        for block_id, name in enumerate(names):
            assert tree.insert([1], [block_id], name).num_cached_tokens == 0
        assert [matched(tree, [1], name) for name in names] == [[i] for i in range(len(names))]

    @pytest.mark.parametrize("name", ["a", None, 5, (1,), (None,), ("a", b"b"), ("x" * 1025,), ("x",) * 33], ids=str)
    def test_are_tuples_of_strings(self, name: object) -> None:
        """A str is a sequence of strings too, and would be its letters. Length is bounded."""
        tree = RadixTree(block_size=1)
        calls = (tree.match_prefix, tree.probe, lambda t, n: tree.insert(t, [1], n), lambda _, n: tree.reset(n or 5))
        for call in calls:
            with pytest.raises(InvalidArgument, match="namespace"):
                call([1], name)

    def test_may_be_given_as_a_list(self) -> None:
        """What JSON makes of a tuple names the same."""
        tree = RadixTree(block_size=1)
        tree.insert([1], [5], ["a", "b"])  # type: ignore[arg-type]
        assert matched(tree, [1], ("a", "b")) == [5]


class TestProbe:
    def test_counts_and_changes_nothing(self) -> None:
        """No lock, no touch, no split."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2, 3], [0, 1, 2])
        tree.insert([9], [9])
        assert [tree.probe(t) for t in ([1, 2, 3, 4], [1, 2], [1, 5], [], [8])] == [3, 2, 1, 0, 0]
        assert tree.probe([1], ("other",)) == 0
        assert (tree.num_nodes, tree_counters(tree)) == (2, (4, 4, 0))
        assert list(tree.evict(3)) == [2, 1, 0], "a probe counted as a use"


class TestIntegrityCheck:
    @pytest.mark.parametrize("harm", ["locks", "protected", "cached", "nodes", "owned", "order", "parent", "access"])
    def test_finds_what_is_broken(self, harm: str) -> None:
        """A check that cannot fail guards nothing."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2, 3], [0, 1, 2])
        tree.insert([1, 5], [0, 5])
        match = tree.match_prefix([1, 2])
        tree.check_integrity()
        index, node = tree._index, match._node
        assert node is not None
        match harm:
            case "locks":
                node.num_locks += 1
            case "protected":
                index.num_protected_blocks -= 1
            case "cached":
                index.num_cached_blocks += 1
            case "nodes":
                index.num_nodes += 1
            case "owned":
                tree._owned[5] = 0
            case "order":
                index.policy.discard(index.policy.victim())  # type: ignore[arg-type]
            case "parent":
                node.parent = None
            case "access":
                node.last_access = index.now + 1
        with pytest.raises(IntegrityError):
            tree.check_integrity()


@pytest.mark.parametrize("block_size", [0, -1, 1.5, "16", True, None], ids=repr)
def test_a_block_has_at_least_one_token(block_size: object) -> None:
    """The error names the field and the value."""
    with pytest.raises(InvalidArgument, match=rf"block_size.*{block_size!r}"):
        RadixTree(block_size=block_size)  # type: ignore[arg-type]
