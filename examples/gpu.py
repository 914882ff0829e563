"""A pretended GPU that computes behind the scheduler's back: what is launched runs when it is waited for, not before.

That is as late as it can be. If a block were given to somebody else while a kernel is under way, the kernel would spoil
that somebody's KV, or its own would be spoilt, and `KVMemory.check` would find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kv_memory import KVMemory, next_token


class Launch(NamedTuple):
    """One request's part of a step: compute the KV of positions [start, stop) of tokens, the last of which are drafts.

    num_samples: answers to one prompt that begin here. seed: of the first.
    """

    table: Sequence[int]
    tokens: list[int]
    num_drafts: int
    start: int
    stop: int
    seed: int = 0
    num_samples: int = 1


class Computed(NamedTuple):
    """What came of it.

    num_computed: tokens whose KV is there and counts. tokens: sampled, the drafts that were right first; none before
    the last chunk of a prompt. firsts: first tokens of the other answers.
    """

    num_computed: int
    tokens: list[int]
    firsts: list[int]


class GPU:
    """Runs what was launched, for any keys."""

    def __init__(self, kv: KVMemory) -> None:
        self._kv = kv
        self.launched: dict[Any, Launch] = {}

    def launch(self, launches: dict[Any, Launch]) -> None:
        """Return at once."""
        self.launched = launches

    def wait(self) -> dict[Any, Computed]:
        """Wait for the end of what was launched; return what came of each."""
        launched, self.launched = self.launched, {}
        return {key: self._run(launch) for key, launch in launched.items()}

    def _run(self, launch: Launch) -> Computed:
        self._kv.compute(launch.table, launch.tokens, launch.start, launch.stop)
        if launch.stop < len(launch.tokens):
            return Computed(launch.stop, [], [])
        num_known = len(launch.tokens) - launch.num_drafts
        sampled = [self._sample(launch, num_known + number) for number in range(launch.num_drafts + 1)]
        num_right = _num_equal(launch.tokens[num_known:], sampled)
        firsts = [self._sample(launch, num_known, more) for more in range(1, launch.num_samples)]
        return Computed(num_known + num_right, sampled[: num_right + 1], firsts)

    def _sample(self, launch: Launch, num_tokens: int, more: int = 0) -> int:
        return self._kv.sample(launch.table, num_tokens, launch.seed + more)


def _num_equal(drafts: list[int], sampled: list[int]) -> int:
    """How many drafts, from the first on, are what was sampled in their place."""
    pairs = enumerate(zip(drafts, sampled, strict=False))
    return next((number for number, (draft, sample) in pairs if draft != sample), len(drafts))


def guess(tokens: list[int], num_drafts: int, seed: int) -> list[int]:
    """A small model's guesses at what follows: about every third is wrong."""
    drafts: list[int] = []
    for _ in range(num_drafts):
        token = next_token(tokens + drafts, seed)
        drafts.append(token ^ (token % 3 == 0))
    return drafts
