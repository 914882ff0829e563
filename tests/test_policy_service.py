"""Policies behind a server: named on the command line with parameters, and led by hints that came over the wire."""

from __future__ import annotations

from typing import Any

import pytest
from service_process import ServerProcess, StartFailed
from test_cli_serve import running_server
from test_policy_contract import POLICIES

from radix_cache import Hints
from radix_cache_service import Client, ServerConfig


def publish(cache: Any, *tokens: int, hints: Hints | None = None, late: Hints | None = None) -> None:
    """Match with ``hints``, insert with ``late``, and release."""
    lease = cache.match_prefix(tokens, num_tokens=len(tokens), hints=hints)
    cache.insert(lease, tokens, hints=late)
    cache.release(lease)


def order(cache: Client, *tokens: int) -> list[int]:
    """Evict block by block; return the one-block prompts in the order in which they went."""
    gone: list[int] = []
    while len(gone) < len(tokens):
        assert cache.evict(1) == 1
        gone += [token for token in tokens if token not in gone and not cache.probe([token])]
    return gone


@pytest.mark.parametrize("policy", POLICIES)
def test_a_server_can_be_set_to_any(policy: str) -> None:
    cache = ServerConfig(num_blocks=8, block_size=1, policy=policy).make_cache()
    publish(cache, 1, 2, hints=Hints(1, 2, "c", "chat", 3, 4, 5))
    cache.check_integrity()
    assert cache.evict(8) == 2


def test_hints_change_the_order() -> None:
    """In a call, with the match or with the insert, and in a batch."""
    with ServerProcess(policy="priority", num_blocks=8, block_size=1) as server, Client(server.address) as cache:
        publish(cache, 1, hints=Hints(priority=5))
        publish(cache, 2)
        publish(cache, 3, late=Hints(priority=9))
        with cache.batch() as batch:
            publish(batch, 4, hints=Hints(priority=-1))
        assert order(cache, 1, 2, 3, 4) == [4, 2, 1, 3]  # LRU would be 1, 2, 3, 4


def test_parameters_are_given_on_the_command_line() -> None:
    """Of 5 tokens 5 + 1 - 3 are kept, of 2 none."""
    options = ("--policy", "tlru:threshold=3,next_prompt_tokens=1", "--num-blocks", "8", "--block-size", "1")
    with running_server(*options, "--growth-share", "0") as address, Client(address) as cache:
        publish(cache, 1, 2, 3, 4, 5)
        publish(cache, 6, 7)
        publish(cache, 8, hints=Hints(next_prompt_tokens=3))
        assert cache.describe().policy.startswith("tlru:")
        assert cache.evict(2) == 2
        assert cache.probe([1, 2, 3, 4, 5]) == 3
        assert order(cache, 6, 1, 8) == [6, 1, 8]


def test_a_wrong_parameter_keeps_it_from_starting() -> None:
    with pytest.raises(StartFailed, match=r"threshold is at least 0 .* not -1"):
        ServerProcess(policy="tlru:threshold=-1")


def test_a_policy_of_one_s_own() -> None:
    """By module and class, on the server's path."""
    with (
        ServerProcess(policy="test_policy_contract:Shortest", num_blocks=8, block_size=1) as server,
        Client(server.address) as cache,
    ):
        publish(cache, 1, 2)
        publish(cache, 3)
        assert order(cache, 1, 3) == [3, 1]
        assert cache.describe().policy == "shortest"
