"""Playing a trace in its own time: requests overlap, and hold their leases while they run.

A simulation, event by event; nobody sleeps. A request that arrives takes its place in one queue. When it is at the head
and there are blocks for its prompt and its answer, it is matched, locked and given them; its prefill takes as long as
the tokens that were not cached, its decoding as long as its answer. When the prefill ends the prompt is published, at
the end the answer (where the trace has its tokens), and the lease is released. So a request that comes while another of
the same prompt is still in its prefill finds nothing, locked blocks cannot be evicted, and where the pool is small,
requests wait.

What this does not model: that prefills and decodings slow each other down, chunks, preemption. All blocks of an answer
are taken at once at the beginning. A request that needs more blocks than the pool has is refused, and hits nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple

from radix_cache.cache import PrefixCache
from radix_cache.errors import InvalidArgument, PoolExhausted
from radix_cache.lab.hits import ReplayResult, Tally
from radix_cache.lab.info import Spread
from radix_cache.lab.playing import new_cache, peek, telling_of
from radix_cache.lab.replay import TraceClock, in_blocks
from radix_cache.lab.requests import Request
from radix_cache.leases import Lease
from radix_cache.operations import check_count
from radix_cache.policies import EvictionPolicy
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["Engine", "TimedResult", "replay_in_time"]


@dataclass(frozen=True, slots=True)
class Engine:
    """How fast requests run. ``inf`` is a rate, too: with both, requests end when they begin.

    prefill_tokens_per_s: of one request. decode_tokens_per_s: of one request. max_running: at the same time.
    holds: until when a request keeps its blocks from being evicted, the end of its prefill or of its answer. With
    ``"prefill"`` its answer takes no blocks: another pool is thought to have them.
    """

    prefill_tokens_per_s: float = 10_000.0
    decode_tokens_per_s: float = 40.0
    max_running: int = 256
    holds: Literal["prefill", "answer"] = "answer"

    def __post_init__(self) -> None:
        check_count(self.max_running, "max_running", 1)
        for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"{name} is above 0, not {getattr(self, name)!r}")
        if self.holds not in {"prefill", "answer"}:
            raise InvalidArgument(f"holds is 'prefill' or 'answer', not {self.holds!r}")


@dataclass(frozen=True, slots=True)
class TimedResult:
    """What a replay in time came to.

    replay: hits in the order of admission, as `radix_cache.lab.replay` counts them. num_refused: larger than the pool.
    num_waited: not admitted on arrival. wait_s: of all admitted. max_running: the most at any time, as are
    max_leased_blocks, which requests had for themselves, and max_held_blocks, of those and the ones they had locked.
    """

    replay: ReplayResult
    num_refused: int
    num_waited: int
    wait_s: Spread
    max_running: int
    max_leased_blocks: int
    max_held_blocks: int

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name, ready for JSON."""
        own = {name: getattr(self, name) for name in self.__slots__ if name not in {"replay", "wait_s"}}
        return {**self.replay.as_dict(), **own, "wait_s": asdict(self.wait_s)}


def replay_in_time(
    requests: Iterable[Request],
    policy: str | EvictionPolicy,
    num_blocks: int,
    block_size: int | None = None,
    engine: Engine | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> TimedResult:
    """Play ``requests``, which are sorted by time, to a new cache in the trace's time, and return what it found.

    policy, block_size: as for `radix_cache.lab.replay_policy`, but not ``"optimal"``. clock: seconds, to measure calls.
    Raises `InvalidArgument`, also for a request that is earlier than the one before.
    """
    first, requests = peek(requests)
    trace_clock = TraceClock(first)
    cache = new_cache(first, policy, num_blocks, block_size, trace_clock)
    with telling_of(policy):
        return _Simulation(cache, trace_clock, engine or Engine(), clock).run(requests)


class _Running(NamedTuple):
    lease: Lease
    prompt: bytes
    computed: bytes


class _Due(NamedTuple):
    """Something that happens at a time; the number keeps those of one time in order."""

    at_s: float
    number: int
    what: Callable[[_Running], None]
    running: _Running


@dataclass(slots=True)
class _Simulation:
    cache: PrefixCache
    trace_clock: TraceClock
    engine: Engine
    clock: Callable[[], float]
    due: list[_Due] = field(default_factory=list)
    queue: deque[Request] = field(default_factory=deque)
    waits_s: list[float] = field(default_factory=list)
    num_due: int = 0
    num_running: int = 0
    num_refused: int = 0
    num_waited: int = 0
    num_calls: int = 0
    max_running: int = 0
    max_leased_blocks: int = 0
    max_held_blocks: int = 0
    seconds: float = 0.0

    def run(self, requests: Iterable[Request]) -> TimedResult:
        tally = Tally(self.cache.block_size)
        for number, request in enumerate(requests, 1):
            arrival_s = request.timestamp_ms / 1000
            while self.due and self.due[0].at_s <= arrival_s:
                self._happen(tally)
            if arrival_s < self.trace_clock.now_s:
                raise InvalidArgument(
                    f"request {number} is of {arrival_s:g} s, and one before it of {self.trace_clock.now_s:g} s: "
                    f"in time, requests have to be sorted (--sort)"
                )
            self.trace_clock.advance_to(arrival_s)
            self.queue.append(request)
            self._admit(tally)
            self.num_waited += bool(self.queue) and self.queue[-1] is request
        while self.due:
            self._happen(tally)
        return TimedResult(
            tally.result(self.cache.stats().counters["num_evicted_blocks"], self.num_calls, self.seconds),
            self.num_refused,
            self.num_waited,
            Spread.of(self.waits_s),
            self.max_running,
            self.max_leased_blocks,
            self.max_held_blocks,
        )

    def _happen(self, tally: Tally) -> None:
        event = heappop(self.due)
        self.trace_clock.advance_to(event.at_s)
        event.what(event.running)
        self._admit(tally)

    def _admit(self, tally: Tally) -> None:
        """Begin requests from the head of the queue on, until there is no room for one."""
        while self.queue and self.num_running < self.engine.max_running:
            request = self.queue[0]
            lease = self._begin(request)
            if lease is None and self.num_running:
                return
            self.queue.popleft()
            num_hit_tokens = 0 if lease is None else lease.num_cached_tokens
            tally.add(request, num_hit_tokens // self.cache.block_size)
            self.num_refused += lease is None

    def _begin(self, request: Request) -> Lease | None:
        """Match and allocate, and say when the prefill ends; None if the blocks are not there."""
        prompt, computed = in_blocks(request, self.cache.block_size)
        num_tokens = self._num_tokens(request, prompt)
        try:
            lease: Lease = self._call(
                lambda: self.cache.match_prefix(prompt, num_tokens=num_tokens, hints=request.hints)
            )
        except PoolExhausted:
            return None
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        stats = self.cache.stats()
        self.max_leased_blocks = max(self.max_leased_blocks, stats.num_leased_blocks)
        self.max_held_blocks = max(self.max_held_blocks, stats.num_leased_blocks + stats.num_protected_blocks)
        now_s = self.trace_clock.now_s
        self.waits_s.append(now_s - request.timestamp_ms / 1000)
        per_id = request.tokens_per_id / (self.cache.block_size if request.tokens_per_id > 1 else 1)
        num_missing = max(request.num_prompt_tokens - lease.num_cached_tokens * per_id, 0)
        prefilled_s = now_s + num_missing / self.engine.prefill_tokens_per_s
        running = _Running(lease, prompt, computed)
        if self.engine.holds == "prefill":
            self._later(prefilled_s, self._end, running)
        else:
            self._later(prefilled_s, self._publish, running)
            self._later(prefilled_s + request.num_output_tokens / self.engine.decode_tokens_per_s, self._end, running)
        return lease

    def _num_tokens(self, request: Request, prompt: bytes) -> int:
        """Return how many tokens of the cache the request needs room for."""
        num_output = request.num_output_tokens if self.engine.holds == "answer" else 0
        if request.tokens_per_id == 1:
            return request.num_prompt_tokens + max(num_output - 1, 0)
        num_tokens = request.num_prompt_tokens + max(num_output - 1, 0)
        return max(-(-num_tokens // request.tokens_per_id) * self.cache.block_size, len(prompt) // TOKEN_BYTES)

    def _publish(self, running: _Running) -> None:
        self._call(lambda: self.cache.insert(running.lease, running.prompt))

    def _end(self, running: _Running) -> None:
        known = running.prompt if self.engine.holds == "prefill" else running.computed
        self._call(lambda: self.cache.insert(running.lease, known))
        self._call(lambda: self.cache.release(running.lease))
        self.num_running -= 1

    def _later(self, at_s: float, what: Callable[[_Running], None], running: _Running) -> None:
        self.num_due += 1
        heappush(self.due, _Due(at_s, self.num_due, what, running))

    def _call(self, verb: Callable[[], Any]) -> Any:
        self.num_calls += 1
        start = self.clock()
        try:
            return verb()
        finally:
            self.seconds += self.clock() - start
