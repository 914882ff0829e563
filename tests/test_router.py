"""A router over real servers: whom it chooses, how it balances, and what comes of nodes that come and go."""

from __future__ import annotations

import asyncio
import signal
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import grpc
import pytest
from client_help import wait_until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers import cached
from router_help import BLOCK_SIZE, NODE, SOON_S, Cluster, prompt
from scraping import read_metrics
from service_process import ServerProcess, own_address, reason_of, stub_to

from radix_cache.errors import InvalidArgument, InvalidTokens, LimitExceeded, ServiceUnavailable
from radix_cache_service import AsyncRouter, Client, LayoutMismatch, Router
from radix_cache_service.pb import prefix_cache_pb2
from radix_cache_service.pb import router_pb2 as pb
from radix_cache_service.pb import router_pb2_grpc as pb_grpc

if find_spec("dynamo") is None:
    pytest.skip("ai-dynamo-runtime is not installed: pip install 'radix-cache[router]'", allow_module_level=True)

TENANT = ("llm", "tenant/1")


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, ServerProcess]]:
    """Three servers for all tests here that leave them as they are, but for what is cached."""
    started = {name: ServerProcess(**NODE) for name in ("a", "b", "c")}
    yield started
    for server in started.values():
        server.stop()


@pytest.fixture
def open_cluster(servers: dict[str, ServerProcess]) -> Iterator[Callable[..., Cluster]]:
    """Start routers that are stopped when the test ends; of the three servers unless others are given."""
    opened: list[Cluster] = []

    def open_one(over: dict[str, ServerProcess] | None = None, **settings: Any) -> Cluster:
        if over is None:
            for server in servers.values():
                with Client(server.address) as client:
                    client.reset()
        opened.append(Cluster(servers if over is None else over, **settings))
        return opened[-1]

    yield open_one
    for cluster in opened:
        cluster.close()


@pytest.fixture
def own() -> Iterator[dict[str, ServerProcess]]:
    """Two servers that a test may end, and start again."""
    started = {name: ServerProcess(own_address(), **NODE) for name in ("a", "b")}
    yield started
    for server in started.values():
        server.stop(signal.SIGKILL)


# Whom it chooses.


def test_who_has_most_of_a_prompt_is_chosen(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster()
    cluster.cache("b", prompt(1, 32))
    cluster.cache("c", prompt(1, 16))
    routed = cluster.router.route(prompt(1), with_nodes=True)
    assert (routed.node, routed.address) == ("b", cluster.servers["b"].address)
    assert routed.num_cached_tokens == 32
    assert [(each.node, each.num_cached_tokens) for each in routed.nodes] == [("a", 0), ("b", 32), ("c", 16)]


def test_what_is_cached_under_another_namespace_does_not_count(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster()
    cluster.cache("a", prompt(1), TENANT)
    for namespace in ((), ("llm",), ("llm", "tenant", "1"), ("llm/tenant/1",)):
        assert cluster.router.route(prompt(1), namespace, peek=True).num_cached_tokens == 0
    assert cluster.router.route(prompt(1), TENANT).node == "a"


def test_what_is_evicted_counts_no_more(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster()
    cluster.cache("a", prompt(1))
    with Client(cluster.servers["a"].address) as client:
        client.evict(6)
    wait_until(lambda: cluster.known("a", prompt(1)) == 64 - 6 * BLOCK_SIZE, SOON_S)


def test_where_nobody_has_anything_the_least_load_decides(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster()
    sent = [cluster.router.route(prompt(number)) for number in range(9)]
    assert sorted(Counter(routed.node for routed in sent).items()) == [("a", 3), ("b", 3), ("c", 3)]
    for routed in sent:
        if routed.node == "b":
            routed.finish()
    assert {cluster.router.route(prompt(number)).node for number in (10, 11)} == {"b"}


def test_where_all_have_the_same_the_least_load_decides(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster()
    for name in ("a", "b", "c"):
        cluster.cache(name, prompt(1))
    assert cluster.spread(prompt(1), 9) == [3, 3, 3]


def test_a_hot_prefix_does_not_melt_one_node(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster()
    cluster.cache("a", prompt(1, 4096))
    assert cluster.router.route(prompt(1, 4096), peek=True).node == "a"
    sent = cluster.spread(prompt(1, 4096), 60)
    assert sent[0] <= 1.5 * 20 + 1
    assert sent[-1] > 0


def test_without_our_weights_a_hot_prefix_does(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster(prefill_weight=1, request_weight=0, max_load=1e6)
    cluster.cache("a", prompt(1, 4096))
    assert cluster.spread(prompt(1, 4096), 60) == [60, 0, 0]


def test_a_request_weighs_something_though_all_of_it_is_cached(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster(prefill_weight=1, request_weight=100, max_load=1e6)
    cluster.cache("a", prompt(1, 400))
    sent = cluster.spread(prompt(1, 400), 30)
    assert 10 < sent[0] < 30


@pytest.mark.parametrize(
    ("listen", "events"), [("[::1]:0", "[::1]:0"), ("127.0.0.1:0", "0.0.0.0:0"), ("[::1]:0", "[::]:0")]
)
def test_events_are_found_where_a_node_says_that_they_are(
    listen: str, events: str, open_cluster: Callable[..., Cluster]
) -> None:
    environ = {"RADIX_CACHE_ALLOW_PLAINTEXT_EVENTS": "true"}
    with ServerProcess(listen, environ=environ, **{**NODE, "events_listen": events}) as server:
        cluster = open_cluster({"a": server})
        cluster.cache("a", prompt(1))
        cluster.close()


def test_metrics_tell_what_was_routed(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster(metrics_listen="127.0.0.1:0")
    cluster.cache("a", prompt(1, 32))
    sent = [cluster.router.route(prompt(1))]
    sent[0].finish()
    sent.append(cluster.router.route(prompt(1)))
    metrics = read_metrics(cluster.process.metrics_address)

    def told(name: str) -> dict[str, float]:
        samples = metrics[f"radix_cache_router_{name}"].samples
        return {sample.labels["node"]: sample.value for sample in samples if sample.name.endswith(("_total", name))}

    assert [routed.node for routed in sent] == ["a", "a"]
    assert told("requests") == {"a": 2, "b": 0, "c": 0}
    assert told("prompt_tokens") == {"a": 128, "b": 0, "c": 0}
    assert told("cached_tokens") == {"a": 64, "b": 0, "c": 0}
    assert told("requests_in_flight") == {"a": 1, "b": 0, "c": 0}


# Requests in flight.


def test_a_request_is_load_until_it_is_finished(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster()
    cluster.cache("a", prompt(1, 32))
    with cluster.router.route(prompt(1)) as routed:
        info = cluster.info("a")
        assert (info.num_requests, info.num_routed_requests, info.num_pending_tokens) == (1, 1, 32)
        cluster.router.finish_prefill(routed.request_id)
        assert cluster.info("a").num_pending_tokens == 0
    assert cluster.info("a").num_requests == 0
    routed.finish()
    cluster.router.finish("nobody knows it")
    cluster.router.finish_prefill("nobody knows it")
    assert cluster.info("a").num_routed_requests == 1


def test_who_only_asks_is_no_load(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster()
    with cluster.router.route(prompt(1), peek=True) as routed:
        assert routed.request_id == ""
    assert {(info.num_requests, info.num_routed_requests) for info in cluster.router.nodes()} == {(0, 0)}


def test_the_same_request_again_gets_the_same_node_and_counts_once(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster()
    first = cluster.router.route(prompt(1), request_id="r")
    assert {cluster.router.route(prompt(1), request_id="r").node for _ in range(5)} == {first.node}
    assert sum(info.num_requests for info in cluster.router.nodes()) == 1
    first.finish()
    assert sum(info.num_requests for info in cluster.router.nodes()) == 0


def test_what_nobody_finishes_is_load_for_a_time_only(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster(request_ttl=0.1, metrics_listen="127.0.0.1:0")
    for number in range(3):
        cluster.router.route(prompt(number))
    wait_until(lambda: not any(info.num_requests or info.num_pending_tokens for info in cluster.router.nodes()), SOON_S)
    metrics = read_metrics(cluster.process.metrics_address)
    assert [sample.value for sample in metrics["radix_cache_router_requests_expired"].samples] == [3]


def test_there_are_only_so_many_at_once(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster(max_requests=2)
    sent = [cluster.router.route(prompt(number)) for number in range(2)]
    with pytest.raises(LimitExceeded, match="max_requests"):
        cluster.router.route(prompt(3))
    cluster.router.route(prompt(3), peek=True)
    sent[0].finish()
    cluster.router.route(prompt(3))


# Nodes that come and go.


def test_a_node_that_is_killed_is_sent_nothing_until_it_is_back(
    own: dict[str, ServerProcess], open_cluster: Callable[..., Cluster]
) -> None:
    cluster = open_cluster(own)
    cluster.cache("a", prompt(1))
    kept = cluster.router.route(prompt(1), request_id="r")
    assert kept.node == "a"
    address = own["a"].address
    own["a"].stop(signal.SIGKILL)
    cluster.wait_for("a", "down")
    assert cluster.info("a").num_requests == 0
    again = cluster.router.route(prompt(1), request_id="r", with_nodes=True)
    assert (again.node, again.num_cached_tokens, [each.node for each in again.nodes]) == ("b", 0, ["b"])
    own["a"] = ServerProcess(address, **NODE)
    cluster.wait_for("a", "serving")
    assert cluster.known("a", prompt(1)) == 0
    cluster.cache("a", prompt(2))
    assert cluster.router.route(prompt(2)).node == "a"


def test_a_node_with_a_state_directory_comes_back_with_what_it_had(
    tmp_path: Any, open_cluster: Callable[..., Cluster]
) -> None:
    settings = {**NODE, "state_dir": tmp_path / "state", "pool_epoch": "p"}
    servers = {"a": ServerProcess(own_address(), **settings)}
    cluster = open_cluster(servers)
    cluster.cache("a", prompt(1))
    servers["a"].stop(signal.SIGKILL)
    cluster.wait_for("a", "down")
    servers["a"] = ServerProcess(servers["a"].address, **settings)
    cluster.wait_for("a", "serving")
    wait_until(lambda: cluster.known("a", prompt(1)) == 64, SOON_S)
    servers["a"].stop()


def test_a_node_that_hangs_is_noticed_though_its_connection_holds(
    own: dict[str, ServerProcess], open_cluster: Callable[..., Cluster]
) -> None:
    cluster = open_cluster(own, heartbeat=3)
    cluster.cache("a", prompt(1))
    own["a"].process.send_signal(signal.SIGSTOP)
    cluster.wait_for("a", "down")
    wait_until(lambda: cluster.goes_to(prompt(1)) == "b", SOON_S)
    own["a"].process.send_signal(signal.SIGCONT)
    cluster.wait_for("a", "serving")
    wait_until(lambda: cluster.known("a", prompt(1)) == 64, SOON_S)


def test_a_node_that_hung_has_as_much_to_do_as_before(
    own: dict[str, ServerProcess], open_cluster: Callable[..., Cluster]
) -> None:
    cluster = open_cluster(own, heartbeat=6)
    cluster.wait_for("a", "serving")
    sent = [cluster.router.route(prompt(number)) for number in range(8)]
    before = cluster.info("a")
    assert before.num_requests > 0
    assert before.num_pending_tokens == 64 * before.num_requests
    own["a"].process.send_signal(signal.SIGSTOP)
    cluster.wait_for("a", "down")
    own["a"].process.send_signal(signal.SIGCONT)
    cluster.wait_for("a", "serving")
    after = cluster.info("a")
    assert (after.num_requests, after.num_pending_tokens) == (before.num_requests, before.num_pending_tokens)
    for routed in sent:
        routed.finish()
    assert {(info.num_requests, info.num_pending_tokens) for info in cluster.router.nodes()} == {(0, 0)}


def test_a_node_that_hung_and_was_killed_then_has_nothing_to_do(
    own: dict[str, ServerProcess], open_cluster: Callable[..., Cluster]
) -> None:
    cluster = open_cluster(own, heartbeat=6)
    cluster.cache("a", prompt(1))
    assert cluster.router.route(prompt(1)).node == "a"
    address = own["a"].address
    own["a"].process.send_signal(signal.SIGSTOP)
    cluster.wait_for("a", "down")
    own["a"].stop(signal.SIGKILL)
    own["a"] = ServerProcess(address, **NODE)
    cluster.wait_for("a", "serving")
    wait_until(lambda: cluster.info("a").num_requests == 0, SOON_S)
    wait_until(lambda: cluster.known("a", prompt(1)) == 0, SOON_S)


def test_a_node_that_drains_is_sent_no_more(
    open_cluster: Callable[..., Cluster], own: dict[str, ServerProcess]
) -> None:
    own["a"].stop()
    own["a"] = ServerProcess(**NODE, drain_delay=60)
    cluster = open_cluster(own)
    cluster.cache("a", prompt(1))
    own["a"].process.send_signal(signal.SIGTERM)
    cluster.wait_for("a", "draining")
    assert cluster.router.route(prompt(1)).node == "b"


def test_a_node_that_joins_late_brings_what_it_has(
    own: dict[str, ServerProcess], open_cluster: Callable[..., Cluster]
) -> None:
    with Client(own["b"].address) as client:
        cached(client, prompt(1))
    cluster = open_cluster({"a": own["a"]})
    assert cluster.router.route(prompt(1), peek=True).node == "a"
    info = cluster.router.add_node("b", own["b"].address)
    assert (info.node, info.state) == ("b", "serving")
    wait_until(lambda: cluster.known("b", prompt(1)) == 64, SOON_S)
    assert cluster.router.route(prompt(1)).node == "b"
    cluster.router.remove_node("b")
    assert [each.node for each in cluster.router.nodes()] == ["a"]
    assert cluster.router.route(prompt(1)).node == "a"


def test_where_no_node_serves_it_is_said_so(
    own: dict[str, ServerProcess], open_cluster: Callable[..., Cluster]
) -> None:
    cluster = open_cluster({})
    with pytest.raises(ServiceUnavailable, match="no node serves now: there is none"):
        cluster.router.route(prompt(1))
    assert health_of(cluster) == health_pb2.HealthCheckResponse.NOT_SERVING
    cluster.router.add_node("a", own["a"].address)
    wait_until(lambda: health_of(cluster) == health_pb2.HealthCheckResponse.SERVING)
    own["a"].stop(signal.SIGKILL)
    cluster.wait_for("a", "down")
    with pytest.raises(ServiceUnavailable, match="no node serves now: 1 down"):
        cluster.router.route(prompt(1))
    wait_until(lambda: health_of(cluster) == health_pb2.HealthCheckResponse.NOT_SERVING)


def health_of(cluster: Cluster) -> int:
    """What the router says of its readiness."""
    with grpc.insecure_channel(cluster.process.address) as channel:
        request = health_pb2.HealthCheckRequest(service="radixcache.v1.RouterService")
        return health_pb2_grpc.HealthStub(channel).Check(request).status


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({**NODE, "block_size": 8}, "block_size is 8 there, and 4 here"),
        (
            {**NODE, "events_listen": "127.0.0.1:0", "layout_fingerprint": "other"},
            "layout_fingerprint is 'other' there",
        ),
        ({"block_size": 4}, "it tells of no events over ZeroMQ: it needs --events-listen"),
    ],
    ids=["block size", "layout", "events"],
)
def test_a_node_that_does_not_fit_is_refused_with_the_reason(
    settings: dict[str, Any], said: str, open_cluster: Callable[..., Cluster]
) -> None:
    first = ServerProcess(**NODE, layout_fingerprint="one")
    with first, ServerProcess(**settings) as odd:
        cluster = open_cluster({"a": first})
        with pytest.raises(LayoutMismatch, match=said):
            cluster.router.add_node("odd", odd.address)
        assert [info.node for info in cluster.router.nodes()] == ["a"]
        cluster.close()


def test_a_server_under_two_names_is_refused_the_second_time(open_cluster: Callable[..., Cluster]) -> None:
    with ServerProcess("127.0.0.1:0", "127.0.0.1:0", **NODE) as server:
        cluster = open_cluster({"a": server})
        with pytest.raises(LayoutMismatch, match=r"its events are at 127\.0\.0\.1:\d+, where those of node a are"):
            cluster.router.add_node("b", server.addresses[1])
        cluster.router.remove_node("a")
        assert cluster.router.add_node("b", server.addresses[1]).state == "serving"
        cluster.close()


def test_a_node_that_does_not_fit_from_the_start_is_listed_with_the_reason(
    servers: dict[str, ServerProcess], open_cluster: Callable[..., Cluster]
) -> None:
    cluster = open_cluster({"a": servers["a"]}, block_size=16)
    assert cluster.info("a").state == "refused"
    assert cluster.info("a").reason == f"block_size is {BLOCK_SIZE} there, and 16 here"
    with pytest.raises(ServiceUnavailable, match="1 refused"):
        cluster.router.route(prompt(1))


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_the_first_in_order_says_how_long_blocks_are(
    order: tuple[str, str], open_cluster: Callable[..., Cluster]
) -> None:
    with ServerProcess(**{**NODE, "block_size": 8}) as a, ServerProcess(**NODE) as b:
        servers = {"a": a, "b": b}
        cluster = open_cluster({name: servers[name] for name in order})
        assert [cluster.info(name).state for name in order] == ["serving", "refused"]
        for name in order:
            cluster.router.remove_node(name)
        cluster.router.add_node(order[1], servers[order[1]].address)
        cluster.cache(order[1], prompt(1))
        cluster.close()


def test_a_node_that_was_refused_is_asked_again(
    own: dict[str, ServerProcess], open_cluster: Callable[..., Cluster]
) -> None:
    odd = ServerProcess(own_address(), **{**NODE, "block_size": 8})
    cluster = open_cluster({**own, "odd": odd}, heartbeat=3, block_size=BLOCK_SIZE)
    cluster.wait_for("odd", "refused")
    odd.stop(signal.SIGKILL)
    with ServerProcess(odd.address, **NODE):
        cluster.wait_for("odd", "serving")


def test_who_is_listened_to_anew_is_heard_from_the_beginning_and_keeps_what_is_booked(
    servers: dict[str, ServerProcess],
) -> None:
    from radix_cache_service.router.selection import Prompt, Selection, Worker

    cached_there, booked = (Prompt(array("I", prompt(number)), None) for number in (1, 2))
    with stub_to(servers["a"].address) as stub, Client(servers["a"].address) as client:
        said = stub.Describe(prefix_cache_pb2.DescribeRequest())
        cached(client, prompt(1))

    async def play() -> None:
        selection = Selection(BLOCK_SIZE, 1, 0, 600)
        dead = Worker(1, "127.0.0.1:1", "127.0.0.1:1", 0)
        await selection.add(dead)
        assert await selection.choose(booked, [1], "b") == (1, 0)
        await selection.listen_anew(dead._replace(events=said.events_address, replay=said.events_replay_address))
        async with asyncio.timeout(SOON_S):
            while (await selection.scores(cached_there)).get(1) != 64:  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(0.01)
        await selection.listen_anew(dead)
        assert (await selection.scores(cached_there)).get(1) == 0
        assert selection.pending_tokens() == {1: 64}
        await selection.close()

    asyncio.run(play())


def test_a_node_that_fails_as_it_is_let_go_is_let_go(own: dict[str, ServerProcess]) -> None:
    from radix_cache_service.router.config import NodeName, RouterConfig
    from radix_cache_service.router.node import Link, Node

    async def play() -> None:
        has_begun = asyncio.Event()

        async def join(*_: Any) -> None:
            has_begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                raise ServiceUnavailable("its process has ended, just now")

        def leave(_: int) -> None:
            raise AssertionError("it has never come to be a worker")

        node = Node(NodeName("a", own["a"].address), Link(RouterConfig()), join, lambda _: None, leave)
        node.start()
        async with asyncio.timeout(SOON_S):
            await has_begun.wait()
            await node.close()

    asyncio.run(play())


def test_a_node_whose_events_nobody_can_listen_to_is_refused() -> None:
    from radix_cache_service.router.selection import Selection, Worker

    async def play() -> None:
        selection = Selection(BLOCK_SIZE, 1, 0, 1)
        with pytest.raises(InvalidArgument, match="the selection service does not take it: "):
            await selection.add(Worker(1, "dns:///localhost:1", "dns:///localhost:2", 0))
        await selection.close()

    asyncio.run(play())


# What is asked for wrongly.


def test_bad_requests_are_refused_and_change_nothing(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster(max_tokens=100)
    with grpc.insecure_channel(cluster.process.address) as channel:
        stub = pb_grpc.RouterServiceStub(channel)

        def refusal(request: pb.RouteRequest) -> tuple[grpc.StatusCode, str, str]:
            with pytest.raises(grpc.RpcError) as caught:
                stub.Route(request)
            return (*reason_of(caught.value)[:2], caught.value.details())

        tokens = grpc.StatusCode.INVALID_ARGUMENT, "INVALID_TOKENS"
        argument = grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"
        assert refusal(pb.RouteRequest(tokens=b"12345"))[:2] == tokens
        said = refusal(pb.RouteRequest(token_ids=[777_777] * 101))
        assert said == (*tokens, "a prompt has at most 100 tokens here, not 101")
        assert refusal(pb.RouteRequest(namespace=["a"] * 1000))[:2] == argument
        assert refusal(pb.RouteRequest(request_id="r" * 10_000))[:2] == argument
        with pytest.raises(grpc.RpcError) as caught:
            stub.Finish(pb.FinishRequest())
        assert reason_of(caught.value)[:2] == argument
        raw = channel.unary_unary("/radixcache.v1.RouterService/Route")
        with pytest.raises(grpc.RpcError) as caught:
            raw(b"\xff\xff\xff")
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert stub.Route(pb.RouteRequest(token_ids=range(100), peek=True)).node in {"a", "b", "c"}
    assert {info.num_requests for info in cluster.router.nodes()} == {0}


def test_bad_nodes_are_refused(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster()
    router, there = cluster.router, cluster.servers["c"].address
    for name, address, said in (
        ("a", "127.0.0.1:1", "node a is there already"),
        ("", "127.0.0.1:1", "a node's name is"),
        ("x y", "127.0.0.1:1", "a node's name is"),
        ("x", "nowhere", "node x: 'nowhere' is neither"),
        ("x", "unix:relative", "node x: 'unix:relative' is neither"),
        ("x", "dns:///localhost:1", "node x: 'dns:///localhost:1' has more than a host and a port"),
        ("x", there, f"nodes c and x are both at {there}"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            router.add_node(name, address)
    with pytest.raises(InvalidArgument, match="there is no node 'x'"):
        router.remove_node("x")
    assert [info.node for info in router.nodes()] == ["a", "b", "c"]


def test_the_asyncio_client_does_the_same(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster()
    cluster.cache("b", prompt(1), TENANT)

    async def play() -> None:
        async with AsyncRouter(cluster.process.address) as router:
            async with await router.route(prompt(1), TENANT, "r", with_nodes=True) as routed:
                assert (routed.node, routed.num_cached_tokens, routed.request_id) == ("b", 64, "r")
                assert [each.node for each in routed.nodes] == ["a", "b", "c"]
                await router.finish_prefill(routed.request_id)
                assert [info.num_requests for info in await router.nodes()] == [0, 1, 0]
            assert [info.num_requests for info in await router.nodes()] == [0, 0, 0]
            with pytest.raises(InvalidArgument, match="node a is there already"):
                await router.add_node("a", "127.0.0.1:1")
            await router.remove_node("b")
            assert (await router.route(prompt(1), TENANT, peek=True)).node in {"a", "c"}
        with pytest.raises(ServiceUnavailable, match="is closed"):
            await router.nodes()

    asyncio.run(play())


def test_bad_arguments_do_not_leave_the_client() -> None:
    for make in (lambda: Router(""), lambda: Router("127.0.0.1:1", timeout_s=0)):
        with pytest.raises(InvalidArgument):
            make()
    with Router("127.0.0.1:1") as router:
        with pytest.raises(InvalidTokens):
            router.route([-1])
        with pytest.raises(InvalidArgument):
            router.route([1], "text")
        with pytest.raises(ServiceUnavailable):
            router.route([1])
    with pytest.raises(ServiceUnavailable, match="is closed"):
        router.route([1])


def test_a_node_that_does_not_answer_is_added_and_found_later(
    own: dict[str, ServerProcess], open_cluster: Callable[..., Cluster]
) -> None:
    cluster = open_cluster({"a": own["a"]})
    address = own["b"].address
    own["b"].stop(signal.SIGKILL)
    assert cluster.router.add_node("b", address).state == "down"
    own["b"] = ServerProcess(address, **NODE)
    cluster.wait_for("b", "serving")
    assert cluster.router.add_node("b", address).state == "serving", "who adds it once more is told how it is"
    assert [info.node for info in cluster.router.nodes()] == ["a", "b"]


def test_who_is_let_go_in_good_order_is_no_warning(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster(log_level="warning")
    cluster.router.remove_node("c")
    assert cluster.process.stop() == (0, "")


def test_it_ends_in_good_order_and_says_nothing_of_prompts(open_cluster: Callable[..., Cluster]) -> None:
    cluster = open_cluster(log_level="debug")
    for number in range(5):
        cluster.router.route([987_654_321] * 64, ("secret",), request_id=f"r{number}")
    status, errors = cluster.process.stop()
    assert status == 0, errors
    assert "987654321" not in errors
    assert "secret" not in errors
