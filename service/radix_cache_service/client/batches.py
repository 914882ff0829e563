"""Batches on their way to a server: `radix_cache.batch.Recorder`, and what becomes of it when its block ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any

from radix_cache.batch import Block, Pending, Recorder, lease_in
from radix_cache.leases import Lease
from radix_cache.operations import Operation, Outcome

__all__ = ["AsyncBatch", "Batch", "RemoteRecorder"]


class RemoteRecorder(Recorder):
    """Records verbs, and which leases the caller named by object. check: refuses an operation as it is written down."""

    def __init__(self, check: Callable[[Operation], None], number: int | None = None) -> None:
        super().__init__(number)
        self._check = check
        self._given: dict[str, Lease] = {}

    def _record(self, make: Callable[[Any], Operation], opens: Any = None, needs: object = None) -> Pending[Any]:
        lease = lease_in(needs)
        if lease is not None and lease._ended is None:
            self._given[lease.lease_id] = lease
        return super()._record(lambda lease: self._checked(make(lease)), opens, needs)

    def _checked(self, operation: Operation) -> Operation:
        self._check(operation)
        return operation

    def _resolve(self, outcomes: Any) -> None:
        super()._resolve(outcomes)
        for _, pending in self._recorded:
            value = None if pending._outcome is None else pending._outcome.value
            if isinstance(value, Lease):  # a repeated batch gets the names that it had the first time
                pending.lease_id = value.lease_id


class Batch(RemoteRecorder, Block):
    """A context manager that sends what was recorded in it when it ends; left by an exception, it sends nothing.

    run: sends the operations, and which leases were named by object, and returns the outcomes.
    """

    def __init__(
        self,
        check: Callable[[Operation], None],
        run: Callable[[Sequence[Operation], dict[str, Lease]], list[Outcome]],
        number: int | None = None,
    ) -> None:
        super().__init__(check, number)
        self._run = run

    def _send(self) -> None:
        self._resolve(self._run(self._operations, self._given))


class AsyncBatch(RemoteRecorder):
    """The same as an asynchronous context manager. Its verbs are plain calls."""

    def __init__(
        self,
        check: Callable[[Operation], None],
        run: Callable[[Sequence[Operation], dict[str, Lease]], Awaitable[list[Outcome]]],
        number: int | None = None,
    ) -> None:
        super().__init__(check, number)
        self._run = run

    async def __aenter__(self) -> AsyncBatch:
        self._check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_left(error):
            with self._sent():
                self._resolve(await self._run(self._operations, self._given))
