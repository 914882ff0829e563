"""The service against its transport: what it adds to a bare echo of the same messages, what batches and streams save.

Servers run in processes of their own, on loopback; the client is this one. Contestants take turns, round by round, and
what is compared are the ratios within a round. Here the clock is the wall's: what a client waits for is what counts,
and on a shared machine that is noisy, so the quartiles belong to the figures.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc

from benchmarks.options import Options
from benchmarks.prompts import Prompts
from benchmarks.report import Goal, Row
from benchmarks.timing import ratio, spread
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.pb import prefix_cache_pb2_grpc as pb_grpc

TITLE = "service"

BLOCK_SIZE = 16
_names = itertools.count()
Round = Callable[[int], list[float]]
"""Makes so many calls; returns the seconds of each."""


def run(options: Options) -> list[Row]:
    """Unary calls, many at once, batches, sessions, a scheduler's step."""
    num_rounds, num_calls = options.pick(21, 7, 1), options.pick(300, 100, 3)
    with _server(
        "-m", "radix_cache_service", "--listen", "127.0.0.1:0", "--num-blocks", "100000", "--log-level", "warning"
    ) as ours:
        rows = []
        for num_tokens in (2048, 32_768):
            table_bytes = str(num_tokens // BLOCK_SIZE * 4)
            with ExitStack() as stack:
                echoes = {
                    f"echo, {kind}": stack.enter_context(_server("-m", "benchmarks.echo", kind, table_bytes))
                    for kind in ("aio", "threads")
                }
                rows += _transport(ours, echoes, num_tokens, num_rounds, num_calls)
        return [*rows, *_saving(ours, num_rounds, num_calls)]


@contextmanager
def _server(*arguments: str) -> Iterator[Any]:
    """Run a server; yield a stub to it."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().split()[-1]
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub: Any = pb_grpc.PrefixCacheServiceStub(channel)
        stub.address = address
        try:
            yield stub
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()


def _rounds(contestants: dict[str, Round], num_rounds: int, num_calls: int) -> dict[str, list[list[float]]]:
    """Let them take turns; return the seconds of each call, by contestant and round."""
    series: dict[str, list[list[float]]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(num_rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds = contestants[name](num_calls)
            if number:
                series[name].append(seconds)
    return series


# Unary calls against the echo.


def _transport(ours: Any, echoes: dict[str, Any], num_tokens: int, num_rounds: int, num_calls: int) -> list[Row]:
    tokens = Prompts(num_tokens).one(num_tokens)
    _cache(ours, tokens)
    servers = {"MatchPrefix": ours, **echoes}
    one = _rounds({name: _one_by_one(stub, tokens) for name, stub in servers.items()}, num_rounds, num_calls)
    many = _rounds({name: _many_at_once(stub, tokens) for name, stub in servers.items()}, num_rounds, num_calls)
    label = f"match of {num_tokens:,} tokens, {num_tokens // BLOCK_SIZE:,} block ids back"
    means = {name: [statistics.fmean(seconds) * 1e6 for seconds in rounds] for name, rounds in one.items()}
    speed = ratio(means["echo, aio"], means["MatchPrefix"]).median
    slow = {name: _p99(list(itertools.chain(*rounds))) for name, rounds in one.items()}
    goals = (
        Goal("calls/s of the echo's", speed, 0.85, is_at_least=True),
        Goal("p99 of the echo's", slow["MatchPrefix"] / slow["echo, aio"], 1.3),
    )
    rates = {name: [seconds[0] * 1e6 for seconds in rounds] for name, rounds in many.items()}
    busy = Goal("calls/s of the echo's", ratio(rates["echo, aio"], rates["MatchPrefix"]).median, 0.85, is_at_least=True)
    return [_row(f"{label}, one in flight", means, goals), _row(f"{label}, 16 in flight, a call", rates, (busy,))]


def _row(label: str, series: dict[str, list[float]], goals: tuple[Goal, ...] = ()) -> Row:
    first = next(iter(series))
    ratios = {name: ratio(values, series[first]) for name, values in series.items() if name != first}
    return Row(label, {name: spread(values) for name, values in series.items()}, ratios=ratios, goals=goals)


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)]


def _request(tokens: bytes) -> pb.MatchPrefixRequest:
    return pb.MatchPrefixRequest(tokens=tokens, lease_id=f"lease-{next(_names)}")


def _cache(stub: Any, tokens: bytes) -> None:
    lease = stub.MatchPrefix(_request(tokens), timeout=10)
    stub.Allocate(pb.AllocateRequest(lease_id=lease.lease_id, num_tokens=len(tokens) // 4), timeout=10)
    stub.Insert(pb.InsertRequest(lease_id=lease.lease_id, tokens=tokens), timeout=10)
    stub.Release(pb.ReleaseRequest(lease_id=lease.lease_id), timeout=10)


def _release(stub: Any, lease_ids: list[str]) -> None:
    """End leases, where the server knows of any, outside of what is timed."""
    releases = [pb.Operation(release=pb.ReleaseRequest(lease_id=lease_id)) for lease_id in lease_ids]
    try:
        for start in range(0, len(releases), 1000):
            stub.Batch(pb.BatchRequest(operations=releases[start : start + 1000]), timeout=10)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:  # an echo has no such method
            raise


def _one_by_one(stub: Any, tokens: bytes) -> Round:
    def play(num_calls: int) -> list[float]:
        requests = [_request(tokens) for _ in range(num_calls)]
        seconds = [_timed(lambda request=request: stub.MatchPrefix(request, timeout=10)) for request in requests]
        _release(stub, [request.lease_id for request in requests])
        return seconds

    return play


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _many_at_once(stub: Any, tokens: bytes) -> Round:
    """Sixteen in flight, through an asyncio client: the mean time between two answers."""

    async def keep_calling(target: Any, requests: Iterator[Any]) -> None:
        for request in requests:
            await target.MatchPrefix(request, timeout=10)

    async def run(requests: list[Any]) -> float:
        async with grpc.aio.insecure_channel(stub.address) as channel:
            target = pb_grpc.PrefixCacheServiceStub(channel)
            await target.MatchPrefix(requests[0], timeout=10)
            rest = iter(requests[1:])
            start = time.perf_counter()
            await asyncio.gather(*(keep_calling(target, rest) for _ in range(16)))
            return (time.perf_counter() - start) / (len(requests) - 1)

    def play(num_calls: int) -> list[float]:
        requests = [_request(tokens) for _ in range(num_calls + 1)]
        mean = asyncio.run(run(requests))
        _release(stub, [request.lease_id for request in requests])
        return [mean]

    return play


# What batches and streams save.


def _saving(ours: Any, num_rounds: int, num_calls: int) -> list[Row]:
    tokens = Prompts(1).one(2048)
    _cache(ours, tokens)
    with ExitStack() as stack:
        contestants = {
            "unary": _one_by_one(ours, tokens),
            "16 in a batch": _batches(ours, tokens),
            "session": stack.enter_context(_session(ours, tokens)),
            "empty unary call": _empty(ours),
            "step on a session": stack.enter_context(_steps(ours)),
        }
        series = _rounds(contestants, num_rounds, num_calls)
    means = {name: [statistics.fmean(seconds) * 1e6 for seconds in rounds] for name, rounds in series.items()}
    items = {"unary": means["unary"], "16 in a batch": [us / 16 for us in means["16 in a batch"]]}
    streamed = {name: means[name] for name in ("session", "unary")}
    step = {name: means[name] for name in ("step on a session", "empty unary call")}
    return [
        _row(
            "match of 2,048 tokens, an item",
            items,
            (Goal("items/s of a batch", ratio(*items.values()).median, 10, is_at_least=True),),
        ),
        _row(
            "match of 2,048 tokens, one in flight",
            streamed,
            (Goal("session, calls/s of unary", ratio(means["unary"], means["session"]).median, 1.3, is_at_least=True),),
        ),
        _row(
            "a scheduler's step: 30 operations, 54 KB",
            step,
            (Goal("times an empty call", ratio(*step.values()).median, 1.5),),
        ),
    ]


def _batches(stub: Any, tokens: bytes) -> Round:
    def play(num_calls: int) -> list[float]:
        seconds = []
        for _ in range(max(num_calls // 16, 2)):
            requests = [_request(tokens) for _ in range(16)]
            batch = pb.BatchRequest(operations=[pb.Operation(match_prefix=request) for request in requests])
            seconds.append(_timed(lambda batch=batch: stub.Batch(batch, timeout=10)))
            _release(stub, [request.lease_id for request in requests])
        return seconds

    return play


def _empty(stub: Any) -> Round:
    return lambda num_calls: [_timed(lambda: stub.Probe(pb.ProbeRequest(), timeout=10)) for _ in range(num_calls)]


@contextmanager
def _stream(stub: Any) -> Iterator[Callable[[pb.BatchRequest], pb.BatchResponse]]:
    """Open a session; yield what sends one batch and waits for its answer."""
    from queue import SimpleQueue

    queue: SimpleQueue[Any] = SimpleQueue()
    answers = stub.Session(iter(queue.get, None))

    def send(batch: pb.BatchRequest) -> pb.BatchResponse:
        queue.put(pb.SessionRequest(batch=batch))
        return next(answers).batch

    yield send
    queue.put(None)
    list(answers)


@contextmanager
def _session(stub: Any, tokens: bytes) -> Iterator[Round]:
    with _stream(stub) as send:

        def play(num_calls: int) -> list[float]:
            requests = [_request(tokens) for _ in range(num_calls)]
            batches = [pb.BatchRequest(operations=[pb.Operation(match_prefix=request)]) for request in requests]
            seconds = [_timed(lambda batch=batch: send(batch)) for batch in batches]
            _release(stub, [request.lease_id for request in requests])
            return seconds

        yield play


@contextmanager
def _steps(stub: Any) -> Iterator[Round]:
    """256 running requests: a step lets some grow by a block, and begins, publishes and ends one of 6,144 tokens."""
    running = [f"running-{number}" for number in range(256)]
    prompts = Prompts(7)
    for lease_id in running:
        stub.MatchPrefix(pb.MatchPrefixRequest(lease_id=lease_id, num_blocks=8), timeout=10)
    turns, begun = itertools.cycle(running), itertools.count()

    def step() -> pb.BatchRequest:
        """A prompt of 24 KB is matched, then published; 13 leases grow; 13 short prompts are looked up."""
        long, short, name = prompts.one(6144), prompts.one(768), f"step-{next(begun)}"
        return pb.BatchRequest(
            operations=[
                *(pb.Operation(allocate=pb.AllocateRequest(lease_id=next(turns), num_blocks=1)) for _ in range(13)),
                *(pb.Operation(probe=pb.ProbeRequest(tokens=short[:64])) for _ in range(13)),
                pb.Operation(
                    match_prefix=pb.MatchPrefixRequest(tokens=long, lease_id=name, num_tokens=6144, max_tokens=6143)
                ),
                pb.Operation(insert=pb.InsertRequest(lease_id=name, tokens=long)),
                pb.Operation(insert=pb.InsertRequest(lease_id=name, tokens=b"", offset=6144)),
                pb.Operation(release=pb.ReleaseRequest(lease_id=name)),
            ]
        )

    with _stream(stub) as send:

        def play(num_calls: int) -> list[float]:
            batches = [step() for _ in range(max(num_calls // 3, 2))]
            assert all(len(batch.operations) == 30 for batch in batches)
            seconds = [_timed(lambda batch=batch: send(batch)) for batch in batches]
            for lease_id in running:  # what grew is trimmed, so that the pool does not run out
                stub.Release(pb.ReleaseRequest(lease_id=lease_id), timeout=10)
                stub.MatchPrefix(pb.MatchPrefixRequest(lease_id=lease_id, num_blocks=8), timeout=10)
            return seconds

        yield play
    _release(stub, running)
