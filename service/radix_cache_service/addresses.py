"""Which addresses never leave the machine. Others carry a token in the clear only if somebody says so."""

from __future__ import annotations

import ipaddress

__all__ = ["is_local"]


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
