"""Playing a trace to a cache: what is counted, and how.

Requests come one after the other, each to its end before the next begins: what is cached of its prompt is matched and
locked, the rest is allocated, all of it is published, the lease is released. That is one batch, so one message to a
server. The path of a request is touched and locked before anything is evicted for it, or it would evict its own prefix.

In a trace of hash ids each id is one block of many tokens. It is played as ONE token to a cache with ``block_size=1``:
the tree holds one id where an engine's would hold a block of tokens, and decides the same. Hits are counted in tokens
all the same: blocks hit times tokens per block, but no more than the prompt has, since its last block may be ragged.
Only what is contiguous from the start of a prompt is a hit.

What this does not model: time between requests, requests that overlap, and decoding.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from radix_cache.batch import Recorder
from radix_cache.errors import InvalidArgument, PoolExhausted
from radix_cache.lab.trace import Request
from radix_cache.stats import Description, Stats
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["Hits", "ReplayResult", "replay"]


class Cache(Protocol):
    """What is used of a cache."""

    def batch(self) -> AbstractContextManager[Recorder]: ...
    def stats(self) -> Stats: ...
    def describe(self) -> Description: ...


@dataclass(frozen=True, slots=True)
class Hits:
    """What was asked of a cache, and how much of it was there. Rates are in [0, 1], or None where nothing was asked."""

    num_requests: int
    num_prompt_tokens: int
    num_prompt_blocks: int
    num_hit_requests: int
    num_hit_tokens: int
    num_hit_blocks: int

    @property
    def token_hit_rate(self) -> float | None:
        """Cached share of the prompt tokens: the share of prefill that is saved."""
        return _rate(self.num_hit_tokens, self.num_prompt_tokens)

    @property
    def block_hit_rate(self) -> float | None:
        """Cached share of the prompts' blocks."""
        return _rate(self.num_hit_blocks, self.num_prompt_blocks)

    @property
    def request_hit_rate(self) -> float | None:
        """Share of the requests that found anything."""
        return _rate(self.num_hit_requests, self.num_requests)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay came to.

    whole, last_half: hits over all requests, and over those from number ``num_requests // 2`` on, when the cache is
    warm. num_evicted_blocks: by the cache meanwhile. num_calls: batches run. seconds: spent in them, reading the trace
    not included.
    """

    whole: Hits
    last_half: Hits
    num_evicted_blocks: int
    num_calls: int
    seconds: float

    @property
    def requests_per_s(self) -> float | None:
        """Requests played in a second of calls."""
        return self.whole.num_requests / self.seconds if self.seconds else None

    def as_dict(self) -> dict[str, Any]:
        """Return all figures and rates by name, ready for JSON."""
        shown = asdict(self)
        for name, hits in (("whole", self.whole), ("last_half", self.last_half)):
            for rate in ("token_hit_rate", "block_hit_rate", "request_hit_rate"):
                shown[name][rate] = getattr(hits, rate)
        return {**shown, "requests_per_s": self.requests_per_s}


def replay(
    trace: Iterable[Request],
    cache: Cache,
    namespace: tuple[str, ...] = (),
    batch: Callable[[], AbstractContextManager[Recorder]] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> ReplayResult:
    """Play ``trace`` to ``cache`` and count the hits; the cache should be empty, or ``namespace`` new to it.

    batch: how a batch is begun, if not by ``cache.batch()``: a session's is faster. clock: seconds.
    A request that finds fewer blocks than it needs publishes what fits. Where the trace has output tokens, all but the
    last are published too, as an engine would: the last one's KV is never computed. Mutates the cache. One batch a
    request. Raises `InvalidArgument` for a trace of hash ids on a cache whose blocks have more than one token, and what
    the cache raises.
    """
    player = _Player(batch or cache.batch, cache.describe().block_size, namespace)
    tally = _Tally(player.block_size)
    num_evicted_before = cache.stats().counters["num_evicted_blocks"]
    seconds = 0.0
    for request in trace:
        player.check(request)
        start = clock()
        num_hit_ids = player.play(request)
        seconds += clock() - start
        tally.add(request, num_hit_ids)
    return ReplayResult(
        whole=tally.hits_from(0),
        last_half=tally.hits_from(len(tally) // 2),
        num_evicted_blocks=cache.stats().counters["num_evicted_blocks"] - num_evicted_before,
        num_calls=player.num_calls,
        seconds=seconds,
    )


class _Player:
    """Plays one request after the other."""

    def __init__(
        self, batch: Callable[[], AbstractContextManager[Recorder]], block_size: int, namespace: tuple[str, ...]
    ) -> None:
        self.block_size = block_size
        self.num_calls = 0
        self._batch = batch
        self._namespace = namespace

    def check(self, request: Request) -> None:
        """Raise unless blocks mean the same to the trace and to the cache."""
        if request.tokens_per_id > 1 and self.block_size > 1:
            raise InvalidArgument(
                f"a trace of hash ids needs a cache with a block size of 1 (each id is a block), not {self.block_size}"
            )

    def play(self, request: Request) -> int:
        """Match, allocate, publish and release in one call; return how many ids were cached."""
        ids = request.prompt + request.output[:-TOKEN_BYTES]
        with self._call() as batch:
            lease = batch.match_prefix(request.prompt, self._namespace, num_tokens=len(ids) // TOKEN_BYTES)
            inserted = batch.insert(lease, ids)
            batch.release(lease)
        try:
            num_hit_ids = lease.result().num_cached_tokens
        except PoolExhausted as error:
            return self._play_in_part(request, ids, error.available)
        inserted.result()
        return num_hit_ids

    def _play_in_part(self, request: Request, ids: bytes, num_available: int) -> int:
        """The same with no more blocks than there are, or with none if others took them meanwhile."""
        for num_blocks in (num_available, 0):
            with self._call() as batch:
                match = batch.match_prefix(
                    request.prompt, self._namespace, num_tokens=len(ids) // TOKEN_BYTES, num_blocks=num_blocks
                )
            try:
                lease = match.result()
                break
            except PoolExhausted:
                if not num_blocks:
                    raise
        with self._call() as batch:
            inserted = batch.insert(lease, ids[: lease.num_blocks * self.block_size * TOKEN_BYTES])
            batch.release(lease)
        inserted.result()
        return lease.num_cached_tokens

    def _call(self) -> AbstractContextManager[Recorder]:
        self.num_calls += 1
        return self._batch()


class _Tally:
    """The hits of each request, kept because nobody knows where the last half begins before the end."""

    _NUM_COLUMNS = 5

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows = array("q")

    def __len__(self) -> int:
        return len(self._rows) // self._NUM_COLUMNS

    def add(self, request: Request, num_hit_ids: int) -> None:
        num_hit_tokens = min(num_hit_ids * request.tokens_per_id, request.num_prompt_tokens)
        num_prompt_blocks, num_hit_blocks = request.num_ids // self._block_size, num_hit_ids // self._block_size
        self._rows.extend(
            (request.num_prompt_tokens, num_prompt_blocks, num_hit_tokens > 0, num_hit_tokens, num_hit_blocks)
        )

    def hits_from(self, first: int) -> Hits:
        """Add up the requests from number ``first`` on."""
        start = first * self._NUM_COLUMNS
        sums = [sum(self._rows[start + column :: self._NUM_COLUMNS]) for column in range(self._NUM_COLUMNS)]
        return Hits(len(self) - first, *sums)


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None
