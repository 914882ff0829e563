"""Playing a trace to a cache: what is counted, and how.

Requests come one after the other, each to its end before the next begins: what is cached of its prompt is matched and
locked, the rest is allocated, all of it is published, the lease is released. That is one batch, so one message to a
server. The path of a request is touched and locked before anything is evicted for it, or it would evict its own prefix.
Two things are left out, which would push others out and never be cached: blocks for the ragged tail of a prompt, and
blocks for an answer that is cached already. (So an answer is looked up like a prompt, and not counted as a hit.)

In a trace of hash ids each id is one block of many tokens. It is played as ONE block of the cache, whatever the size of
that: the id, as often as the block has tokens. So the pool has as many blocks as it is said to have, each stands for a
block of the trace, and the tree decides as it would there. Hits are counted in the trace's tokens: blocks hit times
tokens per block, but no more than the prompt has, since its last block may be ragged. Only what is contiguous from the
start of a prompt is a hit.

What this does not model: requests that overlap, and decoding; see `radix_cache.lab.timed`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from radix_cache.batch import Recorder
from radix_cache.errors import PoolExhausted
from radix_cache.hints import Hints
from radix_cache.lab.hits import ReplayResult, Tally
from radix_cache.lab.requests import Request
from radix_cache.stats import Description, Stats
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["TraceClock", "in_blocks", "replay"]


class Cache(Protocol):
    """What is used of a cache."""

    def batch(self) -> AbstractContextManager[Recorder]: ...
    def stats(self) -> Stats: ...
    def describe(self) -> Description: ...


class TraceClock:
    """A clock that shows the time of the trace, for policies that read one: give it to the cache and to the replay."""

    def __init__(self, first: Request | None = None) -> None:
        """Show the time of ``first`` at first; 0 without one."""
        self.now_s = 0.0 if first is None else first.timestamp_ms / 1000

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def advance_to(self, now_s: float) -> None:
        """Show ``now_s``, unless that is past: a clock never goes back."""
        self.now_s = max(self.now_s, now_s)


def replay(
    trace: Iterable[Request],
    cache: Cache,
    namespace: tuple[str, ...] = (),
    batch: Callable[[], AbstractContextManager[Recorder]] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    trace_clock: TraceClock | None = None,
) -> ReplayResult:
    """Play ``trace`` to ``cache`` and count the hits; the cache should be empty, or ``namespace`` new to it.

    batch: how a batch is begun, if not by ``cache.batch()``: a session's is faster. clock: seconds. trace_clock: the
    cache's, to be set to the time of each request.
    A request that finds fewer blocks than it needs publishes what fits. Where the trace has output tokens, all but the
    last are published too, as an engine would: the last one's KV is never computed. Mutates the cache. One batch a
    request. Raises what the cache raises.
    """
    player = _Player(batch or cache.batch, cache.describe().block_size, namespace)
    tally = Tally(player.block_size)
    num_evicted_before = cache.stats().counters["num_evicted_blocks"]
    seconds = 0.0
    for request in trace:
        if trace_clock is not None:
            trace_clock.advance_to(request.timestamp_ms / 1000)
        prompt, computed = in_blocks(request, player.block_size)
        start = clock()
        num_hit_tokens = player.play(computed, request.hints)
        seconds += clock() - start
        tally.add(request, min(num_hit_tokens, len(prompt) // TOKEN_BYTES) // player.block_size)
    num_evicted_blocks = cache.stats().counters["num_evicted_blocks"] - num_evicted_before
    return tally.result(num_evicted_blocks, player.num_calls, seconds)


def in_blocks(request: Request, block_size: int) -> tuple[bytes, bytes]:
    """Return the whole blocks of the prompt, and of all that is computed, as token ids for a cache of ``block_size``.

    One block for each hash id, or for ``block_size`` token ids. Copies nothing at a block size of 1.
    """
    prompt, computed = request.prompt, request.computed
    if block_size == 1:
        return prompt, computed
    if request.tokens_per_id == 1:
        return _whole(prompt, block_size), _whole(computed, block_size)
    prompt = b"".join(prompt[at : at + TOKEN_BYTES] * block_size for at in range(0, len(prompt), TOKEN_BYTES))
    return prompt, prompt


def _whole(tokens: bytes, block_size: int) -> bytes:
    return tokens[: len(tokens) - len(tokens) % (block_size * TOKEN_BYTES)]


class _Player:
    """Plays one request after the other."""

    def __init__(
        self, batch: Callable[[], AbstractContextManager[Recorder]], block_size: int, namespace: tuple[str, ...]
    ) -> None:
        self.block_size = block_size
        self.num_calls = 0
        self._batch = batch
        self._namespace = namespace

    def play(self, tokens: bytes, hints: Hints) -> int:
        """Match, allocate, publish and release in one call; return how many tokens of the cache were there."""
        with self._call() as batch:
            lease = batch.match_prefix(tokens, self._namespace, num_tokens=len(tokens) // TOKEN_BYTES, hints=hints)
            inserted = batch.insert(lease, tokens)
            batch.release(lease)
        try:
            num_hit_tokens = lease.result().num_cached_tokens
        except PoolExhausted as error:
            return self._play_in_part(tokens, hints, error.available)
        inserted.result()
        return num_hit_tokens

    def _play_in_part(self, tokens: bytes, hints: Hints, num_available: int) -> int:
        """The same with no more blocks than there are, or with none if others took them meanwhile."""
        num_tokens = len(tokens) // TOKEN_BYTES
        for num_blocks in (num_available, 0):
            with self._call() as batch:
                match = batch.match_prefix(
                    tokens, self._namespace, num_tokens=num_tokens, num_blocks=num_blocks, hints=hints
                )
            try:
                lease = match.result()
                break
            except PoolExhausted:
                if not num_blocks:
                    raise
        with self._call() as batch:
            inserted = batch.insert(lease, tokens[: lease.num_blocks * self.block_size * TOKEN_BYTES])
            batch.release(lease)
        inserted.result()
        return lease.num_cached_tokens

    def _call(self) -> AbstractContextManager[Recorder]:
        self.num_calls += 1
        return self._batch()
