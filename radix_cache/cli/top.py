"""``radix-cache top``: one or many servers at a glance, live.

A server that does not answer, or refuses to, has a row that says so, and why below, until it does: the view outlives
restarts. The exit status is 1 where the last round had figures of none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from radix_cache.cli.numbers import Number
from radix_cache.cli.rates import rates_between, share
from radix_cache.cli.remote import Address, connected, connecting
from radix_cache.cli.show import count, make_console, make_table, percent
from radix_cache.errors import RadixCacheError, ServiceUnavailable

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

    from radix_cache_service import Client
    from radix_cache_service.calls import ServerStats

__all__ = ["overview", "top"]

_BAR = 8
_STATES = (
    ("leased", "red", "█"),
    ("protected", "yellow", "▓"),
    ("evictable", "green", "▒"),
    ("free", "bright_black", "░"),
)


@click.command()
@click.argument("addresses", type=Address(), nargs=-1, required=True)
@click.option("--interval", type=Number(0.1, 86_400), default=1.0, show_default=True, help="Seconds.")
@click.option("--count", "num_rounds", type=click.IntRange(1), help="End after so many rounds.")
@connecting
def top(addresses: tuple[str, ...], interval: float, num_rounds: int | None) -> None:
    """Show the servers at ADDRESSES live, a row each; end it with Ctrl-C.

    The bar is the pool: leased, protected and evictable blocks, then free ones. Hit rate, calls, failures and evictions
    are those of the last interval; a failure is a call, or an operation of a batch, whose status is not OK.
    """
    from rich.live import Live

    console = make_console()
    rows: list[_Row] = []
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(address)) for address in addresses]
        rounds = _rounds(clients, interval, num_rounds)
        try:
            if not console.is_terminal:
                for rows in rounds:
                    console.print(overview(addresses, rows))
            else:
                with Live(console=console, auto_refresh=False, screen=num_rounds is None) as live:
                    for rows in rounds:
                        live.update(overview(addresses, rows), refresh=True)
        except KeyboardInterrupt:
            return
    if all(row.now is None for row in rows):
        raise SystemExit(1)


class _Row:
    """One server: its figures, and what happened in a second; both None where it gives none, and why."""

    def __init__(self) -> None:
        self.now: ServerStats | None = None
        self.rates: dict[str, float] | None = None
        self.error: RadixCacheError | None = None

    def look(self, client: Client) -> _Row:
        """Return the row that follows this one."""
        after = _Row()
        try:
            after.now = client.stats()
        except RadixCacheError as error:
            after.error = error
            return after
        if self.now is not None:
            after.rates = rates_between(self.now, after.now)
        return after


def _rounds(clients: Sequence[Client], interval: float, num_rounds: int | None) -> Iterator[list[_Row]]:
    """Yield a row for each client, every ``interval`` seconds; a server that hangs holds up the others for as long."""
    for client in clients:
        client.timeout_s = max(interval, 1.0)
    rows, number = [_Row() for _ in clients], 0
    with ThreadPoolExecutor(len(clients)) as threads:
        while num_rounds is None or number < num_rounds:
            if number:
                time.sleep(interval)
            rows = list(threads.map(_Row.look, rows, clients))
            yield rows
            number += 1


def overview(addresses: Sequence[str], rows: Sequence[_Row]) -> Group:
    """Return the rows as a table, for a terminal of 80 columns if the addresses are short, and why some are empty."""
    from rich.console import Group
    from rich.text import Text

    table = make_table("server", "pool", "hit rate", "calls/s", "fails/s", "evict/s", "leases", "waiting")
    table.box, table.padding = None, (0, 1)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    table.columns[1].justify = "left"
    table.caption = Text(" ").join(Text(f"{mark} {state}", colour) for state, colour, mark in _STATES)
    table.caption_justify = "left"
    for address, row in zip(addresses, rows, strict=True):
        if row.now is None:
            table.add_row(address, "no answer" if isinstance(row.error, ServiceUnavailable) else "refused")
        else:
            table.add_row(address, _bar(row.now), *_figures(row.now, row.rates))
    reasons = [Text(f"{address}: {row.error}") for address, row in zip(addresses, rows, strict=True) if row.error]
    return Group(table, *reasons)


def _figures(now: ServerStats, rates: dict[str, float] | None) -> Iterator[str]:
    if rates is None:
        yield from "-" * 4
    else:
        yield percent(share(rates["num_hit_tokens"], rates["num_queried_tokens"]))
        for name in ("num_calls", "num_failed", "num_evicted_blocks"):
            yield count(rates[name])
    yield from map(count, (now.num_leases, now.num_waiting_calls))


def _bar(now: ServerStats) -> Text:
    """The pool, `_BAR` characters wide; what is there at all has one at least."""
    from rich.text import Text

    numbers = [getattr(now, f"num_{state}_blocks") for state, *_ in _STATES]
    widths = [_BAR * number // max(sum(numbers), 1) or min(number, 1) for number in numbers]
    widths[max(range(len(widths)), key=lambda place: (widths[place], place))] += _BAR - sum(widths)
    bar = Text()
    for (_, colour, mark), width in zip(_STATES, widths, strict=True):
        bar.append(mark * width, colour)
    return bar
