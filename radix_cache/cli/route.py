"""``radix-cache route``: a router of several servers in the foreground, with a flag for each of its settings."""

from __future__ import annotations

from radix_cache_service.router.command import route

__all__ = ["route"]
