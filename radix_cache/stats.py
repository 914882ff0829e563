"""What a cache says of itself: blocks by state, counters, its own shape, and its tree as rows."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from radix_cache.operations import Namespace

__all__ = ["Counters", "Description", "Stats", "TreeNode"]


@dataclass(slots=True)
class Counters:
    """Running totals since the cache began; each only grows.

    Lookups are all matches that were answered; requests are those whose lease came to publish something, each counted
    once, so that a scheduler which matches again and again before it finds room does not inflate the reuse.
    """

    num_lookups: int = 0
    num_lookup_tokens: int = 0
    num_lookup_hit_tokens: int = 0
    num_requests: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_allocated_blocks: int = 0
    num_inserted_blocks: int = 0
    num_redundant_blocks: int = 0
    num_evicted_blocks: int = 0
    num_expired_leases: int = 0
    num_resets: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the totals by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True, slots=True)
class Stats:
    """Blocks by state and leases now; ``free + leased + cached`` is the pool less what is reserved.

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
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float | None:
        """Cached share of the tokens of all requests that published something; None before the first."""
        queried = self.counters.get("num_queried_tokens", 0)
        return self.counters["num_hit_tokens"] / queried if queried else None


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
