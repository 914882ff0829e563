"""Generation with Hugging Face models whose KV lies in our blocks and whose prefixes come from our cache.

A `Generator` is a small engine: it takes requests at any time and does a step at a time, in which every running request
computes a chunk of its prompt or one token. The cache is a `radix_cache.PrefixCache` or a client of the service; each
step is one batch, so one message. The rules are those of docs/engines.md:

- A match has ``max_tokens=n - 1``: the last token is computed in any case, to sample from it.
- Of the cached block that agrees longest behind the match, the part that agrees is copied, not computed.
- Whole blocks are published as soon as their kernels have ended, in the middle of a prompt too.
- The block table is read anew for each pass: blocks that others had published first take the place of one's own.
- When blocks run out, the youngest request gives up its lease. What it published stays cached, and it resumes later.
- Each step names every lease before it computes, and computes nothing past the client's ``valid_until``. A request
  whose lease is gone, or whose namespace was reset, begins again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from radix_cache.errors import InvalidArgument, PoolExhausted, StaleLease, UnknownLease
from radix_cache.integrations.paged import PagedCache, forward_arguments, layout_of
from radix_cache.operations import check_count, check_namespace
from radix_cache.tokens import pack_tokens, unpack_tokens
from radix_cache.torch_pool import KVPool, SharedKVPool

__all__ = ["Generator", "PagedCache", "Request", "greedy", "layout_of"]

Sample = Callable[[torch.Tensor], int]


def greedy(logits: torch.Tensor) -> int:
    """Return the likeliest token. logits: ``[vocabulary]``."""
    return int(logits.argmax())


@dataclass(eq=False)
class Request:
    """A prompt and what is generated from it. Attributes are read-only to callers.

    tokens: the prompt, then what was sampled. num_reused_tokens: of the prompt, found in the cache when it was first
    admitted. num_prefill_tokens: of the prompt, computed before the first token was sampled: all that was not reused,
    and what was lost to a preemption in between. num_preemptions: how often it gave way.
    """

    tokens: list[int]
    num_prompt_tokens: int
    stop_at: int
    stop_ids: frozenset[int]
    submitted_at: float
    first_token_at: float | None = None
    num_reused_tokens: int | None = None
    num_prefill_tokens: int = 0
    num_preemptions: int = 0
    lease: Any = None
    num_computed: int = field(default=0)  # tokens whose KV is in the lease's blocks

    @property
    def computed(self) -> list[int]:
        """The tokens whose KV is in the lease's blocks."""
        return self.tokens[: self.num_computed]

    @property
    def new_tokens(self) -> list[int]:
        """What was generated so far."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_over(self) -> bool:
        """Whether it came to its end."""
        num_new = len(self.tokens) - self.num_prompt_tokens
        return len(self.tokens) >= self.stop_at or bool(num_new and self.tokens[-1] in self.stop_ids)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from `Generator.submit` to the first token; None before."""
        return None if self.first_token_at is None else self.first_token_at - self.submitted_at


class Generator:
    """Runs requests of one model to their end, round robin. For one thread.

    model: a causal language model. pool: its KV, of the layout that `layout_of` returns. cache: a `PrefixCache` or a
    client, of the pool's size. namespace: everything that the KV depends on: model, weights, adapter, tenant. batch: a
    client's ``session().batch``, in place of the cache's. max_running: requests at once. num_chunk_tokens: of a prompt
    in one step. copies_partial: reuse the beginnings of blocks too. sample: from logits ``[vocabulary]`` to a token.
    clock: for `Request.ttft_s`.
    Raises `InvalidArgument` where model, pool and cache do not fit each other.
    """

    def __init__(
        self,
        model: Any,
        pool: KVPool,
        cache: Any,
        namespace: Iterable[str] = (),
        *,
        batch: Callable[..., Any] | None = None,
        max_running: int = 8,
        num_chunk_tokens: int = 256,
        copies_partial: bool = True,
        sample: Sample = greedy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self._model, self._pool, self._sample, self._clock = model, pool, sample, clock
        self._namespace, self._copies_partial = check_namespace(namespace), copies_partial
        self._cache, self._begin_batch = cache, batch or cache.batch
        self._max_running = check_count(max_running, "max_running", 1)
        self._num_chunk_blocks = -(-check_count(num_chunk_tokens, "num_chunk_tokens", 1) // pool.block_size)
        self._num_usable_blocks = self._check_fit(cache.describe())
        self._closing: list[tuple[Any, list[int]]] = []  # leases to release, with the tokens computed
        self._redundant: list[tuple[Any, Any]] = []  # leases with the blocks that they don't need any more
        self._is_short = False

    def _check_fit(self, cache: Any) -> int:
        pool, wanted = self._pool, layout_of(self._model, self._pool.block_size)
        for name in ("num_layers", "head_dim", "num_kv_heads"):
            here, there = getattr(pool.layout, name), getattr(wanted, name)
            if here != there:
                raise InvalidArgument(f"{name} is {here} in the pool and {there} in the model")
        for name, here in (("block_size", pool.block_size), ("num_blocks", pool.num_blocks)):
            if getattr(cache, name) != here:
                raise InvalidArgument(f"{name} is {here} in the pool and {getattr(cache, name)} in the cache")
        return int(cache.num_blocks - cache.num_reserved_blocks)

    # What callers do.

    def submit(self, tokens: Iterable[int], max_new_tokens: int, stop_ids: Collection[int] = ()) -> Request:
        """Queue a prompt and return its request; it ends after so many tokens, or with one of ``stop_ids``.

        Raises `InvalidArgument` for an empty prompt, and for one that the whole pool can't hold; `InvalidTokens`.
        """
        prompt = list(unpack_tokens(pack_tokens(tokens)))
        n = check_count(len(prompt), "number of prompt tokens", 1)
        stop_at = n + check_count(max_new_tokens, "max_new_tokens", 1)
        num_blocks = -(-stop_at // self._pool.block_size)
        if num_blocks > self._num_usable_blocks:
            raise InvalidArgument(f"{stop_at} tokens take {num_blocks} blocks, the pool has {self._num_usable_blocks}")
        request = Request(prompt, n, stop_at, frozenset(stop_ids), self._clock())
        self.waiting.append(request)
        return request

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.is_busy:
            self.step()

    @property
    def is_busy(self) -> bool:
        """Whether a step has anything to do; with the last one, the last leases are released."""
        return bool(self.waiting or self.running or self._closing)

    def step(self) -> list[Request]:
        """One message to the cache, then a forward pass for each request that has blocks; return those that ended.

        Raises `PoolGone` when the owner of a shared pool has ended, and whatever the cache raises but `PoolExhausted`.
        """
        if isinstance(self._pool, SharedKVPool):
            self._pool.check_owner()
        self._wait_for_kernels()
        ready = self._ask()
        valid_until = getattr(self._cache, "valid_until", None)  # a client's
        for request in ready:
            if valid_until is not None and time.monotonic() > valid_until:
                break  # their leases may have run out: ask first
            if request.lease is not None:  # not preempted just now
                self._compute(request)
        if not ready and self.is_busy:
            time.sleep(0.002)  # others have all the blocks
        return self._take_ended()

    # The message: what is complete, and what the next passes need.

    def _ask(self) -> list[Request]:
        """Return the requests whose table covers their next chunk."""
        admitted = self._next_waiting()
        closing, self._closing = self._closing, []
        redundant, self._redundant = self._redundant, []
        with self._begin_batch(strict=True) as batch:  # strict: where the old must wait, the young don't overtake
            for lease, block_ids in redundant:
                batch.free(lease, block_ids)
            for lease, computed in closing:
                self._publish(batch, lease, computed)
                batch.release(lease)
            inserted = [self._publish(batch, request.lease, request.computed) for request in self.running]
            grown = [batch.allocate(request.lease, num_tokens=self._target(request)) for request in self.running]
            opened = [self._match(batch, request) for request in admitted]
        answers = zip(list(self.running), inserted, grown, strict=True)
        ready = [request for request, published, added in answers if self._goes_on(request, published, added)]
        self._is_short = len(ready) < len(self.running)
        if self._is_short:
            self._preempt(self.running[-1])
        begun = [request for request, answer in zip(admitted, opened, strict=True) if self._has_begun(request, answer)]
        self.waiting.extendleft(request for request in reversed(admitted) if request.lease is None)
        return ready + begun

    def _goes_on(self, request: Request, published: Any, added: Any) -> bool:
        """Tell whether a running request has its blocks."""
        try:
            if published is not None and len(published.result().redundant_block_ids):
                self._redundant.append((request.lease, published.result().redundant_block_ids))
            return _is_granted(added)
        except (UnknownLease, StaleLease):
            request.num_computed = 0
            self._close(request)
            self.waiting.appendleft(request)
            return False

    def _next_waiting(self) -> list[Request]:
        num_seats = 0 if self._is_short else self._max_running - len(self.running)
        return [self.waiting.popleft() for _ in range(min(num_seats, len(self.waiting)))]

    def _publish(self, batch: Any, lease: Any, computed: list[int]) -> Any:
        """Tell of the whole blocks that are complete and not told yet."""
        start = lease.num_published_tokens
        if len(computed) - start < self._pool.block_size:
            return None
        return batch.insert(lease, computed[start:], offset=start)

    def _target(self, request: Request) -> int:
        """How many tokens have their KV after the next pass: all, or what a chunk of blocks more holds."""
        num_blocks = request.num_computed // self._pool.block_size + self._num_chunk_blocks
        return min(len(request.tokens), num_blocks * self._pool.block_size)

    def _match(self, batch: Any, request: Request) -> Any:
        n = len(request.tokens)
        return batch.match_prefix(
            request.tokens,
            self._namespace,
            max_tokens=n - 1,
            num_tokens=n,
            num_blocks=self._num_chunk_blocks,
            partial=self._copies_partial,
        )

    def _has_begun(self, request: Request, answer: Any) -> bool:
        if not _is_granted(answer):
            return False
        request.lease = lease = answer.result()
        request.num_computed = lease.num_cached_tokens + lease.num_partial_tokens
        if lease.partial_block_id is not None:  # into the first block of its own
            own = lease.block_table[lease.num_cached_tokens // self._pool.block_size]
            self._pool.copy_blocks([lease.partial_block_id], [own])
        if request.num_reused_tokens is None:
            request.num_reused_tokens = request.num_computed
        self.running.append(request)
        return True

    def _preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        self._close(request)
        self.waiting.appendleft(request)

    def _close(self, request: Request) -> None:
        self.running.remove(request)
        self._closing.append((request.lease, request.computed))
        request.lease = None

    def _take_ended(self) -> list[Request]:
        ended = [request for request in self.running if request.is_over]
        for request in ended:
            self._close(request)
        return ended

    # The model.

    @torch.inference_mode()
    def _compute(self, request: Request) -> None:
        """Compute the KV up to the target; sample a token when all have theirs."""
        start, end = request.num_computed, self._target(request)
        paged = PagedCache(self._pool, request.lease.block_table, start, end)
        tokens = torch.tensor([request.tokens[start:end]], device=self._model.device)
        logits = self._model(input_ids=tokens, **forward_arguments(paged)).logits
        request.num_computed = end
        if request.first_token_at is None:
            request.num_prefill_tokens += end - start
        if end == len(request.tokens):
            request.tokens.append(self._sample(logits[0, -1]))
            request.first_token_at = request.first_token_at or self._clock()

    def _wait_for_kernels(self) -> None:
        """What is published must be complete, and a chunk that sampled nothing may be under way."""
        if self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).synchronize()


def _is_granted(answer: Any) -> bool:
    try:
        answer.result()
    except PoolExhausted:
        return False
    return True
