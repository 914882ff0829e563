"""NVIDIA Dynamo's indexer reads our events as they are: what it says of a prompt is what the tree would match."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from client_help import wait_until
from event_router import BLOCK_SIZE, Router, served_to_peers
from helpers import NAMESPACES, cached
from hypothesis import given, settings
from hypothesis import strategies as st
from service_process import ServerProcess, own_addresses

from radix_cache import PrefixCache
from radix_cache_service import Client
from radix_cache_service.events.sockets import EventSockets
from radix_cache_service.events.stream import EventStream
from radix_cache_service.events.wire import EventEncoder

ANY = "127.0.0.1:0"
PROMPTS = [[symbol // 9, symbol // 9, symbol // 3 % 3, 7, symbol % 3, 8] for symbol in range(27)]


class Node:
    """A cache whose events are published at ports of its own."""

    ports: tuple[str, ...]

    def __init__(self, form: str = "map", num_blocks: int = 40, **options: Any) -> None:
        self.cache = PrefixCache(num_blocks, BLOCK_SIZE)
        self.stream = EventStream(self.cache, encode=EventEncoder(BLOCK_SIZE, form), **options)
        self.ports = (ANY, ANY)
        self.open()
        self.stream.start()
        self._num_marks = 0

    def open(self) -> None:
        self._sockets = EventSockets(self.stream, *self.ports)
        self._sockets.start()
        self.ports = tuple(self._sockets.addresses)

    def cut_off(self) -> None:
        """Nobody can reach it any more, until it is opened again."""
        self.stream.leave(self._sockets._send)
        self.stream._ask(lambda: None).result(60)  # it has left
        self._sockets.close()

    def close(self) -> None:
        self.stream.close()
        self._sockets.close()

    def next_mark(self) -> int:
        """A number of its own for each."""
        self._num_marks += 1
        return self._num_marks

    def mark(self, router: Router) -> None:
        """Wait until the router has seen all that there was."""
        tokens = [1000 + self.next_mark(), 0]
        cached(self.cache, tokens, ("mark",))
        router.wait_for(tokens, ("mark",), 2)


def known(router: Router) -> list[int]:
    """What the router knows of every prompt."""
    return [router.score(tokens, namespace) for namespace in NAMESPACES for tokens in PROMPTS]


def cached_of_each(cache: Any) -> list[int]:
    """What the cache would match of every prompt."""
    return [cache.probe(tokens, namespace) for namespace in NAMESPACES for tokens in PROMPTS]


def assert_same(router: Router, cache: Any) -> None:
    """The router knows of every prompt what the cache would match."""
    assert known(router) == cached_of_each(cache)


def step(cache: PrefixCache, dice: random.Random) -> None:
    """One random call, or a few."""
    kind, namespace, tokens = dice.random(), dice.choice(NAMESPACES), dice.choice(PROMPTS)
    if kind < 0.7:
        cached(cache, tokens[: dice.choice((2, 4, 6))], namespace)
    elif kind < 0.9:
        cache.evict(dice.randrange(6))
    elif kind < 0.95:
        cache.reset(namespace, tokens[: dice.choice((0, 2, 4))])
    else:
        cache.release(cache.match_prefix(tokens, namespace))


@pytest.fixture
def router() -> Iterator[Router]:
    """A router that knows nobody yet."""
    made = Router()
    yield made
    made.close()


@pytest.fixture
def open_node() -> Iterator[Callable[..., Node]]:
    """Open nodes that are closed when the test ends."""
    nodes: list[Node] = []

    def open_one(**options: Any) -> Node:
        nodes.append(Node(**options))
        return nodes[-1]

    yield open_one
    for node in nodes:
        node.close()


@pytest.mark.parametrize("form", ["map", "array"])
def test_any_history_ends_in_the_same_answers(router: Router, open_node: Callable[..., Node], form: str) -> None:
    node = open_node(form=form)
    router.add(1, *node.ports)
    node.mark(router)

    @settings(max_examples=20)
    @given(st.lists(st.randoms(use_true_random=False), min_size=1, max_size=30))
    def run(steps: list[random.Random]) -> None:
        node.cache.reset()
        for dice in steps:
            step(node.cache, dice)
        node.mark(router)
        assert_same(router, node.cache)

    run()


@contextmanager
def under_load(node: Node, dice: random.Random) -> Iterator[None]:
    """Random calls go on in a thread of their own."""
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.wait(0.0005):
            step(node.cache, dice)

    going = threading.Thread(target=go_on)
    going.start()
    try:
        yield
    finally:
        is_over.set()
        going.join()


def test_a_router_that_joins_late_in_the_midst_of_it(router: Router, open_node: Callable[..., Node]) -> None:
    node = open_node(num_kept=16)
    dice = random.Random(1)
    for _ in range(100):
        step(node.cache, dice)
    with under_load(node, dice):
        router.add(1, *node.ports)
        wait_until(lambda: node.stream.figures().num_snapshots >= 1)
    node.mark(router)
    assert_same(router, node.cache)


def test_a_replica_begins_with_what_another_one_knows(router: Router, open_node: Callable[..., Node]) -> None:
    node = open_node(num_blocks=400)  # nothing is evicted while the replica can't hear of it
    dice = random.Random(2)
    router.add(1, *node.ports)
    for _ in range(100):
        step(node.cache, dice)
    node.mark(router)
    num_replays = node.stream.figures().num_replays
    with served_to_peers(router) as (peer, asked), closing(Router(peer)) as replica:
        replica.add(1, node.ports[0], None)  # nobody else can tell it what was before
        wait_until(lambda: known(replica) == cached_of_each(node.cache))
        assert asked == ["/dump"]
        wait_until(lambda: hears(replica, node))
        for _ in range(100):
            step(node.cache, dice)
        node.mark(replica)
        assert_same(replica, node.cache)
    assert node.stream.figures().num_replays == num_replays


def hears(router: Router, node: Node) -> bool:
    """Tell whether the router is subscribed: it has heard of a prompt that was cached just now."""
    tokens = [2000 + node.next_mark(), 0]
    cached(node.cache, tokens, ("mark",))
    time.sleep(0.1)
    return router.score(tokens, ("mark",)) == len(tokens)


def test_replicas_begin_with_each_other_in_the_midst_of_it(open_node: Callable[..., Node]) -> None:
    node = open_node()
    replicas = [Router()]
    replicas[0].add(1, *node.ports)
    node.mark(replicas[0])
    try:
        with under_load(node, random.Random(3)):
            for _ in range(3):  # each begins with the one before, the third with one that began so itself
                with served_to_peers(replicas[-1]) as (peer, asked):
                    replicas.append(Router(peer))
                    replicas[-1].add(1, *node.ports)
                    assert asked == ["/dump"]
        for replica in replicas:
            node.mark(replica)
            assert_same(replica, node.cache)
    finally:
        for replica in replicas:
            replica.close()


@pytest.mark.parametrize("num_steps", [5, 1000], ids=["shorter", "longer"])
def test_an_outage_that_is_longer_or_shorter_than_what_is_kept(
    router: Router, open_node: Callable[..., Node], num_steps: int
) -> None:
    node = open_node(num_kept=256)
    router.add(1, *node.ports)
    node.mark(router)
    node.mark(router)  # heard of after the end of what it asked for: it would wait for that for ever
    before = node.stream.figures().num_snapshots
    node.cut_off()
    dice = random.Random(num_steps)
    for _ in range(num_steps):
        step(node.cache, dice)
    node.open()
    node.mark(router)
    assert_same(router, node.cache)
    assert (node.stream.figures().num_snapshots > before) == (num_steps > 256)


def test_a_full_queue_heals_by_itself(router: Router, open_node: Callable[..., Node]) -> None:
    node = open_node(max_queued=2)
    router.add(1, *node.ports)
    node.mark(router)
    dice = random.Random(3)
    for _ in range(200):
        step(node.cache, dice)
    node.mark(router)
    assert_same(router, node.cache)
    assert node.stream.figures().num_dropped > 0


@pytest.mark.parametrize("is_kept", [False, True], ids=["cold", "with its state"])
def test_a_server_that_is_killed_and_started_again(router: Router, tmp_path: Any, is_kept: bool) -> None:
    ports = own_addresses(2)
    options: dict[str, Any] = {"events_listen": ports[0], "events_replay_listen": ports[1], "num_blocks": 64}
    if is_kept:
        options |= {"state_dir": tmp_path / "state", "pool_epoch": "p"}
    with ServerProcess(block_size=BLOCK_SIZE, **options) as server, Client(server.address) as client:
        router.add(1, *ports)
        for tokens in PROMPTS[:9]:
            cached(client, tokens)
        router.wait_for(PROMPTS[8], (), 6)
        cached(client, PROMPTS[9])  # heard of after the end of what it asked for: it would wait for that for ever
        router.wait_for(PROMPTS[9], (), 6)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with ServerProcess(block_size=BLOCK_SIZE, **options) as server, Client(server.address) as client:
        wait_until(lambda: known(router) == cached_of_each(client))
        cached(client, PROMPTS[20])
        router.wait_for(PROMPTS[20], (), 6)
        assert_same(router, client)
