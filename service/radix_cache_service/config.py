"""What a server is started with, checked as a whole before any port opens."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from radix_cache import PrefixCache
from radix_cache.errors import InvalidArgument
from radix_cache.operations import check_count, check_seconds

__all__ = ["ServerConfig", "message_limit"]

_OVERHEAD_BYTES = 1024 * 1024
_LEAST_MESSAGE_BYTES = 64 * 1024 * 1024
_MOST_MESSAGE_BYTES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """A server's settings. Raises `InvalidArgument` that names the field and the value, whatever is wrong with it.

    listen: addresses, ``host:port`` (port 0: any free one) or ``unix:/path``.
    num_blocks, block_size, policy, num_reserved_blocks, growth_share: as in `radix_cache.PrefixCache`.
    lease_ttl_s: seconds that a lease lives unheard of.
    max_tokens: the longest prompt; message limits of both directions follow from it.
    max_operations: the most operations in a batch. max_streams: sessions and other streams open at once.
    uds_mode: permissions of unix sockets. layout_fingerprint: what the KV blocks look like; clients may insist on it.
    drain_delay_s: time between NOT_SERVING and the end of service. grace_s: time that calls in flight then have.
    test_clock: a file that the lease clock is read from, for tests of expiry.
    """

    listen: tuple[str, ...] = ("127.0.0.1:50051",)
    num_blocks: int = 65536
    block_size: int = 16
    policy: str = "lru"
    num_reserved_blocks: int = 0
    growth_share: float = 0.01
    lease_ttl_s: float = 60.0
    max_tokens: int = 1_048_576
    max_operations: int = 1024
    max_streams: int = 1024
    uds_mode: int = 0o660
    layout_fingerprint: str = ""
    drain_delay_s: float = 0.0
    grace_s: float = 5.0
    test_clock: str | None = None

    def __post_init__(self) -> None:
        if not self.listen:
            raise InvalidArgument("listen needs at least one address")
        for address in self.listen:
            _check_address(address)
        for name, least, most in (
            ("max_tokens", 1, 2**28),
            ("max_operations", 1, 2**20),
            ("max_streams", 1, 2**20),
            ("uds_mode", 0, 0o777),
        ):
            check_count(getattr(self, name), name, least, most)
        for name in ("drain_delay_s", "grace_s"):
            if getattr(self, name) != 0:
                check_seconds(getattr(self, name), name)
        check_seconds(self.lease_ttl_s, "lease_ttl_s")
        self.make_cache()  # checks all that the cache is made of

    def make_cache(self) -> PrefixCache:
        """Return a new, empty cache of these settings."""
        names = {"num_blocks", "block_size", "policy", "num_reserved_blocks", "growth_share", "lease_ttl_s"}
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name in names}
        if self.test_clock is not None:
            settings["clock"] = _FileClock(self.test_clock)
        return PrefixCache(**settings)

    @property
    def max_message_bytes(self) -> int:
        """The longest message of either direction."""
        return message_limit(self.max_tokens)


class _FileClock:
    """Reads the time from a file at each call."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def __call__(self) -> float:
        return float(self._path.read_text(encoding="ascii") or 0)


def message_limit(max_tokens: int) -> int:
    """Return how long a message may be that serves prompts of ``max_tokens``.

    An insert's answer at block size 1 has two ids of 4 bytes for each token; a batch has several answers.
    """
    return min(max(_LEAST_MESSAGE_BYTES, 24 * max_tokens + _OVERHEAD_BYTES), _MOST_MESSAGE_BYTES)


def _check_address(address: str) -> None:
    if not isinstance(address, str):
        raise InvalidArgument(f"listen takes addresses, not {address!r}")
    if address.startswith("unix:"):
        if not address.removeprefix("unix:").startswith("/"):
            raise InvalidArgument(f"listen: {address!r} needs an absolute path, as in unix:/run/radix-cache.sock")
        return
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise InvalidArgument(f"listen: {address!r} is neither host:port nor unix:/path")
