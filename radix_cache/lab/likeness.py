"""What a trace is like, conversation by conversation, in numbers: enough to make others like it.

Of a conversation it says when the next one begins, and of each of its requests how long after the one before it came,
how many blocks it has in common with which earlier one, and how long it is. Of a first request it says how many of its
blocks others have sent before, how many others, how long ago the last of them, and what has become of that one's path.
So lengths, turns, times and sharing stay together as they occur; means and spreads of each (`radix_cache.lab.fit`) lose
that. There are no ids in it, and no names but the kinds of requests.

`radix_cache.lab.resample` makes traces of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from radix_cache.errors import InvalidArgument
from radix_cache.lab.blocks import BlockTrace
from radix_cache.lab.requests import Request, in_time_order
from radix_cache.lab.turns import conversations_of
from radix_cache.operations import check_count

__all__ = ["Chat", "Likeness", "Turn"]

_MOST = 10**12


class Turn(NamedTuple):
    """A request. wait_ms: after the one before. back: how many requests ago the conversation had the ``num_kept`` first
    of its ``num_blocks`` blocks; of a first request others had them, and ``back`` is 0.
    """

    wait_ms: float
    back: int
    num_kept: int
    num_blocks: int
    num_tokens: int
    num_output_tokens: int


class Chat(NamedTuple):
    """A conversation. next_ms: after it, the next one begins. age_ms: before its first request, the last of its kept
    blocks was used, by a request that has ``num_left`` blocks more. ``num_busy`` of the kept ones were used since by
    others; ``num_users`` conversations had the last of them.
    """

    next_ms: float
    age_ms: float
    num_busy: int
    num_left: int
    num_users: int
    request_type: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Likeness:
    """The conversations of a trace, in the order in which they began. num_requests: that are to be made."""

    num_requests: int
    tokens_per_block: int
    chats: tuple[Chat, ...] = field(repr=False)

    def __post_init__(self) -> None:
        check_count(self.num_requests, "num_requests", 1)
        check_count(self.tokens_per_block, "tokens_per_block", 1)
        if not self.chats:
            raise InvalidArgument("a likeness has one conversation or more")

    @classmethod
    def of(cls, requests: Sequence[Request], block_size: int = 16) -> Likeness:
        """Return what ``requests``, taken in the order of their times, are like. O(blocks).

        block_size: of traces of token ids. Raises `InvalidArgument` for fewer than two requests.
        """
        if len(requests) < 2:
            raise InvalidArgument(f"a likeness is taken of two requests or more, not {len(requests)}")
        requests = in_time_order(requests)
        trace = BlockTrace.of(requests, block_size)
        return cls(len(requests), trace.block_tokens[0], _Looking(requests, trace).chats())

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Likeness:
        """Return what `as_dict` returned. Raises `InvalidArgument`, and for other things what unpacking them raises."""
        chats = tuple(_chat(number, *values) for number, values in enumerate(saved["conversations"]))
        return cls(saved["num_requests"], saved["tokens_per_block"], chats)

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers, ready for JSON: about 35 characters for each request of the trace."""
        return {
            "num_requests": self.num_requests,
            "tokens_per_block": self.tokens_per_block,
            "conversations": self.chats,
        }


def _chat(
    number: int, next_ms: float, age_ms: float, busy: int, left: int, users: int, kind: str, turns: list[list[Any]]
) -> Chat:
    _check(f"conversation {number}", (next_ms, age_ms), (busy, left, users))
    if not turns or not isinstance(kind, str):
        raise InvalidArgument(f"conversation {number} has a request type and one request or more")
    checked = tuple(_turn(f"request {at} of conversation {number}", at, *turn) for at, turn in enumerate(turns))
    return Chat(next_ms, age_ms, busy, left, users, kind, checked)


def _turn(name: str, at: int, wait_ms: float, *sizes: int) -> Turn:
    _check(name, (wait_ms,), sizes)
    turn = Turn(wait_ms, *sizes)
    if turn.num_kept > turn.num_blocks or not min(at, 1) <= turn.back <= at:
        raise InvalidArgument(f"{name} keeps {turn.num_kept} of {turn.num_blocks} blocks, of {turn.back} requests ago")
    return turn


def _check(name: str, times: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
    for kinds, values in (((int, float), times), ((int,), sizes)):
        for value in values:
            if type(value) not in kinds or not 0 <= value < _MOST:
                raise InvalidArgument(f"{name} has {value!r} where a number of at least 0 belongs")


class _Looking:
    """Goes through a trace once."""

    def __init__(self, requests: Sequence[Request], trace: BlockTrace) -> None:
        self._requests = requests
        self._trace = trace
        self._last = array("q", [-1]) * trace.num_blocks  # which request used each block last
        self._num_users = array("q", [0]) * trace.num_blocks  # how many conversations had it
        self._begun: dict[int, Chat] = {}
        self._turns: dict[int, list[Turn]] = {}
        self._own: dict[int, dict[int, int]] = {}  # which of a conversation's turns used each of its blocks last

    def chats(self) -> tuple[Chat, ...]:
        """Return the conversations; after the last one comes the end of the trace."""
        begins: list[float] = []
        before: dict[int, float] = {}
        for number, conversation in enumerate(conversations_of(self._requests, self._trace)):
            now_ms = self._requests[number].timestamp_ms
            if conversation not in before:
                begins.append(now_ms)
            self._add(number, conversation, now_ms - before.get(conversation, now_ms))
            before[conversation] = now_ms
        gaps = (later - earlier for earlier, later in pairwise([*begins, self._requests[-1].timestamp_ms]))
        return tuple(
            chat._replace(next_ms=round(gap_ms, 3), turns=tuple(turns))
            for chat, turns, gap_ms in zip(self._begun.values(), self._turns.values(), gaps, strict=True)
        )

    def _add(self, number: int, conversation: int, wait_ms: float) -> None:
        request, path = self._requests[number], self._trace.path(number)[: self._trace.num_lookups[number]]
        turns = self._turns.setdefault(conversation, [])
        own = self._own.setdefault(conversation, {})
        if turns:
            num_kept = next((at for at, block in enumerate(path) if block not in own), len(path))
            back = len(turns) - own[path[num_kept - 1]] if num_kept else 1
        else:
            num_kept = next((at for at, block in enumerate(path) if self._last[block] < 0), len(path))
            back = 0
            self._begun[conversation] = self._chat(number, path, num_kept)
        sizes = len(path), request.num_prompt_tokens, request.num_output_tokens
        for block in path:
            self._last[block] = number
            self._num_users[block] += block not in own
            own[block] = len(turns)
        turns.append(Turn(round(wait_ms, 3), back, num_kept, *sizes))

    def _chat(self, number: int, path: array[int], num_kept: int) -> Chat:
        request = self._requests[number]
        if not num_kept:
            return Chat(0.0, 0.0, 0, 0, 0, request.request_type, ())
        user = self._last[path[num_kept - 1]]
        age_ms = request.timestamp_ms - self._requests[user].timestamp_ms
        num_busy = next(at for at, block in enumerate(path) if self._last[block] == user)
        num_left = self._trace.num_lookups[user] - num_kept
        num_users = self._num_users[path[num_kept - 1]]
        return Chat(0.0, round(age_ms, 3), num_busy, num_left, num_users, request.request_type, ())
