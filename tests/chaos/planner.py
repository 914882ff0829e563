"""What an engine asks for in its next message: the life of requests, with all that schedulers do to them.

Chunked prefill, decoding a few tokens at a time, room for drafts that is given back, preemption, forks, aborts, leases
handed to another engine; and now and then an eviction, a reset, a renewal, or a question whether what a lease has
published is really there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radix_cache.errors import InvalidArgument, PoolExhausted, UnknownLease
from radix_cache.operations import new_lease_id

from .mailbox import Parcel
from .memory import first_digest, next_digest
from .prompts import SCRATCH, namespace, prompt
from .request import Request
from .routes import Op

if TYPE_CHECKING:
    from .engine import Engine

_CHUNK_TOKENS = 24
_HAND_OVER_TTLS = 3.0
_VOCABULARY = 50_000


class Planner:
    """One engine's. leaving: requests whose lease the message ends. is_short: somebody could not grow."""

    def __init__(self, engine: Engine) -> None:
        self.leaving: set[Request] = set()
        self.is_short = False
        self._preempted: set[Request] = set()
        self._engine = engine
        self._dice = engine.dice
        self._size = engine.settings.block_size

    def _has_luck(self, share: float) -> bool:
        return self._dice.random() < share

    # Requests.

    def new_request(self) -> Request:
        """Draw one."""
        tokens = prompt(self._engine.settings.seed, self._dice)
        return self._request(tokens, namespace(self._dice))

    def _request(self, tokens: list[int], name: tuple[str, ...]) -> Request:
        stop_at = len(tokens) + self._dice.randint(1, 40)
        return Request(tokens, name, stop_at, self._size, is_sampled_freely=self._has_luck(0.3))

    def kernel_target(self, request: Request) -> int:
        """Return up to where the next kernels compute: what there are tokens and blocks for, a chunk at most."""
        room = request.lease.num_blocks * self._size
        return min(len(request.tokens), request.num_computed + _CHUNK_TOKENS, room)

    def sample(self, request: Request) -> None:
        """Once all tokens are computed, there are a few more."""
        if request.num_computed < len(request.tokens):
            return
        for _ in range(min(self._dice.randint(1, 4), request.stop_at - len(request.tokens))):
            if request.is_sampled_freely:
                request.tokens.append(self._dice.randrange(_VOCABULARY))
            else:
                seen = next_digest(first_digest(request.namespace), request.tokens[-8:])
                request.tokens.append(int.from_bytes(seen[:4], "little") % _VOCABULARY)

    # A message.

    def plan_again(self) -> list[Op]:
        """Write down the matches whose answer was lost, to get the leases that they may have opened."""
        waiting = self._engine.waiting
        again = [request for request in waiting if request.retried_id is not None]
        for request in again:
            waiting.remove(request)
        return [self._match(request) for request in again]

    def plan(self) -> list[Op]:
        """Write down the next message."""
        engine = self._engine
        self.leaving.clear()
        ops = [Op("release", None, (lease_id,)) for lease_id in engine.doomed]
        engine.doomed.clear()
        if engine.is_cut_off:  # which of them are left?
            ops += [Op("renew", request, (request.lease,)) for request in engine.running]
        self._preempted = {engine.running[-1]} if self.is_short and engine.running else set()
        self.is_short = False
        forks = [op for request in engine.running if self._has_luck(0.01) for op in self._fork(request)]
        ops += forks
        for request in list(engine.running):
            ops += self._of(request)
        ops += self._admissions(engine.settings.max_running - len(engine.running) - len(forks))
        ops += self._odds()
        return ops

    def _of(self, request: Request) -> list[Op]:
        ops = self._questions(request)
        if self._has_luck(0.7):
            ops += self._free_redundant(request)
        if self._has_luck(0.8) or request.is_over:
            ops += self._publish(request)
        request.is_aborted |= self._has_luck(0.005)
        if request.is_over or request in self._preempted:
            self.leaving.add(request)
            ops.append(Op("release", request, (request.lease,)))
        elif self._has_luck(0.004):
            self.leaving.add(request)
            ttl_s = _HAND_OVER_TTLS * self._engine.settings.lease_ttl_s
            ops.append(Op("renew", request, (request.lease,), {"ttl_s": ttl_s}))
        elif self._has_luck(0.05):
            ops += self._trim(request)
        else:
            drafts = self._dice.randint(1, 8) if self._has_luck(0.1) else 0
            wanted = min(len(request.tokens), request.num_computed + _CHUNK_TOKENS) + drafts
            ops.append(Op("allocate", request, (request.lease,), {"num_tokens": wanted}))
        return ops

    def _questions(self, request: Request) -> list[Op]:
        published = request.lease.num_published_tokens
        if not published or not self._has_luck(0.1):
            return []
        return [Op("probe", request, (request.tokens[:published], request.namespace), num_before=published)]

    def _publish(self, request: Request) -> list[Op]:
        published = request.lease.num_published_tokens
        if request.num_computed - published < self._size:
            return []
        start = 0 if self._has_luck(0.2) else published
        tokens = request.tokens[start : request.num_computed]
        return [Op("insert", request, (request.lease, tokens), {"offset": start}, num_before=published)]

    def _free_redundant(self, request: Request) -> list[Op]:
        table = set(request.lease.block_table)
        return self._free(request, [block for block in request.own if block not in table])

    def _trim(self, request: Request) -> list[Op]:
        """Drafts were rejected: the blocks behind what is computed go back."""
        return self._free(request, list(request.lease.block_table[-(-request.num_computed // self._size) :]))

    def _free(self, request: Request, blocks: list[int]) -> list[Op]:
        for block in blocks:
            request.own.pop(block, None)  # not one's own from the moment that this is sent
        return [Op("free", request, (request.lease, blocks))] if blocks else []

    def _fork(self, parent: Request) -> list[Op]:
        """Another continuation of what the parent has published."""
        published = parent.lease.num_published_tokens
        if not published:
            return []
        keep = self._dice.randint(published, len(parent.tokens))
        tail = [self._dice.randrange(_VOCABULARY) for _ in range(self._dice.randint(1, 6))]
        child = self._request(parent.tokens[:keep] + tail, parent.namespace)
        self._engine.count("num_forks")
        options = {**self._room(child), "parent": parent.lease}
        return [Op("match_prefix", child, (child.tokens[published:], child.namespace), options)]

    def _room(self, request: Request) -> dict[str, object]:
        n = len(request.tokens)
        return {"max_tokens": n - 1, "num_tokens": n, "num_blocks": _CHUNK_TOKENS // self._size}

    def _match(self, request: Request) -> Op:
        lease_id = request.retried_id or new_lease_id()
        options = {**self._room(request), "lease_id": lease_id}
        return Op("match_prefix", request, (request.tokens, request.namespace), options)

    def _admissions(self, num_seats: int) -> list[Op]:
        engine = self._engine
        ops: list[Op] = []
        if self._has_luck(0.02) and (parcel := engine.mailbox.take()) is not None:
            engine.count("num_taken_over")
            ops.append(self._match(self._request(parcel.tokens, parcel.namespace)))
            ops.append(Op("release", None, (parcel.lease_id,)))
        num_admitted = min(num_seats - len(ops) // 2, len(engine.waiting), 2)
        return ops + [self._match(engine.waiting.popleft()) for _ in range(num_admitted)]

    def _odds(self) -> list[Op]:
        ops = []
        if self._has_luck(0.01):
            ops.append(Op("evict", None, (self._dice.randint(1, 12),)))
        if self._has_luck(0.004):
            ops.append(Op("reset", None, ((*SCRATCH, str(self._dice.randrange(2))),)))
        return ops

    # What became of it.

    def is_fair_refusal(self, op: Op) -> bool:
        """Tell whether a match asked again for a lease that is just being given back."""
        is_again = op.request is not None and op.request.retried_id is not None
        return is_again and isinstance(op.error, (InvalidArgument, UnknownLease))

    def match_failed(self, op: Op) -> None:
        """Nothing was opened, as far as is known."""
        request = op.request
        assert request is not None
        request.retried_id = None
        if isinstance(op.error, PoolExhausted):
            self._engine.count("num_refused")
        elif not op.is_answered and self._has_luck(0.5):
            request.retried_id = op.options.get("lease_id")
        self._engine.waiting.append(request)

    def has_ended(self, request: Request) -> None:
        """Its lease was released."""
        engine = self._engine
        if request in self._preempted:
            engine.count("num_preempted")
            engine.waiting.append(request)
        else:
            engine.count("num_aborted" if request.is_aborted else "num_finished")

    def hand_over(self, request: Request) -> None:
        """Its lease has a time of its own now: another engine may have it."""
        engine = self._engine
        engine.count("num_handed_over")
        published = request.tokens[: request.lease.num_published_tokens + 1]
        engine.mailbox.put(Parcel(request.lease.lease_id, [*published, 1], request.namespace))
        engine.forget(request)
