"""The stream of a server's events: numbered, kept for a while, never behind without saying so."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from client_help import wait_until
from helpers import cached, packed
from mirror import Mirror, walked

from radix_cache import PrefixCache
from radix_cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from radix_cache_service.client.watches import Assembly
from radix_cache_service.events import batches as event_batches
from radix_cache_service.events.batches import EventBatch
from radix_cache_service.events.stream import EventStream
from radix_cache_service.events.watching import messages_of

WAIT_S = 60


class Stepped:
    """A stream whose thread is the test's: it goes on only in `turn`."""

    def __init__(self, num_blocks: int = 16, **options: Any) -> None:
        self.cache = PrefixCache(num_blocks, 1)
        self.stream = EventStream(self.cache, encode=lambda events, rest: repr(events).encode(), **options)
        self.seen: list[EventBatch] = []
        self.cache.subscribe(self.stream._listen)
        self.stream.join(self.seen.append)
        self.turn()

    def turn(self, is_due: bool = False) -> list[EventBatch]:
        """Go on; return what was published."""
        before = len(self.seen)
        self.stream._turn(is_due=is_due)
        return self.seen[before:]

    def store(self, *tokens: int) -> EventBatch:
        """Cache tokens; return what was published."""
        cached(self.cache, tokens)
        (batch,) = self.turn()
        return batch

    def replay(self, start_seq: int) -> list[EventBatch]:
        """Ask for what was from there on."""
        future = self.stream.replay(start_seq)
        self.turn()
        return future.result(0)


def test_a_call_is_a_batch_and_numbers_go_on_from_the_clock() -> None:
    before = time.time_ns() // 1000
    stepped = Stepped()
    start = stepped.stream.last_seq
    assert before < start <= time.time_ns() // 1000 + 1
    for number in (1, 2, 3):
        batch = stepped.store(number)
        assert batch.seq == start + number
        assert not batch.is_reset
        assert [type(event) for event in batch.events] == [BlockStored]
    (beat,) = stepped.turn(is_due=True)
    assert (beat.seq, beat.events) == (start + 4, [])


def test_what_waits_comes_in_order_however_much_it_is() -> None:
    stepped = Stepped()
    before = stepped.stream.last_seq
    for number in range(200):
        cached(stepped.cache, [number])
    batches = stepped.turn()
    assert [batch.seq for batch in batches] == list(range(before + 1, before + 1 + len(batches)))
    stored = [event.tokens for batch in batches for event in batch.events if isinstance(event, BlockStored)]
    assert stored == [packed([number]) for number in range(200)]


def test_what_was_made_before_a_failure_is_sent() -> None:
    stepped = Stepped()
    encode = stepped.stream._encode

    def fail_at_the_third(events: Any, rest: Any) -> bytes:
        if len(stepped.stream._kept._batches) == 3:
            stepped.stream._encode = encode
            raise ValueError("once")
        return b""

    stepped.stream._encode = fail_at_the_third
    for number in range(5):
        cached(stepped.cache, [number])
    first = stepped.turn()
    (anew,) = stepped.turn()
    assert [batch.is_reset for batch in first] == [False, False]
    assert (anew.seq, anew.is_reset) == (first[-1].seq + 1, True)
    mirror = Mirror()
    mirror.read(anew.events)
    assert mirror.parents == walked(stepped.cache)


def test_what_is_there_at_the_start_is_published_first() -> None:
    cache = PrefixCache(16, 1)
    cached(cache, [1, 2])
    stream = EventStream(cache)
    stream.start()
    stream.close()
    mirror = Mirror()
    assert stream._kept._batches[0].is_reset
    mirror.read(stream._kept._batches[0].events)
    assert mirror.parents == walked(cache) != {}


def test_what_was_lost_is_sent_again_as_it_was() -> None:
    stepped = Stepped()
    live = [stepped.store(number) for number in range(7)]
    again = stepped.replay(live[4].seq)
    assert again == live[4:]
    assert [batch.payload for batch in again] == [batch.payload for batch in live[4:]]
    assert stepped.replay(live[6].seq + 1) == []


@pytest.mark.parametrize("start", ["before what is kept", "nothing", "the future"])
def test_what_is_no_longer_kept_is_one_batch_under_the_newest_number(start: str) -> None:
    stepped = Stepped(num_kept=3)
    live = [stepped.store(number) for number in range(7)]
    asked = {"before what is kept": live[3].seq, "nothing": 0, "the future": live[6].seq + 2}[start]
    (batch,) = stepped.replay(asked)
    assert batch.is_reset
    assert batch.seq == live[6].seq
    assert batch.events[0] == AllBlocksCleared()
    mirror = Mirror()
    mirror.read(batch.events)
    assert mirror.parents == walked(stepped.cache)
    assert stepped.store(99).seq == live[6].seq + 1
    assert stepped.stream.figures().num_snapshots == 1


def test_of_another_stream_nothing_is_taken_for_known() -> None:
    stepped = Stepped()
    live = [stepped.store(number) for number in range(3)]
    for epoch, resets in ((stepped.stream.epoch, []), ("another", [True])):
        joined = stepped.stream.join(lambda batch: None, live[2].seq + 1, epoch)
        stepped.turn()
        assert [batch.is_reset for batch in joined.result(0)] == resets


def test_what_is_kept_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_batches, "_MAX_KEPT_BYTES", 3000)
    stepped = Stepped(num_blocks=64)
    for number in range(50):
        stepped.store(number)
    assert 0 < sum(batch.num_bytes for batch in stepped.stream._kept._batches) <= 3000
    assert stepped.stream._kept._num_bytes == sum(batch.num_bytes for batch in stepped.stream._kept._batches)
    monkeypatch.setattr(event_batches, "_MAX_KEPT_BYTES", 10)
    batch = stepped.store(100)
    assert not stepped.stream._kept._batches
    assert [again.is_reset for again in stepped.replay(batch.seq)] == [True]


def test_a_full_queue_is_dropped_and_the_whole_tree_published() -> None:
    stepped = Stepped(max_queued=3)
    mirror = Mirror()
    before = stepped.stream.last_seq
    for number in range(6):
        cached(stepped.cache, [number])
    stepped.cache.evict(1)
    (batch,) = stepped.turn()
    assert (batch.seq, batch.is_reset) == (before + 1, True)
    mirror.read(batch.events)
    assert mirror.parents == walked(stepped.cache)
    assert stepped.stream.figures().num_dropped == 6
    mirror.read(stepped.store(7, 8).events)
    assert mirror.parents == walked(stepped.cache)


def test_a_snapshot_is_of_what_was_published_by_then() -> None:
    stepped = Stepped()
    stepped.store(1)
    cached(stepped.cache, [1, 2])
    future = stepped.stream.replay(0)
    cached(stepped.cache, [1, 3])
    published = stepped.turn()
    (snapshot,) = future.result(0)
    assert snapshot.seq == published[-1].seq
    cached(stepped.cache, [1, 4])
    mirror = Mirror()
    mirror.read([*snapshot.events, *stepped.turn()[0].events])
    assert mirror.parents == walked(stepped.cache)


def test_a_snapshot_of_a_lost_queue_is_the_tree_too() -> None:
    stepped = Stepped(max_queued=2)
    stepped.store(1)
    original = stepped.cache.snapshot

    def late(stamp: Any) -> Any:
        stepped.cache.snapshot = original  # type: ignore[method-assign]
        for number in range(4):
            cached(stepped.cache, [1, number])
        return original(stamp)

    future = stepped.stream.replay(0)
    stepped.cache.snapshot = late  # type: ignore[method-assign]
    stepped.turn()
    (snapshot,) = future.result(0)
    mirror = Mirror()
    mirror.read(snapshot.events)
    assert mirror.parents == walked(stepped.cache)
    assert snapshot.seq == stepped.stream.last_seq


def test_after_a_snapshot_that_failed_the_tree_is_published() -> None:
    stepped = Stepped()
    stepped.store(1)
    original, encode = stepped.cache.snapshot, stepped.stream._encode

    def late(stamp: Any) -> Any:
        stepped.cache.snapshot = original  # type: ignore[method-assign]
        cached(stepped.cache, [1, 2])
        return original(stamp)

    def fail(events: Any, rest: Any) -> bytes:
        stepped.stream._encode = encode
        raise ValueError("once")

    future = stepped.stream.replay(0)
    stepped.cache.snapshot, stepped.stream._encode = late, fail  # type: ignore[method-assign]
    assert stepped.turn() == []
    assert isinstance(future.exception(0), ValueError)
    (batch,) = stepped.turn()
    assert batch.is_reset
    mirror = Mirror()
    mirror.read(batch.events)
    assert mirror.parents == walked(stepped.cache)


def test_many_threads_and_late_readers_see_one_tree() -> None:
    cache = PrefixCache(64, 1)
    stream = EventStream(cache, max_queued=16, num_kept=8)
    stream.start()

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(300):
            cached(cache, [dice.randrange(3) for _ in range(dice.randrange(1, 8))], (str(dice.randrange(2)),))
            if dice.random() < 0.1:
                cache.evict(dice.randrange(20))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    readers: list[tuple[list[EventBatch], list[EventBatch]]] = []
    for start in (0, 0, 0):
        live: list[EventBatch] = []
        readers.append((stream.join(live.append, start).result(WAIT_S), live))
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    stream.close()
    for missed, live in readers:
        batches = [*missed, *live]
        mirror = Mirror()
        assert [batch.seq for batch in batches] == list(range(batches[0].seq, batches[0].seq + len(batches)))
        for batch in batches:
            mirror.read(batch.events)
        assert mirror.parents == walked(cache)


def test_a_failure_is_followed_by_the_whole_tree(caplog: pytest.LogCaptureFixture) -> None:
    cache = PrefixCache(16, 1)
    broken = [True]

    def encode(events: Any, rest: Any) -> bytes:
        if events and not isinstance(events[0], AllBlocksCleared) and broken.pop():
            raise ValueError("a secret")
        return b""

    stream = EventStream(cache, encode=encode)
    seen: list[EventBatch] = []
    stream.start()
    stream.join(seen.append).result(WAIT_S)
    cached(cache, [1, 2])
    resets: list[EventBatch] = []

    def is_told_anew() -> bool:
        """The one at the start tells of nothing, and may have come before the sink."""
        resets[:] = [batch for batch in seen if batch.is_reset and len(batch.events) > 1]
        return bool(resets)

    wait_until(is_told_anew)
    mirror = Mirror()
    mirror.read(resets[0].events)
    assert mirror.parents == walked(cache) != {}
    stream.close()
    assert [record.message for record in caplog.records] == ["events could not be published: ValueError"]


def test_a_heartbeat_comes_each_second() -> None:
    now = [0.0]
    stream = EventStream(PrefixCache(16, 1), clock=lambda: now[0])
    seen: list[EventBatch] = []

    def num_seen() -> int:
        """Count, when the stream has looked at the clock for sure."""
        for _ in range(2):
            stream._ask(lambda: None).result(WAIT_S)
        return len(seen)

    stream.start()
    stream.join(seen.append).result(WAIT_S)
    first = num_seen()
    for number in range(3):
        now[0] += 0.99
        assert num_seen() == first + number
        now[0] += 0.02
        wait_until(lambda: len(seen) > first + number)  # noqa: B023 - called at once
        assert num_seen() == first + number + 1
    stream.close()


def test_large_batches_travel_in_pieces() -> None:
    cache = PrefixCache(2000, 1024)
    for number in range(400):
        cached(cache, [number] * 1024 * 3)
    stepped = EventStream(cache)
    stepped.join(lambda batch: None)
    stepped._turn(is_due=False)
    batch = stepped._kept._batches[0]
    pieces = list(messages_of(batch, "E"))
    assert len(pieces) > 3
    assert max(piece.ByteSize() for piece in pieces) < 1.1 * 2**20
    assert [piece.is_partial for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert [piece.is_reset for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assembly = Assembly()
    *nothing, seen = map(assembly.read, pieces)
    assert set(nothing) == {None}
    assert (seen.seq, seen.epoch, seen.is_reset, seen.events) == (batch.seq, "E", True, batch.events)
    removed = EventBatch(7, [BlockRemoved([2**64 - 1, 0])], False, b"", 0)
    (message,) = messages_of(removed, "E")
    assert assembly.read(message) == (7, "E", False, removed.events)
