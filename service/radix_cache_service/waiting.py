"""Calls that wait for blocks, first come, first served.

Waiting allocations go before waiting matches: a running request that gets its blocks ends and gives back all it has,
while a new one only takes. Among equals the first in line is not passed, so that small requests don't starve a large
one; only a call whose time is up tries once more, whatever its place. Calls that don't ask to wait know no line. Who
waits for its own tenant's limit, and not for the pool, keeps its place and holds up nobody.

Nothing is held while waiting: each attempt is a call like any other, made when something has happened that may have
returned blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from radix_cache.errors import LimitExceeded, PoolExhausted

__all__ = ["WaitingLine"]


class _Turn:
    """One call in line. is_limited: its last attempt failed for its own limit alone."""

    __slots__ = ("is_limited", "wakened")

    def __init__(self) -> None:
        self.wakened = asyncio.Event()
        self.is_limited = False


class WaitingLine:
    """The calls that wait, at most ``max_calls``.

    num_usable_blocks: what needs more can't ever have it, and isn't kept waiting.
    """

    def __init__(self, num_usable_blocks: int, max_calls: int) -> None:
        self.num_usable_blocks = num_usable_blocks
        self._max_calls = max_calls
        self._first: dict[_Turn, None] = {}  # in order of arrival
        self._second: dict[_Turn, None] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def _front(self) -> Iterator[_Turn]:
        """Yield those who may try now: the first in line, and all before it that only wait for their own limit."""
        for turn in chain(self._first, self._second):
            yield turn
            if not turn.is_limited:
                return

    def stir(self) -> None:
        """Blocks may have come back: let the front of the line try again. O(front)."""
        for turn in self._front():
            turn.wakened.set()

    def close(self) -> None:
        """Nobody waits any longer: each call tries once more."""
        self._is_closed = True
        for turn in (*self._first, *self._second):
            turn.wakened.set()

    async def run(
        self,
        attempt: Callable[[], Any],
        timeout_s: float | None,
        *,
        goes_first: bool,
        waited: Callable[[float], None] = lambda _: None,
    ) -> Any:
        """Return what ``attempt`` returns, once there are blocks for it; None for ``timeout_s``: however long it takes.
        waited: told the seconds of each wait.

        Raises what it raises; `PoolExhausted` only when the time is up, or when the whole pool would not do; and
        `LimitExceeded` where too many wait already.
        """
        if not len(self):  # nobody is passed
            try:
                return attempt()
            except PoolExhausted as error:
                if error.needed > self.num_usable_blocks:
                    raise
        if len(self) >= self._max_calls:
            raise LimitExceeded("max_waiting_calls", self._max_calls)
        line = self._first if goes_first else self._second
        turn = _Turn()
        line[turn] = None
        try:
            async with asyncio.timeout(timeout_s):
                return await self._take_turns(attempt, turn, waited)
        except TimeoutError:
            return attempt()
        finally:
            del line[turn]
            self.stir()

    async def _take_turns(self, attempt: Callable[[], Any], turn: _Turn, waited: Callable[[float], None]) -> Any:
        while not self._is_closed:
            if turn in self._front():
                try:
                    return attempt()
                except PoolExhausted as error:
                    if error.needed > self.num_usable_blocks:
                        raise
                    self._note(turn, error.is_own_limit)
            began = time.perf_counter()
            try:
                await turn.wakened.wait()
            finally:
                waited(time.perf_counter() - began)
            turn.wakened.clear()
        return attempt()

    def _note(self, turn: _Turn, is_limited: bool) -> None:
        """Remember what the attempt failed for; those behind may be at the front now."""
        if is_limited and not turn.is_limited:
            turn.is_limited = True
            for other in self._front():
                if other is not turn and not other.is_limited:
                    other.wakened.set()
        turn.is_limited = is_limited
