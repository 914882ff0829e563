"""Conversations that share what conversations share: a system prompt, few-shot examples, and their own past.

Words are random numbers from a seed; there is no tokenizer. Every engine has the same system prompt and the same
few-shot examples, so each finds what the other has computed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from engine import Engine, Request

_NUM_WORDS = 32_000


def words(random_: random.Random, least: int, most: int) -> list[int]:
    return [random_.randrange(_NUM_WORDS) for _ in range(random_.randint(least, most))]


@dataclass
class Conversation:
    """A user who asks, reads the answer, and asks again, a few times."""

    random: random.Random
    tokens: list[int]
    num_turns_left: int

    def next_request(self) -> Request | None:
        """Return the next turn, or None if there is no more."""
        if not self.num_turns_left:
            return None
        self.num_turns_left -= 1
        prompt = self.tokens + words(self.random, 10, 60)
        stop_at = len(prompt) + self.random.randint(10, 50)
        is_impatient = self.random.random() < 0.08
        abort_at = (len(prompt) + stop_at) // 2 if is_impatient else None
        return Request(prompt, stop_at, abort_at, owner=self)

    def hear(self, request: Request) -> None:
        """Take up the answer; whoever has left is not asking again."""
        self.tokens = request.tokens
        if request.is_aborted:
            self.num_turns_left = 0


def conversations(seed: int, engine: int, number: int) -> list[Conversation]:
    """Return ``number`` conversations of one engine, the same at each run."""
    shared = random.Random(seed)
    system = words(shared, 100, 100)
    few_shots = [words(shared, 80, 160) for _ in range(4)]
    own = random.Random(f"{seed}/{engine}")
    return [
        Conversation(random.Random(own.random()), system + own.choice(few_shots), own.randint(1, 5))
        for _ in range(number)
    ]


def run(engine: Engine, talks: list[Conversation]) -> Iterator[int]:
    """Run all conversations to their end; yield after each step how many have ended."""
    num_ended = 0
    engine.waiting.extend(request for talk in talks if (request := talk.next_request()))
    while engine.is_busy:
        for request in engine.step():
            request.owner.hear(request)
            following = request.owner.next_request()
            if following is None:
                num_ended += 1
            else:
                engine.waiting.append(following)
        yield num_ended
