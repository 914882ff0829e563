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

__all__ = ["Call", "Exchange"]

_REPEATABLE = (MatchPrefix, Release, Renew, Probe)
_CERTAIN = (InvalidArgument, PoolExhausted, UnknownLease, StaleLease, *REFUSALS)  # the server said no
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

    def repeat_after(self, error: ServiceUnavailable) -> None:
        """Get ready for a second try, or raise ``error`` where there must not be one."""
        is_lost = not isinstance(error, NotConnected)
        if self._is_second or (is_lost and not self.is_repeatable) or isinstance(error, DeadlineExceeded):
            raise error
        self._is_second = True
        self._is_doubtful = is_lost
        self.sent_at = self._books.clock()


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
        return exchange

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
        was_never_sent = isinstance(error, NotConnected) and not self._is_doubtful
        if isinstance(error, LayoutMismatch) or not (was_never_sent or isinstance(error, _CERTAIN)):
            self._books.lose(self)
            return
        self._books.refuse(self, error)  # type: ignore[arg-type]
        if isinstance(error, _HEARD):
            self._books.heard(self.sent_at)

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
