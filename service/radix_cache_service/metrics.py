"""What the server counts of its calls: how many, how they ended, how long they took."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict

from radix_cache_service.pb import prefix_cache_pb2 as pb

__all__ = ["CallMetrics"]

_LEAST_S = 1e-6
_GROWTH = 1.1
_BOUNDS_S = [_LEAST_S * _GROWTH**step for step in range(200)]  # 1 us to 170 s, each 10 % above the last


class _Latencies:
    """A histogram of fixed size; its quantiles are at most 10 % too high."""

    __slots__ = ("counts", "max_s", "num_samples")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS_S) + 1)
        self.num_samples = 0
        self.max_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self.num_samples += 1
        self.max_s = max(self.max_s, seconds)

    def quantile(self, share: float) -> float:
        below = 0
        for bound, count in zip(_BOUNDS_S, self.counts, strict=False):
            below += count
            if below >= share * self.num_samples:
                return min(bound, self.max_s)
        return self.max_s


class CallMetrics:
    """Counts and latencies by method. `record` is O(log buckets)."""

    def __init__(self) -> None:
        self.num_calls: Counter[str] = Counter()
        self._latencies: defaultdict[str, _Latencies] = defaultdict(_Latencies)

    def record(self, method: str, code: str, seconds: float) -> None:
        """Note a call that ended with the status ``code`` after ``seconds`` in its handler."""
        self.num_calls[f"{method}/{code}"] += 1
        self._latencies[method].add(seconds)

    def latencies(self) -> dict[str, pb.Latency]:
        """Return the quantiles by method."""
        return {
            method: pb.Latency(
                p50_s=seen.quantile(0.5), p99_s=seen.quantile(0.99), max_s=seen.max_s, num_samples=seen.num_samples
            )
            for method, seen in self._latencies.items()
        }
