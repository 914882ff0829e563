"""Events as routers read them: vLLM's format over ZeroMQ.

A batch is ``[seconds, [events], data parallel rank]`` in msgpack. An event is a map with its type and named fields, or,
for older readers, an array that begins with its type. Hashes are unsigned 64-bit integers. A namespace travels as
``lora_name``, which readers that tell adapters apart make part of a block's identity.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec

from radix_cache.events import BlockRemoved, BlockStored, Event
from radix_cache.operations import Namespace
from radix_cache.tokens import unpack_tokens

__all__ = ["EventEncoder", "lora_name_of"]

_MEDIUM = "GPU"


class EventEncoder:
    """Makes payloads. clock: seconds since 1970."""

    def __init__(
        self, block_size: int, form: str = "map", rank: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self._block_size = block_size
        self._is_array = form == "array"
        self._rank = rank
        self._clock = clock
        self._encode = msgspec.msgpack.Encoder().encode

    def __call__(self, events: list[Event]) -> bytes:
        """Return the payload of a batch. O(tokens)."""
        return self._encode((self._clock(), list(map(self._encoded, events)), self._rank))

    def _encoded(self, event: Event) -> msgspec.Raw:
        """Encode one event: all of a large tree in one go would keep other threads from running all the while."""
        fields = self._fields(event)
        return msgspec.Raw(self._encode(list(fields.values()) if self._is_array else fields))

    def _fields(self, event: Event) -> dict[str, Any]:
        """Return an event's fields, in the order that the array has."""
        if isinstance(event, BlockStored):
            return {
                "type": "BlockStored",
                "block_hashes": event.block_hashes,
                "parent_block_hash": event.parent_hash,
                "token_ids": unpack_tokens(event.tokens).tolist(),
                "block_size": self._block_size,
                "lora_id": None,
                "medium": _MEDIUM,
                "lora_name": lora_name_of(event.namespace),
            }
        if isinstance(event, BlockRemoved):
            return {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": _MEDIUM}
        return {"type": "AllBlocksCleared"}


def lora_name_of(namespace: Namespace) -> str | None:
    """Return the one name that stands for a namespace: its parts with slashes between, None for the empty one.

    What is in a part and no letter, digit or ``-._~`` is written as in a URL, an empty part as ``%``: two namespaces
    have two names.
    """
    return "/".join(quote(part, safe="", errors="surrogatepass") or "%" for part in namespace) or None
