"""``radix-cache stats``: what a running server says of itself, once or live.

The live view outlives restarts: where there is no answer it says so, until there is one. Its exit status is that of its
last round.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from radix_cache.cli.numbers import Number
from radix_cache.cli.rates import rates_between, share
from radix_cache.cli.remote import Address, connected, connecting
from radix_cache.cli.show import count, duration, make_console, make_table, percent, plural, print_json
from radix_cache.errors import RadixCacheError, ServiceUnavailable

if TYPE_CHECKING:
    from rich.console import Console, Group

    from radix_cache_service import Client

__all__ = ["stats", "tables"]


@click.command()
@click.argument("address", type=Address())
@click.option("--watch", is_flag=True, help="Go on, with rates; end it with Ctrl-C.")
@click.option("--interval", type=Number(0.1, 86_400), default=1.0, show_default=True, help="Seconds, with --watch.")
@click.option("--count", "num_rounds", type=click.IntRange(1), help="End after so many rounds, with --watch.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch, one line a round.")
@connecting
def stats(address: str, watch: bool, interval: float, num_rounds: int | None, as_json: bool) -> None:
    """Show the figures of the server at ADDRESS.

    Blocks by state, reuse, calls and their latency. A hit rate is the cached share of the prompt tokens of all requests
    that published something.
    """
    with connected(address) as client:
        if not watch:
            _show_once(client, address, as_json)
            return
        try:
            is_answered = _watch(client, address, interval, num_rounds, as_json)
        except KeyboardInterrupt:
            return
    if not is_answered:
        raise SystemExit(1)


def _show_once(client: Client, address: str, as_json: bool) -> None:
    now = client.stats()
    if as_json:
        print_json(_as_dict(now))
    else:
        make_console().print(tables(address, client.describe(), now))


class _Round(NamedTuple):
    """The figures, and what happened in a second since those before; or the error that came in their place."""

    now: Any
    rates: dict[str, float]
    error: RadixCacheError | None = None


def _watch(client: Client, address: str, interval: float, num_rounds: int | None, as_json: bool) -> bool:
    """Show round after round; tell whether the last one had an answer."""
    console = make_console()
    rounds = _rounds(client, interval, num_rounds)
    if not as_json and console.is_terminal:
        return _watch_live(console, client.describe(), address, rounds, is_endless=num_rounds is None)
    error: RadixCacheError | None = None
    for now, rates, error in rounds:
        if as_json:
            said = {"error": _excuse(address, error)} if error else {**_as_dict(now), "rates": rates}
            print_json(said, indent=None)
        else:
            click.echo(_excuse(address, error) if error else _line(now, rates))
    return error is None


def _watch_live(console: Console, description: Any, address: str, rounds: Iterator[_Round], is_endless: bool) -> bool:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    error: RadixCacheError | None = None
    shown = Group()
    with Live(console=console, auto_refresh=False, screen=is_endless) as live:
        for now, rates, error in rounds:
            if error is None:
                shown = tables(address, description, now, rates)
            live.update(Group(shown, Text(_excuse(address, error), style="red")) if error else shown, refresh=True)
    return error is None


def _rounds(client: Client, interval: float, num_rounds: int | None) -> Iterator[_Round]:
    """Yield a round every ``interval`` seconds. Raises what the first look of all ends in."""
    before, number = client.stats(), 0
    while num_rounds is None or number < num_rounds:
        time.sleep(interval)
        try:
            now = client.stats()
        except RadixCacheError as error:
            yield _Round(None, {}, error)
        else:
            yield _Round(now, rates_between(before, now))
            before = now
        number += 1


def _excuse(address: str, error: RadixCacheError | None) -> str:
    return f"{'no answer from' if isinstance(error, ServiceUnavailable) else 'refused by'} {address}: {error}"


def _line(now: Any, rates: dict[str, float]) -> str:
    """One round in one line, for logs."""
    return (
        f"{count(rates['num_calls'])} calls/s, {count(rates['num_queried_tokens'])} prompt tokens/s, "
        f"{percent(share(rates['num_hit_tokens'], rates['num_queried_tokens']))} of them cached, "
        f"{count(rates['num_evicted_blocks'])} blocks evicted/s; "
        f"{now.num_free_blocks} free, {now.num_leased_blocks} leased, {now.num_cached_blocks} cached"
    )


def tables(address: str, description: Any, now: Any, rates: dict[str, float] | None = None) -> Group:
    """Return the figures as tables; with ``rates``, a column of what happens in a second."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.text import Text

    pool = f"{count(description.num_blocks)} blocks of {plural(description.block_size, 'token')}"
    up = timedelta(seconds=int(now.uptime_s))
    title = Text(f"{address}: {pool}, {description.policy}, up {up}", style="bold")
    blocks, reuse, calls = _blocks_table(now), _reuse_table(now, rates), _calls_table(now)
    if rates is None:
        return Group(title, blocks, reuse, calls)
    for table in (blocks, reuse, calls):  # a live view has to fit the height of a terminal
        table.box, table.padding = None, (0, 1)
    return Group(title, "", Columns([blocks, reuse], padding=(0, 4)), "", calls)


def _blocks_table(now: Any) -> Any:
    table = make_table("blocks", "", "")
    usable = now.num_free_blocks + now.num_leased_blocks + now.num_cached_blocks
    for name, number in (
        ("free", now.num_free_blocks),
        ("leased", now.num_leased_blocks),
        ("cached", now.num_cached_blocks),
        ("  evictable", now.num_evictable_blocks),
        ("  protected", now.num_protected_blocks),
    ):
        table.add_row(name, count(number), percent(share(number, usable)))
    return table


def _reuse_table(now: Any, rates: dict[str, float] | None) -> Any:
    table = make_table("reuse", "", *(["in a second"] if rates else []))

    def add(name: str, value: str, rate: str = "") -> None:
        table.add_row(name, value, *([rate] if rates else []))

    rows = (
        ("requests", "num_requests"),
        ("prompt tokens", "num_queried_tokens"),
        ("  found in the cache", "num_hit_tokens"),
        ("blocks evicted", "num_evicted_blocks"),
        ("leases expired", "num_expired_leases"),
    )
    for name, counter in rows:
        add(name, count(now.counters.get(counter, 0)), count(rates.get(counter, 0)) if rates else "")
    recent = percent(share(rates["num_hit_tokens"], rates["num_queried_tokens"])) if rates else ""
    add("hit rate", percent(now.hit_rate), recent)
    add("leases now", count(now.num_leases))
    add("  the oldest is open for", duration(now.oldest_lease_age_s))
    add("calls waiting for blocks", count(now.num_waiting_calls))
    add("streams open", count(now.num_streams))
    add("nodes in the tree", count(now.num_nodes))
    return table


def _calls_table(now: Any) -> Any:
    table = make_table("calls", "answered", "failed", "p50", "p99", "longest")
    for method, (answered, failed) in _by_name(now.num_calls).items():
        latency = now.latencies.get(method)
        times = (latency.p50_s, latency.p99_s, latency.max_s) if latency else (None, None, None)
        table.add_row(method, count(answered), count(failed), *map(duration, times))
    for verb, (answered, failed) in _by_name(now.num_operations).items():
        table.add_row(f"  {verb} in a batch", count(answered), count(failed))
    return table


def _by_name(numbers: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """How many there were of each, and how many of these failed, in the order of the names."""
    found: dict[str, tuple[int, int]] = {}
    for key, number in sorted(numbers.items()):
        name, _, code = key.partition("/")
        answered, failed = found.get(name, (0, 0))
        found[name] = answered + number, failed + (0 if code == "OK" else number)
    return found


def _as_dict(now: Any) -> dict[str, Any]:
    latencies = {method: latency._asdict() for method, latency in now.latencies.items()}
    return {**asdict(now), "latencies": latencies, "hit_rate": now.hit_rate}
