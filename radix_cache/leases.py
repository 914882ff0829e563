"""Leases: one engine request in flight each, and the table that finds them, renews them and lets them run out.

A lease holds a locked path in the tree (blocks it shares) and private blocks (its alone). Its block table is the first
followed by the second. This file keeps the books of a lease; what a change of them means for tree and pool is
`radix_cache.executor`'s business, and a remote client keeps the same books from the server's answers.

Time comes from outside, as ``now``. A lease with an engine lives as long as the engine is heard of; one without, as
long as calls name it; and either for as long as `renew` promised it. The heap of deadlines is lazy: renewing moves a
number, and only a deadline that comes up is looked at.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from radix_cache.errors import InvalidBlocks, LeaseExpired, UnknownLease
from radix_cache.hints import NO_HINTS
from radix_cache.node import Node, Root
from radix_cache.operations import Namespace
from radix_cache.stats import LeaseInfo

__all__ = ["Lease", "LeaseTable"]

_MAX_PARTS = 256
_NOTHING: frozenset[int] = frozenset()
_NUM_REMEMBERED = 65_536


class Lease:
    """One request in flight. All attributes are read-only to callers; the verbs of the cache change them.

    lease_id: the name that any client may use in place of this object.
    namespace: where its tokens live.
    engine_id: the engine whose calls keep it alive, or None.
    is_pin: it only keeps a prefix resident, see `radix_cache.PrefixCache.pin`.
    num_cached_tokens: tokens that were cached when it was opened.
    num_published_tokens: tokens, from position 0, that are in the tree and locked by this lease.
    partial_block_id, num_partial_tokens: the cached block that agrees longest with the prompt behind the match, and for
    how many tokens; None and 0 where none was asked for or found. Locked with the lease until it publishes anything:
    by then the engine has copied it.
    """

    __slots__ = (
        "__weakref__",
        "_deadline",
        "_ended",
        "_engine",
        "_hints",
        "_is_scheduled",
        "_is_stale",
        "_named_in",
        "_node",
        "_num_queried_tokens",
        "_opened_at",
        "_opening",
        "_partial",
        "_parts",
        "_private",
        "_redundant",
        "_root",
        "_table",
        "_version",
        "block_size",
        "engine_id",
        "is_pin",
        "lease_id",
        "namespace",
        "num_cached_tokens",
        "num_partial_tokens",
        "num_published_tokens",
        "partial_block_id",
    )

    def __init__(
        self,
        lease_id: str,
        namespace: Namespace,
        block_size: int,
        num_cached_tokens: int,
        cached: list[bytes],
        engine_id: str | None = None,
    ) -> None:
        self.lease_id = lease_id
        self.namespace = namespace
        self.engine_id = engine_id
        self.block_size = block_size
        self.num_cached_tokens = num_cached_tokens
        self.num_published_tokens = num_cached_tokens
        self._parts = cached  # the published part of the table: int32 ids, span by span
        self._private: array[int] = array("i")  # the rest of it
        self._redundant: frozenset[int] = _NOTHING
        self._version = 0  # of the table
        self._table: tuple[int, array[int]] | None = None
        self._node: Node | None = None  # where the locked path ends
        self._root: Root = None  # type: ignore[assignment]  # of its namespace; a client's books have none
        self._hints = NO_HINTS
        self._partial: Node | None = None  # ends with the partial block, and is locked
        self.partial_block_id: int | None = None
        self.num_partial_tokens = 0
        self.is_pin = False
        self._opened_at = 0.0
        self._opening: Any = None  # what a server keeps of the request that it came from
        self._engine: _Engine | None = None
        self._deadline = 0.0  # own promise; an engine's may be later
        self._is_scheduled = False  # whether the heap of deadlines has it; once, and no later than its deadline
        self._is_stale = False
        self._ended: type[UnknownLease] | None = None  # what a verb raises that is given this object when it is gone
        self._named_in: object = None  # the last batch with a number of the caller's that named this object
        self._num_queried_tokens: int | None = None  # to be counted at the first insert; None: counted, or not to be

    def __repr__(self) -> str:
        return (
            f"<Lease {self.lease_id} {self.num_published_tokens} tokens published, "
            f"{len(self._private)} private blocks, {len(self._redundant)} redundant>"
        )

    @property
    def block_table(self) -> array[int]:
        """The physical block ids in token order, int32: cached and published ones first, then private ones.

        A fresh array each time: write to it, wrap it, keep it; nobody else sees or changes it. O(number of blocks), a
        memcpy; keep it in a variable while it does not change.
        """
        known = self._table
        if known is None or known[0] != self._version:
            version = self._version  # read before what it stands for: a change by another thread meanwhile shows later
            self._table = known = version, array("i", self._packed_table())
        return known[1][:]

    @property
    def num_blocks(self) -> int:
        """Length of the block table."""
        return self.num_published_tokens // self.block_size + len(self._private)

    # The books. `cache` and the remote clients call these, with what has been decided.

    def _grow(self, block_ids: array[int]) -> None:
        """The table grew by ``block_ids``."""
        self._private.extend(block_ids)
        self._version += 1

    def _publish(self, canonical: bytes, redundant: array[int]) -> None:
        """The first blocks of the private part are published as ``canonical``; ``redundant`` of them were replaced."""
        self.partial_block_id, self.num_partial_tokens = None, 0
        num_blocks = len(canonical) // 4
        del self._private[:num_blocks]
        if len(self._parts) >= _MAX_PARTS:
            self._parts = [b"".join(self._parts)]
        self._parts.append(canonical)
        if redundant:
            self._redundant = self._redundant.union(redundant)
        self.num_published_tokens += num_blocks * self.block_size
        self._version += 1

    def _published_ids(self) -> bytes:
        """The published part of the table, packed."""
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def _packed_table(self) -> bytes:
        """The block table, packed."""
        return self._published_ids() + self._private.tobytes()

    def _check_return(self, block_ids: array[int]) -> int:
        """Return how many blocks ``block_ids`` would trim off the table; the others are redundant ones.

        Raises `InvalidBlocks` for an id named twice, and for one that is neither redundant nor in the private tail.
        """
        given = set(block_ids)
        if len(given) != len(block_ids):
            twice = next(i for i in block_ids if block_ids.count(i) > 1)
            raise InvalidBlocks(f"block {twice} is named twice", twice)
        tail = given - self._redundant
        num_trimmed = len(tail)
        if num_trimmed > len(self._private) or tail.difference(self._private[len(self._private) - num_trimmed :]):
            bad = min(tail.difference(self._private) or tail)
            raise InvalidBlocks(
                f"block {bad} is neither redundant nor at the private tail of lease {self.lease_id!r}", bad
            )
        return num_trimmed

    def _return(self, block_ids: array[int], num_trimmed: int) -> None:
        """The lease gave ``block_ids`` back, ``num_trimmed`` of them from the tail of its table."""
        self._redundant = self._redundant.difference(block_ids)
        del self._private[len(self._private) - num_trimmed :]
        self._version += 1

    def _owned(self) -> array[int]:
        """Every block that this lease alone owns."""
        return self._private + array("i", sorted(self._redundant)) if self._redundant else self._private


class _Engine:
    """What is known of one engine: when it was last heard of, and its leases."""

    __slots__ = ("deadline", "is_scheduled", "leases")

    def __init__(self) -> None:
        self.deadline = 0.0
        self.is_scheduled = False
        self.leases: dict[str, Lease] = {}


class LeaseTable:
    """Finds leases by id, and names those that have run out.

    ttl_s: seconds that a lease lives unheard of; None: for ever. is_timed: whether any lease can run out. by_id: the
    live leases, for reading.
    Every method is O(1) but `expired`, which is
    O(log n) for each deadline that came up.
    """

    def __init__(self, ttl_s: float | None) -> None:
        self.ttl_s = ttl_s
        self.is_timed = ttl_s is not None
        self.by_id: dict[str, Lease] = {}
        self._engines: dict[str, _Engine] = {}
        self._deadlines: list[tuple[float, int, _Engine | Lease]] = []
        self._num_scheduled = 0  # breaks ties in the heap
        self._gone: OrderedDict[str, Namespace] = OrderedDict()  # ids that expired, the newest last

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self.by_id.values())

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self.by_id

    def get(self, lease_id: str) -> Lease:
        """Return the live lease of this id. Raises `LeaseExpired` or `UnknownLease`."""
        lease = self.by_id.get(lease_id)
        if lease is not None:
            return lease
        raise LeaseExpired(lease_id) if lease_id in self._gone else UnknownLease(lease_id)

    def add(self, lease: Lease, now: float) -> None:
        """Take up a new lease; it lives until ``now + ttl_s`` at least."""
        self.by_id[lease.lease_id] = lease
        lease._opened_at = now
        if self._gone:
            self._gone.pop(lease.lease_id, None)
        if lease.engine_id is not None:
            lease._engine = engine = self._engines.setdefault(lease.engine_id, _Engine())
            engine.leases[lease.lease_id] = lease
        if self.ttl_s is not None:
            if lease._engine is None:
                lease._deadline = now + self.ttl_s
                self._schedule_lease(lease)
            else:
                self._hear(lease._engine, now + self.ttl_s)

    def add_pin(self, pin: Lease, now: float, ttl_s: float) -> None:
        """Take up a lease that lives until ``now + ttl_s``, also where others live for ever."""
        self.by_id[pin.lease_id] = pin
        self._gone.pop(pin.lease_id, None)
        self.is_timed = True
        self.promise(pin, now, ttl_s)

    def remove(self, lease: Lease, ended: type[UnknownLease] = UnknownLease) -> None:
        """Forget a lease; ``ended`` is what a verb raises from here on that is given it, whoever has its id then."""
        del self.by_id[lease.lease_id]
        lease._ended = ended
        engine = lease._engine
        if engine is not None:
            del engine.leases[lease.lease_id]
            if not engine.leases:
                del self._engines[lease.engine_id]  # type: ignore[arg-type]

    def namespace_of(self, lease_id: str) -> Namespace | None:
        """Return where a live lease, or one of the latest that expired, has its tokens."""
        lease = self.by_id.get(lease_id)
        return self._gone.get(lease_id) if lease is None else lease.namespace

    def oldest_age_s(self, now: float) -> float | None:
        """Return how long ago the oldest lease that is no pin was opened. O(pins)."""
        oldest = next((lease for lease in self.by_id.values() if not lease.is_pin), None)
        return None if oldest is None else now - oldest._opened_at

    def of_engine(self, engine_id: str) -> list[Lease]:
        """The engine's leases."""
        engine = self._engines.get(engine_id)
        return list(engine.leases.values()) if engine else []

    def info(self, lease: Lease, now: float) -> LeaseInfo:
        """Say what a live lease has, and how long it lives on."""
        is_timed = self.ttl_s is not None or lease.is_pin
        return LeaseInfo(
            lease_id=lease.lease_id,
            namespace=lease.namespace,
            engine_id=lease.engine_id,
            num_cached_tokens=lease.num_cached_tokens,
            num_published_tokens=lease.num_published_tokens,
            num_private_blocks=len(lease._private),
            num_redundant_blocks=len(lease._redundant),
            left_s=self._until(lease) - now if is_timed else None,
            is_promised=lease._engine is not None and lease._deadline > now,
            is_pin=lease.is_pin,
        )

    def heartbeat(self, engine_id: str, now: float) -> None:
        """Renew every lease of the engine."""
        engine = self._engines.get(engine_id)
        if engine is not None and self.ttl_s is not None:
            self._hear(engine, now + self.ttl_s)

    def renew(self, lease: Lease, now: float) -> None:
        """A call without an engine id named this lease."""
        if self.ttl_s is not None:
            lease._deadline = max(lease._deadline, now + self.ttl_s)

    def promise(self, lease: Lease, now: float, ttl_s: float) -> None:
        """Let this lease live until ``now + ttl_s``, whatever becomes of its engine."""
        if self.ttl_s is not None or lease.is_pin:
            lease._deadline = max(lease._deadline, now + ttl_s)  # what was promised is not taken back
            self._schedule_lease(lease)

    def expired(self, now: float) -> list[Lease]:
        """Remove and return the leases whose time is up; from here on their ids raise `LeaseExpired`."""
        gone: list[Lease] = []
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            holder = heapq.heappop(deadlines)[2]
            if isinstance(holder, Lease):
                holder._is_scheduled = False
                due = [holder] if self.by_id.get(holder.lease_id) is holder else []
            else:
                holder.is_scheduled = False
                due = list(holder.leases.values())
                if due and holder.deadline > now:
                    self._hear(holder, holder.deadline)
                    continue
            for lease in due:
                if self._until(lease) <= now:
                    gone.append(lease)
                    self.remove(lease, LeaseExpired)
                    self._remember(lease)
                elif lease._deadline > now:  # else its engine lives, and has a deadline of its own in the heap
                    self._schedule_lease(lease)
        return gone

    def _until(self, lease: Lease) -> float:
        engine = lease._engine
        return lease._deadline if engine is None else max(lease._deadline, engine.deadline)

    def _hear(self, engine: _Engine, deadline: float) -> None:
        engine.deadline = deadline
        if not engine.is_scheduled:
            engine.is_scheduled = True
            self._schedule(deadline, engine)

    def _schedule_lease(self, lease: Lease) -> None:
        if not lease._is_scheduled:
            lease._is_scheduled = True
            self._schedule(lease._deadline, lease)

    def _schedule(self, deadline: float, holder: _Engine | Lease) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._deadlines, (deadline, self._num_scheduled, holder))

    def _remember(self, lease: Lease) -> None:
        self._gone[lease.lease_id] = lease.namespace
        if len(self._gone) > _NUM_REMEMBERED:
            self._gone.popitem(last=False)

    def check(self) -> list[str]:
        """Return each broken rule of the books, in words."""
        wrong: list[str] = []
        for name, engine in self._engines.items():
            if not engine.leases:
                wrong.append(f"engine {name!r} is kept without a lease")
            for lease_id, lease in engine.leases.items():
                if self.by_id.get(lease_id) is not lease or lease._engine is not engine:
                    wrong.append(f"lease {lease_id!r} is in the books of engine {name!r} only")
        return wrong
