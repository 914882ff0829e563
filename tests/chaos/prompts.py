"""Prompts that share what prompts share: a tree of segments, whose upper ones everybody uses.

A segment's tokens follow from the seed and its path alone, so engines that never talk to each other compute the same
prefixes. Which path a request takes is the engine's own dice.
"""

from __future__ import annotations

import random
from functools import lru_cache

NAMESPACES = (("model", "w1"), ("model", "w1", "lora"), ("model", "w2"))
SCRATCH = ("scratch",)  # what is reset under load lies under it; a lease elsewhere never gets stale
_NUM_SCRATCH = 2
_BRANCHES = 4
_VOCABULARY = 50_000


@lru_cache(maxsize=4096)
def segment(seed: int, path: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens at the end of a path."""
    dice = random.Random(f"{seed}/segment/{path}")
    return tuple(dice.randrange(_VOCABULARY) for _ in range(dice.randint(3, 24)))


def prompt(seed: int, dice: random.Random) -> list[int]:
    """Draw a prompt: one to four segments of the tree, and often a few tokens that nobody else has."""
    path: tuple[int, ...] = ()
    tokens: list[int] = []
    for _ in range(dice.randint(1, 4)):
        path += (min(int(dice.expovariate(0.9)), _BRANCHES - 1),)
        tokens += segment(seed, path)
    if dice.random() < 0.5:
        tokens += [dice.randrange(_VOCABULARY) for _ in range(dice.randint(1, 12))]
    return tokens


def namespace(dice: random.Random) -> tuple[str, ...]:
    """Draw a namespace, one in eight times one that is reset now and then."""
    if dice.random() < 0.125:
        return (*SCRATCH, str(dice.randrange(_NUM_SCRATCH)))
    return dice.choice(NAMESPACES)


def is_reset_at_times(name: tuple[str, ...]) -> bool:
    """Tell whether leases in this namespace may get stale."""
    return name[:1] == SCRATCH
