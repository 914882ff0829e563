"""A client for the length of one command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from radix_cache.errors import ServiceUnavailable

if TYPE_CHECKING:
    from radix_cache_service import Client

__all__ = ["connected"]


@contextmanager
def connected(address: str) -> Iterator[Client]:
    """Yield a client of the server at ``address``; that it cannot be reached becomes one line that names it."""
    from radix_cache_service import Client

    try:
        with Client(address) as client:
            yield client
    except ServiceUnavailable as error:
        raise click.ClickException(f"no answer from {address}: {error}") from error
