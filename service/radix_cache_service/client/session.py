"""A session: batches on one stream, answered in order, each for less than a call of its own.

Whoever wants an answer reads the stream up to it, so no thread reads for others. One thread watches the clock: a stream
has no deadline for each message, so a reader that has waited too long gets the stream ended. With it go all answers
that are not there yet, and what those leave behind is what lost calls leave (`radix_cache_service.client.losses`).
No lease moves because a stream broke, and the next message opens a new one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from radix_cache.batch import Block, Pending
from radix_cache.errors import InvalidArgument, RadixCacheError, ServiceUnavailable
from radix_cache.leases import Lease
from radix_cache.operations import Operation, Outcome
from radix_cache_service.client.batches import Batch, RemoteRecorder
from radix_cache_service.client.exchange import Exchange
from radix_cache_service.client.stream import Answer, Stream
from radix_cache_service.client.verbs import Verbs

if TYPE_CHECKING:
    from radix_cache_service.client.blocking import Client

__all__ = ["Session", "SubmittedBatch"]

T = TypeVar("T")


class Session(Verbs):
    """The verbs of a client and its `batch`, each one message on a stream; `submit` doesn't wait for the answer.

    A context manager, made by `radix_cache_service.Client.session`. Thread-safe. Its batches are not numbered unless
    the caller does it: nothing here is sent twice.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sending = threading.Lock()
        self._stream: Stream | None = None
        self._is_closed = False

    def batch(self, seq: int | None = None, strict: bool = False) -> Batch:
        """Return a context manager whose verbs are one message; when it ends, the answers are there."""
        self._client._check_seq(seq)
        return Batch(partial(self._client._books.check, seq=seq), partial(self._run, seq=seq, strict=strict), seq)

    def submit(self, seq: int | None = None, strict: bool = False) -> SubmittedBatch:
        """Return a context manager whose verbs are one message, sent when it ends; the ``result()`` of each waits.

        The next one may be sent before that. A block table shows what was answered up to the last result asked for.
        """
        self._client._check_seq(seq)
        return SubmittedBatch(
            partial(self._client._books.check, seq=seq), partial(self._submit, seq=seq, strict=strict), seq
        )

    def close(self) -> None:
        """Read what is still to come, and end the stream. Leases stay. A second close does nothing."""
        with self._sending:
            self._is_closed = True
            if self._stream is not None and self._stream.is_ours:
                self._stream.end()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Sending.

    def _do(self, operation: Operation, lease: object = None, wait_s: float | None = None) -> Any:
        if wait_s is not None:
            raise InvalidArgument("nothing in a session waits for blocks: call the client for that")
        self._client._prepare()
        (outcome,) = self._send(Exchange.of_item(self._client._books, operation, lease, self._client.timeout_s)).wait()
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _run(
        self, operations: Sequence[Operation], given: dict[str, Lease], seq: int | None, strict: bool
    ) -> list[Outcome]:
        return self._submit(operations, given, seq, strict).wait()

    def _submit(
        self, operations: Sequence[Operation], given: dict[str, Lease], seq: int | None, strict: bool
    ) -> Answer:
        client = self._client
        client._prepare()
        return self._send(Exchange.of_batch(client._books, operations, given, client.timeout_s, seq, seq, strict))

    def _send(self, exchange: Exchange) -> Answer:
        with exchange, self._sending:
            if self._is_closed:
                raise ServiceUnavailable("the session is closed")
            self._client._check_size(exchange.request)
            self._client._release_orphans()
            return self._usable_stream().send(exchange)

    def _usable_stream(self) -> Stream:
        """Return the stream, a new one where the last one broke or is another process's."""
        stub, stream = self._client._connected(), self._stream
        if stream is not None and stream.is_ours and stream.stub is stub and stream.is_active:
            return stream
        if stream is not None:
            stream.give_up()
        self._stream = Stream(stub, self._client)
        return self._stream


class SubmittedBatch(RemoteRecorder, Block):
    """A context manager that sends what was recorded in it when it ends; left by an exception, it sends nothing."""

    def __init__(self, check: Any, submit: Any, number: int | None) -> None:
        super().__init__(check, number)
        self._submit = submit
        self._answer: Answer | None = None

    def wait(self) -> None:
        """Wait for the answer, whatever it is. Raises nothing: the verbs' results do."""
        if self._answer is None:
            return
        try:
            outcomes = self._answer.wait()
        except RadixCacheError as failure:
            self._fail(failure)
        else:
            self._resolve(outcomes)
        self._answer = None

    def _record(self, make: Any, opens: Any = None, needs: object = None) -> Pending[Any]:
        pending = super()._record(make, opens, needs)
        if pending._outcome is not None:  # refused as it was written down
            return pending
        awaited: _Awaited[Any] = _Awaited(pending.lease_id, self)
        self._recorded[-1] = self._recorded[-1][0], awaited
        return awaited

    def _send(self) -> None:
        self._answer = self._submit(self._operations, self._given)


class _Awaited(Pending[T]):
    """An answer that comes by itself."""

    __slots__ = ("_batch",)

    def __init__(self, lease_id: str | None, batch: SubmittedBatch) -> None:
        super().__init__(lease_id)
        self._batch = batch

    def result(self) -> T:
        """Wait for the answer; return it, or raise the error that the verb ended in."""
        self._batch.wait()
        return super().result()
