"""Eviction policies: how one is named or given, and the exact order of the default."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_cache import NamespaceLimit, PrefixCache
from radix_cache.errors import IntegrityError, InvalidArgument
from radix_cache.node import Node
from radix_cache.policies import LRU, EvictionPolicy, make_policy
from radix_cache.tree import RadixTree


class Newest(LRU):
    """A user's own policy: the leaf that was used last goes first."""

    name = "newest"

    def victim(self) -> Node | None:
        """Return the unlocked leaf with the latest use."""
        unlocked = [leaf for leaf in self.candidates() if not leaf.num_locks]
        return max(unlocked, key=lambda leaf: leaf.last_access, default=None)


class Mute(LRU):
    """A broken policy that names no victim."""

    name = "mute"

    def victim(self) -> Node | None:
        """Return nothing."""
        return None


class Half(EvictionPolicy):
    """One that lacks every method."""

    name = "half"


def not_a_policy() -> int:
    """What a factory must not return."""
    return 5


class TestMakePolicy:
    def test_by_name(self) -> None:
        """Each call makes a policy of its own: none serves two trees."""
        first, second = make_policy("lru"), make_policy("lru")
        assert isinstance(first, LRU)
        assert first is not second

    def test_by_module_and_class(self) -> None:
        """A user's policy needs no registration."""
        made = make_policy(f"{__name__}:Newest")
        assert isinstance(made, Newest)

    def test_an_object_is_taken_as_it_is(self) -> None:
        """It may carry arguments of its own."""
        policy = Newest()
        assert make_policy(policy) is policy

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("lrv", r"'lrv' is neither built in \(.*lru.*\) nor an entry point"),
            ("", "neither built in"),
            ("no_such_module_here:Class", "cannot be imported.*no_such_module_here"),
            (f"{__name__}:Missing", "cannot be imported.*Missing"),
            (f"{__name__}:not_a_policy", "makes a int, which is no EvictionPolicy"),
            (None, "not NoneType"),
            (5, "not int"),
            (LRU, "not "),
        ],
        ids=str,
    )
    def test_what_is_none_is_refused(self, name: object, why: str) -> None:
        """The error names it, and is one of ours."""
        with pytest.raises(InvalidArgument, match=why):
            make_policy(name)  # type: ignore[arg-type]

    def test_an_incomplete_class_is_refused(self) -> None:
        """A missing method shows when the policy is made, not at the first eviction."""
        with pytest.raises((InvalidArgument, TypeError), match=r"victim|Half"):
            make_policy(f"{__name__}:Half")

    @pytest.mark.parametrize("name", ["", ":", "a:", ":b", "..:x"])
    def test_a_malformed_path_is_refused(self, name: str) -> None:
        """No import machinery's own error reaches the caller."""
        with pytest.raises(InvalidArgument, match="policy"):
            make_policy(name)

    def test_the_tree_takes_all_three(self) -> None:
        """And a custom order is really used."""
        for policy in (Newest(), f"{__name__}:Newest"):
            tree = RadixTree(block_size=1, policy=policy)
            for token in (1, 2, 3):
                tree.insert([token], [token])
            assert list(tree.evict(2)) == [3, 2]
            tree.check_integrity()
        with pytest.raises(InvalidArgument, match="lrv"):
            RadixTree(policy="lrv")


class TestAPolicyCannotHarm:
    def test_a_mute_one_is_found_out(self) -> None:
        """Blocks that the counters call evictable and the policy hides are an error in words."""
        tree = RadixTree(block_size=1, policy=Mute())
        tree.insert([1], [1])
        with pytest.raises(IntegrityError, match="'mute' names no victim; 1 more"):
            tree.evict(1)

    def test_a_forgotten_leaf_is_found_out(self) -> None:
        """The integrity check asks the policy for what it knows."""
        policy = LRU()
        tree = RadixTree(block_size=1, policy=policy)
        tree.insert([1], [1])
        leaf = policy.victim()
        assert leaf is not None
        policy.discard(leaf)
        with pytest.raises(IntegrityError, match="missing in the eviction order"):
            tree.check_integrity()


class TestLRU:
    """The policy alone, with nodes for leaves."""

    def leaf(self, last_access: int) -> Node:
        """Return a node as old as that."""
        node = Node(None, b"\0\0\0\0", b"\0\0\0\0")
        node.last_access = last_access
        return node

    def test_oldest_touch_first(self) -> None:
        """A touch moves to the back, and a leaf is in the order once."""
        lru = LRU()
        first, second = self.leaf(1), self.leaf(2)
        lru.touch(first)
        lru.touch(second)
        assert lru.victim() is first
        first.last_access = 3
        lru.touch(first)
        assert lru.victim() is second
        assert set(lru.candidates()) == {first, second}
        assert len(list(lru.candidates())) == 2

    def test_a_victim_stays_until_it_is_discarded(self) -> None:
        """Only its tail may go."""
        lru = LRU()
        leaf = self.leaf(1)
        lru.touch(leaf)
        assert lru.victim() is lru.victim() is leaf
        lru.discard(leaf)
        lru.discard(leaf)
        assert lru.victim() is None

    def test_a_locked_leaf_is_passed_over_and_comes_back_in_its_place(self) -> None:
        """It was not used while it was locked."""
        lru = LRU()
        old, new = self.leaf(1), self.leaf(2)
        lru.touch(old)
        lru.touch(new)
        old.num_locks = 1
        assert lru.victim() is new
        old.num_locks = 0
        lru.add(old)
        lru.add(old)
        assert lru.victim() is old
        assert len(list(lru.candidates())) == 2

    def test_a_parent_takes_the_place_of_its_age(self) -> None:
        """It comes up late but is older than other leaves."""
        lru = LRU()
        leaves = [self.leaf(age) for age in (1, 5)]
        for leaf in leaves:
            lru.touch(leaf)
        parent = self.leaf(3)
        lru.add(parent)
        order = []
        while (leaf := lru.victim()) is not None:
            order.append(leaf.last_access)
            lru.discard(leaf)
        assert order == [1, 3, 5]

    @given(st.lists(st.tuples(st.sampled_from(["touch", "add", "discard", "lock"]), st.integers(0, 5)), max_size=60))
    def test_any_history_equals_a_scan(self, steps: list[tuple[str, int]]) -> None:
        """After each step the victim is the unlocked known leaf with the least last access, and no leaf is twice
        there.
        """
        lru = LRU()
        leaves = [self.leaf(0) for _ in range(6)]
        known: set[int] = set()
        for now, (step, which) in enumerate(steps, start=1):
            leaf = leaves[which]
            if step == "touch":
                leaf.last_access = now
                lru.touch(leaf)
                known.add(which)
            elif step == "discard":
                lru.discard(leaf)
                known.discard(which)
            elif not leaf.last_access:
                continue  # no leaf is locked or unlocked before its first touch
            elif step == "lock" and not leaf.num_locks:
                leaf.num_locks = 1
            else:
                leaf.num_locks = 0  # what the tree does when the last lock goes
                lru.add(leaf)
                known.add(which)
            unlocked = [leaves[i] for i in known if not leaves[i].num_locks]
            assert lru.victim() is min(unlocked, key=lambda leaf: leaf.last_access, default=None)
            listed = list(lru.candidates())
            assert len(listed) == len(set(listed))
            assert set(listed).issuperset(unlocked)


def test_an_object_serves_one_tree() -> None:
    """Its records lie in the nodes, and its order names them: two trees would evict each other's blocks."""
    policy = LRU()
    RadixTree(1, policy)
    with pytest.raises(InvalidArgument, match="serves another tree already"):
        RadixTree(1, policy)
    RadixTree(1, copy.copy(policy))


@pytest.mark.parametrize("spec", ["lru", "slru:protected_hits=3", "tlru:threshold=5,next_prompt_tokens=7", "lfu-da"])
def test_its_parameters_are_part_of_its_name(spec: str) -> None:
    """What a cache says of itself makes the same policy again; what has its default is left out."""
    for limits in ({}, {("a",): NamespaceLimit(3)}):
        assert PrefixCache(8, policy=spec, limits=limits).describe().policy == spec
    assert make_policy("slru:protected_hits=2").spec == "slru"
