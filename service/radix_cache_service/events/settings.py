"""What the settings of events may be, and what follows from them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from radix_cache.errors import InvalidArgument
from radix_cache_service.access.addresses import check_host_and_port, is_local

if TYPE_CHECKING:
    from radix_cache_service.config import ServerConfig

__all__ = ["EVENT_FORMATS", "check_events", "replay_address_of"]

EVENT_FORMATS = ("map", "array")


def check_events(config: ServerConfig) -> None:
    """Raise `InvalidArgument` for a setting of events that is wrong, or whose packages are missing."""
    if config.events_format not in EVENT_FORMATS:
        raise InvalidArgument(f"events_format is one of {', '.join(EVENT_FORMATS)}, not {config.events_format!r}")
    _check_together(config)
    if config.events_listen is None:
        return
    for name in ("events_listen", "events_replay_listen"):
        address = getattr(config, name)
        if address is not None:
            check_host_and_port(address, name, "is not host:port")
            _check_privacy(config, name, address)
    text = "leaves no port for what was missed: set events_replay_listen"
    check_host_and_port(replay_address_of(config), "events_listen", text)
    if find_spec("zmq") is None or find_spec("msgspec") is None:
        raise InvalidArgument("events_listen needs more: pip install 'radix-cache[service,events]'")
    if config.events_key_file is not None:
        from radix_cache_service.events.curve import read_curve  # noqa: PLC0415 - an extra

        read_curve(config.events_key_file, config.events_readers_dir)


def _check_together(config: ServerConfig) -> None:
    for name, other in (
        ("events_replay_listen", "events_listen"),
        ("events_key_file", "events_listen"),
        ("events_readers_dir", "events_key_file"),
    ):
        if getattr(config, name) is not None and getattr(config, other) is None:
            raise InvalidArgument(f"{name} goes with {other}")


def _check_privacy(config: ServerConfig, name: str, address: str) -> None:
    if not is_local(address) and config.events_key_file is None and not config.allow_plaintext_events:
        raise InvalidArgument(
            f"{name}: events, which have the prompts in them, would leave {address} in the clear; "
            "listen on loopback, or set events_key_file or allow_plaintext_events"
        )


def replay_address_of(config: ServerConfig) -> str:
    """Return where missed events are sent again: 1000 ports above the others, unless it is said."""
    if config.events_replay_listen is not None:
        return config.events_replay_listen
    host, _, port = (config.events_listen or ":0").rpartition(":")
    return f"{host}:{int(port) and int(port) + 1000}"
