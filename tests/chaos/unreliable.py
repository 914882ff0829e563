"""A client whose calls go wrong on purpose, on the lease clock of `clock`.

Only the way to the server is tampered with: what the client makes of it is its own. A fault is counted when it took
effect: a call that was answered before it could be cancelled was not cancelled.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import grpc

from radix_cache.errors import DeadlineExceeded, RadixCacheError, ServiceUnavailable
from radix_cache_service import Client
from radix_cache_service.client.books import Books

_SHORT_S = (0.0002, 0.004)


class CallCancelled(RadixCacheError):
    """The engine cancelled its own call."""


class UnreliableClient(Client):
    """clock: the lease clock. share: how many of the calls go wrong. count: told of each fault by its name."""

    def __init__(
        self,
        target: str,
        engine_id: str,
        clock: Callable[[], float],
        dice: random.Random,
        share: float,
        count: Callable[[str], object],
        **options: Any,
    ) -> None:
        self._lease_clock = clock
        self._dice = dice
        self._share = share
        self._count = count
        self._owner = threading.current_thread()  # background calls are left alone: the dice are this thread's
        super().__init__(target, engine_id, **options)

    def _reset(self) -> None:
        super()._reset()
        self._books = Books(self.engine_id, self._lease_clock)
        self._began_at = self._books.clock()

    def _send_once(self, call: Any) -> Any:
        is_fair_game = threading.current_thread() is self._owner and call.method not in {"Describe", "DumpTree"}
        if not is_fair_game or self._dice.random() >= self._share:
            return super()._send_once(call)
        return self._dice.choice((self._cut_by_deadline, self._cancelled, self._lost, self._lost_then_repeated))(call)

    def _cut_by_deadline(self, call: Any) -> Any:
        call.timeout_s = self._dice.uniform(*_SHORT_S)
        try:
            return super()._send_once(call)
        except DeadlineExceeded:
            self._count("call_deadline")
            raise

    def _cancelled(self, call: Any) -> Any:
        future = getattr(self._connected(), call.method).future(call.request, timeout=call.timeout_s)
        patience = self._dice.uniform(*_SHORT_S)
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        if not done.wait(patience):
            future.cancel()
        if future.cancelled():
            self._count("call_cancelled")
            raise CallCancelled("cancelled by the engine itself")
        return self._result(future)

    @staticmethod
    def _result(future: Any) -> Any:
        from radix_cache_service.errors import from_call_error

        try:
            return future.result()
        except grpc.RpcError as error:
            raise from_call_error(error) from None

    def _lost(self, call: Any) -> Any:
        super()._send_once(call)
        self._count("reply_lost")
        raise DeadlineExceeded("the reply was lost on purpose")

    def _lost_then_repeated(self, call: Any) -> Any:
        """The client tries once more what may be tried twice."""
        super()._send_once(call)
        self._count("reply_lost_then_repeated")
        raise ServiceUnavailable("the reply was lost on purpose")
