"""What events cost the server where somebody does not read: bounded in bytes, for subscribers and for those who ask."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from client_help import wait_until
from helpers import cached, packed
from mirror import Mirror, hashes_of, walked
from zmq.utils.garbage import gc as lent

from radix_cache import PrefixCache
from radix_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from radix_cache_service import ServerConfig
from radix_cache_service.events import pieces as event_pieces
from radix_cache_service.events import replays as event_replays
from radix_cache_service.events.batches import EventBatch
from radix_cache_service.events.pieces import Pieces
from radix_cache_service.events.service import EventService
from radix_cache_service.events.sockets import EventSockets
from radix_cache_service.events.stream import EventStream
from radix_cache_service.events.wire import EventEncoder

ANY = "127.0.0.1:0"
WAIT_S = 60
WAIT_MS = WAIT_S * 1000
BLOCK_SIZE = 16
MIB = 2**20
IN_THE_KERNEL = 16 * MIB  # more than the buffers of one connection hold


def num_lent_bytes() -> int:
    """How much memory waits to be sent: a payload counts once, however many it goes to."""
    return sum({id(each.obj): len(each.obj) for each in list(lent.refs.values())}.values())  # type: ignore[arg-type]


@pytest.fixture
def is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ZeroMQ copy nothing, so that all that waits is in `num_lent_bytes`."""
    monkeypatch.setattr(zmq, "COPY_THRESHOLD", 1)
    wait_until(lambda: num_lent_bytes() == 0)


class Published:
    """A cache whose events are published; what was missed is sent again when the test says so."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.cache = PrefixCache(num_blocks, BLOCK_SIZE)
        pieces = Pieces(BLOCK_SIZE)
        self.stream = EventStream(self.cache, num_kept=8, encode=EventEncoder(BLOCK_SIZE), cut=pieces)
        self.sockets = EventSockets(self.stream, ANY, ANY, num_waiting=pieces.num_waiting)
        self.stream.join(self.sockets._send)
        self.stream.start()
        self.replays = self.sockets._replays
        self.address, self.replay_address = self.sockets.addresses

    def publish(self, event: Event) -> int:
        """Publish an event, as the cache's are; return the bytes of it."""
        batches = self.stream._ask(lambda: self.stream._publish([event])).result(WAIT_S)
        return sum(len(batch.payload) for batch in batches)

    def answer(self) -> None:
        """Read what is asked, and answer whom there is room for."""
        self.replays._take()
        self.replays._answer()

    def close(self) -> None:
        self.stream.close()
        self.sockets.close()


class Peer:
    """A peer. One that is not quick takes a message and no more, until the test reads it."""

    def __init__(self, kind: int, address: str, is_quick: bool = False) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        if not is_quick:
            self.socket.setsockopt(zmq.RCVHWM, 1)
            self.socket.setsockopt(zmq.RCVBUF, 64 * 1024)
        if kind == zmq.SUB:
            self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.connect(f"tcp://{address}")

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """What is closed when the test ends."""
    made: list[Any] = []
    yield made
    for each in reversed(made):
        each.close()


def stored(number: int, num_blocks: int) -> BlockStored:
    """An event with hashes and tokens of its own."""
    dice = random.Random(number)
    return BlockStored((), None, [dice.getrandbits(64) for _ in range(num_blocks)], dice.randbytes(64 * num_blocks))


@pytest.mark.usefixtures("is_lent")
def test_what_waits_for_a_stuck_subscriber_is_bounded_and_given_back(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_pieces, "_MAX_WAITING_BYTES", 2 * MIB)
    published = Published()
    opened.append(published)
    stuck, reader = (Peer(zmq.SUB, published.address, is_quick) for is_quick in (False, True))
    opened.extend([stuck, reader])
    for each in (stuck, reader):
        assert each.socket.poll(WAIT_MS)
    num_bytes = 0
    while num_bytes < 2 * MIB + 2 * IN_THE_KERNEL:
        num_bytes += published.publish(stored(1, 10_000))
    newest, number = published.stream.last_seq, 0
    while number < newest:
        assert reader.socket.poll(WAIT_MS)
        number = int.from_bytes(reader.socket.recv_multipart()[1], "big")
    wait_until(lambda: num_lent_bytes() <= 2 * MIB + 4 * 64 * 1024)  # and what is being written
    stuck.close()
    wait_until(lambda: num_lent_bytes() == 0)


def test_a_subscriber_that_reads_loses_nothing_however_little_is_kept(opened: list[Any]) -> None:
    config = ServerConfig(num_blocks=64, block_size=BLOCK_SIZE, events_listen=ANY, max_kept_events=1)
    service = EventService(config, config.make_cache())
    opened.append(service)
    service.start()
    reader = Peer(zmq.SUB, service.addresses[0], is_quick=True)
    opened.append(reader)
    assert reader.socket.poll(WAIT_MS)
    stream = service.stream
    assert stream is not None
    stream._ask(lambda: [stream._publish([stored(number, 1)]) for number in range(500)]).result(WAIT_S)
    stream._ask(lambda: stream._publish([stored(500, 10_000)])).result(WAIT_S)
    newest, numbers, sizes = stream.last_seq, [], []
    while not numbers or numbers[-1] < newest:
        assert reader.socket.poll(WAIT_MS)
        _, number, payload = reader.socket.recv_multipart()
        numbers.append(int.from_bytes(number, "big"))
        sizes.append(len(payload))
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert len(numbers) > 510
    assert max(sizes) <= 64 * 1024


@pytest.mark.usefixtures("is_lent")
def test_who_asks_and_does_not_read_costs_one_answer(opened: list[Any]) -> None:
    published = Published(num_blocks=8192)
    opened.append(published)
    cached(published.cache, range(16 * 8192 - 16))
    (whole,) = published.stream.replay(0).result(WAIT_S)
    stuck = Peer(zmq.DEALER, published.replay_address)
    opened.append(stuck)
    for number in range(2 * IN_THE_KERNEL // len(whole.payload)):
        stuck.socket.send_multipart([b"", bytes(8)])
        assert published.replays._socket.poll(WAIT_MS)
        cached(published.cache, [number] * 16)  # what is sent is another one each time
        published.answer()
    wait_until(lambda: num_lent_bytes() <= len(whole.payload) * 1.01)
    reader = Peer(zmq.DEALER, published.replay_address)
    opened.append(reader)
    reader.socket.send_multipart([b"", bytes(8)])
    assert published.replays._socket.poll(WAIT_MS)
    published.answer()
    for _ in range(2):
        assert reader.socket.poll(WAIT_MS)
        assert len(reader.socket.recv_multipart()) == 4
    newest = published.stream.last_seq
    cached(published.cache, [2**20] * 16)
    numbers = []
    while not numbers or numbers[-1] <= newest:  # what was asked last is answered once there is room
        published.answer()
        if stuck.socket.poll(10):
            number = int.from_bytes(stuck.socket.recv_multipart()[2], "big", signed=True)
            numbers += [number] if number >= 0 else []
    wait_until(lambda: num_lent_bytes() == 0)


def test_several_requests_that_wait_are_one(opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_replays, "_MOST_AT_ONCE", 1)
    published = Published()
    opened.append(published)
    peer = Peer(zmq.DEALER, published.replay_address)
    opened.append(peer)
    published.publish(stored(1, 1))
    start_seq = published.stream.last_seq
    published.publish(stored(2, 1))
    for number in (start_seq + 1, start_seq, start_seq + 1):
        peer.socket.send_multipart([b"", number.to_bytes(8, "big")])
    for _ in range(3):
        assert published.replays._socket.poll(WAIT_MS)
        published.replays._take()
    published.answer()
    assert peer.socket.poll(WAIT_MS)
    assert int.from_bytes(peer.socket.recv_multipart()[2], "big") == start_seq
    assert published.stream.figures().num_replays == 1


def test_those_who_ask_together_share_an_answer() -> None:
    cache = PrefixCache(64, 1)
    cached(cache, [1, 2, 3])
    stream = EventStream(cache, num_kept=1, encode=EventEncoder(1))
    stream._turn(is_due=True)
    asked = [stream.replay(0) for _ in range(3)]
    stream._turn(is_due=False)
    first, *others = [future.result(0)[0] for future in asked]
    assert all(other is first for other in others)
    assert stream.figures().num_snapshots == 3
    stream._turn(is_due=True)
    later = stream.replay(0)
    stream._turn(is_due=False)
    assert later.result(0)[0].seq == first.seq + 1


def test_a_peer_that_sends_much_is_cut_off(opened: list[Any]) -> None:
    published = Published()
    opened.append(published)
    peer = Peer(zmq.DEALER, published.replay_address)
    opened.append(peer)
    with peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        peer.socket.send_multipart([b"", bytes(5000)])
        assert monitor.poll(WAIT_MS)
        peer.socket.disable_monitor()


# Pieces.


def payloads(events: list[Event], block_size: int, form: str = "map") -> list[bytes]:
    return [EventEncoder(block_size, form)(piece) for piece in Pieces(block_size)(events)]


def test_what_is_little_is_one_piece() -> None:
    for events in ([], [AllBlocksCleared()], [stored(1, 3), BlockRemoved([1, 2])]):
        assert list(Pieces(16)(events)) == [events]


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize(
    ("block_size", "num_blocks", "namespace"),
    [(1, 50_000, ()), (16, 10_000, ("a",)), (16, 700, ("\U0001f600" * 1024,)), (1024, 300, ("\x00" * 1024,))],
)
def test_no_piece_is_large(block_size: int, num_blocks: int, namespace: tuple[str, ...], form: str) -> None:
    tokens = random.Random(1).randbytes(4 * block_size * num_blocks)
    event = BlockStored(namespace, 7, hashes_of(tokens, namespace, block_size), tokens)
    found = payloads([event, BlockRemoved(event.block_hashes[::-1])], block_size, form)
    assert len(found) >= len(tokens) // (64 * 1024)
    assert max(map(len, found)) <= 64 * 1024
    assert Pieces(block_size).num_waiting * 64 * 1024 == 64 * MIB


@pytest.mark.parametrize("block_size", [13_050, 100_000])
def test_a_block_that_is_large_is_a_piece_by_itself(block_size: int) -> None:
    event = BlockStored(("\x00" * 1024,), None, [1, 2, 3], bytes(4 * block_size * 3))
    found = payloads([event], block_size)
    assert len(found) == 3
    assert max(map(len, found)) * Pieces(block_size).num_waiting <= 64 * MIB


def test_the_pieces_of_a_call_are_batches_that_amount_to_it() -> None:
    cache = PrefixCache(9000, 16)
    seen: list[EventBatch] = []
    stream = EventStream(cache, encode=EventEncoder(16), cut=Pieces(16))
    cache.subscribe(stream._listen)
    stream.join(seen.append)
    stream._answer_all()
    for tokens in (range(16 * 4000), [*range(16 * 100), *range(16 * 1000)]):
        cached(cache, tokens)
    stream._turn(is_due=False)
    cached(cache, range(16 * 4000, 16 * 9000))
    stream._turn(is_due=False)
    assert len(seen) > 10
    assert [batch.is_reset for batch in seen] == [True] + [False] * (len(seen) - 1)
    assert [batch.seq for batch in seen] == list(range(seen[0].seq, seen[0].seq + len(seen)))
    mirror = Mirror()
    for batch in seen:
        mirror.read(batch.events)
    assert mirror.parents == walked(cache)
    assert packed(range(16)) in {event.tokens[:64] for event in seen[0].events if isinstance(event, BlockStored)}
