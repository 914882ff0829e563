"""Random histories of the standalone tree, step by step against the naive model."""

from __future__ import annotations

from array import array

import pytest
from helpers import NAMESPACES, Prompt, namespaces, prompts
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from tree_model import Namespace, TreeModel

from radix_cache import index
from radix_cache.errors import InvalidBlocks, InvalidTokens, UnknownLease
from radix_cache.tree import Match, RadixTree


class TreeMachine(RuleBasedStateMachine):
    """Callers that match, hold, insert, evict and reset in any order; some of them hand in ids that are not theirs."""

    held = Bundle("held")
    released = Bundle("released")

    @initialize(block_size=st.sampled_from([1, 2, 3]))
    def start(self, block_size: int) -> None:
        """Begin with an empty tree."""
        self.block_size = block_size
        self.tree = RadixTree(block_size)
        self.model = TreeModel(block_size)
        self.next_id = 0
        self.live: dict[int, Match] = {}

    def fresh_ids(self, amount: int) -> list[int]:
        """Return ids that were never used."""
        self.next_id += amount
        return list(range(self.next_id - amount, self.next_id))

    @rule(target=held, prompt=prompts(), namespace=namespaces(), cap=st.none() | st.integers(0, 12))
    def match(self, prompt: Prompt, namespace: Namespace, cap: int | None) -> Match:
        """The longest cached prefix, locked and touched."""
        tokens = prompt.tokens(self.block_size)
        path = self.model.find(namespace, tokens if cap is None else tokens[:cap])
        match = self.tree.match_prefix(tokens, namespace, cap)
        assert list(match.block_ids) == [block.block_id for block in path]
        assert match.num_tokens == len(path) * self.block_size
        self.model.touch(path)
        self.model.hold(id(match), path)
        self.live[id(match)] = match
        return match

    @rule(target=released, match=consumes(held))
    def release(self, match: Match) -> Match:
        """Once; what a reset had detached comes back."""
        del self.live[id(match)]
        assert sorted(self.tree.release(match)) == sorted(self.model.let_go(id(match)))
        return match

    @rule(match=released)
    def release_again(self, match: Match) -> None:
        """Never twice."""
        with pytest.raises(UnknownLease):
            self.tree.release(match)

    @rule(prompt=prompts(), namespace=namespaces())
    def insert_fresh(self, prompt: Prompt, namespace: Namespace) -> None:
        """A prompt that its writer computed in blocks of its own from end to end, matched before or not."""
        tokens = prompt.tokens(self.block_size)
        self.check_insert(tokens, namespace, self.fresh_ids(len(tokens) // self.block_size))

    @rule(prompt=prompts(), namespace=namespaces(), own=st.lists(st.booleans(), min_size=5, max_size=5))
    def insert_mixed(self, prompt: Prompt, namespace: Namespace, own: list[bool]) -> None:
        """What was matched in the tree's blocks, some of it in blocks of its own, the rest new; with one for the
        tail.
        """
        tokens = prompt.tokens(self.block_size)
        canonical = [block.block_id for block in self.model.find(namespace, tokens)]
        ids = self.fresh_ids(len(tokens) // self.block_size)
        for place, (block_id, is_own) in enumerate(zip(canonical, own, strict=False)):
            ids[place] = ids[place] if is_own else block_id
        if len(tokens) % self.block_size:
            ids += self.fresh_ids(1)
        self.check_insert(tokens, namespace, ids)

    def check_insert(self, tokens: list[int], namespace: Namespace, ids: list[int]) -> None:
        """Insert on both sides and compare the whole answer."""
        whole = tokens[: self.model.whole(len(tokens))]
        found = [block.block_id for block in self.model.find(namespace, whole)]
        result = self.tree.insert(tokens, array("i", ids), namespace)
        path = self.model.add(namespace, whole, ids)
        assert result.num_cached_tokens == len(found) * self.block_size
        assert list(result.block_ids) == [block.block_id for block in path]
        assert list(result.redundant_block_ids) == [
            given for given, kept in zip(ids, found, strict=False) if given != kept
        ]

    @rule(prompt=prompts(), namespace=namespaces(), place=st.integers(0, 4), which=st.integers(0))
    def insert_foreign(self, prompt: Prompt, namespace: Namespace, place: int, which: int) -> None:
        """An id that the tree holds elsewhere, or names twice, is refused wherever it stands."""
        tokens = (Prompt((*prompt.symbols, 0))).tokens(self.block_size)
        ids = self.fresh_ids(len(tokens) // self.block_size)
        place %= len(ids)
        canonical = self.model.find(namespace, tokens)
        there = {canonical[place].block_id} if place < len(canonical) else set()
        foreign = sorted(self.model.block_ids - there) or [ids[place - 1]] * (len(ids) > 1) or [-1]
        ids[place] = foreign[which % len(foreign)]
        with pytest.raises(InvalidBlocks):
            self.tree.insert(tokens, ids, namespace)

    @rule(num_blocks=st.integers(0, 6))
    def evict(self, num_blocks: int) -> None:
        """Exactly so many, in exactly this order."""
        assert list(self.tree.evict(num_blocks)) == self.model.evict(num_blocks)

    @rule(namespace=st.none() | st.sampled_from(NAMESPACES), prompt=prompts(2))
    def reset(self, namespace: Namespace | None, prompt: Prompt) -> None:
        """Whole namespaces, or what extends a prefix; a ragged prefix is refused."""
        tokens = prompt.tokens(self.block_size)
        if len(tokens) % self.block_size:
            with pytest.raises(InvalidTokens):
                self.tree.reset(namespace, tokens)
        else:
            assert sorted(self.tree.reset(namespace, tokens)) == sorted(self.model.reset(namespace or (), tokens))

    @rule(prompt=prompts(), namespace=namespaces())
    def probe(self, prompt: Prompt, namespace: Namespace) -> None:
        """What a match would find; the next eviction shows whether it left a trace."""
        tokens = prompt.tokens(self.block_size)
        assert self.tree.probe(tokens, namespace) == len(self.model.find(namespace, tokens)) * self.block_size

    @invariant()
    def counts_agree(self) -> None:
        """After every step."""
        if hasattr(self, "tree"):
            assert self.tree.num_cached_blocks == len(self.model.cached)
            assert self.tree.num_protected_blocks == self.model.num_protected
            assert self.tree.num_evictable_blocks == self.model.num_evictable
            self.tree.check_integrity()

    @precondition(lambda self: not self.live)
    @rule()
    def give_everything_back(self) -> None:
        """With nobody holding anything, every block can be had back, each once, and no node is left."""
        assert list(self.tree.evict(self.next_id)) == self.model.evict(self.next_id)
        assert self.tree.num_nodes == self.tree.num_cached_blocks == 0


class WideTreeMachine(TreeMachine):
    """The same where every node that has more than a few children keeps them as those with thousands do."""

    def __init__(self) -> None:
        super().__init__()
        self._limit, index.MAX_PLAIN_CHILDREN = index.MAX_PLAIN_CHILDREN, 1

    def teardown(self) -> None:
        index.MAX_PLAIN_CHILDREN = self._limit


TestTreeMachine = TreeMachine.TestCase
TestWideTreeMachine = WideTreeMachine.TestCase
