"""Health as grpc.health.v1 has it: "" is liveness, the service's full name readiness.

The stock servicer says that "" serves from the moment it is made, and its watches outlive the service: each would hold
up the end of the server for the whole of its grace.
"""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health, health_pb2

from radix_cache_service.streams import OpenStreams

__all__ = ["Health"]

_States = health_pb2.HealthCheckResponse


class Health(health.aio.HealthServicer):
    """Speaks of "" and of ``service``. Its watches end with ``streams``, and do not count there."""

    def __init__(self, service: str, streams: OpenStreams) -> None:
        super().__init__()
        self._service = service
        self._streams = streams

    async def start(self) -> None:
        """Not alive yet; to be called before any port opens."""
        await self.set("", _States.NOT_SERVING)
        await self.set(self._service, _States.NOT_SERVING)

    async def alive(self) -> None:
        """Alive; it is said elsewhere whether it is to be sent calls."""
        await self.set("", _States.SERVING)

    async def ready(self) -> None:
        """Alive, and to be sent calls."""
        await self.set("", _States.SERVING)
        await self.set(self._service, _States.SERVING)

    async def unready(self) -> None:
        """Alive, but to be sent no more calls."""
        await self.set(self._service, _States.NOT_SERVING)

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Say the state of both; the stock servicer leaves this method out."""
        states = {
            name: await self.Check(health_pb2.HealthCheckRequest(service=name), context) for name in ("", self._service)
        }
        return health_pb2.HealthListResponse(statuses=states)  # type: ignore[attr-defined]  # not in the stubs yet

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        """Send the state, and each change of it, until the client has enough or the server ends."""
        await self._streams.wait(context, super().Watch(request, context))
