"""Batches: a step of a scheduler as one call.

Recording and running are apart. `Recorder` has the verbs of a cache, and turns each call into an operation and a
`Pending` answer; what carries the operations to a cache and brings the outcomes back is given to it. In process that is
a method of the cache, remotely one message.

A verb with a bad argument spoils nothing: its own answer is the error, and so is that of every later verb which needs
the lease it would have opened.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from radix_cache import operations
from radix_cache.errors import BatchNotRun, RadixCacheError, UnknownLease
from radix_cache.hints import Hints
from radix_cache.leases import Lease
from radix_cache.operations import InsertResult, Operation, Outcome
from radix_cache.tokens import BlockIds, TokenIds

__all__ = ["Batch", "Block", "Pending", "Recorder", "lease_in"]

T = TypeVar("T")


class Pending(Generic[T]):
    """The answer to come of one verb in a batch. Anywhere a lease goes in the same batch, a pending match may go.

    lease_id: the lease that it opens or needs, if any.
    """

    __slots__ = ("_outcome", "lease_id")

    def __init__(self, lease_id: str | None = None) -> None:
        self.lease_id = lease_id
        self._outcome: Outcome | None = None

    def result(self) -> T:
        """Return the answer, or raise the error that the verb ended in. Raises `BatchNotRun` before there is one."""
        if self._outcome is None:
            raise BatchNotRun("the batch has not run: its answers are there after the with block")
        if self._outcome.error is not None:
            raise self._outcome.error
        value: T = self._outcome.value
        return value

    @property
    def _ended(self) -> type[UnknownLease] | None:
        """As of the lease, once it is there; before that, its id is its own."""
        lease = lease_in(self)
        return None if lease is None else lease._ended

    def _resolve(self, outcome: Outcome) -> None:
        self._outcome = outcome


def lease_in(needs: object) -> Lease | None:
    """Return the lease that a verb is given, itself or as an answer that is there; None where it is less than that."""
    found = needs
    if isinstance(needs, Pending):
        found = None if needs._outcome is None else needs._outcome.value
    return found if isinstance(found, Lease) else None


class Recorder:
    """The verbs of a cache, written down. Arguments and answers are those of `radix_cache.PrefixCache`.

    number: of the caller's, so that the batch can be sent again. It has to be the same one then, though its first time
    may have ended leases that it names: those are known by having been named under this number before.
    """

    def __init__(self, number: object = None) -> None:
        self._number = number
        self._named: list[Lease] = []
        self._recorded: list[tuple[Operation, Pending[Any]]] = []
        self._failed: dict[str, RadixCacheError] = {}  # leases whose match was refused when it was written down
        self._opened: set[str] = set()
        self._has_ended = False

    def match_prefix(
        self,
        tokens: TokenIds,
        namespace: Iterable[str] = (),
        max_tokens: int | None = None,
        num_tokens: int | None = None,
        num_blocks: int | None = None,
        parent: object = None,
        lease_id: str | None = None,
        hints: Hints | None = None,
        partial: bool = False,
    ) -> Pending[Lease]:
        """Find the longest cached prefix, lock it and allocate."""
        opened = operations.new_lease_id() if lease_id is None else lease_id
        return self._record(
            lambda parent: operations.match_prefix(
                tokens, namespace, max_tokens, num_tokens, num_blocks, parent, opened, hints, partial
            ),
            opened,
            needs=parent,
        )

    def allocate(
        self, lease: object, num_tokens: int | None = None, num_blocks: int | None = None
    ) -> Pending[array[int]]:
        """Grow the block table."""
        return self._record(lambda lease: operations.allocate(lease, num_tokens, num_blocks), needs=lease)

    def insert(
        self, lease: object, tokens: TokenIds, offset: int = 0, hints: Hints | None = None
    ) -> Pending[InsertResult]:
        """Publish whole blocks."""
        return self._record(lambda lease: operations.insert(lease, tokens, offset, hints), needs=lease)

    def free(self, lease: object, block_ids: BlockIds) -> Pending[None]:
        """Give back redundant blocks or the tail of the table."""
        return self._record(lambda lease: operations.free(lease, block_ids), needs=lease)

    def release(self, lease: object) -> Pending[None]:
        """End the lease."""
        return self._record(operations.release, needs=lease)

    def renew(self, lease: object, ttl_s: float | None = None) -> Pending[None]:
        """Let the lease live on."""
        return self._record(lambda lease: operations.renew(lease, ttl_s), needs=lease)

    def probe(self, tokens: TokenIds, namespace: Iterable[str] = ()) -> Pending[int]:
        """Count cached tokens."""
        return self._record(lambda _: operations.probe(tokens, namespace))

    def evict(self, num_blocks: int) -> Pending[int]:
        """Return evictable blocks to the pool; the answer is how many."""
        return self._record(lambda _: operations.evict(num_blocks))

    def reset(self, namespace: Iterable[str] | None = None, tokens: TokenIds | None = None) -> Pending[None]:
        """Forget what is cached."""
        return self._record(lambda _: operations.reset(namespace, tokens))

    def pin(
        self, tokens: TokenIds, ttl_s: float, namespace: Iterable[str] = (), lease_id: str | None = None
    ) -> Pending[Lease]:
        """Keep the cached part of a prefix resident."""
        opened = operations.new_lease_id() if lease_id is None else lease_id
        return self._record(lambda _: operations.pin(tokens, ttl_s, namespace, opened), opened)

    def unpin(self, pin: object) -> Pending[None]:
        """End a pin."""
        return self._record(operations.unpin, needs=pin)

    def _record(self, make: Callable[[Any], Operation], opens: Any = None, needs: object = None) -> Pending[Any]:
        """Write down what ``make`` makes of the lease that it ``needs``."""
        self._check_open()
        pending: Pending[Any] = Pending(opens if opens is not None else getattr(needs, "lease_id", None))
        try:
            named = None if needs is None else self._name_of(needs)
            self._recorded.append((make(named), pending))
            if opens is not None:
                self._failed.pop(opens, None)
                self._opened.add(opens)
        except RadixCacheError as error:
            pending._resolve(Outcome(error=error))
            if isinstance(opens, str):
                self._failed[opens] = error
        return pending

    def _name_of(self, needs: object) -> object:
        """Return what names the lease that a verb needs, or raise what stands against it: the lease has ended, was
        refused above, or its id is another's by then.
        """
        lease = lease_in(needs)
        if lease is not None and self._number is not None:
            if lease._ended is None:
                self._named.append(lease)
            elif lease._named_in == self._number:
                needs = lease.lease_id
        lease_id = operations.lease_id_of(needs)
        if failed := self._failed.get(lease_id):
            raise failed
        if lease is not None and lease_id in self._opened:
            raise UnknownLease(lease_id)
        return needs

    def _is_left(self, error: BaseException | None) -> bool:
        """End the block; tell whether an exception ended it, so that nothing of it runs."""
        self._has_ended = True
        for lease in self._named if error is None else ():
            lease._named_in = self._number
        return error is not None

    def _check_open(self) -> None:
        """Raise `BatchNotRun` once the batch has ended: what is written down then would never run."""
        if self._has_ended:
            raise BatchNotRun("this batch has ended: begin another")

    @property
    def _operations(self) -> list[Operation]:
        return [operation for operation, _ in self._recorded]

    def _resolve(self, outcomes: Iterable[Outcome]) -> None:
        for (_, pending), outcome in zip(self._recorded, outcomes, strict=True):
            pending._resolve(outcome)

    def _fail(self, error: RadixCacheError) -> None:
        """The batch as a whole came to nothing."""
        self._resolve(Outcome(error=error) for _ in self._recorded)

    @contextmanager
    def _sent(self) -> Iterator[None]:
        """Around what sends the batch: an error of that is the error of every verb."""
        try:
            yield
        except RadixCacheError as failure:
            self._fail(failure)
            raise


class Block(Recorder):
    """A recorder whose ``with`` block sends what was recorded when it ends; left by an exception, it sends nothing."""

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_left(error):
            with self._sent():
                self._send()

    def _send(self) -> None:
        """Send what was recorded."""
        raise NotImplementedError


class Batch(Block):
    """A context manager that runs what was recorded in it when it ends; left by an exception, it runs nothing.

    run: carries the operations to a cache and returns their outcomes, in order.
    """

    def __init__(self, run: Callable[[list[Operation]], list[Outcome]], number: object = None) -> None:
        super().__init__(number)
        self._run = run

    def _send(self) -> None:
        self._resolve(self._run(self._operations))
