"""NVIDIA Dynamo's indexer reads our events as they are: what it says of a prompt is what the tree would match."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from helpers import NAMESPACES, cached
from hypothesis import given, settings
from hypothesis import strategies as st
from service_process import ServerProcess

from radix_cache import PrefixCache
from radix_cache_service import Client
from radix_cache_service.events.sockets import EventSockets
from radix_cache_service.events.stream import EventStream
from radix_cache_service.events.wire import EventEncoder, lora_name_of

os.environ.setdefault("DYN_LOG", "off")
llm = pytest.importorskip("dynamo.llm", reason="ai-dynamo-runtime is not installed: pip install 'radix-cache[router]'")

ANY = "127.0.0.1:0"
CONVERGED_S = 10.0
BLOCK_SIZE = 2
PROMPTS = [[symbol // 9, symbol // 9, symbol // 3 % 3, 7, symbol % 3, 8] for symbol in range(27)]


class Router:
    """A selection service, which subscribes to publishers and is asked what they have."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._service = llm.SelectionService(indexer_threads=1)

    def add(self, worker_id: int, address: str, replay_address: str) -> None:
        worker = {"worker_id": worker_id, "model_name": "m", "block_size": BLOCK_SIZE, "endpoint": "http://127.0.0.1:1"}
        worker |= {"kv_events_endpoint": f"tcp://{address}", "replay_endpoint": f"tcp://{replay_address}"}
        self._do(self._service.upsert_worker, worker)

    def _do(self, method: Callable[[Any], Any], request: Any) -> Any:
        async def run() -> Any:
            return await method(request)

        return self._runner.run(run())

    def score(self, tokens: Sequence[int], namespace: tuple[str, ...], worker_id: int = 1) -> int:
        """How many tokens of a prompt it thinks that the worker has."""
        request = {"model_name": "m", "token_ids": list(tokens), "lora_name": lora_name_of(namespace)}
        said = self._do(self._service.overlap_scores, request)
        found = [each["device_blocks"] for each in said["workers"] if each["worker_id"] == worker_id]
        return max(found) * BLOCK_SIZE

    def wait_for(self, tokens: Sequence[int], namespace: tuple[str, ...], num_tokens: int, worker_id: int = 1) -> None:
        deadline = time.monotonic() + CONVERGED_S
        while (seen := self.score(tokens, namespace, worker_id)) != num_tokens:
            assert time.monotonic() < deadline, f"{seen} tokens after {CONVERGED_S} s, not {num_tokens}"
            time.sleep(0.005)

    def close(self) -> None:
        self._service.shutdown()
        self._runner.close()


class Node:
    """A cache whose events are published at ports of its own."""

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
        self._sockets.close()

    def close(self) -> None:
        self.stream.close()
        self._sockets.close()

    def mark(self, router: Router) -> None:
        """Wait until the router has seen all that there was."""
        self._num_marks += 1
        tokens = [1000 + self._num_marks, 0]
        cached(self.cache, tokens, ("mark",))
        router.wait_for(tokens, ("mark",), 2)


def assert_same(router: Router, cache: Any) -> None:
    """The router knows of every prompt what the cache would match."""
    for namespace in NAMESPACES:
        for tokens in PROMPTS:
            assert router.score(tokens, namespace) == cache.probe(tokens, namespace)


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


def test_a_router_that_joins_late_in_the_midst_of_it(router: Router, open_node: Callable[..., Node]) -> None:
    node = open_node(num_kept=16)
    dice = random.Random(1)
    for _ in range(100):
        step(node.cache, dice)
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.is_set():
            step(node.cache, dice)
            time.sleep(0.0005)

    going = threading.Thread(target=go_on)
    going.start()
    router.add(1, *node.ports)
    time.sleep(1.5)
    is_over.set()
    going.join()
    node.mark(router)
    assert_same(router, node.cache)
    assert node.stream.figures().num_snapshots >= 1


@pytest.mark.parametrize("num_steps", [5, 200], ids=["shorter", "longer"])
def test_an_outage_that_is_longer_or_shorter_than_what_is_kept(
    router: Router, open_node: Callable[..., Node], num_steps: int
) -> None:
    node = open_node(num_kept=64)
    router.add(1, *node.ports)
    node.mark(router)
    before = node.stream.figures().num_snapshots
    node.cut_off()
    dice = random.Random(num_steps)
    for _ in range(num_steps):
        step(node.cache, dice)
    node.open()
    node.mark(router)
    assert_same(router, node.cache)
    assert (node.stream.figures().num_snapshots > before) == (num_steps > 64)


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


def free_ports(number: int) -> list[str]:
    """Return addresses that are free now."""
    holders = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    addresses = [f"127.0.0.1:{holder.getsockname()[1]}" for holder in holders]
    for holder in holders:
        holder.close()
    return addresses


@pytest.mark.parametrize("is_kept", [False, True], ids=["cold", "with its state"])
def test_a_server_that_is_killed_and_started_again(router: Router, tmp_path: Any, is_kept: bool) -> None:
    ports = free_ports(2)
    options: dict[str, Any] = {"events_listen": ports[0], "events_replay_listen": ports[1], "num_blocks": 64}
    if is_kept:
        options |= {"state_dir": tmp_path / "state", "pool_epoch": "p"}
    with ServerProcess(block_size=BLOCK_SIZE, **options) as server, Client(server.address) as client:
        router.add(1, *ports)
        for tokens in PROMPTS[:9]:
            cached(client, tokens)
        router.wait_for(PROMPTS[8], (), 6)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with ServerProcess(block_size=BLOCK_SIZE, **options) as server, Client(server.address) as client:
        router.wait_for(PROMPTS[0], (), 6 if is_kept else 0)
        assert_same(router, client)
        cached(client, PROMPTS[20])
        router.wait_for(PROMPTS[20], (), 6)
        assert_same(router, client)
