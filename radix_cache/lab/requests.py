"""What a trace is made of: requests, and what is wrong with a line that is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from os import PathLike
from typing import TypeAlias

from radix_cache.errors import InvalidArgument
from radix_cache.hints import NO_HINTS, Hints
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["Request", "TraceError", "TracePath", "group_ties", "in_time_order"]

TracePath: TypeAlias = "str | PathLike[str]"


class TraceError(InvalidArgument):
    """A line of a trace cannot be used. path, line: where it is, counted from 1."""

    def __init__(self, path: TracePath, line: int, why: str) -> None:
        super().__init__(f"{'stdin' if path == '-' else path}, line {line}: {why}")
        self.path = path
        self.line = line
        self._why = why

    def __reduce__(self) -> tuple[type[TraceError], tuple[TracePath, int, str]]:
        return type(self), (self.path, self.line, self._why)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    prompt: what is looked up, packed: token ids, or the hash ids of blocks. output: the token ids that were generated,
    packed; empty where the trace doesn't have them. tokens_per_id: 1 for token ids, else the tokens of a block.
    conversation, request_type, turn (from 1): where the trace has them, else "" and None.
    """

    timestamp_ms: float
    num_prompt_tokens: int
    num_output_tokens: int
    prompt: bytes
    output: bytes = b""
    tokens_per_id: int = 1
    conversation: str = ""
    request_type: str = ""
    turn: int | None = None

    @property
    def num_ids(self) -> int:
        """Length of the prompt in ids."""
        return len(self.prompt) // TOKEN_BYTES

    @property
    def computed(self) -> bytes:
        """All ids whose KV exists when the request ends: prompt and output but for its last token, never computed."""
        return self.prompt + self.output[:-TOKEN_BYTES]

    @property
    def hints(self) -> Hints:
        """What an eviction policy may know of the request."""
        if not self.conversation and not self.request_type:
            return NO_HINTS
        return Hints(conversation=self.conversation, request_type=self.request_type)


def in_time_order(requests: Iterable[Request]) -> list[Request]:
    """Return the requests sorted by time; those of one time keep their order. O(n log n), holds all of them."""
    return sorted(requests, key=lambda request: request.timestamp_ms)


def group_ties(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Yield lists of neighbours that have the same time: an engine sees each list at once."""
    for _, ties in groupby(requests, key=lambda request: request.timestamp_ms):
        yield list(ties)
