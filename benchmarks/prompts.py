"""Random tokens, the same in every run."""

from __future__ import annotations

import random

TOKEN_BYTES = 4


class Prompts:
    """Packed tokens out of a seeded generator.

    They are 32 random bits each, so that as many prompts as one likes differ in their very first token, and the number
    of prompts is the number of leaves.
    """

    def __init__(self, seed: int = 1) -> None:
        self._random = random.Random(seed)

    def one(self, num_tokens: int) -> bytes:
        """Fresh random tokens."""
        return self._random.randbytes(TOKEN_BYTES * num_tokens)

    def many(self, number: int, num_tokens: int) -> list[bytes]:
        """That many prompts."""
        return [self.one(num_tokens) for _ in range(number)]

    def listed(self, num_tokens: int) -> list[int]:
        """Tokens of a real vocabulary, below 2**17, as Python integers."""
        return [self._random.getrandbits(17) for _ in range(num_tokens)]
