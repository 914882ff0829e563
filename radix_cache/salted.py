"""Numbers in place of blocks of tokens: they tell which prompts share how long a prefix, and nothing else of them.

A block is told by a keyed digest (BLAKE2b, the salt is its key) of itself and all before it, beginning with the
namespace, and each new digest gets the next number. So equal prefixes have equal numbers, equal tokens in two
namespaces have different ones, and without the salt nobody can make two prompts collide. Numbers count from 0 in each
object: those of two objects have nothing to do with each other, whatever their salts.
"""

from __future__ import annotations

import os
from array import array
from hashlib import blake2b

from radix_cache.tokens import TOKEN_BYTES

__all__ = ["BlockNumbers"]

_DIGEST_BYTES = 16


class BlockNumbers:
    """Numbers for the blocks of prompts. Holds about 160 bytes for each different block; ``len`` says how many.

    block_size: tokens in a block. salt: 1 to 64 bytes; None: random ones that are not kept.
    """

    def __init__(self, block_size: int, salt: bytes | None = None) -> None:
        self.block_size = block_size
        self._salt = os.urandom(32) if salt is None else salt
        self._numbers: dict[bytes, int] = {}
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self._digests)

    def blocks(self, tokens: bytes, namespace: tuple[str, ...] = (), after: int | None = None) -> array[int]:
        """Return a number for each block of packed ``tokens``, the ragged last one included. O(tokens), 1 us a block.

        after: the number of the block that comes before them, if one does; the namespace is that one's then.
        """
        size = self.block_size * TOKEN_BYTES
        digest = self._beginning(namespace) if after is None else self._digests[after]
        numbers = array("I")
        for at in range(0, len(tokens), size):
            digest = self._digest(digest + tokens[at : at + size])
            number = self._numbers.setdefault(digest, len(self._digests))
            if number == len(self._digests):
                self._digests.append(digest)
            numbers.append(number)
        return numbers

    def _beginning(self, namespace: tuple[str, ...]) -> bytes:
        return self._digest(b"".join(len(part.encode()).to_bytes(4) + part.encode() for part in namespace))

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, key=self._salt, digest_size=_DIGEST_BYTES).digest()
