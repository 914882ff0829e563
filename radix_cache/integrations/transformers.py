"""Generation with Hugging Face models whose KV lies in our blocks and whose prefixes come from our cache.

A `Generator` is a small engine: it takes requests at any time and does a step at a time, in which every running request
computes a chunk of its prompt or one token. The cache is a `radix_cache.PrefixCache` or a client of the service; each
step is one batch, so one message. The rules are those of docs/engines.md:

- A match has ``max_tokens=n - 1``: the last token is computed in any case, to sample from it.
- Of the cached block that agrees longest behind the match, the part that agrees is copied, not computed.
- Whole blocks are published as soon as their kernels have ended, in the middle of a prompt too.
- The block table is read anew for each pass: blocks that others had published first take the place of one's own.
- When blocks run out, the youngest request gives up its lease. What it published stays cached, and it resumes later.
- Each step names every lease before it computes, and neither computes nor copies past the client's ``valid_until``. A
  request whose lease is gone, or whose namespace was reset, begins again.
- A request that fails is given up alone. A message that fails as a whole is sent again with the next step, but for what
  was to be freed: that may have been done, and the blocks may be others' by then, so they go back with the release.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Set
from types import TracebackType
from typing import Any, Self

import torch

from radix_cache.errors import InvalidArgument, InvalidTokens, PoolExhausted, RadixCacheError, StaleLease, UnknownLease
from radix_cache.integrations.paged import PagedCache, forward_arguments, layout_of, longest_request
from radix_cache.integrations.request import Request
from radix_cache.operations import check_count, check_namespace
from radix_cache.tokens import pack_tokens, unpack_tokens
from radix_cache.torch_pool import KVPool, PoolDescriptor, PoolGone, SharedKVPool
from radix_cache.torch_pool.slots import to_device

__all__ = ["Generator", "PagedCache", "Request", "greedy", "layout_of"]

Sample = Callable[[torch.Tensor], int]


def greedy(logits: torch.Tensor) -> int:
    """Return the likeliest token. logits: ``[vocabulary]``."""
    return int(logits.argmax())


class Generator:
    """Runs requests of one model to their end, round robin. For one thread.

    model: a causal language model. pool: its KV, of the layout that `layout_of` returns. cache: a `PrefixCache` or a
    client, of the pool's size. namespace: everything that the KV depends on: model, weights, adapter, tenant. batch: a
    client's ``session().batch``, in place of the cache's. max_running: requests at once. num_chunk_tokens: of a prompt
    in one step. copies_partial: reuse the beginnings of blocks too. sample: from logits ``[vocabulary]`` to a token.
    max_tokens: the longest request, prompt and answer; None: what the model was made for (`longest_request`).
    patience_s: for so long the oldest request waits for others' blocks while nothing runs here; then it fails with
    `PoolExhausted`. clock: for `Request.ttft_s`. A context manager, which ends with `close`.
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
        max_tokens: int | None = None,
        patience_s: float = 60,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self._model, self._pool, self._sample, self._clock = model, pool, sample, clock
        self._namespace, self._copies_partial = check_namespace(namespace), copies_partial
        self._cache, self._begin_batch = cache, batch or cache.batch
        self._max_running = check_count(max_running, "max_running", 1)
        self._num_chunk_blocks = -(-check_count(num_chunk_tokens, "num_chunk_tokens", 1) // pool.block_size)
        self._num_usable_blocks = self._check_fit()
        self._num_vocabulary = model.get_input_embeddings().weight.shape[0]
        self._max_tokens = longest_request(model.config, max_tokens)
        self._closing: list[tuple[Any, list[int]]] = []  # leases to release, with the tokens computed
        self._redundant: list[tuple[Any, Any]] = []  # leases with the blocks that they don't need any more
        self._ended: list[Request] = []
        self._errors: list[Exception] = []
        self._is_short = False
        self._patience_s = patience_s
        self._refusal: PoolExhausted | None = None  # of the last message
        self._idle_since: float | None = None  # for want of blocks

    def _check_fit(self) -> int:
        """Return how many blocks requests can have."""
        pool, wanted, cache = self._pool, layout_of(self._model, self._pool.block_size), self._cache.describe()
        epoch = getattr(self._cache, "epoch", None)  # a client's, of the server that was asked just now
        _check_same(pool, cache.pool_descriptor)
        if pool.device != self._model.device:
            raise InvalidArgument(f"the pool is on {pool.device} and the model on {self._model.device}")
        if (pool.layout.order == "MLA") != (wanted.order == "MLA"):
            raise InvalidArgument(f"order is {pool.layout.order} in the pool, and the model needs {wanted.order}")
        for name in ("num_layers", "head_dim", "num_kv_heads"):
            here, there = getattr(pool.layout, name), getattr(wanted, name)
            if here != there:
                raise InvalidArgument(f"{name} is {here} in the pool and {there} in the model")
        for name, here in (("block_size", pool.block_size), ("num_blocks", pool.num_blocks)):
            if getattr(cache, name) != here:
                raise InvalidArgument(f"{name} is {here} in the pool and {getattr(cache, name)} in the cache")
        if cache.num_reserved_blocks < pool.num_reserved_blocks:
            here, there = pool.num_reserved_blocks, cache.num_reserved_blocks
            raise InvalidArgument(f"num_reserved_blocks is {here} in the pool and {there} in the cache")
        self._epoch = epoch
        return int(cache.num_blocks - cache.num_reserved_blocks)

    # What callers do.

    def submit(self, tokens: Iterable[int], max_new_tokens: int, stop_ids: Collection[int] = ()) -> Request:
        """Queue a prompt and return its request; it ends after so many tokens, or with one of ``stop_ids``.

        Raises `InvalidTokens` for what the model has no embedding of, `InvalidArgument` for an empty prompt, and for a
        request that is too long for the model or for the whole pool.
        """
        prompt = self._check_prompt(tokens)
        n = check_count(len(prompt), "number of prompt tokens", 1)
        stop_at = n + check_count(max_new_tokens, "max_new_tokens", 1)
        if self._max_tokens is not None and stop_at > self._max_tokens:
            raise InvalidArgument(f"prompt and answer have {stop_at} tokens, the model is for {self._max_tokens}")
        num_blocks = -(-(stop_at - 1) // self._pool.block_size)  # the last token is sampled and not computed
        if num_blocks > self._num_usable_blocks:
            raise InvalidArgument(
                f"{stop_at - 1} tokens take {num_blocks} blocks, the pool has {self._num_usable_blocks}"
            )
        stops = frozenset(unpack_tokens(pack_tokens(list(stop_ids) if isinstance(stop_ids, Set) else stop_ids)))
        request = Request(prompt, n, stop_at, stops, self._clock())
        self.waiting.append(request)
        return request

    def _check_prompt(self, tokens: Iterable[int]) -> list[int]:
        prompt = list(unpack_tokens(pack_tokens(tokens)))
        if prompt and (most := max(prompt)) >= self._num_vocabulary:
            index = prompt.index(most)
            raise InvalidTokens(f"token {most} at {index}: the model has {self._num_vocabulary} embeddings", index)
        return prompt

    def cancel(self, request: Request) -> None:
        """Give a request up, or nothing if it is over. Its lease goes back with the next step; what was published stays
        cached.
        """
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._close(request)

    def close(self) -> None:
        """Give up all requests, and give back all leases in a last message. Raises what the cache raises."""
        for request in (*self.waiting, *self.running):
            self.cancel(request)
        while self._closing:
            self._wait_for_kernels()
            self._ask()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self) -> None:
        """Step until nothing is left to do. Raises what a step raises; to go on, run again."""
        while self.is_busy:
            self.step()

    @property
    def is_busy(self) -> bool:
        """Whether a step has anything to do; with the last one, the last leases are released."""
        return bool(self.waiting or self.running or self._closing)

    def step(self) -> list[Request]:
        """One message to the cache, then a forward pass for each request that has blocks; return those that ended.

        A request that fails (what the cache says of it alone, its forward pass, its ``sample``) is given up, its
        ``error`` is set, and, when all others have had their turn, raised. Raises `PoolGone` when the owner of a shared
        pool has ended, or the server has another pool by now, and whatever the message to the cache raises; another
        step begins where this one ended.
        """
        if isinstance(self._pool, SharedKVPool):
            self._pool.check_owner()
        self._wait_for_kernels()
        ready = self._ask()
        if getattr(self._cache, "epoch", None) != self._epoch:  # another server, perhaps of another pool
            self._check_fit()
        valid_until = getattr(self._cache, "valid_until", None)  # a client's
        for request in ready:
            if valid_until is not None and time.monotonic() > valid_until:
                break  # their leases may have run out: ask first
            if request.lease is not None:  # not preempted just now
                self._advance(request)
        self._wait(is_idle=not ready and self.is_busy)
        if self._errors:
            errors, self._errors = self._errors, []
            raise errors[0]
        ended, self._ended = self._ended, []
        return ended

    def _advance(self, request: Request) -> None:
        try:
            if request.to_copy is not None:
                self._pool.copy_blocks(*([block_id] for block_id in request.to_copy))
                request.to_copy = None
            self._compute(request)
        except Exception as error:  # noqa: BLE001 - the model's and the caller's code
            self._give_up(request, error)
        else:
            if request.is_over:
                self._close(request)
                self._ended.append(request)

    def _wait(self, is_idle: bool) -> None:
        """Others have all the blocks, or there are not enough under a limit of the namespace."""
        if not is_idle:
            self._idle_since = None
            return
        time.sleep(0.002)
        self._idle_since = self._idle_since or time.monotonic()
        if self.waiting and self._refusal and time.monotonic() - self._idle_since > self._patience_s:
            self._idle_since = None
            self._give_up(self.waiting.popleft(), self._refusal)

    def _give_up(self, request: Request, error: Exception) -> None:
        request.error = error
        self._errors.append(error)
        if request.lease is not None:
            self._close(request)

    # The message: what is complete, and what the next passes need.

    def _ask(self) -> list[Request]:
        """Return the requests whose table covers their next chunk."""
        admitted, closing = self._next_waiting(), tuple(self._closing)
        redundant, self._redundant = self._redundant, []
        self._refusal = None
        try:
            with self._begin_batch(strict=True) as batch:  # strict: where the old must wait, the young don't overtake
                for lease, block_ids in redundant:
                    batch.free(lease, block_ids)
                for lease, computed in closing:
                    self._publish(batch, lease, computed)
                    batch.release(lease)
                inserted = [self._publish(batch, request.lease, request.computed) for request in self.running]
                grown = [batch.allocate(request.lease, num_tokens=self._target(request)) for request in self.running]
                opened = [self._match(batch, request) for request in admitted]
        except BaseException:
            self.waiting.extendleft(reversed(admitted))
            raise
        del self._closing[: len(closing)]
        answers = zip(list(self.running), inserted, grown, strict=True)
        ready = [request for request, published, added in answers if self._goes_on(request, published, added)]
        self._is_short = len(ready) < len(self.running)
        if self._is_short:
            self._preempt(self.running[-1])
        begun = [request for request, answer in zip(admitted, opened, strict=True) if self._has_begun(request, answer)]
        unheard = [request for request in admitted if request.lease is None and request.error is None]
        self.waiting.extendleft(reversed(unheard))
        return ready + begun

    def _goes_on(self, request: Request, published: Any, added: Any) -> bool:
        """Tell whether a running request has its blocks."""
        try:
            if published is not None and len(published.result().redundant_block_ids):
                self._redundant.append((request.lease, published.result().redundant_block_ids))
            return self._is_granted(added)
        except (UnknownLease, StaleLease):
            request.num_computed = 0
            self._close(request)
            self.waiting.appendleft(request)
        except RadixCacheError as error:
            self._give_up(request, error)
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
        try:
            if not self._is_granted(answer):
                return False
        except RadixCacheError as error:
            self._give_up(request, error)
            return False
        request.lease = lease = answer.result()
        request.num_computed = lease.num_cached_tokens + lease.num_partial_tokens
        if lease.partial_block_id is not None:  # into the first block of its own
            own = lease.block_table[lease.num_cached_tokens // self._pool.block_size]
            request.to_copy = lease.partial_block_id, own
        if request.num_reused_tokens is None:
            request.num_reused_tokens = request.num_computed
        self.running.append(request)
        return True

    def _is_granted(self, answer: Any) -> bool:
        try:
            answer.result()
        except PoolExhausted as refusal:
            self._refusal = self._refusal or refusal
            return False
        return True

    def _preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        self._close(request)
        self.waiting.appendleft(request)

    def _close(self, request: Request) -> None:
        self.running.remove(request)
        self._closing.append((request.lease, request.computed))
        request.lease = request.to_copy = None

    # The model.

    @torch.inference_mode()
    def _compute(self, request: Request) -> None:
        """Compute the KV up to the target; sample a token when all have theirs."""
        start, end = request.num_computed, self._target(request)
        paged = PagedCache(self._pool, request.lease.block_table, start, end)
        tokens = to_device(torch.tensor([request.tokens[start:end]]), self._model.device)
        logits = self._model(input_ids=tokens, **forward_arguments(paged)).logits
        sampled = [self._sample(logits[0, -1])] if end == len(request.tokens) else []
        request.num_computed = end
        if request.first_token_at is None:
            request.num_prefill_tokens += end - start
        if sampled:
            request.tokens += sampled
            request.first_token_at = request.first_token_at or self._clock()

    def _wait_for_kernels(self) -> None:
        """What is published must be complete, and a chunk that sampled nothing may be under way."""
        if self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).synchronize()


def _check_same(pool: KVPool, descriptor: str | None) -> None:
    """Raise unless the cache's blocks are this pool's, as far as the cache knows."""
    if descriptor is None:
        return
    if not isinstance(pool, SharedKVPool):
        raise InvalidArgument("the server's blocks lie in a shared pool: attach_pool(describe().pool_descriptor)")
    if (pool_id := PoolDescriptor.from_json(descriptor).pool_id) != pool.descriptor.pool_id:
        raise PoolGone(
            f"the server's blocks lie in pool {pool_id}, not in {pool.descriptor.pool_id}: attach to that one"
        )
