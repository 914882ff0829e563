"""``radix-cache serve``: a server in the foreground, with a flag for each of its settings."""

from __future__ import annotations

from radix_cache_service.command import serve

__all__ = ["serve"]
