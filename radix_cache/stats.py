"""What a cache says of itself: blocks by state, counters, its own shape, and its tree as rows."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from radix_cache.operations import Namespace

__all__ = ["Counters", "Description", "LeaseInfo", "NamespaceStats", "Stats", "TreeNode"]


@dataclass(slots=True)
class Counters:
    """Running totals since the cache began; each only grows.

    Lookups are all matches that were answered, pins left out; requests are those whose lease came to insert, each
    counted once, so that a scheduler which matches again and again before it finds room does not inflate the reuse.

    num_partial_tokens: tokens of partial blocks that matches named.
    num_near_miss_tokens: tokens behind a match that agree with the beginning of a cached block: lost to block rounding.
    Looked for where the match ends inside a span, or above at most four of them.
    num_reset_blocks: given back by resets; inserted blocks are cached, evicted, or among these.
    evicted_age, evicted_idle: summed over all evicted blocks, how many inserts, and matches that found anything, came
    between the block's insertion, or its last use, and its eviction.
    """

    num_lookups: int = 0
    num_lookup_tokens: int = 0
    num_lookup_hit_tokens: int = 0
    num_near_miss_tokens: int = 0
    num_partial_tokens: int = 0
    num_requests: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_allocated_blocks: int = 0
    num_inserted_blocks: int = 0
    num_redundant_blocks: int = 0
    num_evicted_blocks: int = 0
    num_reset_blocks: int = 0
    evicted_age: int = 0
    evicted_idle: int = 0
    num_expired_leases: int = 0
    num_resets: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the totals by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True, slots=True)
class Stats:
    """Blocks by state and leases now; ``free + leased + cached`` is the pool less what is reserved.

    oldest_lease_age_s: since the oldest lease was opened, pins left out; None where leases do not run out.
    counters: running totals by name, see `Counters`.
    """

    num_free_blocks: int
    num_leased_blocks: int
    num_cached_blocks: int
    num_evictable_blocks: int
    num_protected_blocks: int
    num_leases: int
    num_nodes: int
    num_namespaces: int
    num_pins: int = 0
    num_pinned_blocks: int = 0
    oldest_lease_age_s: float | None = field(default=None, compare=False)  # the one figure that grows by itself
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float | None:
        """Cached share of the tokens of all requests that came to insert; None before the first."""
        queried = self.counters.get("num_queried_tokens", 0)
        return self.counters["num_hit_tokens"] / queried if queried else None

    @property
    def mean_evicted_age(self) -> float | None:
        """Inserts and matches with a hit between a block's insertion and its eviction, on average; None before one."""
        return self._per_evicted_block("evicted_age")

    @property
    def mean_evicted_idle(self) -> float | None:
        """Inserts and matches with a hit between a block's last use and its eviction, on average; None before one."""
        return self._per_evicted_block("evicted_idle")

    def _per_evicted_block(self, name: str) -> float | None:
        num_evicted = self.counters.get("num_evicted_blocks", 0)
        return self.counters.get(name, 0) / num_evicted if num_evicted else None


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """Blocks by state and leases of one namespace now, and its totals since it was last empty."""

    namespace: Namespace
    num_cached_blocks: int
    num_evictable_blocks: int
    num_protected_blocks: int
    num_leased_blocks: int
    num_leases: int
    num_requests: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_near_miss_tokens: int
    num_evicted_blocks: int
    evicted_age: int
    evicted_idle: int

    @property
    def hit_rate(self) -> float | None:
        """Cached share of the tokens of its requests; None before the first."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else None


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """One lease as it is now.

    left_s: seconds that it lives on if nothing is heard of it; None: for ever. is_promised: `renew` promised it a time
    of its own that is not over, whatever becomes of its engine. is_pin: it only keeps a prefix.
    """

    lease_id: str
    namespace: Namespace
    engine_id: str | None
    num_cached_tokens: int
    num_published_tokens: int
    num_private_blocks: int
    num_redundant_blocks: int
    left_s: float | None
    is_promised: bool
    is_pin: bool


@dataclass(frozen=True, slots=True)
class Description:
    """What a client must know of a cache. The fields after ``growth_share`` are a server's; in process they are
    None.
    """

    block_size: int
    num_blocks: int
    num_reserved_blocks: int
    policy: str
    lease_ttl_s: float | None
    growth_share: float
    max_tokens: int | None = None
    max_operations: int | None = None
    layout_fingerprint: str | None = None
    pool_epoch: str | None = None
    pool_descriptor: str | None = None
    epoch: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One node of the tree, or (depth 0, no tokens) the root of a namespace.

    num_locks: leases that end here plus children with locks. age: touches of other paths since this one's last.
    tokens, block_ids: the beginning of the span, packed LE uint32, and the blocks of that beginning, int32 bytes.
    """

    namespace: Namespace
    depth: int
    num_tokens: int
    num_blocks: int
    num_locks: int
    num_children: int
    age: int
    tokens: bytes
    block_ids: bytes
