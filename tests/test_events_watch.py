"""`WatchEvents`: the events over gRPC, from the beginning, from now on, or from where a reader was."""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_help import wait_until as until
from helpers import cached, packed
from mirror import Mirror, hashes_of
from scraping import samples
from security_help import ALICE, ENTRIES, READER, ROOT, write_tokens
from service_process import ServerProcess

from radix_cache.errors import (
    DeadlineExceeded,
    InvalidArgument,
    LimitExceeded,
    PermissionDenied,
    ServiceUnavailable,
    Unauthenticated,
)
from radix_cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from radix_cache_service import AsyncClient, Client, ServerConfig, WatchedEvents
from radix_cache_service.events.stream import EventStream
from radix_cache_service.events.watching import watch
from radix_cache_service.pb import prefix_cache_pb2 as pb

WAIT_S = 60


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server with events."""
    environ = {"RADIX_CACHE_EVENTS": "true"}
    with ServerProcess(num_blocks=64, environ=environ, metrics_listen="127.0.0.1:0", lease_ttl_s=600) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    """A client of it, while nothing is cached and nobody watches."""
    with Client(server.address) as one:
        one.reset()
        wait_until(server, 0)
        yield one


def wait_until(server: ServerProcess, num_watchers: int) -> dict[tuple[str, ...], float]:
    """Wait for so many watchers; return the metrics."""
    deadline = time.monotonic() + WAIT_S
    while (seen := samples(server.metrics_address))["radix_cache_event_watchers",] != num_watchers:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return seen


def path(*tokens: int) -> list[int]:
    return hashes_of(packed(tokens), (), 2)


def next_change(watched: Iterator[WatchedEvents]) -> WatchedEvents:
    """The next batch that is no heartbeat."""
    return next(batch for batch in watched if batch.events)


def test_a_watch_begins_with_all_and_goes_on(client: Client) -> None:
    cached(client, [1, 2, 3, 4])
    watched = client.watch_events()
    first = next(watched)
    assert first.is_reset
    assert first.events == [AllBlocksCleared(), BlockStored((), None, path(1, 2, 3, 4), packed([1, 2, 3, 4]))]
    cached(client, [1, 2, 5, 6])
    client.evict(1)
    client.reset()
    batches = [next_change(watched) for _ in range(3)]
    assert [batch.events for batch in batches] == [
        [BlockStored((), path(1, 2)[0], path(1, 2, 5, 6)[1:], packed([5, 6]))],
        [BlockRemoved(path(1, 2, 3, 4)[1:])],
        [AllBlocksCleared()],
    ]
    assert not any(batch.is_reset for batch in batches)
    assert first.seq < batches[0].seq < batches[1].seq < batches[2].seq
    watched.close()


def test_from_now_on(client: Client) -> None:
    cached(client, [1, 2])
    watched = client.watch_events(snapshot=False)
    beat = next(watched)
    assert (beat.events, beat.is_reset) == ([], False)
    cached(client, [3, 4], ("a", ""))
    (event,) = next_change(watched).events
    assert event.namespace == ("a", "")
    watched.close()


def test_a_reader_goes_on_where_it_was(client: Client) -> None:
    watched = client.watch_events()
    last = next(watched)
    watched.close()
    for number in range(5):
        cached(client, [number, number])
    again = client.watch_events(after=last)
    batches = list(itertools.islice((batch for batch in again if batch.events), 5))
    assert [batch.events[0].block_hashes for batch in batches] == [path(number, number) for number in range(5)]
    again.close()
    again = client.watch_events(after=batches[2])
    assert next_change(again) == batches[3]
    again.close()
    with pytest.raises(InvalidArgument, match="after"):
        next(client.watch_events(after=17))  # type: ignore[arg-type]


def test_after_a_new_start_all_comes_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"environ": {"RADIX_CACHE_EVENTS": "1"}, "num_blocks": 64}
    options |= {"state_dir": tmp_path / "state", "pool_epoch": "p"}
    address = f"unix:{tmp_path}/socket"
    with ServerProcess(address, **options) as server, Client(address) as client:
        cached(client, [1, 2, 3, 4])
        watched = client.watch_events()
        last = next(watched)
        server.process.send_signal(signal.SIGKILL)
        with pytest.raises(ServiceUnavailable):
            list(watched)
    with ServerProcess(address, **options), Client(address) as client:
        batch = next(client.watch_events(after=last))
        assert batch.is_reset
        assert batch.seq > last.seq
        assert batch.epoch != last.epoch
        mirror = Mirror()
        mirror.read(batch.events)
        assert list(mirror.parents) == path(1, 2, 3, 4)


def test_the_watch_of_an_asynchronous_client(server: ServerProcess, client: Client) -> None:
    async def run() -> None:
        async with AsyncClient(server.address) as other:
            watched = other.watch_events()
            first = await anext(watched)
            cached(client, [1, 2])
            async for batch in watched:
                if batch.events:
                    break
            assert batch.events == [BlockStored((), None, path(1, 2), packed([1, 2]))]
            await watched.aclose()
            again = other.watch_events(after=first)
            assert (await anext(again)).seq == first.seq + 1
            await again.aclose()

    asyncio.run(run())


def test_watchers_are_counted_and_let_go(server: ServerProcess, client: Client) -> None:
    before = samples(server.metrics_address)
    watched = client.watch_events()
    next(watched)
    seen = wait_until(server, 1)
    assert seen["radix_cache_event_snapshots_total",] == before["radix_cache_event_snapshots_total",] + 1
    watched.close()
    wait_until(server, 0)
    left = ("radix_cache_calls_total", "CANCELLED", "WatchEvents")
    until(lambda: samples(server.metrics_address).get(left) == before.get(left, 0) + 1)


def test_a_drain_ends_the_watch() -> None:
    server = ServerProcess(environ={"RADIX_CACHE_EVENTS": "true"})
    with Client(server.address) as client:
        watched = client.watch_events()
        next(watched)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(ServiceUnavailable):
            list(watched)
    assert server.finish() == (0, "")


def test_without_events_there_is_nothing_to_watch() -> None:
    with ServerProcess() as server, Client(server.address) as client, pytest.raises(Exception, match="--events"):
        next(client.watch_events())


def test_a_silent_server_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        client = Client(address, timeout_s=0.1)
        client._prepare = lambda: None  # type: ignore[method-assign]
        with pytest.raises((DeadlineExceeded, ServiceUnavailable)):
            next(client.watch_events())
        client.close()


# Who may watch.


def test_only_an_administrator_of_everything_may_watch(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    with ServerProcess(tokens_file=tokens, environ={"RADIX_CACHE_EVENTS": "true"}) as server:
        for token in (READER, ALICE):
            with Client(server.address, token=token) as client, pytest.raises(PermissionDenied):
                next(client.watch_events())
        with Client(server.address, token=ROOT) as client:
            watched = client.watch_events()
            assert next(watched).is_reset
            write_tokens(tokens, ENTRIES[:1])
            with pytest.raises(Unauthenticated):
                list(watched)


# A reader that does not read.


def run_watch(test: Callable[[Any, Any], Any], max_queued: int) -> None:
    """Run ``test`` with the stream and the watch of a cache, on one loop, without gRPC between."""

    async def run() -> None:
        stream = EventStream(ServerConfig(num_blocks=64, block_size=2).make_cache())
        stream.start()

        async def next_of(ask: Any) -> Any:
            async with asyncio.timeout(WAIT_S):
                return await ask()

        messages = watch(stream, pb.WatchEventsRequest(snapshot=True), max_queued, next_of)
        try:
            await test(stream, messages)
        finally:
            await messages.aclose()
            stream.close()

    asyncio.run(run())


def test_a_slow_reader_is_told_and_nothing_is_kept_for_it() -> None:
    async def test(stream: EventStream, messages: Any) -> None:
        assert (await anext(messages)).is_reset
        for number in range(20):
            cached(stream._cache, [number, number])
        await asyncio.to_thread(stream.replay(2**62).result, WAIT_S)
        with pytest.raises(LimitExceeded) as caught:
            async for _ in messages:
                pass
        assert (caught.value.limit, caught.value.value) == ("max_queued_events", 4)
        await asyncio.to_thread(stream.replay(2**62).result, WAIT_S)
        assert stream.figures().num_watchers == 0

    run_watch(test, max_queued=4)


def test_a_reader_that_keeps_up_misses_nothing() -> None:
    async def test(stream: EventStream, messages: Any) -> None:
        numbers = [(await anext(messages)).seq]
        for number in range(50):
            cached(stream._cache, [number % 30, number])
            message = await anext(messages)
            numbers.append(message.seq)
        assert numbers == list(range(numbers[0], numbers[0] + 51))

    run_watch(test, max_queued=1000)


def test_the_bytes_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radix_cache_service.events.watching._MAX_QUEUED_BYTES", 5000)

    async def test(stream: EventStream, messages: Any) -> None:
        await anext(messages)
        for _ in range(4):  # together more than may wait at once
            cached(stream._cache, [*range(60)])
            assert stream._cache.evict(30) == 30
            num_changes = 0
            while num_changes < 2:
                num_changes += len((await anext(messages)).events)
        large = [BlockRemoved([1] * 1000)]
        await asyncio.to_thread(stream._ask(lambda: stream._publish(large)).result, WAIT_S)
        with pytest.raises(LimitExceeded):
            async for _ in messages:
                pass

    run_watch(test, max_queued=1000)
