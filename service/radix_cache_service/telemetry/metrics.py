"""What the server counts of its calls: how many, how they ended, how long they took, how long they waited for blocks.

All of it is written on the event loop, in well under a microsecond or two a call, and nothing here raises: a call that
was answered is not spoilt by the counting of it. Who wants the figures reads them on the same loop.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import grpc

from radix_cache_service.pb import prefix_cache_pb2 as pb

if TYPE_CHECKING:
    from radix_cache_service.telemetry.tracing import Tracing

__all__ = ["BUCKETS_S", "Call", "CallMetrics", "Latencies"]

_log = logging.getLogger(__name__)

_CODES: Final = {code.value[0]: code.name for code in grpc.StatusCode}
# The preferred numbers of ISO 3, series R20: each at most 13 % above the last, and the round ones among them.
_R20: Final = (1, 1.12, 1.25, 1.4, 1.6, 1.8, 2, 2.24, 2.5, 2.8, 3.15, 3.55, 4, 4.5, 5, 5.6, 6.3, 7.1, 8, 9)
_BOUNDS_S: Final = [float(f"{number}e{power}") for power in range(-6, 2) for number in _R20]  # 1 us to 90 s
BUCKETS_S: Final = [float(f"{number}e{power}") for power in range(-5, 1) for number in (1, 2.5, 5)] + [10.0]
"""The bounds that a histogram is shown with: few, and each one a bound of the fine ones."""


class Latencies:
    """A histogram of fixed size; its quantiles are at most 13 % too high. `add` is O(log buckets)."""

    __slots__ = ("_counts", "max_s", "num_samples", "sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self.num_samples = 0
        self.sum_s = 0.0
        self.max_s = 0.0

    def __copy__(self) -> Latencies:
        other = Latencies()
        other._counts = self._counts[:]
        other.num_samples, other.sum_s, other.max_s = self.num_samples, self.sum_s, self.max_s
        return other

    def add(self, seconds: float) -> None:
        """Count a sample."""
        self._counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self.num_samples += 1
        self.sum_s += seconds
        self.max_s = max(self.max_s, seconds)

    def quantile(self, share: float) -> float:
        """Return the bound that ``share`` of the samples are below, or the longest sample."""
        below = 0
        for bound, count in zip(_BOUNDS_S, self._counts, strict=False):
            below += count
            if below >= share * self.num_samples:
                return min(bound, self.max_s)
        return self.max_s

    def buckets(self) -> list[int]:
        """Return how many samples are at or below each of `BUCKETS_S`."""
        shown, below = dict.fromkeys(BUCKETS_S, 0), 0
        for bound, count in zip(_BOUNDS_S, self._counts, strict=False):
            below += count
            if bound in shown:
                shown[bound] = below
        return list(shown.values())

    def as_message(self) -> pb.Latency:
        """Return the quantiles."""
        return pb.Latency(
            p50_s=self.quantile(0.5), p99_s=self.quantile(0.99), max_s=self.max_s, num_samples=self.num_samples
        )


class CallMetrics:
    """Counts and latencies of calls, by method.

    num_calls: by ``"method/code"``. latencies: time in the handler, less the time that it waited for blocks. waits:
    that time, of the calls that waited at all. num_failures: what could not be noted. tracing: where spans go, if
    anywhere.
    """

    def __init__(self) -> None:
        self.num_calls: Counter[str] = Counter()
        self._num_operations: Counter[tuple[str, int]] = Counter()
        self.latencies: defaultdict[str, Latencies] = defaultdict(Latencies)
        self.waits = Latencies()
        self.num_failures = 0
        self.tracing: Tracing | None = None

    def call(self, method: str, context: Any = None, ended: Callable[[], object] = lambda: None) -> Call:
        """Return a call to be entered when its handler begins. context: where tracing finds the caller's span. ended:
        called when the call was counted.
        """
        return Call(self, method, context, ended)

    def count(self, method: str, code: str) -> None:
        """Note a call that has no time in a handler: it was refused before it came to one, or is a stream."""
        try:
            self.num_calls[f"{method}/{code}"] += 1
        except Exception as error:  # noqa: BLE001 - see `record`
            self.failed(error)

    def record(self, method: str, code: str, seconds: float, waited_s: float = 0.0) -> None:
        """Note a call that ended with the status ``code`` after ``seconds`` of work."""
        try:
            self.num_calls[f"{method}/{code}"] += 1
            self.latencies[method].add(seconds)
            if waited_s:
                self.waits.add(waited_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, the call was answered
            self.failed(error)

    def record_operation(self, verb: str, code: int) -> None:
        """Note an operation of a batch and the number of its status."""
        try:
            self._num_operations[verb, code] += 1
        except Exception as error:  # noqa: BLE001 - see `record`
            self.failed(error)

    def num_operations(self) -> dict[str, int]:
        """Return how many operations of batches there were, by ``"verb/code"``."""
        return {f"{verb}/{_CODES[code]}": number for (verb, code), number in self._num_operations.items()}

    def failed(self, error: Exception) -> None:
        """Note that something could not be noted; the log has the first time only."""
        self.num_failures += 1
        if self.num_failures == 1:
            _log.error("a call could not be counted or traced", exc_info=error)


class Call:
    """One call in its handler, as a context manager. code: how it ended, to be set before the block is left."""

    __slots__ = ("_began", "_context", "_ended", "_method", "_metrics", "_span", "_waited_s", "code")

    def __init__(self, metrics: CallMetrics, method: str, context: Any, ended: Callable[[], object]) -> None:
        self.code = "OK"
        self._ended = ended
        self._metrics = metrics
        self._method = method
        self._context = context
        self._span: Any = None
        self._waited_s = 0.0

    def waited(self, seconds: float) -> None:
        """Note time that was spent waiting for blocks; it is no work."""
        self._waited_s += seconds

    def __enter__(self) -> Call:
        self._began = time.perf_counter()
        tracing = self._metrics.tracing
        if tracing is not None:
            try:
                self._span = tracing.begin(self._method, self._context)
            except Exception as error:  # noqa: BLE001 - the call goes on without a span
                self._metrics.failed(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._began - self._waited_s
        self._metrics.record(self._method, self.code, max(seconds, 0.0), self._waited_s)
        if self._span is not None:
            try:
                self._span.finish(self.code, self._waited_s)
            except Exception as failure:  # noqa: BLE001 - the call is over
                self._metrics.failed(failure)
        self._ended()
