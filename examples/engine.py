"""What an inference engine does with a prefix cache: continuous batching, with a pretended GPU.

Each step of the scheduler is one batch, so one message to the server. It tells what the last step's kernels completed
(`insert`, and `release` for what has ended) and asks for what the next ones will write (`allocate`, `match_prefix`).
Prefill and decode are the same thing here: a request computes the KV of its next few tokens, and when it has caught up
with them all it samples another.

The rules that matter:

- A match has ``max_tokens=len(tokens) - 1``: the last token must be computed in any case, to sample from it.
- Only tokens whose KV is complete are published. The token sampled last is not: its KV comes with the next step.
- The block table is read anew after each step. Blocks that someone else had published first take the place of one's
  own; those are redundant then, and given back.
- `PoolExhausted` is no failure. Whoever cannot grow waits, and the youngest request gives up its lease: what it has
  published stays in the cache, so it goes on from there later.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from kv_memory import KVMemory

from radix_cache import PoolExhausted


@dataclass(eq=False)
class Request:
    """One request in an engine.

    tokens: the prompt, then what was sampled. stop_at: their number at the end. abort_at: and when its user leaves.
    owner: whatever the caller wants to find again.
    """

    tokens: list[int]
    stop_at: int
    abort_at: int | None = None
    owner: Any = None
    lease: Any = None
    num_computed: int = 0  # tokens whose KV is in the lease's blocks

    @property
    def is_aborted(self) -> bool:
        return self.abort_at is not None and len(self.tokens) >= self.abort_at

    @property
    def is_over(self) -> bool:
        return self.is_aborted or len(self.tokens) == self.stop_at


@dataclass
class Totals:
    """What an engine has done so far."""

    num_steps: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_preempted: int = 0
    num_refused: int = 0
    num_computed_tokens: int = 0
    num_reused_tokens: int = 0
    num_checked_tokens: int = 0


class Engine:
    """Runs requests to their end.

    begin_batch: `batch` of a client's session, of a client, or of a `radix_cache.PrefixCache`.
    """

    def __init__(
        self,
        begin_batch: Any,
        kv: KVMemory,
        block_size: int,
        namespace: tuple[str, ...] = (),
        max_running: int = 8,
        num_chunk_blocks: int = 8,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.totals = Totals()
        self._begin_batch = begin_batch
        self._kv = kv
        self._block_size = block_size
        self._namespace = namespace
        self._max_running = max_running
        self._num_chunk_blocks = num_chunk_blocks
        self._closing: list[tuple[Any, list[int]]] = []  # leases to release, with the tokens computed
        self._redundant: list[tuple[Any, Any]] = []  # leases with the blocks that they don't need any more
        self._is_short = False

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.running or self._closing)

    def step(self) -> list[Request]:
        """One batch, then the kernels that it found blocks for. Return the requests that came to their end."""
        self.totals.num_steps += 1
        redundant, self._redundant = self._redundant, []
        closing, self._closing = self._closing, []
        admitted = [] if self._is_short else self._next_waiting()

        with self._begin_batch(strict=True) as batch:  # strict: where the old must wait, the young don't overtake
            for lease, block_ids in redundant:
                batch.free(lease, block_ids)
            for lease, computed in closing:
                self._publish(batch, lease, computed)
                batch.release(lease)
            inserted = [self._publish(batch, r.lease, r.tokens[: r.num_computed]) for r in self.running]
            grown = [batch.allocate(r.lease, num_tokens=self._target(r)) for r in self.running]
            opened = [self._match(batch, r) for r in admitted]

        self._redundant = [
            (request.lease, answer.result().redundant_block_ids)
            for request, answer in zip(self.running, inserted, strict=True)
            if answer is not None and len(answer.result().redundant_block_ids)
        ]
        ready = [request for request, answer in zip(self.running, grown, strict=True) if self._is_granted(answer)]
        self._is_short = len(ready) < len(self.running)
        if self._is_short:
            self._preempt(self.running[-1])
        ready += [request for request, answer in zip(admitted, opened, strict=True) if self._has_begun(request, answer)]
        self.waiting.extendleft(request for request in reversed(admitted) if request.lease is None)
        for request in ready:
            if request.lease is not None:  # not preempted just now
                self._run_kernels(request)
        if not ready:
            time.sleep(0.002)  # others have all the blocks
        return self._take_ended()

    # What goes into the batch.

    def _publish(self, batch: Any, lease: Any, computed: list[int]) -> Any:
        """Tell what whole blocks are complete that were not told yet."""
        start = lease.num_published_tokens
        if len(computed) - start < self._block_size:
            return None
        return batch.insert(lease, computed[start:], offset=start)

    def _target(self, request: Request) -> int:
        """How many tokens have their KV after the next kernels: all, or a chunk more."""
        return min(len(request.tokens), request.num_computed + self._num_chunk_blocks * self._block_size)

    def _match(self, batch: Any, request: Request) -> Any:
        n = len(request.tokens)
        return batch.match_prefix(
            request.tokens, self._namespace, max_tokens=n - 1, num_tokens=n, num_blocks=self._num_chunk_blocks
        )

    def _next_waiting(self) -> list[Request]:
        num_seats = min(self._max_running - len(self.running), len(self.waiting))
        return [self.waiting.popleft() for _ in range(num_seats)]

    # What its answers mean.

    def _is_granted(self, answer: Any) -> bool:
        try:
            answer.result()
        except PoolExhausted:
            self.totals.num_refused += 1
            return False
        return True

    def _has_begun(self, request: Request, answer: Any) -> bool:
        if not self._is_granted(answer):
            return False
        request.lease = answer.result()
        request.num_computed = request.lease.num_cached_tokens
        self.totals.num_reused_tokens += request.num_computed
        self._check(request)
        self.running.append(request)
        return True

    def _preempt(self, request: Request) -> None:
        self.totals.num_preempted += 1
        self.running.remove(request)
        self._close(request)
        self.waiting.appendleft(request)

    def _close(self, request: Request) -> None:
        self._closing.append((request.lease, request.tokens[: request.num_computed]))
        request.lease = None

    def _take_ended(self) -> list[Request]:
        ended = [request for request in self.running if request.is_over]
        for request in ended:
            self.running.remove(request)
            self._check(request)
            self._close(request)
            self.totals.num_aborted += request.is_aborted
            self.totals.num_finished += not request.is_aborted
        return ended

    # The GPU.

    def _run_kernels(self, request: Request) -> None:
        """Compute the KV up to the target; sample a token when all have theirs."""
        table, target = request.lease.block_table, self._target(request)
        self._kv.compute(table, request.tokens, request.num_computed, target)
        self.totals.num_computed_tokens += target - request.num_computed
        request.num_computed = target
        if target == len(request.tokens):
            request.tokens.append(self._kv.sample(table, target))

    def _check(self, request: Request) -> None:
        """Only a demo can: compare all KV of the request with what it should be."""
        computed = request.tokens[: request.num_computed]
        self.totals.num_checked_tokens += self._kv.check(request.lease.block_table, computed)
