"""What of a server can be seen from outside beside its calls: metrics on a port of their own, and traces.

Each is off, and its library not imported, unless the settings ask for it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from radix_cache_service.config import ServerConfig
from radix_cache_service.servicer import Servicer
from radix_cache_service.telemetry.figures import Figures, take_figures

if TYPE_CHECKING:
    from radix_cache_service.telemetry.scrape import Scrapes

__all__ = ["Telemetry"]


class Telemetry:
    """Watches ``servicer``. is_serving: for the server to say. metrics_address: with the real port, once started."""

    def __init__(self, config: ServerConfig, servicer: Servicer) -> None:
        self.is_serving = False
        self.metrics_address: str | None = None
        self._listen = config.metrics_listen
        self._servicer = servicer
        self._scrapes: Scrapes | None = None
        if config.otlp_endpoint is not None:
            from radix_cache_service.telemetry.tracing import Tracing  # noqa: PLC0415 - an extra

            servicer.metrics.tracing = Tracing(config.otlp_endpoint, config.trace_share)

    def start(self) -> None:
        """Open the port of the metrics. Raises `OSError` if it is taken."""
        if self._listen is not None:
            from radix_cache_service.telemetry.prometheus import families  # noqa: PLC0415 - only where it is wanted
            from radix_cache_service.telemetry.scrape import Scrapes  # noqa: PLC0415 - see above

            self._scrapes = Scrapes(self._listen, self._figures, families)
            self.metrics_address = self._scrapes.address

    def _figures(self, loop_delay_s: float) -> Figures:
        return take_figures(self._servicer, is_serving=self.is_serving, loop_delay_s=loop_delay_s)

    async def close(self) -> None:
        """Close the port, and send the spans that are left."""
        if self._scrapes is not None:
            await asyncio.to_thread(self._scrapes.close)
            self._scrapes = None
        if self._servicer.metrics.tracing is not None:
            self._servicer.metrics.tracing.close()
            self._servicer.metrics.tracing = None
