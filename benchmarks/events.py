"""What publishing costs: a server with and without events, and a cache in process.

Each request matches, inserts and releases a prompt of new tokens, so all that it inserts is published; and in a full
pool as much is evicted, and published too: nothing costs more. One batch is one request. Subscribers are processes of
their own: one reads, another one is connected and never does.

The clock is the processor time of the whole process that has the cache, until all is published: a second of it holds
so many requests on one core. That a second core may take over some of the publishing is not counted in favour.
"""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import grpc

from benchmarks.options import Options
from benchmarks.prompts import Prompts
from benchmarks.report import Goal, Row
from benchmarks.timing import ratio, spread
from radix_cache import PrefixCache
from radix_cache_service.events.stream import EventStream
from radix_cache_service.events.wire import EventEncoder
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.pb import prefix_cache_pb2_grpc as pb_grpc

TITLE = "events"

BLOCK_SIZE = 16
NUM_TOKENS = 512
NUM_BLOCKS = 8192
_SUBSCRIBER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.setsockopt(zmq.SUBSCRIBE, b"")
socket.connect(sys.argv[1])
socket.recv_multipart()
print("here", flush=True)
while sys.argv[2] == "reads":
    socket.recv_multipart()
sys.stdin.read()
"""
_PUBLISHED_S = 0.05  # after so long all of a round is out
_names = itertools.count()


class Contestant(NamedTuple):
    """send: makes requests, one after the other. clock: processor seconds of the process that answers them."""

    send: Callable[[list[bytes]], object]
    clock: Callable[[], float]


def run(options: Options) -> list[Row]:
    """Two rows: served, and in process."""
    num_rounds, num_calls = options.pick(63, 21, 1), options.pick(100, 50, 3)  # in short turns noise falls on all alike
    label = f"{NUM_TOKENS} new tokens, block size {BLOCK_SIZE}"
    with ExitStack() as stack:
        served = {
            "no events": stack.enter_context(_server()),
            "one subscriber": stack.enter_context(_published("reads")),
            "a stuck one": stack.enter_context(_published("is stuck")),
        }
        series = _rounds(served, num_rounds, num_calls)
    goals = [
        Goal(f"requests/s, {name}, of those without", ratio(series["no events"], series[name]).median, 0.85, True)
        for name in ("one subscriber", "a stuck one")
    ]
    with ExitStack() as stack:
        local = _rounds({name: stack.enter_context(make()) for name, make in _LOCAL.items()}, num_rounds, num_calls)
    return [
        _row(f"served: {label}", series, tuple(goals)),
        _row(f"in process: {label}", local),
    ]


def _rounds(contestants: dict[str, Contestant], num_rounds: int, num_calls: int) -> dict[str, list[float]]:
    """Let them take turns; return the microseconds of a request, by contestant and round."""
    prompts = Prompts()
    series: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(num_rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            tokens = prompts.many(num_calls, NUM_TOKENS)
            contestant = contestants[name]
            start = contestant.clock()
            contestant.send(tokens)
            time.sleep(_PUBLISHED_S)
            if number:
                series[name].append((contestant.clock() - start) / num_calls * 1e6)
    return series


def _row(label: str, series: dict[str, list[float]], goals: tuple[Goal, ...] = ()) -> Row:
    first = next(iter(series))
    ratios = {name: ratio(values, series[first]) for name, values in series.items() if name != first}
    return Row(label, {name: spread(values) for name, values in series.items()}, ratios=ratios, goals=goals)


# Served.


@contextmanager
def _server(*arguments: str) -> Iterator[Contestant]:
    """Run a server; yield what sends requests to it, one after the other."""
    command = [sys.executable, "-m", "radix_cache_service", "--listen", "127.0.0.1:0", "--log-level", "warning"]
    command += ["--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = next(line.split()[-1] for line in process.stdout if line.startswith("listening on"))
        clock = partial(time.clock_gettime, ~process.pid << 3 | 2)  # what Linux calls the clock of that process
        with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub: Any = pb_grpc.PrefixCacheServiceStub(channel)
            try:
                yield Contestant(lambda prompts: [stub.Batch(_batch(each), timeout=10) for each in prompts], clock)
            finally:
                process.terminate()


@contextmanager
def _published(how: str) -> Iterator[Contestant]:
    """Run a server that publishes events to one subscriber."""
    port = _free_port()
    with _server("--events-listen", f"127.0.0.1:{port}", "--events-replay-listen", "127.0.0.1:0") as contestant:
        command = [sys.executable, "-c", _SUBSCRIBER, f"tcp://127.0.0.1:{port}", how]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as subscriber:
            try:
                assert subscriber.stdout is not None
                assert subscriber.stdout.readline() == b"here\n"
                yield contestant
            finally:
                subscriber.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        return int(holder.getsockname()[1])


def _batch(tokens: bytes) -> pb.BatchRequest:
    lease_id = f"lease-{next(_names)}"
    return pb.BatchRequest(
        operations=[
            pb.Operation(match_prefix=pb.MatchPrefixRequest(tokens=tokens, lease_id=lease_id, num_tokens=NUM_TOKENS)),
            pb.Operation(insert=pb.InsertRequest(lease_id=lease_id, tokens=tokens)),
            pb.Operation(release=pb.ReleaseRequest(lease_id=lease_id)),
        ]
    )


# In process.


def _cycles(cache: PrefixCache) -> Contestant:
    def work(prompts: list[bytes]) -> None:
        for tokens in prompts:
            lease = cache.match_prefix(tokens, num_tokens=NUM_TOKENS)
            cache.insert(lease, tokens)
            cache.release(lease)

    return Contestant(work, time.process_time)


@contextmanager
def _silent() -> Iterator[Contestant]:
    yield _cycles(PrefixCache(NUM_BLOCKS, BLOCK_SIZE))


@contextmanager
def _noted() -> Iterator[Contestant]:
    cache = PrefixCache(NUM_BLOCKS, BLOCK_SIZE)
    cache.subscribe(lambda changes: None)
    yield _cycles(cache)


@contextmanager
def _streamed() -> Iterator[Contestant]:
    cache = PrefixCache(NUM_BLOCKS, BLOCK_SIZE)
    stream = EventStream(cache, encode=EventEncoder(BLOCK_SIZE))
    stream.start()
    yield _cycles(cache)
    stream.close()


_LOCAL = {"no events": _silent, "changes noted": _noted, "events made": _streamed}
