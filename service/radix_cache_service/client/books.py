"""What a client knows: the server's shape, its own leases, and until when it may rely on them.

No I/O. A client opens an `Exchange` for each message, sends it however it likes, and says what came back; one that ends
without an answer is a loss, see
`radix_cache_service.client.losses`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from radix_cache.errors import (
    InvalidBlocks,
    LeaseExpired,
    OldSeq,
    RadixCacheError,
    UnknownLease,
)
from radix_cache.leases import Lease
from radix_cache.operations import MatchPrefix, Operation, Outcome, Release, check_count, needed_by
from radix_cache.stats import Description
from radix_cache_service.calls import Opened
from radix_cache_service.client.losses import Losses
from radix_cache_service.client.tables import Tables, change

if TYPE_CHECKING:
    from radix_cache_service.client.exchange import Exchange

__all__ = ["Books"]


class Books:
    """One client's; thread-safe. clock: seconds, never going back."""

    def __init__(self, engine_id: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine_id = engine_id
        self.clock = clock
        self.description: Description | None = None
        self.num_available_blocks: int | None = None
        self.heard_at: float | None = None  # when the last answered call that renewed the engine's leases was sent
        self.wake: Callable[[], object] = lambda: None  # called when something may have to be given back
        self._lock = threading.Lock()
        self._tables = Tables(engine_id)
        self._losses = Losses()
        self._seq: int | None = None
        self._chosen_seq = 0  # the last that was chosen here, and the last that the caller chose
        self._own_seq: int | None = None
        self._own_sent_at = 0.0
        self._answered_seq: int | None = None
        self._unsure: set[str] = set()  # leases that may have run out, and were not asked for since
        self._unsure_since = 0.0
        self._sure_from = 0.0  # what was sent from here on tells whether a lease is among those that `heard_at` is for

    # The server, and until when it keeps our leases.

    def described(self, description: Description) -> None:
        """Take up what the server is; what was known of another one is void."""
        with self._lock:
            if self.epoch is not None and self.epoch != description.epoch:
                self._tables.clear()
                self._losses.clear()
                self._unsure.clear()
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
            if self._unsure:
                return self._unsure_since
            return None if self.heard_at is None else self.heard_at + self.ttl_s

    def heard(self, sent_at: float) -> None:
        """A call that carries the engine id, if there is one, was answered.

        In time, the server saw the call before any lease could run out, and renewed them all. If not, they may have run
        out first: until a call has named each, nobody may rely on any.
        """
        with self._lock:
            before = self.heard_at
            until = None if before is None or self.ttl_s is None else before + self.ttl_s
            is_in_time = self.ttl_s is None or (until is not None and self.clock() < until)
            if not is_in_time:
                if not self._unsure:
                    self._unsure_since = sent_at if until is None else until
                self._unsure.update(self._tables.leases.keys() - self._tables.promised)
            self.heard_at = sent_at if before is None else max(before, sent_at)
            if not is_in_time:
                self._sure_from = self.heard_at

    def owned(self) -> list[str]:
        """Return the ids that an orderly close gives back: open here, or perhaps, and not promised to live longer."""
        with self._lock:
            self._losses.give_up(self.clock())
            return [*(self._tables.leases.keys() - self._tables.promised), *self._losses.orphans]

    # One message; see `Exchange`.

    def next_seq(self, last: int = 0) -> int:
        """Return a number above all that this engine has used, in this process or, if the clock has not gone back, in
        an earlier one. last: what the server says of that.
        """
        with self._lock:
            seq = max(time.time_ns() if self._seq is None else self._seq + 1, last + 1)
            self._seq = self._chosen_seq = check_count(seq, "seq of the next batch", 1, 2**64 - 1)
            return self._seq

    def check(self, operation: Operation, seq: int | None = None) -> None:
        """Refuse what can't work: `StaleLease` for a lease in doubt, `InvalidArgument` for the name of an orphan."""
        with self._lock:
            self._losses.check(operation, seq, self.clock())

    def has(self, lease_id: str) -> bool:
        """Tell whether a lease of this name was opened here and is not known to be gone."""
        with self._lock:
            return lease_id in self._tables.leases

    def first_sent_at(self, seq: int | None) -> float | None:
        """Return when the caller's last batch was first sent, if this is its number."""
        return self._own_sent_at if seq is not None and seq == self._own_seq else None

    def begin(self, operations: Sequence[Operation], seq: int | None = None, is_batch: bool = False) -> frozenset[str]:
        """A message is to be sent; return the leases that an earlier try of it may have opened.

        Raises `OldSeq` for a number of the caller's that this client has given to a batch of its own meanwhile.
        """
        with self._lock:
            if seq is not None:
                if seq <= self._chosen_seq and seq != self._own_seq:
                    last = self._chosen_seq
                    raise OldSeq(f"seq {seq} is not above {last}, this client's own number of a batch", seq, last)
                self._seq = max(seq, self._seq or 0)
                if seq != self._own_seq:
                    self._own_seq, self._own_sent_at = seq, self.clock()
            return self._losses.begin(operations, seq, is_batch, self.clock())

    def take(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Note what the server answered; return the outcomes with leases in them."""
        with self._lock:
            is_repeated = self._is_repeated(exchange.seq)
            opened: dict[str, Lease] = {}
            taken = []
            for operation, outcome in zip(exchange.operations, outcomes, strict=True):
                needed = needed_by(operation)
                lease = None
                if needed is not None:
                    given = exchange.given.get(needed)
                    is_alive = given is not None and given._ended is None  # else another may have its name
                    lease = opened.get(needed) or (given if is_alive else self._tables.leases.get(needed))
                if isinstance(operation, MatchPrefix) and outcome.error is None:
                    taken.append(self._opened(operation, outcome.value, opened, exchange.seq))
                else:
                    self._done(operation, outcome, lease, is_known=is_repeated and needed not in opened)
                    taken.append(outcome)
                self._renewed(operation, taken[-1], exchange)
            self._account(exchange, taken)
            return taken

    def _is_repeated(self, seq: int | None) -> bool:
        """Tell whether this batch was answered before, so that its tables show all that it did."""
        return seq is not None and seq == self._answered_seq

    def _opened(self, operation: MatchPrefix, answer: Opened, opened: dict[str, Lease], seq: int | None) -> Outcome:
        """Return an outcome with the lease; the same one where it was there already."""
        is_repeated = self._is_repeated(seq)
        assert self.description is not None
        lease_id = answer.lease_id
        if self._losses.is_given_up(lease_id, seq):
            now = self.clock()
            self._losses.abandon([lease_id], now, now)
            return Outcome(error=UnknownLease(lease_id, f"lease {lease_id!r} was given up when its answer was lost"))
        if is_repeated and lease_id in self._tables.leases:
            return Outcome(self._tables.leases[lease_id])
        lease = self._tables.make(answer, self.description.block_size)
        if operation.pin_s is not None:
            lease.is_pin, lease.engine_id = True, None
        opened[operation.lease_id] = lease
        if not is_repeated:  # else it is gone since, and this is what it was
            if lease_id in self._tables.leases or lease_id in self._tables.lost:
                self._forget(lease_id, LeaseExpired)  # unnoticed, or its name would not have been free
            self._tables.leases[lease_id] = lease
        return Outcome(lease)

    def _done(self, operation: Operation, outcome: Outcome, lease: Lease | None, is_known: bool) -> None:
        """Note what an operation that opens nothing came to, unless the same answer came before: a name that was free
        then may have a lease now.
        """
        if is_known:
            return
        if isinstance(outcome.error, UnknownLease) and outcome.error.lease_id == needed_by(
            operation
        ):  # not one's parent
            self._forget(outcome.error.lease_id, type(outcome.error))
        if outcome.error is not None:
            return
        if isinstance(operation, Release):
            self._forget(operation.lease_id, UnknownLease)
        elif lease is not None:
            try:
                change(operation, outcome.value, lease)
            except InvalidBlocks:
                self._losses.doubt(lease.lease_id)

    def _forget(self, lease_id: str, ended: type[UnknownLease] | None = None) -> None:
        self._tables.forget(lease_id, ended)
        self._losses.forget(lease_id)
        self._unsure.discard(lease_id)

    def _renewed(self, operation: Operation, outcome: Outcome, exchange: Exchange) -> None:
        lease_id = outcome.value.lease_id if isinstance(outcome.value, Lease) else needed_by(operation)
        if outcome.error is None and lease_id is not None and self.ttl_s is not None:
            self._tables.renewed(lease_id, operation, exchange.proven_at, self.ttl_s)
            if exchange.proven_at >= self._sure_from or lease_id in self._tables.promised:
                self._unsure.discard(lease_id)
            elif lease_id in self._tables.leases:
                self._unsure.add(lease_id)

    def _account(self, exchange: Exchange, taken: Sequence[Outcome]) -> None:
        """An answer settles what an earlier try of the same message left open."""
        if exchange.seq is not None:
            self._answered_seq = exchange.seq
            self._losses.answered(exchange.seq)
        known = {outcome.value.lease_id for outcome in taken if isinstance(outcome.value, Lease)}
        known.update(operation.lease_id for operation in exchange.operations if isinstance(operation, Release))
        self._losses.abandon(exchange.before - known, exchange.certain_at, self.clock())

    def lose(self, exchange: Exchange) -> None:
        """No answer came, nor will one."""
        with self._lock:
            for operation in exchange.operations:
                if isinstance(operation, Release):
                    self._forget(operation.lease_id)
            held = self._tables.leases.keys()
            before, certain_at = exchange.before, exchange.certain_at
            self._losses.lose(exchange.operations, held, before, certain_at, exchange.seq, self.clock())
        self.wake()

    def refuse(self, exchange: Exchange, error: RadixCacheError) -> None:
        """The message was refused; an earlier try of it may have been served."""
        with self._lock:
            self._losses.abandon(exchange.before, exchange.certain_at, self.clock())
            if isinstance(error, UnknownLease):
                self._forget(error.lease_id, type(error))
        self.wake()

    # Orphans.

    def due_orphans(self) -> list[str]:
        """Return ids that a message should release now."""
        most = (self.description and self.description.max_operations) or 1
        with self._lock:
            return self._losses.take_due(self.clock(), most)

    def settle(self, lease_id: str, error: RadixCacheError | None, sent_at: float) -> None:
        """Note what the release of an orphan came to."""
        with self._lock:
            if self._losses.settle(lease_id, error, sent_at):
                self._tables.forget(lease_id, UnknownLease)
        self.wake()

    def until_orphans_s(self) -> float | None:
        """Seconds until an orphan is due, or None."""
        with self._lock:
            due_at = self._losses.next_due()
            return None if due_at is None else max(due_at - self.clock(), 0.0)
