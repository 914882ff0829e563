"""Servers and a router of them, as the tests of the router start them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from client_help import wait_until
from helpers import cached
from service_process import RouterProcess, ServerProcess

from radix_cache.errors import ServiceUnavailable
from radix_cache_service import Client, NodeInfo, Router

BLOCK_SIZE = 4
SOON_S = 60.0  # for what takes a moment, on any machine
NODE: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_blocks": 4096, "events_listen": "127.0.0.1:0"}


def prompt(number: int, num_tokens: int = 64) -> list[int]:
    """A prompt that shares nothing with those of other numbers."""
    return [number * 1000 + place for place in range(num_tokens)]


class Cluster:
    """Servers by name, and a router of some of them."""

    def __init__(self, servers: dict[str, ServerProcess], **settings: Any) -> None:
        self.servers = servers
        named = [f"{name}={server.address}" for name, server in servers.items()]
        self.process = RouterProcess(node=named, **settings)
        self.router = Router(self.process.address)

    def info(self, name: str) -> NodeInfo:
        """What the router says of a node."""
        (found,) = (info for info in self.router.nodes() if info.node == name)
        return found

    def wait_for(self, name: str, state: str) -> None:
        """Wait until the router says that of a node."""
        wait_until(lambda: self.info(name).state == state, SOON_S)

    def cache(self, name: str, tokens: list[int], namespace: tuple[str, ...] = ()) -> None:
        """Let a node cache a prompt, and the router hear of it."""
        with Client(self.servers[name].address) as client:
            cached(client, tokens, namespace)
        wait_until(lambda: self.known(name, tokens, namespace) == len(tokens), SOON_S)

    def known(self, name: str, tokens: list[int], namespace: tuple[str, ...] = ()) -> int:
        """How much of a prompt the router thinks that a node has; -1: it does not serve now."""
        try:
            nodes = self.router.route(tokens, namespace, peek=True, with_nodes=True).nodes
        except ServiceUnavailable:
            return -1
        return {each.node: each.num_cached_tokens for each in nodes}.get(name, -1)

    def goes_to(self, tokens: list[int]) -> str:
        """Which node would be asked; empty: none serves."""
        try:
            return self.router.route(tokens, peek=True).node
        except ServiceUnavailable:
            return ""

    def spread(self, tokens: list[int], number: int) -> list[int]:
        """Route a prompt several times and finish nothing; return how many each node was sent, the most first."""
        sent = Counter(self.router.route(tokens).node for _ in range(number))
        return sorted((sent[name] for name in self.servers), reverse=True)

    def close(self) -> None:
        self.router.close()
        self.process.stop()
