"""Traces made of a likeness: its conversations in another order, with other neighbours, and new blocks.

Each conversation comes once, not far from its place in the trace, so that what changes in the course of it is kept; all
have come before one comes again. What a first request shares with others it gets from one that came about as long
before as in the trace; among those near in time, from the one whose path is most like the path of then: what is shared
of it was shared by as many, and in as much use since, and it goes on as long. Without that, what few shared would be
shared by many, and the other way round.
"""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

from radix_cache.lab.likeness import Chat, Likeness
from radix_cache.lab.requests import Request
from radix_cache.tokens import pack_tokens

__all__ = ["resample"]

_SPREAD = 0.25  # how far a conversation may move, as a share of all of them
_MAX_CHOICES = 16
_MAX_LOOKED_AT = 250


def resample(likeness: Likeness, seed: int = 0) -> Iterator[Request]:
    """Yield ``likeness.num_requests`` requests of hash ids in the order of their times; the same for the same seed.

    Holds the blocks of all that it made.
    """
    return islice(_turns(likeness, random.Random(seed)), likeness.num_requests)  # noqa: S311 - reproducible, not secret


@dataclass(slots=True)
class _Open:
    """A conversation that goes on."""

    number: int
    chat: Chat
    paths: list[array[int]]


def _turns(likeness: Likeness, draw: random.Random) -> Iterator[Request]:
    past = _Past()
    chats = _chats(likeness, draw)
    due: list[tuple[float, int, _Open]] = []
    begins_ms, num_begun = 0.0, 0
    while True:
        while not due or due[0][0] > begins_ms:
            chat = next(chats)
            heappush(due, (begins_ms, num_begun, _Open(num_begun, chat, [])))
            begins_ms += chat.next_ms
            num_begun += 1
        now_ms, number, open_chat = heappop(due)
        yield _request(likeness.tokens_per_block, open_chat, past, now_ms)
        if len(open_chat.paths) < len(open_chat.chat.turns):
            wait_ms = open_chat.chat.turns[len(open_chat.paths)].wait_ms
            heappush(due, (now_ms + wait_ms, number, open_chat))


def _chats(likeness: Likeness, draw: random.Random) -> Iterator[Chat]:
    """Yield the conversations again and again, each time shuffled a little."""
    chats = likeness.chats
    while True:
        places = [number + draw.random() * _SPREAD * len(chats) for number in range(len(chats))]
        yield from (chats[number] for number in sorted(range(len(chats)), key=places.__getitem__))


def _request(tokens_per_block: int, open_chat: _Open, past: _Past, now_ms: float) -> Request:
    chat, paths = open_chat.chat, open_chat.paths
    turn = chat.turns[len(paths)]
    kept = paths[-turn.back][: turn.num_kept] if turn.back else past.beginning(chat, now_ms)
    path = past.add(now_ms, kept, turn.num_blocks - len(kept), is_first=not paths)
    paths.append(path)
    return Request(
        timestamp_ms=round(now_ms, 3),
        num_prompt_tokens=turn.num_tokens,
        num_output_tokens=turn.num_output_tokens,
        prompt=pack_tokens(path),
        tokens_per_id=tokens_per_block,
        conversation=str(open_chat.number),
        request_type=chat.request_type,
        turn=len(paths),
    )


class _Past:
    """All requests so far, and which of them used each block last."""

    def __init__(self) -> None:
        self._times = array("d")
        self._paths: list[array[int]] = []
        self._last = array("q")
        self._num_users = array("q")  # how many conversations had a block

    def add(self, now_ms: float, kept: array[int], num_new: int, *, is_first: bool) -> array[int]:
        """Return the path of a request: what it keeps, of others if it is a first one, and new blocks. O(blocks)."""
        path = kept + array("I", range(len(self._last), len(self._last) + num_new))
        self._last.extend([0] * num_new)
        self._num_users.extend([1] * num_new)
        for block in path:
            self._last[block] = len(self._paths)
        for block in kept if is_first else ():
            self._num_users[block] += 1
        self._times.append(now_ms)
        self._paths.append(path)
        return path

    def beginning(self, chat: Chat, now_ms: float) -> array[int]:
        """Return the blocks with which a conversation begins, as others did; none if there is nobody to share with."""
        num_kept = chat.turns[0].num_kept
        if not num_kept:
            return array("I")
        near = islice(self._nearest(now_ms - chat.age_ms), _MAX_LOOKED_AT)
        long_enough = [number for number in near if len(self._paths[number]) >= num_kept]
        latest = (number for number in long_enough if self._last[self._paths[number][num_kept - 1]] == number)
        found = min(
            islice(latest, _MAX_CHOICES), key=lambda number: self._unlikeness(number, chat, num_kept), default=None
        )
        if found is None:
            found = next(iter(long_enough), None)
        return array("I") if found is None else self._paths[found][:num_kept]

    def _unlikeness(self, number: int, chat: Chat, num_kept: int) -> float:
        """Return how unlike a request's path is to the one that ``chat`` began with. O(log blocks)."""
        path = self._paths[number]
        num_busy = bisect_left(path, -number, key=lambda block: -self._last[block])  # used since: a beginning
        lengths = abs(len(path) - num_kept - chat.num_left) + abs(num_busy - chat.num_busy)
        users = (self._num_users[path[num_kept - 1]] + 1) / (chat.num_users + 1)
        return lengths / (num_kept + chat.num_left) + abs(math.log(users))

    def _nearest(self, time_ms: float) -> Iterator[int]:
        """Yield the requests, those first that are nearest to a time."""
        times = self._times
        later = bisect_left(times, time_ms)
        earlier = later - 1
        while earlier >= 0 or later < len(times):
            if later == len(times) or (earlier >= 0 and time_ms - times[earlier] <= times[later] - time_ms):
                yield earlier
                earlier -= 1
            else:
                yield later
                later += 1
