"""``radix-cache serve``: a server in the foreground, with a flag for each of its settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import click

from radix_cache.errors import InvalidArgument
from radix_cache_service.config import ServerConfig

__all__ = ["serve"]

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULTS = ServerConfig()


class _Octal(click.ParamType[int]):
    """A file mode, written as ``chmod`` takes it."""

    name = "mode"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number, or fail with a usage error."""
        try:
            return value if isinstance(value, int) else int(value, 8)
        except ValueError:
            self.fail(f"{value!r} is not an octal number such as 660", param, ctx)


def _setting(name: str, help_text: str, *more_flags: str, kind: Any = None) -> Callable[[F], F]:
    """An option for the `ServerConfig` field ``name``, with its default."""
    default = getattr(_DEFAULTS, name)
    return click.option(
        f"--{name.replace('_', '-')}",
        *more_flags,
        name,
        default=f"{default:o}" if isinstance(kind, _Octal) else default,
        type=kind or type(default),
        metavar=None if kind else {int: "N", float: "X"}.get(type(default)),
        show_default=default != "",
        help=help_text,
    )


@click.command()
@click.option(
    "--listen",
    multiple=True,
    metavar="ADDRESS",
    default=_DEFAULTS.listen,
    show_default=True,
    help="HOST:PORT (port 0: any free one) or unix:/path; may be given several times.",
)
@_setting("num_blocks", "Blocks in the pool.")
@_setting("block_size", "Tokens in a block.")
@_setting("policy", "Eviction policy: a name or module:Class.")
@_setting("num_reserved_blocks", "Ids below this are never handed out.", "--reserve-blocks")
@_setting("growth_share", "Share of the pool that is left to requests which are running already.")
@_setting("lease_ttl_s", "Seconds that a lease lives unheard of.", "--lease-ttl")
@_setting("max_tokens", "The longest prompt; message limits follow from it.")
@_setting("max_operations", "The most operations in a batch.")
@_setting("max_streams", "Sessions and other streams open at once.")
@_setting("uds_mode", "Permissions of unix sockets.", kind=_Octal())
@_setting("layout_fingerprint", "What the KV blocks look like; clients may insist on it.")
@_setting("drain_delay_s", "Seconds between the end of readiness and the end of service.", "--drain-delay")
@_setting("grace_s", "Seconds that calls in flight then have.", "--grace")
def serve(**settings: Any) -> None:
    """Serve a prefix cache over gRPC until SIGTERM or Ctrl-C.

    Prints "listening on ADDRESS" for each address once it serves. There is no authentication: listen on loopback or on
    a unix socket, or where only engines can reach it.
    """
    try:
        config = ServerConfig(**settings)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
    from radix_cache_service.server import serve as run_server

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run_server(config)
