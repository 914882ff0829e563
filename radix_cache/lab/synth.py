"""Traces that are made up: conversations and agents over shared prompts, by the knobs that decide what a cache finds.

Conversations begin at random times (a Poisson process). Each begins with one of the shared prompts, a few of which are
popular (Zipf's law), and goes on for a number of turns: the next prompt is all that was said, the answer, and new
tokens. Some of the conversations are agents: their turns are calls of tools, which come back after a gap of their own
and add what the tool said. Lengths and times are log-normal around their means, numbers of turns geometric.

`radix_cache.lab.fit` takes the knobs from a real trace.
"""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any

from radix_cache.errors import InvalidArgument
from radix_cache.lab.requests import Request
from radix_cache.tokens import pack_tokens

__all__ = ["Profile", "synthesize"]


@dataclass(frozen=True, slots=True)
class Profile:
    """The knobs. Means are of tokens or seconds; a ``_spread`` is the standard deviation of the logarithm.

    conversations_per_s: how many begin. shared_prompts: how many there are; popularity: the exponent of Zipf's law, 0
    makes them alike. shared_tokens: of one. first_tokens: what a conversation's first turn adds. turns: requests of a
    conversation. turn_tokens: what each later turn adds, beside the answer. think_s: from an answer to the next turn.
    answer_tokens_per_s: how fast answers come. agent_share: of the conversations, in [0, 1]; agent_turns, tool_tokens,
    tool_gap_s: an agent's instead of turns, turn_tokens and think_s. max_tokens: a conversation ends before its prompt
    exceeds that.
    """

    num_requests: int = 10_000
    block_tokens: int = 512
    conversations_per_s: float = 1.0
    shared_prompts: int = 50
    popularity: float = 1.0
    shared_tokens: float = 1500.0
    shared_spread: float = 0.5
    first_tokens: float = 800.0
    first_spread: float = 1.0
    turns: float = 3.0
    turn_tokens: float = 400.0
    turn_spread: float = 1.0
    answer_tokens: float = 300.0
    answer_spread: float = 0.8
    answer_tokens_per_s: float = 40.0
    think_s: float = 60.0
    think_spread: float = 1.0
    agent_share: float = 0.0
    agent_turns: float = 20.0
    tool_tokens: float = 600.0
    tool_gap_s: float = 3.0
    max_tokens: int = 131_072

    def __post_init__(self) -> None:
        for item in fields(self):
            value, least = getattr(self, item.name), _LEAST.get(item.name, 0)
            kinds = int if item.type == "int" else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < math.inf:
                kind = "an integer" if kinds is int else "a number"
                raise InvalidArgument(f"{item.name} is {kind} of at least {least}, not {value!r}")
        if self.agent_share > 1:
            raise InvalidArgument(f"agent_share is at most 1, not {self.agent_share!r}")

    def as_dict(self) -> dict[str, Any]:
        """Return all knobs by name, ready for JSON."""
        return asdict(self)


_LEAST = {
    "num_requests": 1,
    "block_tokens": 1,
    "conversations_per_s": 1e-9,
    "shared_prompts": 1,
    "turns": 1,
    "agent_turns": 1,
    "answer_tokens_per_s": 1e-9,
    "max_tokens": 1,
}


@dataclass(slots=True)
class _Chat:
    number: int
    is_agent: bool
    num_tokens: int
    ids: array[int]  # of its whole blocks
    turn: int = 1


def synthesize(profile: Profile, seed: int = 0) -> Iterator[Request]:
    """Yield ``profile.num_requests`` requests of hash ids in the order of their times; the same for the same seed."""
    maker = _Maker(profile, random.Random(seed))  # noqa: S311 - reproducible, not secret
    due: list[tuple[float, int, _Chat]] = []
    begins_s, num_begun = 0.0, 0
    for _ in range(profile.num_requests):
        while not due or due[0][0] > begins_s:
            heappush(due, (begins_s, num_begun, maker.chat(num_begun)))
            begins_s += maker.draw.expovariate(profile.conversations_per_s)
            num_begun += 1
        now_s, number, chat = heappop(due)
        request, gap_s = maker.turn(chat, now_s)
        yield request
        if gap_s is not None:
            heappush(due, (now_s + gap_s, number, chat))


class _Maker:
    """Draws conversations and their turns."""

    def __init__(self, profile: Profile, draw: random.Random) -> None:
        self.profile = profile
        self.draw = draw
        self._num_ids = 0
        weights = [1 / rank**profile.popularity for rank in range(1, profile.shared_prompts + 1)]
        self._popularity = list(accumulate(weights))
        self._shared = [self._some(profile.shared_tokens, profile.shared_spread) for _ in weights]
        self._shared_ids = [self._new_ids(num_tokens // profile.block_tokens) for num_tokens in self._shared]

    def chat(self, number: int) -> _Chat:
        """Return a conversation that has not begun."""
        profile, draw = self.profile, self.draw
        which = bisect(self._popularity, draw.random() * self._popularity[-1])
        which = min(which, profile.shared_prompts - 1)
        first = max(self._some(profile.first_tokens, profile.first_spread), 1)
        is_agent = draw.random() < profile.agent_share
        num_tokens = min(self._shared[which] + first, profile.max_tokens)
        return _Chat(number, is_agent, num_tokens, self._shared_ids[which][: num_tokens // profile.block_tokens])

    def turn(self, chat: _Chat, now_s: float) -> tuple[Request, float | None]:
        """Return a request, and how long after it the next one comes, if there is one."""
        profile = self.profile
        num_answer = max(self._some(profile.answer_tokens, profile.answer_spread), 1)
        request = self._request(chat, now_s, num_answer)
        mean = profile.agent_turns if chat.is_agent else profile.turns
        if self.draw.random() < 1 / mean:
            return request, None
        added = profile.tool_tokens if chat.is_agent else profile.turn_tokens
        gap_s = profile.tool_gap_s if chat.is_agent else profile.think_s
        chat.turn += 1
        chat.num_tokens += num_answer + max(self._some(added, profile.turn_spread), 1)
        if chat.num_tokens > profile.max_tokens:
            return request, None
        return request, num_answer / profile.answer_tokens_per_s + self._amount(gap_s, profile.think_spread)

    def _request(self, chat: _Chat, now_s: float, num_answer: int) -> Request:
        size = self.profile.block_tokens
        chat.ids += self._new_ids(chat.num_tokens // size - len(chat.ids))
        ragged = self._new_ids(1) if chat.num_tokens % size else array("I")
        return Request(
            timestamp_ms=round(now_s * 1000),
            num_prompt_tokens=chat.num_tokens,
            num_output_tokens=num_answer,
            prompt=pack_tokens(chat.ids + ragged),
            tokens_per_id=size,
            conversation=str(chat.number),
            request_type="agent" if chat.is_agent else "chat",
            turn=chat.turn,
        )

    def _new_ids(self, count: int) -> array[int]:
        self._num_ids += count
        return array("I", range(self._num_ids - count, self._num_ids))

    def _some(self, mean: float, spread: float) -> int:
        return round(self._amount(mean, spread))

    def _amount(self, mean: float, spread: float) -> float:
        return self.draw.lognormvariate(math.log(mean) - spread**2 / 2, spread) if mean > 0 else 0.0
