"""One call to a server, from its request to what its answer, or the lack of one, means. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from radix_cache.errors import (
    DeadlineExceeded,
    InvalidArgument,
    InvalidBlocks,
    NotConnected,
    OldSeq,
    PoolExhausted,
    RadixCacheError,
    ServiceUnavailable,
    StaleLease,
    UnknownLease,
)
from radix_cache.leases import Lease
from radix_cache.operations import MatchPrefix, Operation, Outcome, Probe, Release, Renew, check_seconds
from radix_cache_service.calls import batch_request, method_of, read_answer, read_batch, request_of
from radix_cache_service.client.books import Books
from radix_cache_service.client.losses import LATE_S
from radix_cache_service.errors import REFUSALS, LayoutMismatch

__all__ = ["TRANSIENT", "Call", "Exchange"]

TRANSIENT = (ServiceUnavailable, PoolExhausted, OldSeq)
"""After these a call may be worth another try: `Call.repeat_after` knows."""

_MAX_SEQ = 2**64 - 1
_PAUSE_S = 0.1
_LEAST_LEFT_S = 0.25  # a server that is not about to end answers a call that waits no sooner before its end

_REPEATABLE = (MatchPrefix, Release, Renew, Probe)
_CERTAIN = (InvalidArgument, PoolExhausted, StaleLease, NotConnected, *REFUSALS)  # the server said no, or was not asked
_HEARD = (InvalidBlocks, PoolExhausted, UnknownLease, StaleLease)  # ... after it had noted that the engine lives


class Call:
    """A request and how to send it. What only asks is a plain `Call`."""

    is_repeatable = True

    def __init__(self, books: Books, method: str, request: Any, timeout_s: float) -> None:
        self.method = method
        self.request = request
        self.timeout_s = timeout_s
        self.sent_at = books.clock()
        self._books = books
        self._is_second = False
        self._is_doubtful = False  # a try may have been served although no answer came

    def repeat_after(self, error: RadixCacheError) -> float:
        """Get ready for another try, and return in how many seconds; or raise ``error`` where there must not be one."""
        is_lost = isinstance(error, ServiceUnavailable) and not isinstance(error, NotConnected)
        if isinstance(error, DeadlineExceeded) or (is_lost and not self.is_repeatable) or not self._goes_on(error):
            raise error
        pause_s = _PAUSE_S if self._is_second else 0.0
        self._is_second = True
        self._is_doubtful |= is_lost
        self.sent_at = self._books.clock() + pause_s
        return pause_s

    def _goes_on(self, error: RadixCacheError) -> bool:
        """Tell whether the call is to be tried again after such an error."""
        return isinstance(error, ServiceUnavailable) and not self._is_second

    def note_arrival(self) -> None:
        """A server has answered, though it is not known yet which one: the call may have taken effect."""
        self._is_doubtful = True


class Exchange(Call):
    """A call about leases, as a context manager around its sending: it has an answer, a refusal, or is lost.

    operations: what it asks for. given: leases that the caller named by object. seq: the caller's own number of a
    batch, if any.
    """

    def __init__(
        self,
        books: Books,
        method: str,
        request: Any,
        timeout_s: float,
        operations: Sequence[Operation],
        given: Mapping[str, Lease],
        seq: int | None = None,
        before: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(books, method, request, timeout_s)
        self.operations = operations
        self.given = given
        self.seq = seq
        self.before = before  # leases that an earlier try may have opened
        self._is_settled = False
        self._first_sent_at = self.sent_at
        self._waits_until: float | None = None  # for blocks
        self._is_numbered_here = False

    @classmethod
    def of_verb(
        cls, books: Books, operation: Operation, lease: object, timeout_s: float, wait_s: float | None = None
    ) -> Exchange:
        """One operation in a call of its own. wait_s: it may wait for blocks, for so long instead of the timeout."""
        if isinstance(operation, MatchPrefix) and books.has(operation.lease_id):
            # Alone it would get the lease that it once opened: meant for lost answers, and not what happens in process.
            return cls.of_item(books, operation, lease, timeout_s)
        books.check(operation)
        request = request_of(operation, books.engine_id)
        if wait_s is not None:
            request.wait, timeout_s = True, check_seconds(wait_s, "wait_s")
        before = books.begin([operation])
        exchange = cls(books, method_of(operation), request, timeout_s, [operation], _given(lease), None, before)
        exchange.is_repeatable = isinstance(operation, _REPEATABLE)
        if wait_s is not None:
            exchange._waits_until = exchange.sent_at + wait_s
        return exchange

    @classmethod
    def of_item(cls, books: Books, operation: Operation, lease: object, timeout_s: float) -> Exchange:
        """One operation as a batch that the caller did not make."""
        books.check(operation)
        request = batch_request([operation], books.engine_id)
        before = books.begin([operation])
        exchange = cls(books, "Batch", request, timeout_s, [operation], _given(lease), None, before)
        exchange.is_repeatable = False
        return exchange

    @classmethod
    def of_batch(
        cls,
        books: Books,
        operations: Sequence[Operation],
        given: Mapping[str, Lease],
        timeout_s: float,
        number: int | None = None,
        seq: int | None = None,
        strict: bool = False,
    ) -> Exchange:
        """Many in one call. ``number``: what it is numbered with; ``seq``: the same, where the caller chose it."""
        first_sent_at = books.first_sent_at(seq)
        before = books.begin(operations, seq, is_batch=True)
        request = batch_request(operations, books.engine_id, number, strict)
        exchange = cls(books, "Batch", request, timeout_s, operations, given, seq, before)
        if first_sent_at is not None:
            exchange._first_sent_at = first_sent_at
        exchange.is_repeatable = number is not None
        exchange._is_numbered_here = seq is None and number is not None
        return exchange

    def _goes_on(self, error: RadixCacheError) -> bool:
        if isinstance(error, OldSeq):
            return self._renumber(error.last)
        if self._waits_until is None:
            return super()._goes_on(error)
        left_s = self._waits_until - self._books.clock() - _PAUSE_S
        if left_s < _LEAST_LEFT_S or not (isinstance(error, ServiceUnavailable) or self._can_have(error)):
            return False
        self.timeout_s = left_s
        return True

    def _renumber(self, last: int) -> bool:
        """Number a batch anew if this client chose its number: an earlier life of the engine had a later clock."""
        if not self._is_numbered_here or self._is_doubtful or last == _MAX_SEQ:
            return False
        self._is_numbered_here = False  # once
        self.request.seq = self._books.next_seq(last)
        return True

    def _can_have(self, error: RadixCacheError) -> bool:
        """Tell whether a call that is refused too soon for its wait was refused for the end of the server."""
        said = self._books.description
        return (
            isinstance(error, PoolExhausted)
            and said is not None
            and error.needed <= said.num_blocks - said.num_reserved_blocks
        )

    @property
    def proven_at(self) -> float:
        """From when on what the answer says held: a repeated batch gets the answer of its first try."""
        return self._first_sent_at if self.method == "Batch" else self.sent_at

    @property
    def certain_at(self) -> float:
        """When a server is surely done with it."""
        return max(self._books.clock(), self.sent_at + self.timeout_s) + LATE_S

    def answered(self, answer: Any) -> list[Outcome]:
        """Return the outcomes, with leases in them."""
        if self.method == "Batch":
            outcomes = read_batch(self.operations, answer)
        else:
            outcomes = [Outcome(read_answer(self.operations[0], answer))]
        self._is_settled = True
        self._books.num_available_blocks = answer.state.num_available_blocks
        self._books.heard(self.sent_at)
        return self._books.take(self, outcomes)

    def value(self, answer: Any) -> Any:
        """Return the value of the one operation, or raise its error."""
        (outcome,) = self.answered(answer)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def failed(self, error: BaseException) -> None:
        """Note what an error means: a refusal, or no answer."""
        if self._is_settled:
            return
        self._is_settled = True
        if self._is_certain(error):
            self._books.refuse(self, error)  # type: ignore[arg-type]
        else:
            self._books.lose(self)
        if isinstance(error, _HEARD):
            self._books.heard(self.sent_at)

    def _is_certain(self, error: BaseException) -> bool:
        """Tell whether the message has done nothing: no try of it was served, nor may have been."""
        if isinstance(error, UnknownLease):
            return True
        return isinstance(error, _CERTAIN) and not isinstance(error, LayoutMismatch) and not self._is_doubtful

    def is_success(self, error: RadixCacheError) -> bool:
        """Tell whether the error of a second try says that the first one had done it."""
        return self._is_doubtful and isinstance(error, UnknownLease) and isinstance(self.operations[0], Release)

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.failed(error)


def _given(lease: object) -> dict[str, Lease]:
    return {lease.lease_id: lease} if isinstance(lease, Lease) else {}
