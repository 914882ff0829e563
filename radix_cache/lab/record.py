"""Recording a trace that can be shared: blocks become numbers, and nothing of a prompt or a namespace is kept.

A block is told by a keyed digest (BLAKE2b, the salt is its key) of itself and all before it, beginning with the
namespace, and each new digest gets the next number. So equal prefixes have equal numbers, equal tokens in two
namespaces have different ones, and without the salt nobody can try whether some prompt is among them. The salt is never
written. Numbers count from 0 in each recorder: files of two recorders share none, whatever their salts.

What the trace still tells: when requests came, how long they were, and which of them share how long a prefix.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TextIO

from radix_cache.errors import InvalidArgument
from radix_cache.lab.requests import Request
from radix_cache.lab.writing import as_line
from radix_cache.operations import check_count
from radix_cache.tokens import TOKEN_BYTES, TokenIds, pack_tokens

__all__ = ["Anonymizer", "RecordingCache"]

_DIGEST_BYTES = 16


class Anonymizer:
    """Turns prompts into numbers for their blocks. Holds about 150 bytes for each different block.

    block_size: tokens in a block. salt: up to 64 bytes; None: random ones that are not kept.
    """

    def __init__(self, block_size: int = 16, salt: bytes | None = None) -> None:
        self.block_size = check_count(block_size, "block_size", 1)
        if salt is not None and not 16 <= len(salt) <= 64:
            raise InvalidArgument(f"a salt has 16 to 64 bytes, not {len(salt)}")
        self._salt = os.urandom(32) if salt is None else salt
        self._numbers: dict[bytes, int] = {}
        self._names: dict[str, int] = {}

    def blocks(self, tokens: bytes, namespace: tuple[str, ...] = ()) -> array[int]:
        """Return a number for each block of packed ``tokens``, the ragged last one included. O(tokens)."""
        size = self.block_size * TOKEN_BYTES
        digest = self._digest(b"".join(len(part.encode()).to_bytes(4) + part.encode() for part in namespace))
        numbers = array("I")
        for at in range(0, len(tokens), size):
            digest = self._digest(digest + tokens[at : at + size])
            numbers.append(self._numbers.setdefault(digest, len(self._numbers)))
        return numbers

    def request(self, request: Request) -> Request:
        """Return a request of token ids as one of hash ids; names of conversations become numbers, too.

        Raises `InvalidArgument` for one that is of hash ids already: who knows how they were made.
        """
        if request.tokens_per_id > 1:
            raise InvalidArgument("a request of hash ids cannot be made anonymous: its ids were made by somebody else")
        conversation = request.conversation and str(self._names.setdefault(request.conversation, len(self._names)))
        prompt = pack_tokens(self.blocks(request.prompt))
        size = self.block_size
        if size == 1:
            return replace(request, prompt=prompt, output=b"", conversation=conversation)
        return replace(request, prompt=prompt, output=b"", tokens_per_id=size, conversation=conversation)

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, key=self._salt, digest_size=_DIGEST_BYTES).digest()


@dataclass(slots=True)
class _Open:
    """A request that is running."""

    timestamp_ms: float
    prompt: bytes
    namespace: tuple[str, ...]
    num_known: int  # tokens that are known of it, its answer's included


class RecordingCache:
    """A cache or client that also writes down what is asked of it; all verbs go through to ``cache``.

    Recorded are matches, when they are released: a scheduler that matches the same request again and again records it
    once each time it lets go. The length of an answer is what was inserted beyond the prompt. Forks are recorded as
    what their tokens are, without the parent's; verbs inside a ``batch`` are not recorded.

    out: where lines go, flushed one by one. anonymizer: its block size should be the cache's. clock: seconds.
    """

    def __init__(
        self, cache: Any, out: TextIO, anonymizer: Anonymizer | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache = cache
        self._out = out
        self._anonymizer = anonymizer or Anonymizer(cache.describe().block_size)
        self._clock = clock
        self._start_s = clock()
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()

    def match_prefix(self, tokens: TokenIds, namespace: Iterable[str] = (), **options: Any) -> Any:
        """Match, and remember what was asked for."""
        prompt, namespace = pack_tokens(tokens), tuple(namespace)
        now_ms = round((self._clock() - self._start_s) * 1000)
        lease = self._cache.match_prefix(prompt, namespace, **options)
        with self._lock:
            self._open[lease.lease_id] = _Open(now_ms, prompt, namespace, len(prompt) // TOKEN_BYTES)
        return lease

    def insert(self, lease: Any, tokens: TokenIds, offset: int = 0, **options: Any) -> Any:
        """Insert, and remember how long the request has become."""
        packed = pack_tokens(tokens)
        result = self._cache.insert(lease, packed, offset, **options)
        with self._lock:
            if (request := self._open.get(_id_of(lease))) is not None:
                request.num_known = max(request.num_known, offset + len(packed) // TOKEN_BYTES)
        return result

    def release(self, lease: Any, **options: Any) -> Any:
        """Release, and write the request down."""
        result = self._cache.release(lease, **options)
        with self._lock:
            if (request := self._open.pop(_id_of(lease), None)) is not None:
                self._out.write(as_line(self._recorded(request)))
                self._out.flush()
        return result

    def _recorded(self, request: _Open) -> Request:
        num_tokens = len(request.prompt) // TOKEN_BYTES
        return Request(
            request.timestamp_ms,
            num_tokens,
            request.num_known - num_tokens,
            pack_tokens(self._anonymizer.blocks(request.prompt, request.namespace)),
            tokens_per_id=self._anonymizer.block_size,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _id_of(lease: Any) -> str:
    return lease if isinstance(lease, str) else str(lease.lease_id)
