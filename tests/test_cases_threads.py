"""Faults that other caches had between threads, in their counters and at their start: the rest of `test_cases`."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from helpers import Counters, counters

from radix_cache import PrefixCache
from radix_cache.errors import InvalidArgument, InvalidBlocks, PoolExhausted

NUM_THREADS = 8
NUM_ROUNDS = 10_000


@pytest.fixture
def tiny_switch_interval() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Race:
    """Readers that match [1, 2] and writers that want the whole pool, on three blocks.

    Each notes which blocks it reads or owns while it holds its lease, and takes the note back before it lets go: so two
    notes about one block mean that the cache gave it away twice.
    """

    def __init__(self) -> None:
        self.cache = PrefixCache(num_blocks=3, block_size=1)
        self.read = Counter[int]()
        self.owned = Counter[int]()
        self.guard = threading.Lock()
        self.start = threading.Barrier(NUM_THREADS)
        self.wrong: list[str] = []
        self.outcomes = Counter[str]()

    def note(self, shared: list[int], own: list[int], change: int) -> None:
        """Add or take back what a lease reads and owns."""
        with self.guard:
            self.read.update(dict.fromkeys(shared, change))
            self.owned.update(dict.fromkeys(own, change))
            for block_id in own:
                if self.owned[block_id] > 1 or (change > 0 and self.read[block_id]):
                    self.wrong.append(f"block {block_id}: {self.owned[block_id]} owners, {self.read[block_id]} readers")

    def read_or_write(self) -> None:
        """Match [1, 2]; compute it again where it is gone."""
        try:
            lease = self.cache.match_prefix([1, 2], num_tokens=2)
        except PoolExhausted:
            self.outcomes["no room"] += 1
            return
        self.outcomes[f"found {lease.num_cached_tokens}"] += 1
        num_shared = lease.num_cached_tokens
        table = list(lease.block_table)
        self.note(table[:num_shared], table[num_shared:], 1)
        self.note(table[:num_shared], table[num_shared:], -1)
        if not num_shared:
            self.cache.insert(lease, [1, 2])
        self.cache.release(lease)

    def take_all(self) -> None:
        """Take the whole pool, which evicts [1, 2] unless somebody reads it."""
        try:
            lease = self.cache.match_prefix([], num_blocks=3)
        except PoolExhausted:
            self.outcomes["refused"] += 1
            return
        self.outcomes["took all"] += 1
        table = list(lease.block_table)
        self.note([], table, 1)
        self.note([], table, -1)
        self.cache.release(lease)

    def run(self, number: int) -> None:
        """One thread's rounds."""
        try:
            self.start.wait()
            for turn in range(NUM_ROUNDS // NUM_THREADS):
                (self.take_all if (number + turn) % 3 == 0 else self.read_or_write)()
        except Exception as error:  # noqa: BLE001 - whatever ends a thread is to be seen
            self.wrong.append(repr(error))


def test_kv21(tiny_switch_interval: None) -> None:
    """Prefix found by one caller is evicted and handed to another before it is locked (vllm-project/vllm#37076)."""
    race = Race()
    threads = [threading.Thread(target=race.run, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert race.wrong == []
    assert set(race.outcomes) <= {"found 0", "found 2", "no room", "took all", "refused"}
    assert min(race.outcomes["found 2"], race.outcomes["took all"]) > 0, "a kind of call never succeeded"
    race.cache.check_integrity()
    found = counters(race.cache.stats())
    assert (found.free + found.evictable, found.leased, found.protected) == (3, 0, 0)


def test_kv35() -> None:
    """Lookups repeated by scheduling retries inflate the hit rate (vllm-project/vllm#45202)."""
    cache = PrefixCache(num_blocks=3, block_size=1)
    first = cache.match_prefix([1, 2], num_tokens=2)
    cache.insert(first, [1, 2])
    cache.release(first)
    before = cache.stats().counters
    for _ in range(3):
        lease = cache.match_prefix([1, 2, 3])
        with pytest.raises(PoolExhausted):
            cache.allocate(lease, num_blocks=2)
        cache.release(lease)
    lease = cache.match_prefix([1, 2, 3], num_tokens=3)
    for _ in range(2):
        cache.insert(lease, [1, 2, 3])
    cache.release(lease)
    cache.probe([1, 2, 3])
    after = cache.stats().counters
    grown = {name: after[name] - before[name] for name in after}
    assert (grown["num_lookups"], grown["num_lookup_tokens"], grown["num_lookup_hit_tokens"]) == (4, 12, 8)
    assert (grown["num_requests"], grown["num_queried_tokens"], grown["num_hit_tokens"]) == (1, 3, 2)
    assert cache.stats().hit_rate == 2 / 5


def test_kv37() -> None:
    """Inconsistent token counts make a counter negative and kill the output loop (vllm-project/vllm#36812)."""
    cache = PrefixCache(num_blocks=6, block_size=2)
    assert cache.stats().hit_rate is None
    lease = cache.match_prefix([1, 2, 3, 4], num_tokens=4)
    steps = [
        lambda: cache.match_prefix([]),
        lambda: cache.match_prefix([1]),
        lambda: cache.insert(lease, [1, 2, 3, 4]),
        lambda: cache.release(lease),
        lambda: cache.insert(cache.match_prefix([1, 2, 3, 4], max_tokens=2, lease_id="a"), [1, 2]),
        lambda: cache.evict(9),
        lambda: cache.match_prefix([1, 2, 3, 4], max_tokens=0, num_blocks=2, lease_id="b"),
        lambda: cache.evict(9),
        lambda: cache.insert("b", [1, 2, 3, 4]),
        lambda: cache.match_prefix([5], parent="b", max_tokens=5),
    ]
    seen = cache.stats().counters
    for step in steps:
        step()
        now = cache.stats().counters
        assert all(now[name] >= seen[name] >= 0 for name in seen)
        assert now["num_hit_tokens"] <= now["num_queried_tokens"]
        assert now["num_lookup_hit_tokens"] <= now["num_lookup_tokens"]
        seen = now


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("block_size", value) for value in (0, -1, 1.5, "16")],
        *[("num_blocks", value) for value in (0, -1)],
        ("lease_ttl_s", -1),
    ],
)
def test_kv47(field: str, value: object) -> None:
    """Zero page size, mismatched page size or half-disabled cache accepted at start (vllm-project/vllm#43521)."""
    config: dict[str, object] = {"num_blocks": 8, "block_size": 2, field: value}
    with pytest.raises(InvalidArgument, match=rf"{field}.*{value}"):
        PrefixCache(**config)  # type: ignore[arg-type]


def test_kv47_blocks_that_do_not_fit() -> None:
    """The second half of it: more tokens than the blocks given for them can hold."""
    cache = PrefixCache(num_blocks=4, block_size=1)
    lease = cache.match_prefix([1, 2, 3, 4], num_blocks=1)
    with pytest.raises(InvalidBlocks, match="4 more blocks, the table has 1"):
        cache.insert(lease, [1, 2, 3, 4])
    assert counters(cache.stats()) == Counters(free=3, leased=1, cached=0, evictable=0, protected=0)
