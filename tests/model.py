"""The cache as the contract describes it, kept as plainly as possible: a second opinion on every answer.

Leases are records, the pool is a dict of free ids, and every question is answered by looking at everything. Where the
contract leaves a choice, the model follows: it does not predict *which* of several blocks that were freed at the same
moment is handed out first. The caller puts the ids that the cache chose into `CacheModel.offered`; the model checks
that no block which has been free for longer was passed over, and goes on with these ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tree_model import ANY, Block, Namespace, TreeModel

from radix_cache.errors import (
    InvalidArgument,
    InvalidBlocks,
    InvalidTokens,
    LeaseExpired,
    PoolExhausted,
    RadixCacheError,
    StaleLease,
    UnknownLease,
)


@dataclass(eq=False)
class LeaseModel:
    """One lease: what it has published, and the blocks that are its alone."""

    lease_id: str
    namespace: Namespace
    engine_id: str | None
    num_cached_tokens: int
    tokens: list[int]  # published
    private: list[int] = field(default_factory=list)
    redundant: list[int] = field(default_factory=list)
    is_stale: bool = False
    deadline: float = 0.0  # its own, apart from its engine's
    is_pin: bool = False
    partial: Block | None = None
    num_partial_tokens: int = 0

    @property
    def partial_block_id(self) -> int | None:
        """The block behind the match that agrees longest."""
        return None if self.partial is None else self.partial.block_id


class Inserted(NamedTuple):
    """The answer to an insert."""

    num_cached_tokens: int
    block_ids: list[int]
    redundant_block_ids: list[int]


class Call(NamedTuple):
    """One verb with its arguments, for a batch: leases go by their ids."""

    verb: str
    options: dict[str, Any]


OPENING = ("match_prefix", "pin")


class CacheModel:
    """The verbs of `radix_cache.PrefixCache`. ``now`` is moved by the test; ``engine_id`` says who calls."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_reserved_blocks: int = 0,
        lease_ttl_s: float | None = None,
        growth_share: float = 0.0,
        pin_share: float = 0.25,
        limits: Mapping[Namespace, Any] | None = None,
    ) -> None:
        self.limits = dict(limits or {})
        self.num_pinnable = int((num_blocks - num_reserved_blocks) * pin_share)
        self.block_size = block_size
        self.ttl_s = lease_ttl_s
        self.tree = TreeModel(block_size)
        self.num_usable = num_blocks - num_reserved_blocks
        self.num_kept_for_growth = int(self.num_usable * growth_share)
        self.freed_at = dict.fromkeys(range(num_reserved_blocks, num_blocks), 0)  # of each free id
        self.num_freeings = 0
        self.leases: dict[str, LeaseModel] = {}
        self.expired: set[str] = set()
        self.engines: dict[str, float] = {}  # engine -> until when its leases live
        self.answers: dict[str, tuple[int, Any]] = {}
        self.now = 0.0
        self.offered: list[int] = []
        self.is_refusing = False

    # Blocks.

    @property
    def num_leased(self) -> int:
        """Blocks that one lease alone owns."""
        return sum(len(lease.private) + len(lease.redundant) for lease in self.leases.values())

    def table(self, lease: LeaseModel) -> list[int]:
        """Return the block table."""
        return [block.block_id for block in self.path(lease)] + lease.private

    def path(self, lease: LeaseModel) -> list[Block]:
        """Return the blocks that the lease locks: what it has published."""
        return self.tree.held.get(lease.lease_id, [])

    def give_back(self, block_ids: Sequence[int]) -> None:
        """These are free from now on, all since the same moment."""
        self.num_freeings += 1
        for block_id in block_ids:
            assert block_id not in self.freed_at
            self.freed_at[block_id] = self.num_freeings

    def require(self, num_blocks: int, available: int) -> None:
        """Refuse what can't be had."""
        if num_blocks and (num_blocks > available or self.is_refusing):
            raise PoolExhausted(num_blocks, max(available, 0))

    def group(self, namespace: Namespace) -> Namespace | None:
        """Return the limited prefix that a namespace falls under: the longest."""
        fitting = [prefix for prefix in self.limits if namespace[: len(prefix)] == prefix]
        return max(fitting, key=len, default=None)

    def cached_in(self, group: Namespace | None) -> list[Block]:
        """Return the cached blocks of a group of namespaces."""
        return [block for block in self.tree.cached if self.group(block.namespace) == group]

    def leased_in(self, group: Namespace | None) -> int:
        """Return how many blocks leases of a group alone have."""
        leases = [lease for lease in self.leases.values() if self.group(lease.namespace) == group]
        return sum(len(lease.private) + len(lease.redundant) for lease in leases)

    def available(self, namespace: Namespace, own: set[Block], kept_free: int = 0) -> int:
        """Return how many blocks a lease there can have, whose match is ``own``, within all limits."""
        mine, locked = self.group(namespace), self.tree.locked | own
        available = len(self.freed_at) - kept_free
        for group in {None, *self.limits}:
            cached = self.cached_in(group)
            evictable = len([block for block in cached if block not in locked])
            kept = 0 if group is None or group == mine else self.limits[group].min_blocks
            available += max(0, min(evictable, len(cached) - kept))
        if mine is not None and self.limits[mine].max_blocks is not None:
            cached = self.cached_in(mine)
            evictable = len([block for block in cached if block not in locked])
            room = self.limits[mine].max_blocks - len(cached) - self.leased_in(mine)
            available = min(available, room + evictable)
        return available

    def evict_for(self, mine: Namespace | None, num_blocks: int) -> None:
        """Free so many blocks, the least recently used first, within what others may keep."""
        freed: list[int] = []
        for _ in range(max(num_blocks, 0)):
            may = {None, mine}
            may |= {g for g in self.limits if len(self.cached_in(g)) > self.limits[g].min_blocks}
            freed += self.tree.evict(1, lambda block, may=may: self.group(block.namespace) in may)
        self.give_back(freed)

    def take(self, num_blocks: int, namespace: Namespace) -> list[int]:
        """Hand out what was offered, having evicted what is missing."""
        mine = self.group(namespace)
        if mine is not None and self.limits[mine].max_blocks is not None:
            over = len(self.cached_in(mine)) + self.leased_in(mine) + num_blocks - self.limits[mine].max_blocks
            self.give_back(self.tree.evict(over, lambda block: self.group(block.namespace) == mine))
        if self.limits:
            self.evict_for(mine, num_blocks - len(self.freed_at))
        else:
            self.give_back(self.tree.evict(num_blocks - len(self.freed_at), ANY))
        taken, self.offered = self.offered[:num_blocks], self.offered[num_blocks:]
        assert len(taken) == num_blocks, f"{num_blocks} blocks were to be handed out, not {taken}"
        freed_at = [self.freed_at.pop(block_id) for block_id in taken]
        passed_over = [i for i, moment in self.freed_at.items() if moment < max(freed_at, default=0)]
        assert not passed_over, f"{passed_over} have been free for longer than some of {taken}"
        return taken

    def missing(self, have: int, num_tokens: int | None, num_blocks: int | None) -> int:
        """Return how many blocks are still to be had: up to a target, or so many more; with both, the fewer."""
        wishes = []
        if num_tokens is not None:
            wishes.append(max(0, -(-num_tokens // self.block_size) - have))
        if num_blocks is not None:
            wishes.append(num_blocks)
        return min(wishes, default=0)

    # Time and names.

    def begin(self, engine_id: str | None) -> None:
        """Whatever a call is: first the silent ones are gone, then the caller is known to live."""
        if self.ttl_s is None and not any(lease.is_pin for lease in self.leases.values()):
            return
        mortal = [lease for lease in self.leases.values() if self.ttl_s is not None or lease.is_pin]
        silent = [lease for lease in mortal if self.lives_until(lease) <= self.now]
        self.end(*silent)
        self.expired.update(lease.lease_id for lease in silent)
        if engine_id is not None and self.ttl_s is not None:
            self.engines[engine_id] = self.now + self.ttl_s

    def lives_until(self, lease: LeaseModel) -> float:
        """Its own deadline or its engine's, whichever is later."""
        return max(lease.deadline, self.engines.get(lease.engine_id or "", 0.0))

    def named(self, lease_id: str, engine_id: str | None) -> LeaseModel:
        """Find a lease; a caller without an engine id speaks for the lease that it names."""
        if lease_id not in self.leases:
            raise LeaseExpired(lease_id) if lease_id in self.expired else UnknownLease(lease_id)
        lease = self.leases[lease_id]
        if engine_id is None and self.ttl_s is not None:
            lease.deadline = max(lease.deadline, self.now + self.ttl_s)
        return lease

    def end(self, *leases: LeaseModel) -> None:
        """Undo their locks and take back their blocks, all at one moment."""
        freed: list[int] = []
        for lease in leases:
            del self.leases[lease.lease_id]
            freed += lease.private + lease.redundant + self.let_go_of_partial(lease) + self.tree.let_go(lease.lease_id)
        self.give_back(freed)

    def let_go_of_partial(self, lease: LeaseModel) -> list[int]:
        """Unlock the partial block; return what is free by that."""
        holder = lease.lease_id, "partial"
        return self.tree.let_go(holder) if holder in self.tree.held else []

    # The verbs.

    def match_prefix(
        self,
        tokens: list[int],
        lease_id: str,
        namespace: Namespace = (),
        max_tokens: int | None = None,
        num_tokens: int | None = None,
        num_blocks: int | None = None,
        parent: str | None = None,
        engine_id: str | None = None,
        partial: bool = False,
    ) -> LeaseModel:
        """Find, lock and allocate, or change nothing."""
        if lease_id in self.leases:
            raise InvalidArgument("lease_id")
        if parent is not None:
            namespace, tokens = self.forked(self.named(parent, engine_id), namespace, tokens, max_tokens)
        within = tokens if max_tokens is None else tokens[:max_tokens]
        path = self.tree.find(namespace, within)
        near, num_near = self.tree.nearest(namespace, within, len(path)) if partial else (None, 0)
        num_private = self.missing(len(path), num_tokens, num_blocks)
        kept = self.num_kept_for_growth if self.num_leased else 0
        if near is not None and num_private > 0 and self.available(namespace, {*path, near}, kept) < num_private:
            near, num_near = None, 0
        self.require(num_private, self.available(namespace, set(path), kept))
        lease = LeaseModel(
            lease_id, namespace, engine_id, len(path) * self.block_size, tokens[: len(path) * self.block_size]
        )
        self.tree.touch(path)
        self.tree.hold(lease_id, path)
        if near is not None:
            lease.partial, lease.num_partial_tokens = near, num_near
            self.tree.hold((lease_id, "partial"), [*path, near])
        lease.private = self.take(num_private, namespace)
        if engine_id is None and self.ttl_s is not None:
            lease.deadline = self.now + self.ttl_s
        self.leases[lease_id] = lease
        self.expired.discard(lease_id)
        return lease

    def forked(
        self, parent: LeaseModel, namespace: Namespace, tokens: list[int], max_tokens: int | None
    ) -> tuple[Namespace, list[int]]:
        """Return the namespace and the whole prompt of a fork."""
        if parent.is_stale:
            raise StaleLease(parent.lease_id)
        if namespace not in ((), parent.namespace):
            raise InvalidArgument("namespace")
        if max_tokens is not None and max_tokens < len(parent.tokens):
            raise InvalidArgument("max_tokens")
        return parent.namespace, parent.tokens + tokens

    def allocate(
        self, lease_id: str, num_tokens: int | None = None, num_blocks: int | None = None, engine_id: str | None = None
    ) -> list[int]:
        """Grow the table, or change nothing."""
        lease = self.named(lease_id, engine_id)
        num_missing = self.missing(len(self.table(lease)), num_tokens, num_blocks)
        if num_missing and lease.is_pin:
            raise InvalidArgument("pin")
        self.require(num_missing, self.available(lease.namespace, set()))
        added = self.take(num_missing, lease.namespace)
        lease.private += added
        return added

    def insert(self, lease_id: str, tokens: list[int], offset: int = 0, engine_id: str | None = None) -> Inserted:
        """Publish whole blocks, or change nothing."""
        lease = self.named(lease_id, engine_id)
        if lease.is_stale:
            raise StaleLease(lease_id)
        if lease.is_pin:
            raise InvalidArgument("pin")
        if offset % self.block_size or offset > len(lease.tokens):
            raise InvalidArgument("offset")
        if any(known != given for known, given in zip(lease.tokens[offset:], tokens, strict=False)):
            raise InvalidTokens("contradiction")
        stop = self.tree.whole(offset + len(tokens))
        prompt = (lease.tokens[:offset] + tokens)[:stop]
        table = self.table(lease)
        if stop > len(table) * self.block_size:
            raise InvalidBlocks("table too short")

        num_cached = len(self.tree.find(lease.namespace, prompt))
        path = self.tree.add(lease.namespace, prompt, table)
        canonical = [block.block_id for block in path]
        redundant = [own for own, kept in zip(table, canonical, strict=False) if own != kept]
        if stop > len(lease.tokens):
            lease.private = table[len(path) :]
            lease.redundant += redundant
            lease.tokens = prompt
            self.tree.hold(lease_id, path)
            self.give_back(self.let_go_of_partial(lease))
            lease.partial, lease.num_partial_tokens = None, 0
        return Inserted(num_cached * self.block_size, canonical[offset // self.block_size :], redundant)

    def free(self, lease_id: str, block_ids: list[int], engine_id: str | None = None) -> None:
        """Take back redundant blocks and the tail of the table, or nothing."""
        lease = self.named(lease_id, engine_id)
        trimmed = set(block_ids) - set(lease.redundant)
        kept = lease.private[: max(0, len(lease.private) - len(trimmed))]
        if len(set(block_ids)) < len(block_ids) or set(lease.private) - set(kept) != trimmed:
            raise InvalidBlocks("not the lease's to give")
        lease.private = kept
        lease.redundant = [i for i in lease.redundant if i not in block_ids]
        self.give_back(block_ids)

    def release(self, lease_id: str, engine_id: str | None = None) -> None:
        """End a lease."""
        self.end(self.named(lease_id, engine_id))

    def renew(self, lease_id: str, ttl_s: float | None = None, engine_id: str | None = None) -> None:
        """Promise a lease to live for so long; what it has been promised already stands."""
        lease = self.named(lease_id, engine_id)
        length = self.ttl_s if ttl_s is None else ttl_s
        if length is not None and (self.ttl_s is not None or lease.is_pin):
            lease.deadline = max(lease.deadline, self.now + length)

    def pin(
        self, tokens: list[int], ttl_s: float, lease_id: str, namespace: Namespace = (), engine_id: str | None = None
    ) -> LeaseModel:
        """Hold what is cached of ``tokens``, for no engine."""
        if lease_id in self.leases:
            raise InvalidArgument("lease_id")
        path = self.tree.find(namespace, tokens)
        left, num_counted = self.num_pinnable - self.num_pinned, max(len(path), 1)
        if num_counted > left:
            raise PoolExhausted(num_counted, left)
        tokens = tokens[: len(path) * self.block_size]
        lease = LeaseModel(lease_id, namespace, None, len(tokens), tokens, deadline=self.now + ttl_s, is_pin=True)
        self.tree.touch(path)
        self.tree.hold(lease_id, path)
        self.leases[lease_id] = lease
        self.expired.discard(lease_id)
        return lease

    @property
    def num_pinned(self) -> int:
        """Blocks under pins, each pin counted, for one at least."""
        return sum(max(len(self.path(lease)), 1) for lease in self.leases.values() if lease.is_pin)

    def probe(self, tokens: list[int], namespace: Namespace = (), engine_id: str | None = None) -> int:
        """Count cached tokens."""
        return len(self.tree.find(namespace, tokens)) * self.block_size

    def evict(self, num_blocks: int, engine_id: str | None = None) -> int:
        """Free up to so many cached blocks."""
        num_free = len(self.freed_at)
        if self.limits:
            self.evict_for(None, num_blocks)
        self.give_back(self.tree.evict(num_blocks - (len(self.freed_at) - num_free), ANY))
        return len(self.freed_at) - num_free

    def reset(
        self, namespace: Namespace | None = None, tokens: list[int] | None = None, engine_id: str | None = None
    ) -> None:
        """Forget; every older lease of these namespaces is stale."""
        tokens, prefix = tokens or [], namespace or ()
        if len(tokens) % self.block_size:
            raise InvalidTokens("not whole blocks")
        affected = [lease for lease in self.leases.values() if lease.namespace[: len(prefix)] == prefix]
        ended = [p for p in affected if p.is_pin and len(p.tokens) > len(tokens) and p.tokens[: len(tokens)] == tokens]
        for pin in ended:
            del self.leases[pin.lease_id]
            del self.tree.held[pin.lease_id]
        self.give_back(self.tree.reset(prefix, tokens))
        for lease in affected:
            lease.is_stale |= not lease.is_pin

    # Many at once.

    def batch(
        self,
        calls: list[Call],
        offers: Callable[[int], list[int]],
        engine_id: str | None = None,
        seq: int | None = None,
        strict: bool = False,
    ) -> list[Any]:
        """Run calls in order; return a value or an error for each. ``offers``: the ids that the cache chose for
        each.
        """
        if seq is not None:
            last, answers = self.answers.get(engine_id or "", (-1, None))
            if seq < last:
                raise InvalidArgument("seq")
            if seq == last:
                return answers  # type: ignore[no-any-return]
        failed: dict[str, RadixCacheError] = {}
        results: list[Any] = []
        for place, call in enumerate(calls):
            self.offered = offers(place)
            results.append(self.attempt(call, engine_id, failed, strict))
        self.is_refusing = False
        if seq is not None:
            self.answers[engine_id or ""] = seq, results
        return results

    def attempt(self, call: Call, engine_id: str | None, failed: dict[str, RadixCacheError], strict: bool) -> Any:
        """Run one call of a batch; a lease that it was to open, and did not, fails what names it."""
        opens = call.options["lease_id"] if call.verb in OPENING else None
        needs = call.options.get("parent") if call.verb in OPENING else call.options.get("lease_id")
        try:
            if needs in failed:
                raise failed[needs]
            result = getattr(self, call.verb)(**call.options, engine_id=engine_id)
        except RadixCacheError as error:
            result = error
            self.is_refusing |= strict and isinstance(error, PoolExhausted)
        if opens is not None:
            failed.pop(opens, None)
            if isinstance(result, RadixCacheError):
                failed[opens] = result
        return result
