"""The process that owns the KV pool: when it ends, what is cached is worth nothing, so the server ends too.

A server that is started again finds another pool, under another `pool_epoch`, and its cache is cold; engines find its
new epoch and map the new pool. In between they get no answer, which stops them sooner than a wrong one would.
"""

from __future__ import annotations

import asyncio
import logging

from radix_cache.errors import InvalidArgument
from radix_cache.pool_descriptor import PoolDescriptor, PoolGone

__all__ = ["end_with_owner"]

_INTERVAL_S = 0.5

_log = logging.getLogger(__name__)


async def end_with_owner(pool: PoolDescriptor, ended: asyncio.Event) -> None:
    """Set ``ended`` when the owner has ended, and raise `PoolGone`. Where that can't be told, as when no more files may
    be opened, ask again.
    """
    while _may_be_alive(pool):  # noqa: ASYNC110 - another process's lock sends no event
        await asyncio.sleep(_INTERVAL_S)
    _log.error("the owner of the KV pool has ended: draining", extra={"pool_id": pool.pool_id})
    ended.set()
    raise PoolGone(f"the owner of pool {pool.pool_id} has ended, and so has this server")


def _may_be_alive(pool: PoolDescriptor) -> bool:
    try:
        return pool.is_owner_alive()
    except InvalidArgument as error:
        _log.warning("the owner of the KV pool could not be looked for: %s", error, extra={"pool_id": pool.pool_id})
        return True
