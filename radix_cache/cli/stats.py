"""``radix-cache stats``: what a running server says of itself, once or live."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from radix_cache.cli.remote import Address, connected
from radix_cache.cli.show import count, duration, make_console, make_table, percent, plural, print_json

if TYPE_CHECKING:
    from rich.console import Group

    from radix_cache_service import Client

__all__ = ["stats", "tables"]


@click.command()
@click.argument("address", type=Address())
@click.option("--watch", is_flag=True, help="Go on, with rates; end it with Ctrl-C.")
@click.option("--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds, with --watch.")
@click.option("--count", "num_rounds", type=click.IntRange(1), help="End after so many rounds, with --watch.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch, one line a round.")
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
            _watch(client, address, interval, num_rounds, as_json)
        except KeyboardInterrupt:
            return


def _show_once(client: Client, address: str, as_json: bool) -> None:
    now = client.stats()
    if as_json:
        print_json(_as_dict(now))
    else:
        make_console().print(tables(address, client.describe(), now))


def _watch(client: Client, address: str, interval: float, num_rounds: int | None, as_json: bool) -> None:
    from rich.live import Live

    console = make_console()
    rounds = _rounds(client, interval, num_rounds)
    if as_json:
        for now, rates in rounds:
            print_json({**_as_dict(now), "rates": rates}, indent=None)
    elif not console.is_terminal:
        for now, rates in rounds:
            click.echo(_line(now, rates))
    else:
        description = client.describe()
        with Live(console=console, auto_refresh=False, screen=num_rounds is None) as live:
            for now, rates in rounds:
                live.update(tables(address, description, now, rates), refresh=True)


def _rounds(client: Client, interval: float, num_rounds: int | None) -> Iterator[tuple[Any, dict[str, float]]]:
    """Yield the figures every ``interval`` seconds, with what happened in a second since the last time."""
    before, number = client.stats(), 0
    while num_rounds is None or number < num_rounds:
        time.sleep(interval)
        now = client.stats()
        yield now, _rates(before, now)
        before, number = now, number + 1


def _rates(before: Any, now: Any) -> dict[str, float]:
    """What each counter, and the calls, gained in a second."""
    seconds = max(now.uptime_s - before.uptime_s, 1e-9)
    gained = {name: (value - before.counters.get(name, 0)) / seconds for name, value in now.counters.items()}
    return {**gained, "num_calls": (sum(now.num_calls.values()) - sum(before.num_calls.values())) / seconds}


def _line(now: Any, rates: dict[str, float]) -> str:
    """One round in one line, for logs."""
    return (
        f"{count(rates['num_calls'])} calls/s, {count(rates['num_queried_tokens'])} prompt tokens/s, "
        f"{percent(_rate(rates['num_hit_tokens'], rates['num_queried_tokens']))} of them cached, "
        f"{count(rates['num_evicted_blocks'])} blocks evicted/s; "
        f"{now.num_free_blocks} free, {now.num_leased_blocks} leased, {now.num_cached_blocks} cached"
    )


def tables(address: str, description: Any, now: Any, rates: dict[str, float] | None = None) -> Group:
    """Return the figures as tables; with ``rates``, a column of what happens in a second."""
    from rich.console import Group
    from rich.text import Text

    pool = f"{count(description.num_blocks)} blocks of {plural(description.block_size, 'token')}"
    up = timedelta(seconds=int(now.uptime_s))
    title = Text(f"{address}: {pool}, {description.policy}, up {up}", style="bold")
    return Group(title, _blocks_table(now), _reuse_table(now, rates), _calls_table(now))


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
        table.add_row(name, count(number), percent(_rate(number, usable)))
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
    recent = percent(_rate(rates["num_hit_tokens"], rates["num_queried_tokens"])) if rates else ""
    add("hit rate", percent(now.hit_rate), recent)
    add("leases now", count(now.num_leases))
    add("nodes in the tree", count(now.num_nodes))
    return table


def _calls_table(now: Any) -> Any:
    table = make_table("calls", "answered", "failed", "p50", "p99", "longest")
    answered: dict[str, int] = {}
    failed: dict[str, int] = {}
    for key, number in now.num_calls.items():
        method, _, code = key.partition("/")
        answered[method] = answered.get(method, 0) + number
        failed[method] = failed.get(method, 0) + (0 if code == "OK" else number)
    for method in sorted(answered):
        latency = now.latencies.get(method)
        times = (latency.p50_s, latency.p99_s, latency.max_s) if latency else (None, None, None)
        table.add_row(method, count(answered[method]), count(failed[method]), *map(duration, times))
    return table


def _as_dict(now: Any) -> dict[str, Any]:
    latencies = {method: latency._asdict() for method, latency in now.latencies.items()}
    return {**asdict(now), "latencies": latencies, "hit_rate": now.hit_rate}


def _rate(part: float, whole: float) -> float | None:
    return part / whole if whole else None
