"""What every benchmark is told."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from benchmarks import sglang
from benchmarks.caches import Cache

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """size: "full" for figures to quote, "quick" for a first look (seconds each), "tiny" to see that all still runs."""

    size: str = "full"
    with_peers: bool = True

    @cached_property
    def peers(self) -> tuple[type[Cache], ...]:
        """The peers that can be measured in this process."""
        return sglang.PEERS if self.with_peers and sglang.is_installed() else ()

    def pick(self, full: T, quick: T, tiny: T) -> T:
        """The one for this size."""
        return {"full": full, "quick": quick, "tiny": tiny}[self.size]
