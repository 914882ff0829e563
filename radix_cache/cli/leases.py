"""``radix-cache leases``: who holds what on a running server, and the end of an engine that is dead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from radix_cache.cli.remote import Address, connected, connecting
from radix_cache.cli.show import count, duration, make_console, make_table, plural, print_json, printable
from radix_cache.stats import LeaseInfo

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["leases", "listed"]


@click.command()
@click.argument("address", type=Address())
@click.option("-e", "--engine", metavar="ID", help="Only the leases of this engine.")
@click.option("--release", is_flag=True, help="End them. The engine must be dead: its kernels would go on writing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the leases, or with --release how many have ended.")
@connecting
def leases(address: str, engine: str | None, release: bool, as_json: bool) -> None:
    """List the leases on the server at ADDRESS, the oldest first.

    Each with the tokens that were cached when it was opened, those that it has published, its private and redundant
    blocks, and how long it lives on if nothing is heard of its engine. Leases that were handed over, with a time of
    their own, are not ended by --release.
    """
    if release and engine is None:
        raise click.UsageError("--release needs --engine: nobody means all of them")
    with connected(address) as client:
        if release and engine is not None:
            _say_released(client.release_engine(engine), engine, as_json)
        else:
            _say(client.leases(engine), as_json)


def _say_released(num_released: int, engine: str, as_json: bool) -> None:
    if as_json:
        print_json({"num_released_leases": num_released})
    else:
        click.echo(f"{plural(num_released, 'lease')} of engine {engine} released")


def _say(found: Sequence[LeaseInfo], as_json: bool) -> None:
    if as_json:
        print_json([asdict(info) for info in found])
    else:
        make_console().print(listed(found))


def listed(found: Sequence[LeaseInfo]) -> Table:
    """Return the leases as a table, a row each."""
    table = make_table("lease", "engine", "namespace", "cached", "published", "private", "redundant", "left", "")
    for info in found:
        table.add_row(
            printable(info.lease_id),
            printable(info.engine_id or "-"),
            printable(repr(info.namespace)),
            count(info.num_cached_tokens),
            count(info.num_published_tokens),
            count(info.num_private_blocks),
            count(info.num_redundant_blocks),
            duration(info.left_s),
            "pin" if info.is_pin else "handed over" if info.is_promised else "",
        )
    table.caption = plural(len(found), "lease")
    return table
