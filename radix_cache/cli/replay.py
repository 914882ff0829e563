"""``radix-cache replay``: what a cache of some size would have made of a trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from radix_cache.cli.numbers import Number
from radix_cache.cli.reading import TRACE, block_size_option, checked, name_of, nothing_in, reading
from radix_cache.cli.remote import Address, connected, connecting
from radix_cache.cli.show import count, duration, make_console, make_table, percent, print_json, with_progress
from radix_cache.lab import (
    Engine,
    ReplayResult,
    Request,
    TimedResult,
    TraceSource,
    count_requests,
    load_policy,
    replay_in_time,
    replay_policy,
)
from radix_cache.lab import replay as play_trace
from radix_cache.stats import Description

__all__ = ["replay"]

_ENGINE = Engine()


@click.command()
@click.argument("trace", type=TRACE)
@click.option("--num-blocks", type=click.IntRange(1), help="Replay in process, with a pool of so many blocks.")
@click.option("--server", type=Address(), help="Replay to this server, in a namespace of its own.")
@click.option(
    "--policy",
    metavar="NAME",
    help="Eviction policy in process: one of the tree's, optimal, or FILE.py:CLASS.  [default: lru]",
)
@block_size_option
@click.option("--in-time", is_flag=True, help="Let requests overlap as they did; in process.")
@click.option(
    "--prefill-rate",
    type=Number(0, min_open=True),
    default=_ENGINE.prefill_tokens_per_s,
    show_default=True,
    help="In time: prompt tokens a second that a request computes.",
)
@click.option(
    "--decode-rate",
    type=Number(0, min_open=True),
    default=_ENGINE.decode_tokens_per_s,
    show_default=True,
    help="In time: tokens a second that a request generates.",
)
@click.option(
    "--max-running",
    type=click.IntRange(1),
    default=_ENGINE.max_running,
    show_default=True,
    help="In time: requests at the same time.",
)
@click.option(
    "--holds",
    type=click.Choice(["answer", "prefill"]),
    default=_ENGINE.holds,
    show_default=True,
    help="In time: until the end of what a request keeps its blocks from being evicted.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@reading
@connecting
def replay(
    trace: str,
    num_blocks: int | None,
    server: str | None,
    policy: str | None,
    block_size: int | None,
    in_time: bool,
    prefill_rate: float,
    decode_rate: float,
    max_running: int,
    holds: Any,
    as_json: bool,
    open_trace: Callable[[str], TraceSource],
) -> None:
    """Play the requests of TRACE to a cache and count the hits.

    TRACE is JSON lines, plain or gzipped, or - for stdin: Mooncake's or Qwen-Bailian's hash ids, token ids (timestamp,
    tokens, output_tokens), or chat logs with --tokenizer. Requests come one after the other, each matched, published
    and released; with --in-time they come when they came, and hold their blocks while they run.
    """
    if (num_blocks is None) is (server is None):
        raise click.UsageError("say either --num-blocks or --server")
    if server is not None and (policy is not None or block_size is not None or in_time):
        raise click.UsageError("--policy and --block-size are the server's own, and --in-time is in process")
    policy = policy or "lru"
    if policy != "optimal":
        checked(lambda: load_policy(policy))
    elif in_time:
        raise click.UsageError("optimal knows no time: it is a bound for requests one after the other")
    requests = _with_progress(trace, open_trace(trace))
    timed: TimedResult | None = None
    if server is not None:
        result, where = _over_grpc(server, requests)
    elif in_time:
        engine = Engine(prefill_rate, decode_rate, max_running, holds)
        timed = replay_in_time(requests, policy, num_blocks or 0, block_size, engine)
        result, where = timed.replay, f"{policy}, {count(num_blocks or 0)} blocks, in the trace's time"
    else:
        result = replay_policy(requests, policy, num_blocks or 0, block_size)
        where = f"{policy}, {count(num_blocks or 0)} blocks, in process"
    if not result.whole.num_requests:
        raise nothing_in(trace)
    if as_json:
        print_json((timed or result).as_dict())
        return
    _print_tables(f"{name_of(trace)}: {where}", result)
    if timed is not None:
        _print_time(timed)


def _with_progress(path: str, source: TraceSource) -> Iterable[Request]:
    """Return the requests, with a bar where they can be counted beforehand."""
    requests = source.read()
    if path == "-" or source.reader or source.is_generated:
        return requests
    return with_progress(iter(requests), lambda: count_requests(path), "replaying")


def _over_grpc(address: str, requests: Iterable[Request]) -> tuple[ReplayResult, str]:
    namespace = ("replay", os.urandom(4).hex())
    with connected(address) as client, client.session() as session:
        description = client.describe()
        result = play_trace(requests, client, namespace, batch=session.batch)
    return result, f"{_shape(description)}, over gRPC to {address}"


def _shape(cache: Description) -> str:
    size = f" of {cache.block_size} tokens" if cache.block_size > 1 else ""
    return f"{cache.policy}, {count(cache.num_blocks)} blocks{size}"


def _rows(result: ReplayResult) -> Iterator[tuple[str, str, str]]:
    whole, half = result.whole, result.last_half
    for name, field in (
        ("requests", "num_requests"),
        ("prompt tokens", "num_prompt_tokens"),
        ("hit tokens", "num_hit_tokens"),
    ):
        yield name, count(getattr(whole, field)), count(getattr(half, field))
    for name, field in (
        ("token hit rate", "token_hit_rate"),
        ("block hit rate", "block_hit_rate"),
        ("requests with a hit", "request_hit_rate"),
    ):
        yield name, percent(getattr(whole, field)), percent(getattr(half, field))


def _print_tables(title: str, result: ReplayResult) -> None:
    table = make_table("", "all requests", "last half")
    for row in _rows(result):
        table.add_row(*row)
    console = make_console()
    console.print(title, style="bold")
    console.print(table)
    rate = "" if result.requests_per_s is None else f", {count(result.requests_per_s)} requests/s"
    console.print(
        f"{count(result.num_evicted_blocks)} blocks evicted; {count(result.num_calls)} calls in "
        f"{duration(result.seconds)} ({duration(result.seconds_per_call)} each){rate}"
    )


def _print_time(timed: TimedResult) -> None:
    make_console().print(
        f"at most {count(timed.max_running)} requests and {count(timed.max_held_blocks)} held blocks at a time; "
        f"{count(timed.num_waited)} waited, 99 % of all at most {duration(timed.wait_s.p99)}; "
        f"{count(timed.num_refused)} were larger than the pool"
    )
