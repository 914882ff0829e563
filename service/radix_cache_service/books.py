"""What a client knows: the server's shape, its own leases, and until when it may rely on them.

No I/O. A client opens an `Exchange` for each message, sends it however it likes, and says what came back; one that ends
without an answer is a loss, see `radix_cache_service.losses`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from radix_cache.errors import (
    InvalidArgument,
    InvalidBlocks,
    PoolExhausted,
    RadixCacheError,
    StaleLease,
    UnknownLease,
)
from radix_cache.leases import Lease
from radix_cache.operations import MatchPrefix, Operation, Outcome, Release, needed_by
from radix_cache.stats import Description
from radix_cache_service.calls import batch_request
from radix_cache_service.losses import Losses, certain_at
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.tables import Tables, change

__all__ = ["Books", "Exchange"]

_CERTAIN = (InvalidArgument, PoolExhausted, UnknownLease, StaleLease)  # the server said no
_HEARD = (InvalidBlocks, PoolExhausted, UnknownLease, StaleLease)  # ... after it had noted that the engine lives


class Books:
    """One client's; thread-safe. clock: seconds, never going back."""

    def __init__(self, engine_id: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine_id = engine_id
        self.clock = clock
        self.description: Description | None = None
        self.num_available_blocks: int | None = None
        self.heard_at: float | None = None  # when the last answered call that renewed the engine's leases was sent
        self._lock = threading.Lock()
        self._tables = Tables(engine_id)
        self._losses = Losses()
        self._seq: int | None = None
        self._answered_seq: int | None = None

    # The server, and until when it keeps our leases.

    def described(self, description: Description) -> None:
        """Take up what the server is; what was known of another one is void."""
        with self._lock:
            if self.epoch is not None and self.epoch != description.epoch:
                self._tables.clear()
                self._losses.clear()
                self._answered_seq = None
            self.description = description

    @property
    def epoch(self) -> str | None:
        """The epoch of the server that is known, or None before the first answer."""
        return None if self.description is None else self.description.epoch

    @property
    def ttl_s(self) -> float | None:
        """Seconds that leases live unheard of, as far as known."""
        return None if self.description is None else self.description.lease_ttl_s

    @property
    def valid_until(self) -> float | None:
        """Until when the leases surely live, by this process's clock; None where they don't run out, or are none."""
        with self._lock:
            if self.ttl_s is None:
                return None
            if self.engine_id is None:
                return min(self._tables.until.values(), default=None)
            return None if self.heard_at is None else self.heard_at + self.ttl_s

    def heard(self, sent_at: float) -> None:
        """A call that renews the engine's leases was answered."""
        with self._lock:
            self.heard_at = sent_at if self.heard_at is None else max(self.heard_at, sent_at)

    def owned(self) -> list[str]:
        """Return the ids that an orderly close gives back: open here, or perhaps, and not promised to live longer."""
        with self._lock:
            self._losses.give_up(self.clock())
            return [*(self._tables.leases.keys() - self._tables.promised), *self._losses.orphans]

    # One message.

    def next_seq(self) -> int:
        """Return a number above all that this engine has used, in this process or an earlier one."""
        with self._lock:
            self._seq = time.time_ns() if self._seq is None else self._seq + 1
            return self._seq

    def check(self, operation: Operation, seq: int | None = None) -> None:
        """Refuse what can't work: `StaleLease` for a lease in doubt, `InvalidArgument` for the name of an orphan."""
        with self._lock:
            self._losses.check(operation, seq)

    def begin(self, seq: int | None) -> frozenset[str]:
        """A batch is sent; return the leases that the same one may have opened before."""
        with self._lock:
            if seq is not None:
                self._seq = seq
            return self._losses.begin(seq, self.clock())

    def take(
        self, operations: Sequence[Operation], outcomes: Sequence[Outcome], given: Mapping[str, Lease], exchange: Exchange
    ) -> list[Outcome]:
        """Note what the server answered; return the outcomes with leases in them."""
        with self._lock:
            is_repeated = exchange.seq is not None and exchange.seq == self._answered_seq
            opened: dict[str, Lease] = {}
            taken = [
                self._take(operation, outcome, {**given, **opened} if opened else given, opened, is_repeated)
                for operation, outcome in zip(operations, outcomes, strict=True)
            ]
            if exchange.seq is not None:
                self._answered_seq = exchange.seq
                self._losses.answered(exchange.seq)
            return taken
