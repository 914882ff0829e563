"""Addresses: what one looks like, and which never leave the machine. Others carry a token in the clear only if somebody
says so.
"""

from __future__ import annotations

import ipaddress
import os

from radix_cache.errors import InvalidArgument

__all__ = ["check_address", "check_host_and_port", "is_local"]

_MAX_PATH_BYTES = 107  # unix(7): 108 with the zero behind it


def is_local(address: str) -> bool:
    """Tell whether ``address``, as a server listens on it or a client connects to it, is a unix socket or loopback.

    What a name resolves to can change, so of the names only ``localhost`` is taken for what it says.
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].removeprefix("ipv4:").removeprefix("ipv6:").strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(address: str) -> None:
    """Raise `InvalidArgument` unless a server can be told to listen there."""
    if not isinstance(address, str):
        raise InvalidArgument(f"listen takes addresses, not {address!r}")
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path.startswith("/"):
            raise InvalidArgument(f"listen: {address!r} needs an absolute path, as in unix:/run/radix-cache.sock")
        if (num_bytes := len(os.fsencode(path))) > _MAX_PATH_BYTES:
            raise InvalidArgument(f"listen: {address!r} has a path of {num_bytes} bytes, at most {_MAX_PATH_BYTES}")
        return
    check_host_and_port(address, "listen", "is neither host:port nor unix:/path")


def check_host_and_port(address: str, name: str, text: str) -> None:
    """Raise `InvalidArgument` with ``name`` and ``text`` unless it is host:port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise InvalidArgument(f"{name}: {address!r} {text}")
