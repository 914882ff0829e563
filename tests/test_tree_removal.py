"""How blocks leave the standalone tree: eviction in exact order, reset, and both at great depth."""

from __future__ import annotations

import copy
import gc
import sys
import time

import pytest
from helpers import chain, packed, split_into_nodes, tree_counters

from radix_cache.errors import InvalidArgument, InvalidTokens, UnknownLease
from radix_cache.tree import RadixTree

DEPTH = 5_000


class TestEvict:
    def test_takes_exactly_what_was_asked_from_the_tail(self) -> None:
        """A long leaf is not thrown away for one block."""
        tree = RadixTree(block_size=2)
        tree.insert(range(10), range(5))
        assert list(tree.evict(2)) == [4, 3]
        assert (tree.probe(range(10)), tree.num_nodes) == (6, 1)
        assert list(tree.evict(99)) == [2, 1, 0]
        assert (tree_counters(tree), tree.num_nodes) == ((0, 0, 0), 0)
        assert list(tree.evict(1)) == []

    def test_takes_the_least_recently_used_leaf(self) -> None:
        """Inserting and matching are uses."""
        tree = RadixTree(block_size=1)
        for token in (1, 2, 3):
            tree.insert([token], [token])
        tree.release(tree.match_prefix([1]))
        tree.insert([2], [2])
        assert [list(tree.evict(1)) for _ in range(3)] == [[3], [1], [2]]

    def test_a_partial_match_does_not_refresh_the_rest(self) -> None:
        """The tail that was not matched keeps its age."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2, 3, 4], [0, 1, 2, 3])
        tree.insert([9], [9])
        tree.release(tree.match_prefix([1, 2, 5]))
        assert list(tree.evict(3)) == [3, 2, 9]

    def test_a_capped_match_does_not_either(self) -> None:
        """max_tokens bounds the touch as it bounds the lock."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2], [1, 2])
        tree.insert([9], [9])
        tree.release(tree.match_prefix([1, 2], max_tokens=1))
        assert list(tree.evict(2)) == [2, 9]

    def test_releasing_is_no_use(self) -> None:
        """What counts is when a request began to read."""
        tree = RadixTree(block_size=1)
        tree.insert([1], [1])
        match = tree.match_prefix([1])
        tree.insert([2], [2])
        tree.release(match)
        assert list(tree.evict(2)) == [1, 2]

    def test_a_childless_parent_is_next_at_once(self) -> None:
        """It is as old as its own last use, not as its children were."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2], [1, 2])
        tree.insert([9], [9])
        tree.insert([1, 3], [1, 3])
        assert list(tree.evict(4)) == [2, 9, 3, 1]

    def test_never_takes_what_is_locked_or_above_it(self) -> None:
        """However much is asked; what is passed over while locked comes back in its old place."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2, 3], [1, 2, 3])
        tree.insert([7], [7])
        match = tree.match_prefix([1, 2])
        tree.insert([8], [8])
        assert list(tree.evict(1)) == [3]
        assert list(tree.evict(1)) == [7]
        tree.release(match)
        assert list(tree.evict(9)) == [2, 1, 8]

    @pytest.mark.parametrize("amount", [-1, 1.0, True, "1", None], ids=repr)
    def test_refuses_a_senseless_number(self, amount: object) -> None:
        """Nothing is evicted for it."""
        tree = RadixTree(block_size=1)
        tree.insert([1], [1])
        with pytest.raises(InvalidArgument, match="num_blocks"):
            tree.evict(amount)  # type: ignore[arg-type]
        assert tree.num_cached_blocks == 1

    def test_trims_long_leaves_in_pieces(self) -> None:
        """The order and the sum are the same whatever is cut off a long leaf inside."""
        tree = RadixTree(block_size=1)
        tree.insert(range(2_000), range(2_000))
        taken = [block_id for amount in (1, 255, 256, 300, 1) for block_id in tree.evict(amount)]
        assert taken == list(range(1_999, 1_999 - 813, -1))
        tree.check_integrity()
        assert tree.probe(range(2_000)) == 2_000 - 813

    def test_an_evicted_id_may_come_again(self) -> None:
        """The caller owns it and may put other tokens into it."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2], [1, 2])
        tree.evict(1)
        assert list(tree.insert([5], [2]).block_ids) == [2]
        tree.check_integrity()


class TestReset:
    def fill(self) -> RadixTree:
        """A small tree under each of four namespaces."""
        tree = RadixTree(block_size=1)
        for block_id, name in enumerate([(), ("m",), ("m", "w7"), ("mw",)]):
            tree.insert([1, 2], [10 * block_id, 10 * block_id + 1], name)
        return tree

    @pytest.mark.parametrize(
        ("prefix", "left"),
        [
            (None, []),
            ((), []),
            (("m",), [(), ("mw",)]),
            (("m", "w7"), [(), ("m",), ("mw",)]),
            (("x",), [(), ("m",), ("mw",), ("m", "w7")]),
        ],
    )
    def test_covers_the_namespaces_that_begin_alike(
        self, prefix: tuple[str, ...] | None, left: list[tuple[str, ...]]
    ) -> None:
        """A prefix of the tuple, not of a joined string."""
        tree = self.fill()
        freed = tree.reset(prefix)
        names: list[tuple[str, ...]] = [(), ("m",), ("mw",), ("m", "w7")]
        assert [name for name in names if tree.probe([1, 2], name)] == left
        assert len(set(freed)) == len(freed) == 8 - 2 * len(left)
        assert tree_counters(tree) == (2 * len(left), 2 * len(left), 0)
        tree.check_integrity()

    def test_with_tokens_forgets_only_what_extends_them(self) -> None:
        """The prefix itself stays, and so does what branches off before its end."""
        tree = RadixTree(block_size=2)
        tree.insert([1, 2, 3, 4, 5, 6], [0, 1, 2])
        tree.insert([1, 2, 7, 7], [0, 7])
        assert sorted(tree.reset((), [1, 2, 3, 4])) == [2]
        assert (tree.probe([1, 2, 3, 4, 5, 6]), tree.probe([1, 2, 7, 7])) == (4, 4)
        assert sorted(tree.reset((), [1, 2, 3, 3])) == []
        assert sorted(tree.reset((), [1, 2])) == [1, 7]
        with pytest.raises(InvalidTokens, match="3 tokens are not whole blocks of 2"):
            tree.reset((), [1, 2, 3])
        assert list(tree.reset((), [])) == [0]

    def test_keeps_what_is_locked_until_it_is_released(self) -> None:
        """Out of sight at once; the ids come back from the release, and the evictable ones at once."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2, 3], [1, 2, 3])
        tree.insert([1, 9], [1, 9])
        match = tree.match_prefix([1, 2])
        assert sorted(tree.reset()) == [3, 9]
        assert (tree.probe([1, 2]), tree_counters(tree)) == (0, (2, 0, 2))
        assert list(tree.evict(9)) == []
        tree.insert([1, 2], [21, 22])
        tree.check_integrity()
        assert sorted(tree.release(match)) == [1, 2]
        assert (tree.probe([1, 2]), tree_counters(tree)) == (2, (2, 2, 0))
        tree.check_integrity()

    def test_twice_is_no_more_than_once(self) -> None:
        """What is detached already is not found again."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2], [1, 2])
        match = tree.match_prefix([1, 2])
        assert [list(tree.reset()) for _ in range(2)] == [[], []]
        assert sorted(tree.release(match)) == [1, 2]
        with pytest.raises(UnknownLease):
            tree.release(match)
        assert tree_counters(tree) == (0, 0, 0)

    def test_ids_are_the_callers_again(self) -> None:
        """They may hold other tokens from then on."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2], [1, 2])
        freed = tree.reset()
        assert tree.insert([7, 8], freed).num_cached_tokens == 0

    def test_two_holders_of_one_detached_path(self) -> None:
        """Each release gives back what nobody else holds any more."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2, 3], [1, 2, 3])
        short, long = tree.match_prefix([1]), tree.match_prefix([1, 2, 3])
        tree.reset()
        assert sorted(tree.release(long)) == [2, 3]
        tree.check_integrity()
        assert sorted(tree.release(short)) == [1]


class TestDepth:
    """A chain of 5,000 nodes under the default recursion limit: nothing walks it by recursion."""

    def test_a_tree_grown_one_held_block_at_a_time(self) -> None:
        """As an agent's turns do it: each turn holds what it matched, so that no leaf grows in place."""
        assert sys.getrecursionlimit() <= 1_000
        tree = RadixTree(block_size=1)
        tokens, depth = packed(range(1_500)), 1_500
        matches = []
        for length in range(1, depth + 1):
            tree.insert(tokens[: 4 * length], range(length))
            matches.append(tree.match_prefix(tokens[: 4 * length]))
        assert (tree.num_nodes, tree.num_protected_blocks) == (depth, depth)
        for match in matches:
            tree.release(match)
        assert tree_counters(tree) == (depth, depth, 0)
        tree.check_integrity()

    def test_everything_works_at_the_bottom(self) -> None:
        """Match, lock, insert, probe, integrity, repr, release, evict."""
        tree, tokens = chain(DEPTH)
        match = tree.match_prefix(tokens)
        assert list(match.block_ids) == list(range(DEPTH))
        assert tree.num_protected_blocks == DEPTH
        tree.insert(tokens + packed([7]), range(DEPTH + 1))
        assert tree.probe(tokens + packed([7])) == DEPTH + 1
        tree.check_integrity()
        assert str(DEPTH + 1) in repr(tree)
        assert repr(match)
        assert list(tree.evict(9)) == [DEPTH]
        tree.release(match)
        assert list(tree.evict(DEPTH)) == list(range(DEPTH))[::-1]

    def test_reset_and_late_release(self) -> None:
        """All of a locked chain is detached and freed."""
        tree, tokens = chain(DEPTH)
        match = tree.match_prefix(tokens)
        assert list(tree.reset()) == []
        tree.check_integrity()
        assert sorted(tree.release(match)) == list(range(DEPTH))

    def test_it_can_be_dropped_and_collected(self) -> None:
        """A destructor that recurses would crash the process."""
        tree, _ = chain(DEPTH)
        del tree
        gc.collect()

    def test_a_deep_copy_does_not_die_of_depth(self) -> None:
        """A deep copy either works or says no; it never dies of depth."""
        tree, tokens = chain(DEPTH)
        try:
            twin = copy.deepcopy(tree)
        except TypeError:
            return
        assert twin.probe(tokens) == DEPTH

    def test_splitting_costs_no_square(self) -> None:
        """Four times as deep a chain takes well under sixteen times as long to match."""

        def cost(depth: int) -> float:
            times = []
            for _ in range(3):
                tree, tokens = chain(depth)  # a new one each time: the first release of it all joins its nodes
                start = time.process_time()
                tree.release(tree.match_prefix(tokens))
                times.append(time.process_time() - start)
                assert tree.num_nodes < 3
            return min(times)

        assert cost(4_000) < 12 * cost(1_000)


def test_cutting_changes_neither_answers_nor_order() -> None:
    """A tree of one long node and one of its single blocks are the same to every caller."""
    trees = RadixTree(block_size=2), RadixTree(block_size=2)
    tokens = packed(range(12))
    for tree in trees:
        tree.insert(tokens, range(6))
    split_into_nodes(trees[1], tokens)
    held = [trees[1].match_prefix(tokens[:stop]) for stop in range(40, 0, -8)]
    for tree in trees:
        tree.insert([90, 91], [90])
        tree.release(tree.match_prefix(tokens[:32]))
    assert [tree.num_nodes for tree in trees] == [3, 7]
    for match in held:
        trees[1].release(match)
    assert list(trees[0].evict(5)) == list(trees[1].evict(5)) == [5, 4, 90, 3, 2]


class TestNodesJoinAgain:
    """What a split left behind is one node again as soon as nothing needs it apart."""

    @staticmethod
    def forked() -> RadixTree:
        """[1, 2, 3, 4] and [1, 2, 9, 9]: a shared node with two leaves."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2, 3, 4], [0, 1, 2, 3])
        tree.insert([1, 2, 9, 9], [0, 1, 8, 9])
        assert tree.num_nodes == 3
        return tree

    def test_when_the_other_branch_is_evicted(self) -> None:
        """The shared part and the branch that stays were used last by the same request."""
        tree = self.forked()
        assert list(tree.evict(2)) == [3, 2]
        tree.check_integrity()
        assert tree.num_nodes == 1
        assert list(tree.evict(4)) == [9, 8, 1, 0]

    def test_not_while_their_times_differ(self) -> None:
        """A later use of the shared part alone must not refresh the branch."""
        tree = self.forked()
        tree.release(tree.match_prefix([1, 2]))
        tree.evict(2)
        assert tree.num_nodes == 2
        tree.insert([5], [5])
        assert list(tree.evict(2)) == [9, 8]
        assert tree.probe([1, 2]) == 2

    def test_when_a_request_over_both_ends(self) -> None:
        """A use of both makes them alike."""
        tree = self.forked()
        tree.release(tree.match_prefix([1, 2]))
        tree.evict(2)
        tree.release(tree.match_prefix([1, 2, 9, 9]))
        tree.check_integrity()
        assert tree.num_nodes == 1

    def test_not_while_a_request_ends_between_them(self) -> None:
        """Its lock is on the shared part alone."""
        tree = RadixTree(block_size=1)
        tree.insert([1, 2, 3, 4], [0, 1, 2, 3])
        held = tree.match_prefix([1, 2])
        tree.release(tree.match_prefix([1, 2, 3, 4]))
        assert (tree.num_nodes, tree.num_protected_blocks) == (2, 2)
        assert list(tree.evict(9)) == [3, 2]
        tree.release(held)
        tree.check_integrity()
        assert list(tree.evict(9)) == [1, 0]

    def test_below_a_lock(self) -> None:
        """What is locked joins as well, and its holder unlocks it all."""
        tree = self.forked()
        held = tree.match_prefix([1, 2, 9, 9])
        tree.evict(2)
        tree.check_integrity()
        assert (tree.num_nodes, tree.num_protected_blocks) == (1, 4)
        tree.release(held)
        assert tree.num_evictable_blocks == 4

    def test_policies_with_a_record_join_equals_only(self) -> None:
        """A shared part that two requests inserted counts twice, its branch once."""
        tree = RadixTree(block_size=1, policy="lfu")
        tree.insert([1, 2, 3, 4], [0, 1, 2, 3])
        tree.insert([1, 2, 9, 9], [0, 1, 8, 9])
        tree.release(tree.match_prefix([1, 2, 9, 9]))
        assert list(tree.evict(2)) == [3, 2]
        assert tree.num_nodes == 2
