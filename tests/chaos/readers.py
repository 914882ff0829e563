"""Slow readers: each opens a stream, reads it late or never, and hangs up. The server must neither wait nor swell."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import grpc

from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.pb import prefix_cache_pb2_grpc as pb_grpc

_TIMEOUT_S = 10.0


def read_tree_slowly(stub: pb_grpc.PrefixCacheServiceStub, dice: random.Random) -> None:
    """Ask for the whole tree, a few times at once, and read a piece now and then."""
    request = pb.DumpTreeRequest(max_span_tokens=1024)
    calls = [stub.DumpTree(request, timeout=_TIMEOUT_S) for _ in range(4)]
    for call in calls:
        time.sleep(dice.uniform(0.05, 0.2))
        for _ in call:
            time.sleep(dice.uniform(0.01, 0.05))
            if dice.random() < 0.3:
                call.cancel()
                break


def send_without_reading(stub: pb_grpc.PrefixCacheServiceStub, dice: random.Random) -> None:
    """Send batch after batch on a stream and read no answer, until flow control stops the server; then read a few."""
    probes = [pb.Operation(probe=pb.ProbeRequest(tokens=bytes(16))) for _ in range(200)]
    message = pb.SessionRequest(batch=pb.BatchRequest(operations=probes))

    def messages() -> Iterator[pb.SessionRequest]:
        for _ in range(300):
            yield message
        time.sleep(dice.uniform(0.5, 1.0))

    call = stub.Session(messages(), timeout=_TIMEOUT_S)
    time.sleep(dice.uniform(0.3, 1.0))
    for _, _ in zip(range(dice.randint(0, 5)), call, strict=False):
        time.sleep(0.02)
    call.cancel()


def watch_events_slowly(stub: pb_grpc.PrefixCacheServiceStub, dice: random.Random) -> None:
    """Watch what is stored and removed, and fall behind until the server has enough of it."""
    call = stub.WatchEvents(pb.WatchEventsRequest(), timeout=_TIMEOUT_S)
    for _, _ in zip(range(dice.randint(0, 3)), call, strict=False):
        time.sleep(dice.uniform(0.3, 1.5))
    call.cancel()


Reader = Callable[[pb_grpc.PrefixCacheServiceStub, random.Random], None]


def run_reader(reader: Reader, address: str, seed: str) -> None:
    """Run one on a connection of its own; that the server goes away meanwhile is no fault of either."""
    channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
    with suppress(grpc.RpcError), channel:
        reader(pb_grpc.PrefixCacheServiceStub(channel), random.Random(seed))
