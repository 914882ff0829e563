"""``radix-cache replay``: what a cache of some size would have made of a trace."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from radix_cache.cli.remote import Address, connected
from radix_cache.cli.show import count, duration, make_console, make_table, percent, print_json, with_progress
from radix_cache.lab import ReplayResult, Request, count_requests, read_trace
from radix_cache.lab import replay as play_trace
from radix_cache.stats import Description

__all__ = ["replay"]


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--num-blocks", type=click.IntRange(1), help="Replay in process, with a pool of so many blocks.")
@click.option("--server", type=Address(), help="Replay to this server, in a namespace of its own.")
@click.option("--policy", help="Eviction policy in process.  [default: lru]")
@click.option(
    "--block-size",
    type=click.IntRange(1),
    help="Tokens in a block, in process.  [default: 16 for token ids; traces of hash ids need 1]",
)
@click.option(
    "--tokens-per-block",
    type=click.IntRange(1),
    help="Tokens that one hash id stands for, where the trace doesn't say.  [default: what fits the lengths]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def replay(
    trace: Path,
    num_blocks: int | None,
    server: str | None,
    policy: str | None,
    block_size: int | None,
    tokens_per_block: int | None,
    as_json: bool,
) -> None:
    """Play the requests of TRACE to a cache and count the hits.

    TRACE is JSON lines, plain or gzipped: Mooncake's (timestamp, input_length, output_length, hash_ids) or token ids
    (timestamp, tokens, output_tokens). Requests come one after the other, each matched, published and released.
    """
    if (num_blocks is None) is (server is None):
        raise click.UsageError("say either --num-blocks or --server")
    if server is not None and (policy is not None or block_size is not None):
        raise click.UsageError("--policy and --block-size are the server's own")
    requests = with_progress(read_trace(trace, tokens_per_block), lambda: count_requests(trace), "replaying")
    if server is not None:
        result, where = _over_grpc(server, requests)
    else:
        result, where = _in_process(num_blocks or 0, block_size, policy or "lru", requests)
    if not result.whole.num_requests:
        raise click.ClickException(f"{trace}: there is no request in it")
    if as_json:
        print_json(result.as_dict())
    else:
        _print_tables(f"{trace.name}: {where}", result)


def _in_process(
    num_blocks: int, block_size: int | None, policy: str, requests: Iterator[Request]
) -> tuple[ReplayResult, str]:
    from radix_cache import PrefixCache
    from radix_cache.errors import InvalidArgument

    first = next(requests, None)
    if block_size is None:
        block_size = 1 if first and first.tokens_per_id > 1 else 16
    try:
        cache = PrefixCache(num_blocks, block_size, policy)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
    result = play_trace(_put_back(first, requests), cache)
    return result, f"{_shape(cache.describe())}, in process"


def _over_grpc(address: str, requests: Iterable[Request]) -> tuple[ReplayResult, str]:
    namespace = ("replay", os.urandom(4).hex())
    with connected(address) as client, client.session() as session:
        description = client.describe()
        result = play_trace(requests, client, namespace, batch=session.batch)
    return result, f"{_shape(description)}, over gRPC to {address}"


def _shape(cache: Description) -> str:
    size = f" of {cache.block_size} tokens" if cache.block_size > 1 else ""
    return f"{cache.policy}, {count(cache.num_blocks)} blocks{size}"


def _put_back(first: Request | None, rest: Iterator[Request]) -> Iterator[Request]:
    if first is not None:
        yield first
    yield from rest


def _print_tables(title: str, result: ReplayResult) -> None:
    whole, half = result.whole, result.last_half
    table = make_table("", "all requests", "last half")
    for name, field in (
        ("requests", "num_requests"),
        ("prompt tokens", "num_prompt_tokens"),
        ("hit tokens", "num_hit_tokens"),
    ):
        table.add_row(name, *(count(getattr(hits, field)) for hits in (whole, half)))
    for name, field in (
        ("token hit rate", "token_hit_rate"),
        ("block hit rate", "block_hit_rate"),
        ("requests with a hit", "request_hit_rate"),
    ):
        table.add_row(name, *(percent(getattr(hits, field)) for hits in (whole, half)))
    console = make_console()
    console.print(title, style="bold")
    console.print(table)
    rate = "" if result.requests_per_s is None else f", {count(result.requests_per_s)} requests/s"
    console.print(
        f"{count(result.num_evicted_blocks)} blocks evicted; {count(result.num_calls)} calls in "
        f"{duration(result.seconds)}{rate}"
    )
