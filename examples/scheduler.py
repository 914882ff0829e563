"""A scheduler that never waits for the cache: the next step's message travels while the last step's kernels run.

`engine.py` shows the verbs; this shows when to send what. A step is one message:

1. While kernels run, it is written down what the next ones need (`allocate`, for new requests `match_prefix`) and what
   the ones before have completed (`insert`), replaced (`free`) or ended (`release`). It is sent.
2. The kernels end. What they sampled is known now, and which drafts were right.
3. The answer is read; it has long been there.
4. Whatever has blocks is launched.

So a block is published or given back one step after the host has seen the last kernel that touches it. Blocks are asked
for before it is known how many tokens the kernels under way will add: for the most that it can be. Targets make that
simple: what turns out to be too much serves the next step, and rejected drafts cost no call, their KV is written over.

What can go wrong has a rule each. `PoolExhausted`: the youngest gives up its lease, and goes on later from what it has
published. `UnknownLease` (`LeaseExpired` is one): the request begins again. `StaleLease`: it goes on, and publishes
nothing. No answer: the same message again, under the same number, is done once. Too long a silence: nothing is launched
before every lease has been asked after.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import engine
from gpu import GPU, Computed, Launch, guess
from kv_memory import KVMemory
from messages import Item, Mailbox, Message

from radix_cache import PoolExhausted, StaleLease, UnknownLease


@dataclass(eq=False)
class Request(engine.Request):
    """A request of this scheduler.

    namespace: model, weights, LoRA: KV computed with others is other KV. num_samples: answers to one prompt; seed:
    which one this is. is_stale: its namespace was reset since it began.
    """

    namespace: tuple[str, ...] = ()
    num_samples: int = 1
    seed: int = 0
    is_stale: bool = False

    @property
    def capacity(self) -> int:
        """Tokens that its block table covers."""
        return self.lease.num_blocks * self.lease.block_size


@dataclass
class Totals(engine.Totals):
    """What a scheduler has done so far."""

    num_drafts: int = 0
    num_accepted_drafts: int = 0
    num_forks: int = 0
    num_lost_leases: int = 0


class Scheduler:
    """Runs requests to their end. client, session: of an engine with an id."""

    def __init__(
        self,
        client: Any,
        session: Any,
        kv: KVMemory,
        max_running: int = 8,
        num_chunk_blocks: int = 4,
        num_drafts: int = 2,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.totals = Totals()
        self._client = client
        self._mailbox = Mailbox(session)
        self._kv = kv
        self._gpu = GPU(kv)
        self._block_size = client.block_size
        self._max_running = max_running
        self._num_chunk_tokens = num_chunk_blocks * client.block_size
        self._num_drafts = num_drafts
        self._items: list[Item] = []  # for the next message
        self._forks: list[tuple[Request, Request]] = []  # with whose prompt they share
        self._valid_until: float | None = None
        self._must_ask = False
        self._is_short = False

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.running or self._items or self._forks)

    def step(self) -> list[Request]:
        """Send, wait for the kernels, read, launch. Return the requests that came to their end."""
        self.totals.num_steps += 1
        message = self._mailbox.send(self._write_down())
        ended = self._take_ended(self._gpu.wait())
        self._read(message)
        self._launch()
        return ended

    def abort(self, request: Request) -> None:
        """Its user has left. It ends with the kernels under way; its blocks go back with the next message."""
        if request in self.waiting:
            self.waiting.remove(request)
        request.abort_at = 0

    # 1. What goes into the next message.

    def _write_down(self) -> list[Item]:
        items, self._items = self._items, []
        for request in self.running:
            items += self._published(request)
        for request in self.running:
            items += self._grown(request)
        forks, self._forks = self._forks, []
        items += [self._forked(child, parent) for child, parent in forks]
        return items + [self._matched(request) for request in self._next_waiting()]

    def _published(self, request: Request) -> Iterator[Item]:
        """The whole blocks that are complete, as far as the host has seen."""
        start = request.lease.num_published_tokens
        if request.num_computed - start >= self._block_size and not request.is_stale:
            tokens = request.tokens[start : request.num_computed]
            yield Item("insert", request, request.lease, (tokens,), {"offset": start})

    def _grown(self, request: Request) -> Iterator[Item]:
        """Blocks for all that the next kernels may compute, unless the table has them."""
        target = self._target(request)
        if target > request.capacity or self._must_ask:
            yield Item("allocate", request, request.lease, (), {"num_tokens": target})

    def _target(self, request: Request) -> int:
        """The most tokens that can have their KV after the next kernels: those under way may accept all drafts."""
        launch = self._gpu.launched.get(request)
        computed = launch.stop if launch else request.num_computed
        num_tokens = max(len(request.tokens), computed + 1) + self._num_drafts
        return min(num_tokens, computed + self._num_chunk_tokens, request.stop_at)

    def _matched(self, request: Request) -> Item:
        n = len(request.tokens)
        options = {"max_tokens": n - 1, "num_tokens": n, "num_blocks": self._num_chunk_tokens // self._block_size}
        return Item("match_prefix", request, None, (request.tokens, request.namespace), options)

    def _forked(self, child: Request, parent: Request) -> Item:
        """The child shares what the parent has published of the prompt. The rest, less than a block, it computes."""
        if parent.lease is None:
            return self._matched(child)
        shared = parent.num_computed - parent.num_computed % self._block_size
        n = len(child.tokens)
        options = {"parent": parent.lease, "max_tokens": n - 1, "num_tokens": n}
        return Item("match_prefix", child, None, (child.tokens[shared:],), options)

    def _next_waiting(self) -> list[Request]:
        num_seats = 0 if self._is_short else self._max_running - len(self.running)
        return [self.waiting.popleft() for _ in range(min(num_seats, len(self.waiting)))]

    # 2. What the kernels came to.

    def _take_ended(self, computed: dict[Request, Computed]) -> list[Request]:
        for request, result in computed.items():
            self._take_up(request, result)
        ended = [request for request in self.running if request.is_over]
        for request in ended:
            self._check(request)
            self._close(request)
            self.totals.num_aborted += request.is_aborted
            self.totals.num_finished += not request.is_aborted
        return ended

    def _take_up(self, request: Request, result: Computed) -> None:
        self.totals.num_computed_tokens += result.num_computed - request.num_computed
        self.totals.num_accepted_drafts += max(len(result.tokens) - 1, 0)
        for seed, first in enumerate(result.firsts, start=request.seed + 1):
            tokens = [*request.tokens, first]
            self._forks.append((Request(tokens, request.stop_at, namespace=request.namespace, seed=seed), request))
        request.num_samples -= len(result.firsts)
        request.tokens += result.tokens
        del request.tokens[request.stop_at :]
        request.num_computed = min(result.num_computed, len(request.tokens))

    # 3. What the answers mean.

    def _read(self, message: Message) -> None:
        self._is_short = False
        for item, value, error in self._mailbox.read(message):
            match error:
                case None:
                    self._answered(item, value)
                case PoolExhausted():
                    self._refused(item)
                case UnknownLease() | StaleLease():
                    self._lost(item, isinstance(error, StaleLease))
                case _:
                    raise error
        if any(request.capacity <= request.num_computed for request in self.running):
            self._preempt(self.running[-1])

    def _answered(self, item: Item, value: Any) -> None:
        request = item.request
        if item.verb == "match_prefix":
            request.lease, request.num_computed, request.is_stale = value, value.num_cached_tokens, False
            self.running.append(request)
            self.totals.num_reused_tokens += request.num_computed
            self.totals.num_forks += "parent" in item.options
            self._check(request)
        if item.verb == "insert" and item.lease is request.lease and len(value.redundant_block_ids):
            # Others had published the same. Kernels under way may still read these blocks; the next message frees them.
            self._items.append(Item("free", request, request.lease, (value.redundant_block_ids,), {}))

    def _refused(self, item: Item) -> None:
        self.totals.num_refused += 1
        self._is_short = True
        if item.verb == "match_prefix":
            self.waiting.appendleft(item.request)

    def _lost(self, item: Item, is_stale: bool) -> None:
        """The lease is gone, and all that was not published with it; or it can't publish any more."""
        request = item.request
        if item.verb == "match_prefix":  # a fork: its prompt can be had without the parent
            self.waiting.appendleft(request)
        elif item.lease is request.lease and is_stale:
            request.is_stale = True
        elif item.lease is request.lease:
            self.totals.num_lost_leases += 1
            self._forget(request)
            self.waiting.appendleft(request)

    def _preempt(self, request: Request) -> None:
        self.totals.num_preempted += 1
        self._close(request)
        self.waiting.appendleft(request)

    def _close(self, request: Request) -> None:
        """No kernel of it is under way: publish what is complete and end the lease, with the next message."""
        self._items += [*self._published(request), Item("release", request, request.lease, (), {})]
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self.running.remove(request)
        request.lease, request.num_computed = None, 0

    # 4. The next kernels.

    def _launch(self) -> None:
        """Launch what has blocks; nothing if some lease may have run out since the last time."""
        is_late = self._valid_until is not None and time.monotonic() > self._valid_until
        self._valid_until, self._must_ask = self._client.valid_until, is_late
        launches = {} if is_late else {request: launch for request in self.running if (launch := self._ready(request))}
        self._gpu.launch(launches)
        if not launches:
            time.sleep(0.002)  # others have all the blocks

    def _ready(self, request: Request) -> Launch | None:
        tokens, start = request.tokens, request.num_computed
        limit = min(start + self._num_chunk_tokens, request.capacity)
        num_drafts = min(self._num_drafts, limit - len(tokens)) if start == len(tokens) - 1 else 0
        drafts = guess(tokens, num_drafts, request.seed)
        stop = min(len(tokens) + len(drafts), limit)
        if stop <= start:
            return None
        self.totals.num_drafts += len(drafts)
        table = request.lease.block_table
        return Launch(table, tokens + drafts, len(drafts), start, stop, request.seed, request.num_samples)

    def _check(self, request: Request) -> None:
        """Only a demo can: compare all KV of the request with what it should be."""
        computed = request.tokens[: request.num_computed]
        self.totals.num_checked_tokens += self._kv.check(request.lease.block_table, computed)
