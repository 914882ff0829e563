"""What lost answers leave behind. A message that ends without an answer may have taken effect, or may still.

- A match: the lease is nobody's, an orphan. Its engine lives on and renews it with every call, so it would never run
  out. It is released along with later calls until that is certain: released, or unknown to a server that can no longer
  be working on the match.
- A release: the same.
- Allocate, insert, free: the table of the lease is not known any more. It is in doubt, and can only be released.
- A batch with a ``seq`` of the caller's: the same, unless the caller's next batch is that one again and is answered.

No I/O and no clock: times come from outside, in seconds.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from radix_cache.errors import InvalidArgument, LeaseExpired, RadixCacheError, StaleLease, UnknownLease
from radix_cache.operations import Allocate, Free, Insert, MatchPrefix, Operation, Release

__all__ = ["LATE_S", "Losses"]

LATE_S = 2.0  # a server may still begin a call so long after its deadline
_RESEND_S = 60.0  # a caller's own batch may be sent again for so long
_RETRY_S = 1.0
_MOST_AT_ONCE = 256


class _Orphan(NamedTuple):
    certain_at: float  # from here on, "unknown" means that it never was, and never will be
    due_at: float
    is_in_flight: bool = False  # its release


class _Batch(NamedTuple):
    seq: int
    lease_ids: frozenset[str]
    certain_at: float


class Losses:
    """One client's. Not thread-safe."""

    def __init__(self) -> None:
        self._orphans: dict[str, _Orphan] = {}
        self._doubts: dict[str, int | None] = {}  # with the seq of the batch that can clear it up
        self._batch: _Batch | None = None  # of the caller's, may be sent again
        self._given_up: _Batch | None = None  # the one before, which was not

    def clear(self) -> None:
        """Forget all: the server has."""
        self._orphans.clear()
        self._doubts.clear()
        self._batch = self._given_up = None

    def check(self, operation: Operation, seq: int | None, now: float) -> None:
        """Refuse to work on a lease in doubt, with `StaleLease`; ``seq`` may be of the batch that clears it up.

        A match under the name of an orphan is refused, with `InvalidArgument`, while that is being released; else the
        release waits until the message can be sent that the operation is written down for.
        """
        if isinstance(operation, (Allocate, Insert, Free)):
            lease_id = operation.lease_id
            if lease_id in self._doubts and (seq is None or self._doubts[lease_id] != seq):
                raise StaleLease(lease_id, f"an answer for lease {lease_id!r} was lost: it can only be released")
        elif isinstance(operation, MatchPrefix) and operation.lease_id in self._orphans:
            orphan = self._usable(operation.lease_id)
            self._orphans[operation.lease_id] = orphan._replace(due_at=max(orphan.due_at, now + _RESEND_S))

    # A message and its end.

    def begin(self, operations: Sequence[Operation], seq: int | None, is_batch: bool, now: float) -> frozenset[str]:
        """A message is to be sent; return the leases that an earlier try of it may have opened.

        Those are no orphans for now. Raises `InvalidArgument` for the name of one that is being released.
        """
        before: set[str] = set()
        if is_batch and self._batch is not None and self._batch.seq == seq:
            before.update(self._batch.lease_ids)
            self._batch = None
        elif is_batch:
            self.give_up(now)
        names = {operation.lease_id for operation in operations if isinstance(operation, MatchPrefix)}
        return frozenset(before | self._reclaim(names))

    def _reclaim(self, names: set[str]) -> set[str]:
        lost = names & self._orphans.keys()
        for name in lost:
            self._usable(name)
        for name in lost:
            del self._orphans[name]
        if self._batch is not None:
            lost |= names & self._batch.lease_ids
            self._batch = self._batch._replace(lease_ids=self._batch.lease_ids - lost)
        return lost

    def _usable(self, name: str) -> _Orphan:
        """Return an orphan whose name may be used again."""
        orphan = self._orphans[name]
        if orphan.is_in_flight:
            raise InvalidArgument(f"lease_id {name!r} is in use: it is just being released")
        return orphan

    def lose(
        self,
        operations: Sequence[Operation],
        held: Container[str],
        before: frozenset[str],
        certain_at: float,
        seq: int | None,
        now: float,
    ) -> None:
        """No answer came, nor will one. ``held``: the leases that the client has, which a match may have named by
        mistake. ``before``: leases that the same batch may have opened already.
        """
        named = {operation.lease_id for operation in operations if isinstance(operation, MatchPrefix)}
        opened = {lease_id for lease_id in named if lease_id not in held}
        self._doubts.update((lease_id, seq) for lease_id in named - opened)
        released = {operation.lease_id for operation in operations if isinstance(operation, Release)}
        for operation in operations:
            if isinstance(operation, (Allocate, Insert, Free)) and operation.lease_id not in opened | released:
                self._doubts[operation.lease_id] = seq
        lost = before | opened | released
        if seq is None:
            self.abandon(lost, certain_at, now)
        else:  # what the batch was to release too: sent again, it may work on it first
            self._batch = _Batch(seq, lost, certain_at)

    def doubt(self, lease_id: str) -> None:
        """Its table is not known, for good."""
        self._doubts[lease_id] = None

    def answered(self, seq: int) -> None:
        """The caller's batch got its answer: what it did is known now."""
        for lease_id in [lease_id for lease_id, cleared_by in self._doubts.items() if cleared_by == seq]:
            del self._doubts[lease_id]

    def forget(self, lease_id: str) -> None:
        """The lease is gone, so there is no doubt about it."""
        self._doubts.pop(lease_id, None)

    # Orphans.

    @property
    def orphans(self) -> Iterable[str]:
        """The ids that are to be given back."""
        return self._orphans

    def is_given_up(self, lease_id: str, seq: int | None) -> bool:
        """Tell whether the answer to batch ``seq`` is too late for this lease: it was given back, or soon will be."""
        batch = self._given_up
        return batch is not None and batch.seq == seq and lease_id in batch.lease_ids

    def abandon(self, lease_ids: Iterable[str], certain_at: float, now: float) -> None:
        """Give these back; what may still open them is over at ``certain_at``."""
        for lease_id in lease_ids:
            self._orphans[lease_id] = _Orphan(certain_at, now)

    def give_up(self, now: float) -> None:
        """The caller did not send the lost batch again: what it may have opened is nobody's."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self._given_up = batch
            self.abandon(batch.lease_ids, batch.certain_at, now)

    def take_due(self, now: float, most: int) -> list[str]:
        """Return ids to release in a message now; those are not due again for a while."""
        if self._batch is not None and now >= self._batch.certain_at + _RESEND_S:
            self.give_up(now)
        due = [lease_id for lease_id, orphan in self._orphans.items() if orphan.due_at <= now]
        del due[min(most, _MOST_AT_ONCE) :]
        for lease_id in due:
            self._orphans[lease_id] = self._orphans[lease_id]._replace(due_at=now + _RETRY_S, is_in_flight=True)
        return due

    def settle(self, lease_id: str, error: RadixCacheError | None, sent_at: float) -> bool:
        """Note what a release that was sent at ``sent_at`` came to, and tell whether an orphan is gone for certain; on
        any other error it is tried again.
        """
        orphan = self._orphans.get(lease_id)
        if orphan is None:
            return False
        is_gone = error is None or isinstance(error, LeaseExpired)
        if is_gone or (isinstance(error, UnknownLease) and sent_at >= orphan.certain_at):
            del self._orphans[lease_id]
            return True
        due_at = orphan.certain_at if isinstance(error, UnknownLease) else orphan.due_at
        self._orphans[lease_id] = _Orphan(orphan.certain_at, due_at)
        return False

    def next_due(self) -> float | None:
        """Return when there is something to give back next, or None."""
        due = [orphan.due_at for orphan in self._orphans.values()]
        if self._batch is not None:
            due.append(self._batch.certain_at + _RESEND_S)
        return min(due, default=None)
