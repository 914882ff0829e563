"""Who looks on all the while: the figures are asked for, and must add up at any moment."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any

from radix_cache.errors import RadixCacheError
from radix_cache_service import Client

from .request import Violation

_BLOCKS = b"radix_cache_blocks{"
_BEHIND_BLOCKS = b"radix_cache_pool_blocks "


def check_sums(stats: Any, num_usable_blocks: int) -> None:
    """Raise `Violation` unless each block is in one state: that holds at any moment."""
    cached = stats.num_cached_blocks
    total = stats.num_free_blocks + stats.num_leased_blocks + cached
    if total != num_usable_blocks or cached != stats.num_evictable_blocks + stats.num_protected_blocks:
        raise Violation("the figures do not add up", stats=str(stats), num_usable_blocks=num_usable_blocks)


def check_statuses(stats: Any) -> None:
    """Raise `Violation` if a call ended in a way in which none may."""
    ended = {**stats.num_calls, **stats.num_operations}
    bad = {name: count for name, count in ended.items() if name.rpartition("/")[2] in {"INTERNAL", "UNKNOWN"}}
    if bad:
        raise Violation("the server had internal errors", calls=bad)


class Scraper(threading.Thread):
    """Asks for the figures ten times a second. say: told of a violation. num_scrapes: how often it got them."""

    def __init__(self, address: str, metrics_url: str, num_usable_blocks: int, say: Callable[[Any], None]) -> None:
        super().__init__(name="scraper", daemon=True)
        self.num_scrapes = 0
        self.num_metrics = 0
        self._client = Client(address, timeout_s=1.0)
        self._metrics_url = metrics_url
        self._num_usable_blocks = num_usable_blocks
        self._say = say
        self._ended = threading.Event()

    def run(self) -> None:
        """Ask until stopped."""
        while not self._ended.wait(0.1):
            try:
                self._scrape()
            except (RadixCacheError, OSError, HTTPException):
                continue  # the server is down at times
            except Violation as violation:
                self._say(violation)

    def _scrape(self) -> None:
        stats = self._client.stats()
        check_sums(stats, self._num_usable_blocks)
        check_statuses(stats)
        self.num_scrapes += 1
        with urllib.request.urlopen(self._metrics_url, timeout=1.0) as answer:
            lines = answer.read().splitlines()
        if not any(line.startswith(_BEHIND_BLOCKS) for line in lines):
            return  # cut off: the server was killed meanwhile
        blocks = sum(float(line.split()[-1]) for line in lines if line.startswith(_BLOCKS))
        if blocks != self._num_usable_blocks:
            raise Violation("the blocks of the metrics do not add up", found=blocks, there_are=self._num_usable_blocks)
        self.num_metrics += 1

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        if self.is_alive():
            self.join()
        self._client.close()
