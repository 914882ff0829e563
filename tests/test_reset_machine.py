"""Resets that give way: between their steps other callers match, insert, evict and reset again.

The model can't know which of the forgotten blocks an eviction takes in between. So it asks the cache what of the
visible ones is left, and checks that this is what was there, less at most what was evicted, and nothing from before a
reset.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import Prompt, counters, prompts
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from radix_cache import Lease, PrefixCache, executor, index
from radix_cache.errors import StaleLease

NUM_BLOCKS = 40
Prefix = tuple[int, ...]


class ResetMachine(RuleBasedStateMachine):
    """One cache whose sweeps take one node a step and whose evictions cut off few blocks at a time."""

    held = Bundle("held")

    @initialize(block_size=st.sampled_from([1, 2]), num_trimmed=st.integers(1, 3))
    def start(self, block_size: int, num_trimmed: int) -> None:
        """Begin with an empty cache."""
        self.knobs = pytest.MonkeyPatch()
        self.knobs.setattr(executor, "_NUM_SWEPT_NODES", 1)
        self.knobs.setattr(index, "_MAX_TRIMMED_BLOCKS", num_trimmed)
        self.block_size = block_size
        self.cache = PrefixCache(NUM_BLOCKS, block_size)
        self.visible: set[Prefix] = set()
        self.stale: set[str] = set()
        self.live: list[str] = []
        self.sweeps: list[Iterator[None]] = []

    def prefixes(self, tokens: list[int]) -> list[Prefix]:
        """Return the prefixes in whole blocks, shortest first."""
        return [tuple(tokens[:end]) for end in range(self.block_size, len(tokens) + 1, self.block_size)]

    def num_found(self, tokens: list[int]) -> int:
        """Return how many tokens the model has of these."""
        return sum(self.block_size for prefix in self.prefixes(tokens) if prefix in self.visible)

    @rule(target=held, prompt=prompts(8))
    def match(self, prompt: Prompt) -> tuple[Lease, list[int]]:
        """Find what was inserted since the last reset."""
        tokens = prompt.tokens(self.block_size)
        lease = self.cache.match_prefix(tokens)
        assert lease.num_cached_tokens == self.num_found(tokens)
        self.live.append(lease.lease_id)
        return lease, tokens

    @rule(request=held)
    def insert(self, request: tuple[Lease, list[int]]) -> None:
        """Compute the rest, if there is room, and publish it, unless a reset came in between."""
        lease, tokens = request
        missing = -(-len(tokens) // self.block_size) - len(lease.block_table)
        if missing > counters(self.cache.stats()).free:
            return self.evict(missing)
        self.cache.allocate(lease, num_tokens=len(tokens))
        if lease.lease_id in self.stale:
            with pytest.raises(StaleLease):
                self.cache.insert(lease, tokens)
        else:
            assert self.cache.insert(lease, tokens).num_cached_tokens == self.num_found(tokens)
            self.visible.update(self.prefixes(tokens))
        return None

    @rule(prompt=prompts(8))
    def whole_request(self, prompt: Prompt) -> None:
        """All of it at once."""
        request = self.match(prompt)
        self.insert(request)
        self.release(request)

    @rule(request=consumes(held))
    def release(self, request: tuple[Lease, list[int]]) -> None:
        """End a request."""
        self.cache.release(request[0])
        self.live.remove(request[0].lease_id)

    @rule(num_blocks=st.integers(1, 5))
    def evict(self, num_blocks: int) -> None:
        """Make room, out of what is visible or of what is being forgotten."""
        evicted = self.cache.evict(num_blocks)
        left = {prefix for prefix in self.visible if self.cache.probe(prefix) == len(prefix)}
        assert len(self.visible - left) <= evicted
        self.visible = left

    @rule(prompt=prompts(4))
    def begin_reset(self, prompt: Prompt) -> None:
        """All is out of sight after the first step, and every lease is stale."""
        tokens = prompt.tokens(self.block_size)
        prefix = tokens[: len(prompt.symbols) * self.block_size]
        sweep = self.cache.reset_steps(None, prefix)
        if next(sweep, "done") != "done":
            self.sweeps.append(sweep)
        self.visible = {p for p in self.visible if len(p) <= len(prefix) or list(p[: len(prefix)]) != prefix}
        self.stale.update(self.live)

    @precondition(lambda self: self.sweeps)
    @rule(which=st.integers(0, 3))
    def go_on_with_reset(self, which: int) -> None:
        """Another node."""
        sweep = self.sweeps[which % len(self.sweeps)]
        if next(sweep, "done") == "done":
            self.sweeps.remove(sweep)

    @invariant()
    def nothing_is_lost_or_found_again(self) -> None:
        """Every visible prefix is found, no other; and the cache agrees with itself."""
        if hasattr(self, "cache"):
            self.cache.check_integrity()
            found = counters(self.cache.stats())
            assert found.free + found.leased + found.cached == NUM_BLOCKS
            for prefix in self.visible:
                assert self.cache.probe(prefix) == len(prefix)
            if not self.sweeps and not self.live:
                assert found.cached == found.evictable == len(self.visible)

    def teardown(self) -> None:
        """Put the knobs back."""
        if hasattr(self, "knobs"):
            self.knobs.undo()


TestResetMachine = ResetMachine.TestCase


@pytest.mark.parametrize(("policy", "grows"), [("lru", True), ("mru", False)])
def test_a_detached_leaf_is_cut_where_it_was_whatever_became_of_its_parent(
    policy: str, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a reset is under way, its prefix is a leaf, which others extend and evictions take from."""
    monkeypatch.setattr(executor, "_NUM_SWEPT_NODES", 1)
    monkeypatch.setattr(index, "_MAX_TRIMMED_BLOCKS", 2)
    cache = PrefixCache(NUM_BLOCKS, 1, policy)

    def use(tokens: list[int]) -> None:
        lease = cache.match_prefix(tokens, num_tokens=len(tokens))
        cache.insert(lease, tokens)
        cache.release(lease)

    prefix = [1, 2, 3, 4]
    for tail in ([], [7] * 8, [8], [9]):
        use(prefix + tail)
    sweep = cache.reset_steps((), prefix)
    next(sweep)
    if grows:
        use([*prefix, 5, 6])
    for _ in range(0 if grows else 5):  # the prefix, then the 8
        cache.evict(1)
    assert cache.probe(prefix) == (4 if grows else 0)
    assert cache.evict(1) == 1  # of the eight
    cache.check_integrity()
    for _ in sweep:
        cache.check_integrity()
    assert counters(cache.stats()).cached == (6 if grows else 0)
