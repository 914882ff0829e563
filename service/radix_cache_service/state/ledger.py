"""The calls to a cache, such that they can be made again: all that an answer depends on is in here.

The same calls at the same readings of the clock give the same answers, block ids and all. That is what makes a journal
of calls a copy of the state: `Ledger.replay` makes a recorded call again. So nothing here may depend on chance, on the
time of day, or on the order in which a set happens to be walked. Names that the server chose are in the record, and so
is what an operation was refused for before it ran.

With a journal, each call is written down before its answer is let go, together with a checksum of the answer: a replay
that would answer anything else is noticed. A call that changed nothing is written down as what it did to the leases:
an engine was heard of, and time went on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from radix_cache import Lease, PrefixCache
from radix_cache.errors import IntegrityError, PoolExhausted, RadixCacheError
from radix_cache.operations import Allocate, MatchPrefix, Operation, Outcome, Probe, Reset, check_name
from radix_cache_service.clock import CallClock
from radix_cache_service.convert import Limits, fill_result
from radix_cache_service.errors import PoolInUse
from radix_cache_service.fatal import end_at_once
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.state.journal import Kind, Record, StateError
from radix_cache_service.state.openings import Openings
from radix_cache_service.state.records import batch_record, digest_of, read_batch_record, read_verb_record, verb_record

__all__ = ["Journal", "Ledger"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_ANY = 2**62
_RESET = pb.Operation.RESET_FIELD_NUMBER
_DONE = object()


class Journal(Protocol):
    """Where calls are written down."""

    def append(self, kind: int, reading: float, digest: int, payload: bytes) -> None:
        """Write one call; return when it is safe from the end of this process."""


class Ledger:
    """One cache and the calls to it. Each call is whole: nothing of another happens in between.

    clock: the cache's own; each call moves it. journal: set once what it holds is replayed; None: nothing is kept.
    watch: told of each operation of a batch that runs, with its outcome and its answer. closed: the lease that holds
    the whole pool, and until when, where nothing must be handed out at first. is_lasting: what is known of requests
    can be saved (`Openings`).
    """

    def __init__(self, cache: PrefixCache, clock: CallClock, *, is_lasting: bool = False) -> None:
        said = cache.describe()
        self.cache = cache
        self.clock = clock
        self.openings = Openings(cache, lasting=is_lasting)
        self.journal: Journal | None = None
        self.watch: Callable[[Operation, Outcome, pb.OperationResult], object] = lambda *_: None
        self.closed: tuple[str, float] | None = None
        self._no_limits = Limits(_ANY, _ANY, _ANY, said.block_size, said.num_blocks)
        self._sweep: Iterator[None] | None = None

    # Calls.

    def one(self, operation: Operation, engine_id: str) -> Any:
        """Run one operation; return its value or raise its error.

        A match that opened a lease which is still there gets that lease.
        """
        if isinstance(operation, Probe):
            if engine_id:
                self.heard(engine_id)
            return self._do(operation, engine_id)  # at the same reading: it changes nothing
        return self._opened_already(operation, engine_id) or self._run(operation, engine_id)

    def without_blocks(self, operation: MatchPrefix | Allocate, engine_id: str) -> Any:
        """Run an operation that may wait for blocks if it needs none; refuse it if it can't ever have what it asks for.

        Raises `PoolExhausted` where it needs any, and has renewed the lease that it names.
        """
        named = operation.lease_id if isinstance(operation, Allocate) else operation.parent_id
        if named is not None:
            self._run(Allocate(named, num_blocks=0), engine_id)
        else:
            self.heard(engine_id)
        opened = self._opened_already(operation, engine_id)
        if opened is not None:
            return opened

        def record(said: object) -> tuple[int, bytes]:
            if isinstance(said, PoolExhausted):  # refused for waiting's sake, and at the same reading: nothing happened
                return Kind.HEARD, engine_id.encode()
            return verb_record(operation, engine_id)

        return self._noted(record, lambda: self._do_without_blocks(operation, engine_id), now=False)

    def _opened_already(self, operation: Operation, engine_id: str) -> Lease | None:
        """Return the live lease that an equal match opened, if the operation is one."""
        opened = self.openings.find(operation, engine_id) if isinstance(operation, MatchPrefix) else None
        return opened if opened is not None and self._is_live(opened, engine_id) else None

    def _is_live(self, lease: Lease, engine_id: str) -> bool:
        """Tell whether the cache still has it; to allocate nothing renews it and changes nothing."""
        try:
            self._run(Allocate(lease.lease_id, num_blocks=0), engine_id)
        except RadixCacheError:
            return False
        return True

    def _run(self, operation: Operation, engine_id: str) -> Any:
        if self.journal is None:
            self.clock.tick()
            try:
                return self._do(operation, engine_id)
            except Exception as error:
                self._check_whole(error)
                raise

        def record(said: object) -> tuple[int, bytes]:
            if (
                isinstance(said, PoolExhausted)
                and isinstance(operation, MatchPrefix)
                and _is_quiet(operation, engine_id)
            ):
                return Kind.HEARD, engine_id.encode()
            return verb_record(operation, engine_id)

        return self._noted(record, lambda: self._do(operation, engine_id))

    def _do(self, operation: Operation, engine_id: str) -> Any:
        try:
            value = self.cache.do(operation, engine_id or None)
        except PoolExhausted as error:
            raise self._explained(error) from None
        if isinstance(operation, MatchPrefix):
            self.openings.note(operation, engine_id, value)
        return value

    def _do_without_blocks(self, operation: Operation, engine_id: str) -> Any:
        outcome = self.cache.run([operation], engine_id=engine_id or None, without_blocks=True)[0]
        if outcome.error is not None:
            raise self._explained(outcome.error)
        if isinstance(operation, MatchPrefix):
            self.openings.note(operation, engine_id, outcome.value)
        return outcome.value

    def batch(
        self,
        batch: pb.BatchRequest,
        requests: list[Any],
        asked: list[Operation],
        response: pb.BatchResponse | None = None,
    ) -> list[pb.OperationResult]:
        """Run ``asked``, which the ``requests`` of a batch ask for; return the answer to each, or raise what is wrong
        with the batch as a whole. The answers are in ``response`` then.
        """
        for request, operation in zip(requests, asked, strict=True):
            if isinstance(operation, MatchPrefix) and not request.lease_id:
                request.lease_id = operation.lease_id
        into = pb.BatchResponse() if response is None else response
        said = self._noted(lambda _: batch_record(batch, asked), lambda: self._do_all(batch, requests, asked, into))
        if not into.results:  # they are the answers of before
            into.results.extend(said)
        return said

    def _do_all(
        self, batch: pb.BatchRequest, requests: list[Any], asked: list[Operation], into: pb.BatchResponse
    ) -> list[pb.OperationResult]:
        paired = iter(requests)
        engine_id, results = batch.engine_id, into.results

        def encode(operation: Operation, outcome: Outcome) -> pb.OperationResult:
            error = outcome.error
            if isinstance(error, IntegrityError):
                raise error  # of the batch as a whole
            if error is not None:
                outcome = Outcome(error=self._explained(error))
            elif isinstance(operation, MatchPrefix):
                self.openings.note(operation, engine_id, outcome.value)
            result = results.add()
            fill_result(result, next(paired), outcome)
            self.watch(operation, outcome, result)
            return result

        return self.cache.run(
            asked, engine_id=engine_id or None, seq=batch.seq or None, strict=batch.strict, encode=encode
        )

    def heard(self, engine_id: str) -> None:
        """Renew the leases of an engine; without one, only let leases expire whose time is up."""
        if engine_id:
            check_name(engine_id, "engine_id")
        self._noted(lambda _: (Kind.HEARD, engine_id.encode()), lambda: self._hear(engine_id))

    def _hear(self, engine_id: str) -> None:
        self.cache.run([], engine_id=engine_id or None)

    def reset(self, operation: Reset) -> Iterator[None]:
        """Forget what a reset names, piece by piece: all of it is out of sight after the first."""
        self._noted(lambda _: (Kind.DETACH, verb_record(operation, "")[1]), lambda: self._detach(operation))
        while self.is_sweeping:
            yield
            self._noted(lambda _: (Kind.SWEEP, b""), self._go_on, now=False)

    @property
    def is_sweeping(self) -> bool:
        """Whether something that a reset has put out of sight is still to be freed."""
        return self._sweep is not None

    def _detach(self, operation: Reset) -> None:
        sweep = self.cache.reset_steps(operation.namespace, operation.tokens)
        is_over = next(sweep, _DONE) is _DONE  # or it is refused, and what was being swept goes on
        self._sweep = None if is_over else sweep

    def _go_on(self) -> None:
        """Free a piece; which of several resets it is of makes no difference."""
        if self._sweep is not None and next(self._sweep, _DONE) is _DONE:
            self._sweep = None

    def _explained(self, error: RadixCacheError) -> RadixCacheError:
        if self.closed is not None and isinstance(error, PoolExhausted) and self.clock() < self.closed[1]:
            return PoolInUse(error.needed, self.closed[1] - self.clock())
        return error

    # Starting.

    def start(self, closed_as: str = "") -> None:
        """Begin to serve: what was being swept is swept to its end, and the leases of before have a full ttl.

        closed_as: the name of a lease that takes the whole pool for one ttl.
        """
        self.clock.resume(self.clock())
        self._noted(lambda _: (Kind.START, closed_as.encode()), lambda: self._start(closed_as))

    def _start(self, closed_as: str) -> None:
        self._hear("")
        while self.is_sweeping:
            self._go_on()
        self._renew_all()
        if closed_as:
            said = self.cache.describe()
            self.cache.match_prefix(b"", num_blocks=said.num_blocks - said.num_reserved_blocks, lease_id=closed_as)
            self.closed = closed_as, self.clock() + (said.lease_ttl_s or 0.0)

    def _renew_all(self) -> None:
        """Nobody could call while the server was down."""
        leases = self.cache.leases()
        for engine_id in dict.fromkeys(lease.engine_id for lease in leases if lease.engine_id is not None):
            self._hear(engine_id)
        for lease in leases:
            is_closure = self.closed is not None and lease.lease_id == self.closed[0]
            if lease.engine_id is None and not lease.is_pin and not is_closure:
                self.cache.renew(lease.lease_id)

    # Writing down and reading back.

    def _noted(self, record: Callable[[object], tuple[int, bytes]], call: Callable[[], T], *, now: bool = True) -> T:
        """Make a call, and write down what ``record`` makes of it and of what came of it.

        now: at the present time; the call begins with what is due by then. Otherwise no time has passed.
        """
        if now:
            self.clock.tick()
        try:
            said = self._made(call)
        except Exception as error:
            self._check_whole(error)
            self._write(record, error)
            raise
        self._write(record, said)
        return said

    def _check_whole(self, error: Exception) -> None:
        """End the process if a fault has left the cache half changed: blocks could be handed out twice. The journal has
        all but this call, so the next start has the cache as it was before.
        """
        if isinstance(error, RadixCacheError) and not isinstance(error, IntegrityError):
            return
        try:
            self.cache.check_integrity()
        except Exception:  # noqa: BLE001 - a walk over what is broken may fail in any way
            end_at_once(_log, os.EX_SOFTWARE, "a call has failed and left the cache half changed", error)

    def _made(self, call: Callable[[], T]) -> T:
        """Make a call. One that the cache refuses before it looks at the clock lets its time pass all the same: else
        whoever reads the cache next would, unwritten.
        """
        try:
            return call()
        except Exception:
            self._hear("")
            raise

    def _write(self, record: Callable[[object], tuple[int, bytes]], said: object) -> None:
        if self.journal is not None:
            kind, payload = record(said)
            self.journal.append(kind, self.clock(), 0 if kind == Kind.HEARD else digest_of(said), payload)

    def replay(self, record: Record) -> None:
        """Make a recorded call again. Raises `StateError` where it is answered otherwise than it was."""
        self.clock.resume(record.reading)
        try:
            said = self._made(lambda: self._again(record.kind, record.payload))
        except Exception as error:  # noqa: BLE001 - whatever it was, it was recorded
            said = error
        if digest_of(said) != record.digest:
            raise StateError(
                f"record {record.number} of the journal (kind {record.kind}) is answered otherwise than it was, "
                f"now with {type(said).__name__}"
            )

    def _again(self, kind: int, payload: bytes) -> Any:
        if kind in {Kind.BATCH, Kind.BATCH_IN_PART}:
            return self._do_all(*read_batch_record(kind, payload, self._no_limits), pb.BatchResponse())
        if kind == Kind.HEARD:
            return self._hear(payload.decode())
        if kind == Kind.SWEEP:
            return self._go_on()
        if kind == Kind.START:
            return self._start(payload.decode())
        if kind == Kind.DETACH:
            reset: Any = read_verb_record(_RESET, payload, self._no_limits)[0]
            return self._detach(reset)
        return self._do(*read_verb_record(kind, payload, self._no_limits))


def _is_quiet(operation: MatchPrefix, engine_id: str) -> bool:
    """Tell whether a match that finds no blocks only lets its engine be heard of.

    One that waits is tried again and again: its prompt is not to be written each time.
    """
    return bool(engine_id) or operation.parent_id is None
