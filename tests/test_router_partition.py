"""A node whose network is gone, in networks of their own: the router sends it nothing, and learns anew what it has."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from client_help import wait_until
from helpers import cached
from networks import _ENTER, HERE, THERE, two_networks
from service_process import RouterProcess, ServerProcess

from radix_cache.errors import ServiceUnavailable
from radix_cache_service import Client, Router

if find_spec("dynamo") is None:
    pytest.skip("ai-dynamo-runtime is not installed: pip install 'radix-cache[router]'", allow_module_level=True)

OLD, NEW = ([start + place for place in range(8)] for start in (100, 200))
SOON_S = 60.0


def test_a_node_whose_network_is_gone_and_back(tmp_path: Path) -> None:
    sockets = [f"unix:{tmp_path}/{name}.sock" for name in ("a", "b", "router")]
    environ = {"RADIX_CACHE_ALLOW_PLAINTEXT_EVENTS": "true"}
    with two_networks() as networks:

        class Server(ServerProcess):
            command = ("-c", _ENTER, networks.there, *ServerProcess.command)

        class Routing(RouterProcess):
            command = ("-c", _ENTER, networks.there, *RouterProcess.command)

        far = networks.server(sockets[0], f"{HERE}:50051", environ=environ, events_listen=f"{HERE}:5557")
        near = Server(sockets[1], environ=environ, events_listen=f"{THERE}:5557")
        nodes = [f"far={HERE}:50051", f"near={sockets[1]}"]
        with (
            far,
            near,
            Routing(sockets[2], node=nodes, heartbeat=4) as process,
            Router(process.address) as router,
            Client(sockets[0]) as client,
        ):

            def known(tokens: list[int]) -> dict[str, int]:
                try:
                    found = router.route(tokens, peek=True, with_nodes=True).nodes
                except ServiceUnavailable:  # a machine that stands still looks like nodes that do
                    return {}
                return {each.node: each.num_cached_tokens for each in found}

            def states() -> dict[str, str]:
                return {info.node: info.state for info in router.nodes()}

            cached(client, OLD)
            wait_until(lambda: known(OLD) == {"far": 8, "near": 0}, SOON_S)
            networks.cut()
            wait_until(lambda: known(OLD) == {"near": 0}, SOON_S)
            wait_until(lambda: states() == {"far": "down", "near": "serving"}, SOON_S)
            client.reset()
            cached(client, NEW)
            networks.mend()
            wait_until(lambda: known(NEW) == {"far": 8, "near": 0}, SOON_S)
            wait_until(lambda: known(OLD) == {"far": 0, "near": 0}, SOON_S)
            assert router.route(NEW).node == "far"
