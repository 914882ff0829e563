"""radix-cache over gRPC: `Client` and `AsyncClient` have the verbs of `radix_cache.PrefixCache`; `serve` runs a
server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radix_cache_service.client.aio import AsyncClient
    from radix_cache_service.client.blocking import Client
    from radix_cache_service.client.router import AsyncRouted, AsyncRouter, NodeInfo, NodeScore, Routed, Router
    from radix_cache_service.client.tls import Tls
    from radix_cache_service.client.watches import WatchedEvents
    from radix_cache_service.config import ServerConfig
    from radix_cache_service.errors import LayoutMismatch
    from radix_cache_service.server import BindError, Server, serve

__all__ = [
    "AsyncClient",
    "AsyncRouted",
    "AsyncRouter",
    "BindError",
    "Client",
    "LayoutMismatch",
    "NodeInfo",
    "NodeScore",
    "Routed",
    "Router",
    "Server",
    "ServerConfig",
    "Tls",
    "WatchedEvents",
    "serve",
]

_HOMES = {
    "AsyncClient": "client.aio",
    "AsyncRouted": "client.router",
    "AsyncRouter": "client.router",
    "BindError": "server",
    "Client": "client.blocking",
    "LayoutMismatch": "errors",
    "NodeInfo": "client.router",
    "NodeScore": "client.router",
    "Routed": "client.router",
    "Router": "client.router",
    "Server": "server",
    "ServerConfig": "config",
    "Tls": "client.tls",
    "WatchedEvents": "client.watches",
    "serve": "server",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that a client does not load the server, nor a server the clients."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
