"""The server under test: the product's own main, which on SIGUSR1 also walks everything and says what it found.

For tests of the harness itself, CHAOS_PLANT names a fault to put in. None of this is in the product.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radix_cache import IntegrityError, PrefixCache
from radix_cache.operations import Insert, Operation
from radix_cache.pool import FreeList
from radix_cache_service import server


def walk(cache: Any, path: Path) -> None:
    """Write down what the integrity check finds."""
    try:
        cache.check_integrity()
        said = None
    except IntegrityError as error:
        said = str(error)
    unfinished = path.with_suffix(".part")
    gc.collect()
    unfinished.write_text(json.dumps({"error": said, "num_python_blocks": sys.getallocatedblocks()}), encoding="utf-8")
    unfinished.replace(path)


def with_walks(start: Any) -> Any:
    """Wrap `Server.start`."""

    async def started(self: Any) -> None:
        await start(self)
        path = Path(os.environ["CHAOS_WALK"])
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, walk, self.servicer.cache, path)

    return started


def hand_out_twice() -> None:
    """Now and then, a pool hands out a block that it handed out a while ago; all sums stay right."""
    take, dice, before = FreeList.take, random.Random(0), [b""]

    def taken(self: FreeList, num_blocks: int) -> bytes:
        ids = take(self, num_blocks)
        if ids and dice.random() < 0.01 and before[0] and before[0] not in ids:
            ids = ids[:-4] + before[0]
        elif ids and dice.random() < 0.1:
            before[0] = ids[:4]
        return ids

    FreeList.take = taken  # type: ignore[method-assign]


def forget_inserts() -> None:
    """Now and then, an insert is answered, and what it published is dropped at once."""
    run, dice = PrefixCache.run, random.Random(0)

    def ran(self: PrefixCache, asked: Sequence[Operation], **options: Any) -> Any:
        answers = run(self, asked, **options)
        inserts = [operation for operation in asked if isinstance(operation, Insert)]
        if inserts and dice.random() < 0.005:
            self.reset()
            for lease in self._executor.leases:
                lease._is_stale = False
        return answers

    PrefixCache.run = ran  # type: ignore[method-assign, assignment]


PLANTS = {"hand-out-twice": hand_out_twice, "forget-inserts": forget_inserts}

if __name__ == "__main__":
    server.Server.start = with_walks(server.Server.start)  # type: ignore[method-assign]
    PLANTS.get(os.environ.get("CHAOS_PLANT", ""), lambda: None)()
    runpy.run_module("radix_cache_service", run_name="__main__", alter_sys=True)
