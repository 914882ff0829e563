"""Events of the core: each block stored and removed once, in an order to follow, under a hash of its path."""

from __future__ import annotations

import doctest
import logging
import threading
from contextlib import suppress
from typing import Any, ClassVar

import pytest
from helpers import NAMESPACES, cached, namespaces, packed, prompts
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mirror import Mirror, hashes_of, walked

import radix_cache.events
from radix_cache import NamespaceLimit, PrefixCache
from radix_cache.errors import InvalidArgument, PoolExhausted, RadixCacheError, StaleLease
from radix_cache.events import AllBlocksCleared, BlockHashes, BlockRemoved, BlockStored, Event


class Watched:
    """A cache and the events of each call that has any."""

    def __init__(self, num_blocks: int = 16, block_size: int = 1, **options: Any) -> None:
        self.cache = PrefixCache(num_blocks, block_size, **options)
        self.hashes = BlockHashes(num_blocks, block_size)
        self.batches: list[list[Event]] = []
        self.mirror = Mirror()
        self.cache.subscribe(self._read)

    def _read(self, changes: Any) -> None:
        events = self.hashes.events(changes)
        self.batches.append(events)
        self.mirror.read(events)

    def take(self) -> list[Event]:
        """The events since the last time."""
        events = [event for batch in self.batches for event in batch]
        self.batches.clear()
        return events


def path(*tokens: int, namespace: tuple[str, ...] = ()) -> list[int]:
    return hashes_of(packed(tokens), namespace, 1)


# The known faults of others.


def test_a_split_says_nothing() -> None:
    watched = Watched()
    cached(watched.cache, [1, 2, 3])
    assert watched.take() == [BlockStored((), None, path(1, 2, 3), packed([1, 2, 3]))]
    watched.cache.release(watched.cache.match_prefix([1, 2, 9]))
    assert watched.take() == []
    cached(watched.cache, [1, 2, 9])
    assert watched.take() == [BlockStored((), path(1, 2)[-1], path(1, 2, 9)[2:], packed([9]))]
    assert watched.mirror.parents == walked(watched.cache)


def test_the_parent_is_the_block_before_whoever_stored_it() -> None:
    watched = Watched()
    cached(watched.cache, [1, 2])
    watched.take()
    cached(watched.cache, [1, 2, 3, 4])
    assert watched.take() == [BlockStored((), path(1, 2)[-1], path(1, 2, 3, 4)[2:], packed([3, 4]))]


def test_a_namespace_is_part_of_the_hash() -> None:
    watched = Watched(num_blocks=4)
    for namespace in (("A",), ("B",)):
        cached(watched.cache, [1, 2], namespace)
    assert len(watched.mirror.parents) == 4
    watched.cache.release(watched.cache.match_prefix([1, 2], ("B",)))
    watched.take()
    assert watched.cache.evict(2) == 2
    assert watched.take() == [BlockRemoved(path(1, 2, namespace=("A",))[::-1])]
    assert set(watched.mirror.parents) == set(path(1, 2, namespace=("B",)))


@pytest.mark.parametrize(("one", "other"), [(("ab",), ("a", "b")), ((), ("",)), (("", "a"), ("a", ""))])
def test_namespaces_that_look_alike_have_no_hash_in_common(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    watched = Watched()
    for namespace in (one, other):
        cached(watched.cache, [1, 2], namespace)
    assert len(watched.mirror.parents) == 4


def test_a_flush_under_a_lease_removes_once() -> None:
    watched = Watched(num_blocks=4, block_size=2)
    cached(watched.cache, [1, 2, 3, 4])
    lease = watched.cache.match_prefix([1, 2, 3, 4])
    watched.take()
    watched.cache.reset()
    assert watched.take() == [AllBlocksCleared()]
    watched.cache.release(lease)
    assert watched.take() == []
    watched.cache.reset()
    assert watched.take() == [AllBlocksCleared()]
    cached(watched.cache, [1, 2, 3, 4])
    with pytest.raises(RadixCacheError):
        watched.cache.release(lease)
    assert watched.mirror.parents == walked(watched.cache) != {}
    assert watched.cache.stats().num_free_blocks == watched.cache.stats().num_evictable_blocks == 2


def test_the_hash_is_an_unsigned_number_of_64_bits() -> None:
    watched = Watched(num_blocks=64)
    cached(watched.cache, range(64))
    (event,) = watched.take()
    assert event.block_hashes == hashes_of(packed(range(64)), (), 1)
    assert any(number >= 2**63 for number in event.block_hashes)
    assert all(0 <= number < 2**64 for number in event.block_hashes)


# Order and number.


def test_one_list_of_changes_a_call() -> None:
    watched = Watched(num_blocks=4)
    with watched.cache.batch() as batch:
        for name in ("a", "b"):
            batch.match_prefix([], (name,), lease_id=name, num_blocks=2)
            batch.insert(name, [1, 2])
            batch.release(name)
    assert [[type(event) for event in events] for events in watched.batches] == [[BlockStored, BlockStored]]
    watched.batches.clear()
    cached(watched.cache, [7, 8, 9])
    removed, stored = watched.batches
    assert removed == [BlockRemoved([*path(1, 2, namespace=("a",))[::-1], path(1, 2, namespace=("b",))[1]])]
    assert stored == [BlockStored((), None, path(7, 8, 9), packed([7, 8, 9]))]


def test_what_finds_nothing_new_says_nothing() -> None:
    watched = Watched()
    cached(watched.cache, [1, 2])
    watched.take()
    cached(watched.cache, [1, 2])
    watched.cache.probe([1, 2])
    watched.cache.heartbeat("E")
    with pytest.raises(PoolExhausted):
        watched.cache.match_prefix([5], num_blocks=17)
    assert watched.cache.evict(0) == 0
    assert watched.batches == []


def test_a_reset_of_a_part_removes_children_first_and_at_once() -> None:
    watched = Watched()
    for tokens in ([1, 2, 3], [1, 2, 4], [5]):
        cached(watched.cache, tokens, ("m",))
    cached(watched.cache, [1, 2], ("n",))
    held = watched.cache.match_prefix([1, 2, 4], ("m",))
    watched.take()
    watched.cache.reset(("m",), [1])
    (event,) = watched.take()
    assert isinstance(event, BlockRemoved)
    assert set(event.block_hashes) == {*path(1, 2, 3, namespace=("m",))[1:], path(1, 2, 4, namespace=("m",))[2]}
    assert event.block_hashes[2:] == path(1, 2, namespace=("m",))[1:]
    watched.cache.release(held)
    assert watched.take() == []
    watched.cache.reset(("n",))
    assert watched.take() == [BlockRemoved(path(1, 2, namespace=("n",))[::-1])]
    assert watched.mirror.parents == walked(watched.cache)


def test_blocks_that_wait_for_the_sweep_are_stored_anew_at_once() -> None:
    watched = Watched()
    cached(watched.cache, [1, 2, 3], ("a",))
    steps = watched.cache.reset_steps(("a",))
    next(steps)
    assert watched.mirror.parents == {}
    cached(watched.cache, [1, 2, 3], ("a",))
    cached(watched.cache, [4] * 13, ("b",))  # evicts what waits for the sweep, if anything does
    for _ in steps:
        pass
    assert watched.mirror.parents == walked(watched.cache)
    assert len(watched.mirror.parents) == 16


# Listening.


def test_a_late_listener_begins_with_a_snapshot() -> None:
    cache = PrefixCache(16, 1)
    for tokens, namespace in (([1, 2, 3], ()), ([1, 2, 4], ()), ([1], ("a",))):
        cached(cache, tokens, namespace)
    hashes, mirror = BlockHashes(16, 1), Mirror()
    cache.subscribe(lambda changes: mirror.read(hashes.events(changes)))
    mirror.read(hashes.events(cache.snapshot()))
    assert mirror.parents == walked(cache)
    assert len(mirror.parents) == 5
    cache.evict(2)
    cached(cache, [1, 2, 5])
    assert mirror.parents == walked(cache)
    assert hashes.known(cache.snapshot()) == BlockHashes(16, 1).events(cache.snapshot())


def test_a_snapshot_is_of_the_moment_of_its_stamp() -> None:
    cache = PrefixCache(16, 1)
    seen: list[bool] = []
    cache.snapshot(lambda: seen.append(cache._lock.locked()))
    assert seen == [True]


def test_there_is_one_listener() -> None:
    watched = Watched()
    with pytest.raises(InvalidArgument, match="one listener"):
        watched.cache.subscribe(print)
    watched.cache.unsubscribe()
    cached(watched.cache, [1])
    assert watched.batches == []
    watched.cache.unsubscribe()
    watched.cache.subscribe(watched._read)


def test_a_listener_that_fails_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cache = PrefixCache(16, 1)
    told: list[Any] = []

    def fail(changes: Any) -> None:
        told.append(changes)
        raise ValueError("no more")

    cache.subscribe(fail)
    with caplog.at_level(logging.ERROR):
        cached(cache, [1, 2])
        cached(cache, [3])
    assert len(told) == 1
    assert cache.probe([1, 2]) == 2
    assert [record.message for record in caplog.records] == ["a listener failed, and is told nothing more"]
    cache.subscribe(told.append)


def test_many_threads_tell_one_story() -> None:
    watched = Watched(num_blocks=32)

    def work(seed: int) -> None:
        for number in range(100):
            tokens = [seed % 2, number % 5, number % 7, seed]
            lease = watched.cache.match_prefix(tokens, num_tokens=4)
            with suppress(StaleLease):  # another thread has reset meanwhile
                watched.cache.insert(lease, tokens)
            watched.cache.release(lease)
            if number % 20 == 19:
                watched.cache.reset((), [seed % 2])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watched.mirror.parents == walked(watched.cache)


class EventMachine(RuleBasedStateMachine):
    """Random calls; after each, the events so far amount to what is in the tree."""

    block_size = 2
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.watched = Watched(16, self.block_size, **self.options)
        self.cache = self.watched.cache
        self.leases: list[Any] = []
        self.resets: list[Any] = []

    @rule(prompt=prompts(), namespace=namespaces(), is_held=st.booleans())
    def request(self, prompt: Any, namespace: tuple[str, ...], is_held: bool) -> None:
        tokens = prompt.tokens(self.block_size)
        try:
            lease = self.cache.match_prefix(tokens, namespace, num_tokens=len(tokens), partial=is_held)
        except PoolExhausted:
            return
        half = len(tokens) // 2
        self.cache.insert(lease, tokens[:half])
        self.cache.insert(lease, tokens)
        if is_held:
            self.leases.append(lease)
        else:
            self.cache.release(lease)

    @rule(prompt=prompts(), namespace=namespaces())
    def hold(self, prompt: Any, namespace: tuple[str, ...]) -> None:
        self.leases.append(self.cache.match_prefix(prompt.tokens(self.block_size), namespace))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.cache.release(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @rule(num_blocks=st.integers(0, 4))
    def evict(self, num_blocks: int) -> None:
        self.cache.evict(num_blocks)

    @rule(namespace=st.sampled_from([None, *NAMESPACES]), prompt=st.none() | prompts(2))
    def reset(self, namespace: Any, prompt: Any) -> None:
        tokens = None if prompt is None else prompt.tokens(self.block_size)
        whole = tokens and tokens[: len(tokens) // self.block_size * self.block_size]
        steps = self.cache.reset_steps(namespace, whole)
        next(steps, None)
        self.resets.append(steps)

    @precondition(lambda self: self.resets)
    @rule()
    def sweep(self) -> None:
        for _ in self.resets.pop():
            pass

    @invariant()
    def the_events_are_the_tree(self) -> None:
        assert self.watched.mirror.parents == walked(self.cache)
        self.cache.check_integrity()

    @invariant()
    def a_snapshot_is_the_tree(self) -> None:
        late = Mirror()
        late.read(self.watched.hashes.known(self.cache.snapshot()))
        assert late.parents == self.watched.mirror.parents


class LimitedEventMachine(EventMachine):
    """The same where tenants evict their own, with a policy that cuts at boundaries of its own."""

    block_size = 1
    options: ClassVar[dict[str, Any]] = {
        "policy": "slru",
        "limits": {("a",): NamespaceLimit(max_blocks=5), (): NamespaceLimit(max_blocks=9, min_blocks=2)},
    }


TestEventMachine = EventMachine.TestCase
TestLimitedEventMachine = LimitedEventMachine.TestCase
TestEventMachine.settings = settings(max_examples=60)
TestLimitedEventMachine.settings = settings(max_examples=40)


def test_the_example_in_the_module() -> None:
    assert doctest.testmod(radix_cache.events).attempted
    assert doctest.testmod(radix_cache.events).failed == 0
