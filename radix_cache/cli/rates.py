"""What happens in a second, from two looks at a server's counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radix_cache_service.calls import ServerStats

__all__ = ["num_failed", "rates_between", "share"]


def rates_between(before: ServerStats, now: ServerStats) -> dict[str, float]:
    """Return what each counter gained in a second, the calls (``num_calls``) and what failed of them (``num_failed``).

    A server that started anew in between has gained what it has.
    """
    is_new = now.uptime_s < before.uptime_s
    seconds = max(now.uptime_s - (0 if is_new else before.uptime_s), 1e-9)

    def rate(after: float, earlier: float) -> float:
        return (after - (0 if is_new else earlier)) / seconds

    gained = {name: rate(value, before.counters.get(name, 0)) for name, value in now.counters.items()}
    calls = rate(sum(now.num_calls.values()), sum(before.num_calls.values()))
    return {**gained, "num_calls": calls, "num_failed": rate(num_failed(now), num_failed(before))}


def num_failed(stats: ServerStats) -> int:
    """Return how many calls, and operations of batches, had a status that is not OK."""
    return _failed(stats.num_calls) + _failed(stats.num_operations)


def _failed(numbers: Mapping[str, int]) -> int:
    return sum(number for name, number in numbers.items() if not name.endswith("/OK"))


def share(part: float, whole: float) -> float | None:
    """Return the quotient, or None where there is nothing to divide by."""
    return part / whole if whole else None
