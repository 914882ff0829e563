"""A step's message to the server, which is sent again until it is answered, and done once.

Its number, `seq`, makes that so: the server answers a number that it has seen with the answers of the first time. No
answer means that the connection broke or the server is away; meanwhile nothing else may be sent, and nothing launched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from radix_cache import RadixCacheError, ServiceUnavailable

_NUM_RESENDS = 50
_PAUSE_S = 0.05


class Item(NamedTuple):
    """An operation of a message. request: whose it is. lease: the one that it changes, if there is one already."""

    verb: str
    request: Any
    lease: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass
class Message:
    """What was sent, and the answers to come."""

    seq: int
    items: list[Item]
    answers: list[Any]


class Mailbox:
    """Sends on a client's session. num_sent: messages so far, those that were sent again among them."""

    def __init__(self, session: Any) -> None:
        self.num_sent = 0
        self._session = session
        self._seq = time.time_ns()  # above all numbers of an earlier life of this engine

    def send(self, items: list[Item]) -> Message:
        """Send a message, and don't wait for its answer."""
        self._seq += 1
        return Message(self._seq, items, self._submit(self._seq, items))

    def read(self, message: Message) -> Iterator[tuple[Item, Any, RadixCacheError | None]]:
        """Yield each item with its value or its error."""
        self._wait(message)
        for item, answer in zip(message.items, message.answers, strict=True):
            error = _error_of(answer)
            yield item, None if error else answer.result(), error

    def _submit(self, seq: int, items: list[Item]) -> list[Any]:
        """strict: where running requests must wait for blocks, new ones don't overtake them."""
        self.num_sent += 1
        with self._session.submit(seq=seq, strict=True) as batch:
            return [
                getattr(batch, verb)(*([] if lease is None else [lease]), *args, **options)
                for verb, _, lease, args, options in items
            ]

    def _wait(self, message: Message) -> None:
        for _ in range(_NUM_RESENDS):
            if not any(isinstance(_error_of(answer), ServiceUnavailable) for answer in message.answers):
                return
            time.sleep(_PAUSE_S)
            message.answers = self._submit(message.seq, message.items)
        raise ServiceUnavailable("the server does not come back")


def _error_of(answer: Any) -> RadixCacheError | None:
    """Wait for an answer; return the error that it is, if it is one."""
    try:
        answer.result()
    except RadixCacheError as error:
        return error
    return None
