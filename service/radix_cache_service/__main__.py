"""``python -m radix_cache_service``: a server with a flag for each field of `ServerConfig`."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import click

from radix_cache.errors import RadixCacheError
from radix_cache_service.config import ServerConfig
from radix_cache_service.server import serve

__all__ = ["main"]


def _options(command: Any) -> Any:
    for field in reversed(fields(ServerConfig)):
        flag = "--" + field.name.replace("_", "-")
        if field.name == "listen":
            command = click.option(flag, multiple=True, default=field.default, show_default=True)(command)
        elif field.name == "test_clock":
            command = click.option(flag, hidden=True)(command)
        elif field.name == "uds_mode":
            command = click.option(flag, type=_Octal(), default="660", show_default=True)(command)
        else:
            command = click.option(flag, type=type(field.default), default=field.default, show_default=True)(command)
    return command


class _Octal(click.ParamType[int]):
    name = "octal"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else int(value, 8)
        except ValueError:
            self.fail(f"{value!r} is not an octal number", param, ctx)


@click.command()
@_options
def main(**settings: Any) -> None:
    """Serve a prefix cache over gRPC until SIGTERM."""
    try:
        serve(ServerConfig(**settings))
    except RadixCacheError as error:
        click.echo(f"radix-cache: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main(prog_name="python -m radix_cache_service")
