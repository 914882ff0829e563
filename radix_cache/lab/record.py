"""Recording a trace that can be shared: blocks become numbers, and nothing of a prompt or a namespace is kept.

How, is in `radix_cache.salted`. The salt is never written. Numbers count from 0 in each recorder: files of two
recorders share none, whatever their salts.

What the trace still tells: when requests came, how long they were, and which of them share how long a prefix.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TextIO

from radix_cache.batch import Recorder
from radix_cache.errors import InvalidArgument, RadixCacheError
from radix_cache.lab.requests import Request
from radix_cache.lab.writing import as_line
from radix_cache.operations import Insert, MatchPrefix, Namespace, Operation, Release, check_count, check_namespace
from radix_cache.salted import BlockNumbers
from radix_cache.tokens import TOKEN_BYTES, TokenIds, pack_tokens

__all__ = ["Anonymizer", "RecordingCache"]


class Anonymizer(BlockNumbers):
    """Turns prompts into numbers for their blocks. Holds about 160 bytes for each different block.

    block_size: tokens in a block. salt: 16 to 64 bytes; None: random ones that are not kept.
    """

    def __init__(self, block_size: int = 16, salt: bytes | None = None) -> None:
        if salt is not None and not 16 <= len(salt) <= 64:
            raise InvalidArgument(f"a salt has 16 to 64 bytes, not {len(salt)}")
        super().__init__(check_count(block_size, "block_size", 1), salt)
        self._names: dict[str, int] = {}

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


@dataclass(slots=True)
class _Open:
    """A request that is running.

    num_known: tokens, its answer's included. published: tokens that are, which may be others than were asked for.
    """

    timestamp_ms: float
    prompt: bytes
    namespace: Namespace
    num_known: int
    published: bytearray
    block_size: int

    def insert(self, tokens: bytes, offset: int) -> None:
        """Take up what was published from position ``offset`` on, its whole blocks."""
        end = offset + len(tokens) // TOKEN_BYTES
        self.num_known = max(self.num_known, end)
        known = len(self.published) - offset * TOKEN_BYTES
        whole = (end // self.block_size * self.block_size - offset) * TOKEN_BYTES
        self.published += tokens[known:whole]


class RecordingCache:
    """A cache or blocking client that also writes down what is asked of it; all verbs go through to ``cache``.

    Recorded are matches, when they are released, so lines come in the order in which requests end: readers sort them by
    time. A scheduler that matches the same request again and again records it once each time it lets go. The length of
    an answer is what was inserted beyond the prompt. A fork's prompt is what its parent had published by then, and its
    own tokens; forks of what is not recorded are left out. Batches of the cache are recorded; those of a session are,
    if they go through `record`. Holds the tokens of open requests twice.

    out: where lines go, flushed one by one. anonymizer: its block size should be the cache's. clock: seconds.
    """

    def __init__(
        self, cache: Any, out: TextIO, anonymizer: Anonymizer | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache = cache
        self._out = out
        self._anonymizer = Anonymizer(cache.describe().block_size) if anonymizer is None else anonymizer
        self._clock = clock
        self._start_s = clock()
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()

    def match_prefix(self, tokens: TokenIds, namespace: Iterable[str] = (), **options: Any) -> Any:
        """Match, and remember what was asked for."""
        prompt, namespace = pack_tokens(tokens), check_namespace(namespace)
        now_ms = self._now_ms()
        lease = self._cache.match_prefix(prompt, namespace, **options)
        parent = options.get("parent")
        self._matched(lease, now_ms, prompt, None if parent is None else _id_of(parent))
        return lease

    def insert(self, lease: Any, tokens: TokenIds, offset: int = 0, **options: Any) -> Any:
        """Insert, and remember how long the request has become."""
        packed = pack_tokens(tokens)
        result = self._cache.insert(lease, packed, offset, **options)
        self._inserted(_id_of(lease), packed, offset)
        return result

    def release(self, lease: Any, **options: Any) -> Any:
        """Release, and write the request down."""
        result = self._cache.release(lease, **options)
        self._released(_id_of(lease))
        return result

    def batch(self, **options: Any) -> AbstractContextManager[Recorder]:
        """Return a batch of the cache that is recorded."""
        return self.record(self._cache.batch(**options))

    @contextmanager
    def record(self, batch: Any) -> Iterator[Recorder]:
        """Enter ``batch``, a session's say, and when it has run record those of its verbs that did not fail."""
        with batch as verbs:
            yield verbs
        now_ms = self._now_ms()
        for operation, pending in verbs._recorded:
            with suppress(RadixCacheError):
                self._note(operation, pending.result(), now_ms)

    def _note(self, operation: Operation, result: Any, now_ms: float) -> None:
        match operation:
            case MatchPrefix(pin_s=None):
                self._matched(result, now_ms, operation.tokens, operation.parent_id)
            case Insert():
                self._inserted(operation.lease_id, operation.tokens, operation.offset)
            case Release():
                self._released(operation.lease_id)

    def _matched(self, lease: Any, now_ms: float, tokens: bytes, parent_id: str | None) -> None:
        with self._lock:
            parent = None if parent_id is None else self._open.get(parent_id)
            if parent is None and parent_id is not None:
                return
            prompt = tokens if parent is None else bytes(parent.published) + tokens
            published = bytearray(prompt[: lease.num_cached_tokens * TOKEN_BYTES])
            self._open[lease.lease_id] = _Open(
                now_ms, prompt, lease.namespace, len(prompt) // TOKEN_BYTES, published, lease.block_size
            )

    def _inserted(self, lease_id: str, tokens: bytes, offset: int) -> None:
        with self._lock:
            if (request := self._open.get(lease_id)) is not None:
                request.insert(tokens, offset)

    def _released(self, lease_id: str) -> None:
        with self._lock:
            if (request := self._open.pop(lease_id, None)) is not None:
                self._out.write(as_line(self._recorded(request)))
                self._out.flush()

    def _now_ms(self) -> float:
        return round((self._clock() - self._start_s) * 1000)

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
