"""The events of a server, from its settings to its ports: no thread, socket or library unless they ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radix_cache import PrefixCache
from radix_cache_service.config import ServerConfig
from radix_cache_service.events.pieces import Pieces
from radix_cache_service.events.settings import replay_address_of
from radix_cache_service.events.stream import EventStream
from radix_cache_service.state.numbers import Numbers

if TYPE_CHECKING:
    from radix_cache_service.events.sockets import EventSockets

__all__ = ["EventService"]


class EventService:
    """Publishes what ``cache`` stores and removes. stream: None where that is not asked for. addresses: of the ZeroMQ
    ports, publisher and replay, with the real numbers, once started.
    """

    def __init__(self, config: ServerConfig, cache: PrefixCache) -> None:
        self.stream: EventStream | None = None
        self.addresses: list[str] = []
        self._config = config
        self._sockets: EventSockets | None = None
        self._pieces = Pieces(config.block_size)
        encode = cut = None
        if config.events_listen is not None:
            from radix_cache_service.events.wire import EventEncoder  # noqa: PLC0415 - an extra

            encode = EventEncoder(config.block_size, config.events_format, config.events_rank)
            cut = self._pieces
        if config.events or encode is not None:
            numbers = Numbers(config.state_dir)
            self.stream = EventStream(
                cache, config.max_queued_events, config.max_kept_events, encode, cut, numbers=numbers
            )

    def start(self) -> None:
        """Open the ports and begin. Raises `OSError` for one that is taken."""
        if self.stream is None:
            return
        if self._config.events_listen is not None:
            from radix_cache_service.events.curve import read_curve  # noqa: PLC0415 - an extra
            from radix_cache_service.events.sockets import EventSockets  # noqa: PLC0415 - an extra

            key_file = self._config.events_key_file
            self._sockets = EventSockets(
                self.stream,
                self._config.events_listen,
                replay_address_of(self._config),
                self._config.events_topic,
                self._pieces.num_waiting,
                None if key_file is None else read_curve(key_file, self._config.events_readers_dir),
            )
            self._sockets.start()
            self.addresses = self._sockets.addresses
        self.stream.start()

    def close(self) -> None:
        """Publish what is left, and close the ports."""
        if self._sockets is not None:
            self._sockets.close_replays()
        if self.stream is not None:
            self.stream.close()
        if self._sockets is not None:
            self._sockets.close()
