"""Ways from an engine to its server: one by one, a batch, a numbered batch, a stream, and a stream ahead of time.

An engine writes down what it wants (`Op`), a route sends it, and each op has its answer or its error afterwards.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from radix_cache.errors import RadixCacheError, ServiceUnavailable

from .request import Request
from .unreliable import CallCancelled

LOST = (ServiceUnavailable, CallCancelled)


@dataclass(eq=False)
class Op:
    """One verb. request: whom it is for; num_before: tokens that its lease had published.

    route: how it was sent.
    """

    verb: str
    request: Request | None
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    num_before: int = 0
    route: str = ""
    value: Any = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.lease = None if self.request is None else self.request.lease

    @property
    def is_answered(self) -> bool:
        return not isinstance(self.error, LOST)


class Routes:
    """The routes of one client. between: called while an answer is on its way. count: told what was done, by name."""

    def __init__(
        self, client: Any, dice: random.Random, between: Callable[[], None], count: Callable[[str], None]
    ) -> None:
        self._client = client
        self._dice = dice
        self._between = between
        self._count = count
        self._session = client.session()
        self._routes = (self.send_alone, self._batch, self._numbered, self._stream, self._ahead)
        self._weights = (1, 2, 2, 2, 4)

    def close(self) -> None:
        """End the stream."""
        self._session.close()

    def send(self, ops: Sequence[Op], is_strict: bool) -> None:
        """Send them all, one way or another; nothing is raised."""
        (route,) = self._dice.choices(self._routes, self._weights)
        for op in ops:
            op.route = route.__name__
        route(ops, is_strict)

    def send_alone(self, ops: Sequence[Op], _: bool = False) -> None:
        """Send each in a call of its own; some wait for blocks."""
        for op in ops:
            wait = {}
            if op.verb in {"match_prefix", "allocate"} and self._dice.random() < 0.2:
                wait = {"wait_s": self._dice.uniform(0.01, 0.2)}
            try:
                op.value = getattr(self._client, op.verb)(*op.args, **op.options, **wait)
            except RadixCacheError as error:
                op.error = error
            self._count("num_messages")

    def _batch(self, ops: Sequence[Op], is_strict: bool) -> None:
        self._run(ops, self._client.batch(strict=is_strict))

    def _numbered(self, ops: Sequence[Op], is_strict: bool) -> None:
        """The caller's own number: what was lost is sent once more, and must then be the same batch."""
        seq = time.time_ns()
        self._run(ops, self._client.batch(seq=seq, strict=is_strict))
        if any(not op.is_answered for op in ops):
            self._count("batch_sent_again")
            self._run(ops, self._client.batch(seq=seq, strict=is_strict))

    def _stream(self, ops: Sequence[Op], is_strict: bool) -> None:
        self._run(ops, self._session.batch(strict=is_strict))

    def _run(self, ops: Sequence[Op], batch: Any) -> None:
        pending: list[Any] = []
        try:
            with batch:
                pending = [getattr(batch, op.verb)(*op.args, **op.options) for op in ops]
        except RadixCacheError:
            pass  # each answer says so
        self._count("num_messages")
        self._take(ops, pending)

    def _ahead(self, ops: Sequence[Op], is_strict: bool) -> None:
        """Send it, see to the memory while it is on its way, then wait."""
        pending: list[Any] = []
        try:
            with self._session.submit(strict=is_strict) as batch:
                pending = [getattr(batch, op.verb)(*op.args, **op.options) for op in ops]
        except RadixCacheError:
            pass
        else:
            if self._dice.random() < 0.01:
                self._drop_stream()
            self._between()
        self._count("num_messages")
        self._take(ops, pending)

    def _drop_stream(self) -> None:
        stream = self._session._stream
        if stream is not None and stream.is_active:
            stream._call.cancel()
            self._count("stream_dropped")

    @staticmethod
    def _take(ops: Sequence[Op], pending: Sequence[Any]) -> None:
        for op, answer in zip(ops, pending, strict=True):
            try:
                op.value, op.error = answer.result(), None
            except RadixCacheError as error:
                op.value, op.error = None, error
