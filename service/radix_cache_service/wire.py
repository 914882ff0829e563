"""Ids on the wire: packed little-endian uint32 ``bytes``, or ``repeated uint32`` for clients written by hand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from radix_cache.errors import InvalidBlocks, InvalidTokens
from radix_cache.tokens import as_block_ids, pack_tokens

__all__ = ["read_block_ids", "read_tokens"]


def read_tokens(packed: bytes, listed: Sequence[int]) -> bytes:
    """Return the tokens of a request, packed. Raises `InvalidTokens` for ragged bytes."""
    if packed or not listed:
        if len(packed) % 4:
            raise InvalidTokens(f"packed tokens are 4 bytes each; {len(packed)} bytes are not a whole number of them")
        return packed
    return pack_tokens(array("I", listed))


def read_block_ids(packed: bytes, listed: Sequence[int]) -> array[int]:
    """Return the block ids of a request or an answer, int32. Raises `InvalidBlocks` for ragged bytes and ids from
    2**31.
    """
    if packed or not listed:
        if len(packed) % 4:
            raise InvalidBlocks(f"packed ids are 4 bytes each; {len(packed)} bytes are not a whole number of them")
        return as_block_ids(array("I", packed))
    return as_block_ids(array("I", listed))
