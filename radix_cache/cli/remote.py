"""A client for the length of one command, and the options that say who it is and whom it trusts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from radix_cache.errors import ServiceUnavailable

if TYPE_CHECKING:
    from radix_cache_service import Client, Tls

__all__ = ["Address", "connected", "connecting"]

F = TypeVar("F", bound=Callable[..., Any])

_KEY = f"{__name__}."
_OPTIONS = {
    "tls": "Speak TLS, and trust whom gRPC trusts.",
    "tls_ca": "Speak TLS, and trust who is in this PEM file.",
    "tls_certificate": "PEM file of this client's certificate, where the server asks for one.",
    "tls_private_key": "PEM file of its private key.",
    "token_file": "A file with the bearer token in it.",
}


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


def connecting(command: F) -> F:
    """Give a command the options that `connected` goes by; its function is not passed them.

    Each is also an environment variable, RADIX_CACHE_CLIENT_ and its name. There is none for the token itself: others
    can read command lines, and variables are handed down.
    """
    for name, help_text in reversed(_OPTIONS.items()):
        command = click.option(
            "--" + name.replace("_", "-"),
            is_flag=name == "tls",
            type=None if name == "tls" else click.Path(exists=True, dir_okay=False, path_type=Path),
            envvar=f"RADIX_CACHE_CLIENT_{name.upper()}",
            expose_value=False,
            callback=_keep,
            help=help_text,
        )(command)
    return command


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    ctx.meta[f"{_KEY}{param.name}"] = value


@contextmanager
def connected(address: str) -> Iterator[Client]:
    """Yield a client of the server at ``address``; that it cannot be reached becomes one line that names it.

    To be called in a command with the options of `connecting`.
    """
    from radix_cache_service import Client

    try:
        with Client(address, tls=_tls(), token=_token()) as client:
            yield client
    except ServiceUnavailable as error:
        raise click.ClickException(f"no answer from {address}: {error}") from error


def _token() -> str | None:
    from radix_cache_service.access.tokens import is_token

    path = _said("token_file")
    if path is None:
        return None
    token = path.read_text(encoding="utf-8", errors="replace").strip()
    if not is_token(token):
        raise click.ClickException(
            f"--token-file {path} has no token in it: one has 16 to 512 letters, digits and -._~+/ (=, at the end)"
        )
    return str(token)


def _tls() -> Tls | None:
    from radix_cache_service import Tls

    root, certificate, private_key = map(_said, ("tls_ca", "tls_certificate", "tls_private_key"))
    if not (_said("tls") or root or certificate or private_key):
        return None
    return Tls(root_certificates=root, certificate=certificate, private_key=private_key)


def _said(name: str) -> Any:
    return click.get_current_context().meta[f"{_KEY}{name}"]
