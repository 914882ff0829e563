"""Health as grpc.health.v1 has it: "" is liveness, the service's full name readiness.

The stock servicer says that "" serves from the moment it is made, and its watches outlive the service: each would hold
up the end of the server for the whole of its grace.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

__all__ = ["Health"]

_States = health_pb2.HealthCheckResponse


class Health(health.aio.HealthServicer):
    """Speaks of "" and of ``service``."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service
        self._watches: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Not alive yet; to be called before any port opens."""
        await self.set("", _States.NOT_SERVING)
        await self.set(self._service, _States.NOT_SERVING)

    async def ready(self) -> None:
        """Alive, and to be sent calls."""
        await self.set("", _States.SERVING)
        await self.set(self._service, _States.SERVING)

    async def unready(self) -> None:
        """Alive, but to be sent no more calls."""
        await self.set(self._service, _States.NOT_SERVING)

    def end_watches(self) -> None:
        """End all open watches with UNAVAILABLE."""
        for watch in self._watches:
            watch.cancel("ending")

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        """Send the state, and each change of it, until the client has enough or the server ends."""
        watch = asyncio.current_task()
        assert watch is not None
        self._watches.add(watch)
        try:
            await super().Watch(request, context)
        except asyncio.CancelledError as cancelled:
            if cancelled.args != ("ending",):
                raise
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        finally:
            self._watches.discard(watch)
