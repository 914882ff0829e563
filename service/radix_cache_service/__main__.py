"""``python -m radix_cache_service``: a server with a flag for each field of `ServerConfig`."""

from __future__ import annotations

import sys

import click

from radix_cache.errors import RadixCacheError
from radix_cache_service.command import serve

__all__ = ["main"]


def main() -> None:
    """Run the command; what is wrong with its surroundings becomes one line."""
    try:
        serve(prog_name="python -m radix_cache_service")
    except RadixCacheError as error:
        click.echo(f"radix-cache: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
