"""A client for the length of one command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from radix_cache.errors import ServiceUnavailable

if TYPE_CHECKING:
    from radix_cache_service import Client

__all__ = ["Address", "connected"]


class Address(click.ParamType[str]):
    """Where a server listens: HOST:PORT or unix:/path."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the address, or fail with a usage error: grpc would take nearly anything and fail later."""
        host, _, port = value.rpartition(":")
        is_tcp = bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 65536
        if not value.startswith("unix:/") and (value.startswith("unix:") or not is_tcp):
            self.fail(f"{value!r} is neither HOST:PORT nor unix:/path", param, ctx)
        return str(value)


@contextmanager
def connected(address: str) -> Iterator[Client]:
    """Yield a client of the server at ``address``; that it cannot be reached becomes one line that names it."""
    from radix_cache_service import Client

    try:
        with Client(address) as client:
            yield client
    except ServiceUnavailable as error:
        raise click.ClickException(f"no answer from {address}: {error}") from error
