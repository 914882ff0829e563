"""Events over ZeroMQ: frames, both encodings, what is sent again, and peers that do not behave."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from helpers import cached, packed
from mirror import hashes_of

from radix_cache import PrefixCache
from radix_cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from radix_cache_service.events.sockets import EventSockets
from radix_cache_service.events.stream import EventStream
from radix_cache_service.events.wire import EventEncoder, lora_name_of

ANY = "127.0.0.1:0"
WAIT_MS = 60_000


class Published:
    """A cache whose events are published."""

    def __init__(self, form: str = "map", block_size: int = 2, **options: Any) -> None:
        self.cache = PrefixCache(64, block_size)
        self.stream = EventStream(self.cache, encode=EventEncoder(block_size, form, 3), **options)
        self.sockets = EventSockets(self.stream, ANY, ANY, "kv@x:1@m", 8)
        self.sockets.start()
        self.stream.start()
        self.address, self.replay_address = self.sockets.addresses

    def close(self) -> None:
        self.stream.close()
        self.sockets.close()


@pytest.fixture
def publish() -> Iterator[Callable[..., Published]]:
    """Start what is closed when the test ends."""
    started: list[Published] = []

    def start(**options: Any) -> Published:
        started.append(Published(**options))
        return started[-1]

    yield start
    for each in started:
        each.close()


class Peers:
    """Sockets of others. They are kept until all are closed."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        self._sockets.append(self._context.socket(kind))
        return self._sockets[-1]

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
def peers() -> Iterator[Peers]:
    """Those on the other side."""
    made = Peers()
    yield made
    made.close()


def subscribed(peers: Peers, published: Published, topic: bytes = b"") -> zmq.Socket[bytes]:
    """Return a subscriber that gets what comes: it has seen a heartbeat."""
    socket = peers.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, topic)
    socket.connect(f"tcp://{published.address}")
    assert socket.poll(WAIT_MS)
    socket.recv_multipart()
    return socket


def read(frames: list[bytes]) -> tuple[int, Any]:
    """Return the number and the content of a message."""
    topic, number, payload = frames
    assert topic == b"kv@x:1@m"
    return struct.unpack(">Q", number)[0], msgspec.msgpack.decode(payload)


def next_events(socket: zmq.Socket[bytes]) -> tuple[int, list[Any]]:
    """Return number and events of the next message that is no heartbeat."""
    while True:
        assert socket.poll(WAIT_MS)
        number, (seconds, events, rank) = read(socket.recv_multipart())
        assert isinstance(seconds, float)
        assert abs(seconds - time.time()) < 60
        assert rank == 3
        if events:
            return number, events


def ask(peers: Peers, published: Published, *frames: bytes) -> list[tuple[int, Any]]:
    """Ask for what was missed; return number and payload of each message of the answer."""
    socket = peers.socket(zmq.DEALER)
    socket.connect(f"tcp://{published.replay_address}")
    socket.send_multipart(frames)
    found = []
    while socket.poll(WAIT_MS):
        empty, *message = socket.recv_multipart()
        assert empty == b""
        if struct.unpack(">q", message[1])[0] == -1:
            assert message[0] == message[2] == b""
            return found
        found.append((struct.unpack(">Q", message[1])[0], message[2]))
    raise AssertionError("no end")


@pytest.mark.parametrize("form", ["map", "array"])
def test_what_travels(publish: Callable[..., Published], peers: Peers, form: str) -> None:
    published = publish(form=form)
    socket = subscribed(peers, published)
    first, last = hashes_of(packed([1, 2, 3, 4]), ("a/b", ""), 2)
    cached(published.cache, [1, 2], ("a/b", ""))
    cached(published.cache, [1, 2, 3, 4], ("a/b", ""))
    published.cache.evict(1)
    published.cache.reset()
    (number, stored), *others = [next_events(socket) for _ in range(4)]
    name = "a%2Fb/%"
    fields = {
        "type": "BlockStored",
        "block_hashes": [first],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": name,
    }
    more = fields | {"block_hashes": [last], "parent_block_hash": first, "token_ids": [3, 4]}
    removed = {"type": "BlockRemoved", "block_hashes": [last], "medium": "GPU"}
    expected = [fields, more, removed, {"type": "AllBlocksCleared"}]
    if form == "array":
        expected = [list(event.values()) for event in expected]
    assert [stored, *(events for _, events in others)] == [[event] for event in expected]
    assert all(later > earlier for earlier, (later, _) in zip([number, *(n for n, _ in others)], others, strict=False))


def test_what_was_missed_comes_again_byte_for_byte(publish: Callable[..., Published], peers: Peers) -> None:
    published = publish()
    socket = subscribed(peers, published)
    live = []
    for number in range(5):
        cached(published.cache, [number] * 4)
        while True:
            assert socket.poll(WAIT_MS)
            _, seq, payload = socket.recv_multipart()
            live.append((int.from_bytes(seq, "big"), payload))
            if msgspec.msgpack.decode(payload)[1]:
                break
    start = live[2][0]
    again = ask(peers, published, b"", start.to_bytes(8, "big"))
    assert again[: len(live) - 2] == live[2:]


def test_too_much_missed_is_one_batch_of_everything(publish: Callable[..., Published], peers: Peers) -> None:
    published = publish(num_kept=2)
    for number in range(5):
        cached(published.cache, [number] * 4)
    published.cache.evict(1)
    ((number, payload),) = ask(peers, published, b"", bytes(8))
    assert number <= published.stream.last_seq
    _, events, _ = msgspec.msgpack.decode(payload)
    assert [event["type"] for event in events] == ["AllBlocksCleared"] + ["BlockStored"] * 5
    assert sum(len(event["block_hashes"]) for event in events[1:]) == 9


@pytest.mark.parametrize("frames", [[b""], [b"", b"1234"], [b"", b"123456789"], [b"", b"", bytes(8)], [bytes(8)] * 4])
def test_what_is_no_request_is_not_answered(
    publish: Callable[..., Published], peers: Peers, frames: list[bytes]
) -> None:
    published = publish()
    socket = peers.socket(zmq.DEALER)
    socket.connect(f"tcp://{published.replay_address}")
    socket.send_multipart(frames)
    socket.send_multipart([b"", bytes(8)])
    assert socket.poll(WAIT_MS)
    assert len(socket.recv_multipart()) == 4
    assert len(socket.recv_multipart()) == 4
    assert not socket.poll(50)


def test_a_taken_port_is_an_error(publish: Callable[..., Published]) -> None:
    published = publish()
    for addresses in ((published.address, ANY), (ANY, published.replay_address)):
        with pytest.raises(OSError, match="in use"):
            EventSockets(published.stream, *addresses)


NAMES = [((), None), (("a",), "a"), (("a", "b"), "a/b"), (("a/b",), "a%2Fb"), (("",), "%"), (("", ""), "%/%")]


@pytest.mark.parametrize(("namespace", "name"), [*NAMES, (("%",), "%25"), (("é ü",), "%C3%A9%20%C3%BC")])
def test_a_namespace_has_a_name_of_its_own(namespace: tuple[str, ...], name: str | None) -> None:
    assert lora_name_of(namespace) == name


def test_hashes_of_any_size_are_decoded_as_they_are() -> None:
    numbers = [100, 2**63 - 1, 2**63, 2**64 - 1]
    events = [BlockStored((), 2**64 - 1, numbers, bytes(16)), BlockRemoved(numbers), AllBlocksCleared()]
    _, (stored, removed, _), _ = msgspec.msgpack.decode(EventEncoder(1)(events))
    assert stored["parent_block_hash"] == 2**64 - 1
    assert stored["block_hashes"] == removed["block_hashes"] == numbers


def test_tokens_of_any_size_are_decoded_as_they_are() -> None:
    tokens = [0, 1, 127, 128, 255, 256, 65535, 65536, 2**31, 2**32 - 1, 0x01020304]
    _, (stored,), _ = msgspec.msgpack.decode(EventEncoder(1)([BlockStored((), None, [*range(11)], packed(tokens))]))
    assert stored["token_ids"] == tokens


def test_a_large_message_is_the_same_at_both_ports(publish: Callable[..., Published], peers: Peers) -> None:
    published = publish(block_size=1024)
    reader = subscribed(peers, published)
    tokens = [number % 70_001 for number in range(60 * 1024)]
    cached(published.cache, tokens)
    _, (stored,) = next_events(reader)
    asker = peers.socket(zmq.DEALER)
    asker.connect(f"tcp://{published.replay_address}")
    asker.send_multipart([b"", (0).to_bytes(8, "big")])
    assert asker.poll(WAIT_MS)
    _, (_, (_, again), _) = read(asker.recv_multipart()[1:])
    assert again == stored
    assert stored["token_ids"] == tokens
