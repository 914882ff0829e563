"""What a cache says of itself at one moment: blocks by state, leases, namespaces, the tree.

Nothing is changed by it, but that leases whose time is over end first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import islice

from radix_cache import operations
from radix_cache.executor import Executor
from radix_cache.leases import Lease
from radix_cache.node import Root
from radix_cache.operations import Namespace, check_count, check_name
from radix_cache.reading import agrees, tree_rows
from radix_cache.stats import Description, LeaseInfo, NamespaceStats, Stats, TreeNode

__all__ = ["Inspected"]


class Inspected:
    """The half of `radix_cache.PrefixCache` that only reads."""

    block_size: int
    lease_ttl_s: float | None
    growth_share: float
    _executor: Executor
    _lock: threading.Lock

    @property
    def num_available_blocks(self) -> int:
        """Free and evictable blocks at this moment: a hint, out of date as soon as it is read. O(1), without the
        lock.
        """
        return self._executor.pool.num_free_blocks + self._executor.index.num_evictable_blocks

    def stats(self) -> Stats:
        """Return blocks by state, leases, and the counters. O(1)."""
        with self._lock:
            self._executor.begin(None)
            executor = self._executor
            index, pool = executor.index, executor.pool
            return Stats(
                num_free_blocks=pool.num_free_blocks,
                num_leased_blocks=executor.allocator.num_leased_blocks,
                num_cached_blocks=index.num_cached_blocks,
                num_evictable_blocks=index.num_evictable_blocks,
                num_protected_blocks=index.num_protected_blocks,
                num_leases=len(executor.leases),
                num_nodes=index.num_nodes,
                num_namespaces=len(index.roots),
                num_pins=executor.num_pins,
                num_pinned_blocks=executor.num_pinned_blocks,
                oldest_lease_age_s=executor.oldest_lease_age_s(),
                counters=executor.totals(),
            )

    def namespace_stats(self, namespace: Iterable[str] = (), max_namespaces: int = 1000) -> list[NamespaceStats]:
        """Return what each namespace that begins with ``namespace`` has and had, up to so many. O(namespaces).

        A namespace in which nothing is cached and no lease is open is forgotten, and its totals with it.
        """
        wanted = operations.check_namespace(namespace)
        most = check_count(max_namespaces, "max_namespaces", 1)
        with self._lock:
            self._executor.begin(None)
            roots = self._executor.index.roots
            found = (root for name, root in roots.items() if name[: len(wanted)] == wanted)
            return [_stats_of(root) for root in islice(found, most)]

    def leases(self, engine_id: str | None = None) -> list[LeaseInfo]:
        """Return all leases, or those of one engine, the oldest first. O(leases)."""
        if engine_id is not None:
            check_name(engine_id, "engine_id")
        with self._lock:
            self._executor.begin(None)
            table, now = self._executor.leases, self._executor.now
            found = table if engine_id is None else table.of_engine(engine_id)
            return [table.info(lease, now) for lease in found]

    def namespace_of(self, lease_id: str) -> Namespace | None:
        """Return where a live lease, or one of the latest that expired, has its tokens; None: no such lease. O(1)."""
        return self._executor.leases.namespace_of(operations.lease_id_of(lease_id))

    def lease_of(self, lease_id: str) -> Lease | None:
        """Return the open lease of this name, None if there is none, as far as the last call knew. O(1)."""
        return self._executor.leases.by_id.get(lease_id)

    def is_opened_with(self, lease: Lease, tokens: bytes) -> bool:
        """Tell whether an open lease's published tokens begin with ``tokens``, whole blocks. O(tokens), a memcmp."""
        return not tokens or (lease._node is not None and agrees(lease._node, 0, tokens))

    def has_namespace(self, namespace: Iterable[str]) -> bool:
        """Tell whether anything is cached or leased in exactly this namespace. O(1)."""
        return operations.check_namespace(namespace) in self._executor.index.roots

    def describe(self) -> Description:
        """Return what the cache was made with."""
        return Description(
            block_size=self.block_size,
            num_blocks=self._executor.pool.num_blocks,
            num_reserved_blocks=self._executor.pool.num_reserved_blocks,
            policy=self._executor.index.policy.spec,
            lease_ttl_s=self.lease_ttl_s,
            growth_share=self.growth_share,
        )

    def dump(self, namespace: Iterable[str] = (), max_nodes: int = 1000, max_span_tokens: int = 16) -> list[TreeNode]:
        """Return up to ``max_nodes`` rows of the tree, parents first, from namespaces that begin with ``namespace``.

        Each shows up to ``max_span_tokens`` of its span, in whole blocks for the ids. O(rows).
        """
        wanted = operations.check_namespace(namespace)
        limit = check_count(max_nodes, "max_nodes")
        shown = check_count(max_span_tokens, "max_span_tokens", most=operations.MAX_TOKENS)
        with self._lock:
            self._executor.begin(None)
            index = self._executor.index
            roots = [root for name, root in index.roots.items() if name[: len(wanted)] == wanted]
            return list(tree_rows(roots, index.now, limit, shown))

    def check_integrity(self) -> None:
        """Walk tree, pool and leases; raise `IntegrityError` on the first broken invariant. O(everything)."""
        with self._lock:
            self._executor.check_integrity()


def _stats_of(root: Root) -> NamespaceStats:
    return NamespaceStats(
        namespace=root.namespace,
        num_cached_blocks=root.num_cached_blocks,
        num_evictable_blocks=root.num_cached_blocks - root.num_protected_blocks,
        num_protected_blocks=root.num_protected_blocks,
        num_leased_blocks=root.num_leased_blocks,
        num_leases=root.num_leases,
        num_requests=root.num_requests,
        num_queried_tokens=root.num_queried_tokens,
        num_hit_tokens=root.num_hit_tokens,
        num_near_miss_tokens=root.num_near_miss_tokens,
        num_evicted_blocks=root.num_evicted_blocks,
        evicted_age=root.evicted_age,
        evicted_idle=root.evicted_idle,
    )
