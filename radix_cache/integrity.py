"""The invariants, checked by walking everything. For tests, and for whoever suspects a fault; nothing else calls it.

They are numbered and said in words in docs/design.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from radix_cache.errors import IntegrityError
from radix_cache.index import PrefixIndex
from radix_cache.node import Node, Root, Share
from radix_cache.reading import nodes_below, path_slice
from radix_cache.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from radix_cache.executor import Executor
    from radix_cache.leases import Lease

__all__ = ["check_cache", "check_index"]


def check_cache(cache: Executor) -> None:
    """Walk tree, pool and leases; raise `IntegrityError` on the first broken invariant. O(everything)."""
    ends = [node for lease in cache.leases for node in (lease._node, lease._partial) if node is not None]
    owners = Counter(check_index(cache.index, ends))
    owners.update(cache.pool.check_integrity())
    leased = Counter[Root]()
    num_leases = Counter(lease._root for lease in cache.leases)
    for lease in cache.leases:
        _check_lease(cache, lease)
        owners.update(lease._owned())
        leased[lease._root] += len(lease._owned())
    _check_namespaces(cache, leased, num_leases)
    _check_pins(cache)
    num_leased = sum(leased.values())
    shared = [block_id for block_id, count in owners.items() if count > 1]
    if shared:
        raise IntegrityError(f"block {shared[0]} has {owners[shared[0]]} owners")
    if len(owners) != cache.pool.num_usable_blocks or num_leased != cache.allocator.num_leased_blocks:
        raise IntegrityError(f"{len(owners)} blocks have an owner, {num_leased} a lease; not {cache.sums()}")
    if wrong := cache.leases.check():
        raise IntegrityError(wrong[0])


def _check_lease(cache: Executor, lease: Lease) -> None:
    """A lease ends in the tree where its books say, under the ids that its table names."""
    depth = lease.num_published_tokens * TOKEN_BYTES
    if (lease._node is None) is not (depth == 0):
        raise IntegrityError(f"{lease!r} is locked exactly if it has published something")
    if lease._node is None:
        return
    tokens, block_ids = path_slice(lease._node, 0, depth)
    if len(tokens) != depth or lease._published_ids() != block_ids:
        raise IntegrityError(f"the block table of {lease!r} is not its path in the tree")


def _check_namespaces(cache: Executor, leased: Counter[Root], num_leases: Counter[Root]) -> None:
    """Namespaces and shares have what their leases have, and no share more than its limit."""
    for root in {*cache.index.roots.values(), *leased}:
        if (root.num_leased_blocks, root.num_leases) != (leased[root], num_leases[root]):
            raise IntegrityError(
                f"a namespace has {num_leases[root]} leases with {leased[root]} blocks, not as it says"
            )
    for share in cache.index.shares.values():
        found = sum(num for root, num in leased.items() if root.share is share)
        if share.num_leased_blocks != found:
            raise IntegrityError(f"{found} blocks are leased in a share that says {share.num_leased_blocks}")
        if share.max_blocks is not None and share.num_leased_blocks + share.num_cached_blocks > share.max_blocks:
            raise IntegrityError("a share has more blocks than its limit allows")


def _check_pins(cache: Executor) -> None:
    """Pins hold what is counted."""
    pins = [lease for lease in cache.leases if lease.is_pin]
    num_pinned = sum(max(lease.num_published_tokens // cache.block_size, 1) for lease in pins)
    if (len(pins), num_pinned) != (cache.num_pins, cache.num_pinned_blocks):
        raise IntegrityError(f"{len(pins)} pins hold {num_pinned} blocks, the books say otherwise")


def check_index(index: PrefixIndex, holders: Iterable[Node]) -> set[int]:
    """Walk everything; raise `IntegrityError` for the first broken invariant. ``holders``: where each lease ends.

    Returns the ids of all cached blocks. O(tree).
    """
    ends = Counter(holders)
    seen: set[int] = set()
    leaves: set[Node] = set()
    sums = Counter[str]()
    books: dict[Root, list[int]] = {root: [0, 0] for root in index.roots.values()}
    detached = [node for node in dict.fromkeys(index._doomed) if not node.is_dead and not _is_child(index, node)]
    locked = Counter(node.parent for node in (*detached, *index._dead) if node.num_locks)  # by those no walk leads to
    for node in nodes_below([*index.roots.values(), *detached, *index._dead]):
        _check_node(index, node)
        _check_links(index, node, ends[node], locked[node])
        ids = memoryview(node.block_ids).cast("i").tolist()
        sums.update(nodes=node.parent is not None, cached=len(ids), locks=node.num_locks)
        sums["protected"] += len(ids) if node.num_locks else 0
        if node.root is not None:
            cached_and_protected = books.setdefault(node.root, [0, 0])
            cached_and_protected[0] += len(ids)
            cached_and_protected[1] += len(ids) if node.num_locks else 0
        seen.update(ids)
        if node.parent is not None and node.children is None and not node.is_dead:
            leaves.add(node)
    if len(seen) != sums["cached"]:
        raise IntegrityError(f"{sums['cached'] - len(seen)} block ids are in the tree twice")
    for counted, kept in (
        (sums["nodes"], index.num_nodes),
        (sums["cached"], index.num_cached_blocks),
        (sums["protected"], index.num_protected_blocks),
    ):
        if counted != kept:
            raise IntegrityError(f"nodes, cached, protected are {dict(sums)}; the books say {kept} for {counted}")
    _check_books(index, books)
    _check_order(index, leaves)
    return seen


def _is_child(index: PrefixIndex, node: Node) -> bool:
    """Tell whether a detached node is below another one: a cut has put its upper half in its place."""
    siblings = None if node.parent is None else node.parent.children
    return siblings is not None and siblings.get(node.tokens[: index.block_bytes]) is node


def _check_books(index: PrefixIndex, found: dict[Root, list[int]]) -> None:
    """Namespaces and shares have what was ``found`` of them: cached and protected blocks."""
    shares: dict[Share, list[int]] = {share: [0, 0] for share in index.shares.values()}
    for root, counted in found.items():
        if counted != [root.num_cached_blocks, root.num_protected_blocks]:
            raise IntegrityError(f"{counted} blocks of a namespace are cached and protected, not what its root says")
        if root.share is not None:
            shares[root.share] = [have + more for have, more in zip(shares[root.share], counted, strict=True)]
    for share, counted in shares.items():
        if counted != [share.num_cached_blocks, share.num_protected_blocks]:
            raise IntegrityError(f"{counted} blocks of a share are cached and protected, not what it says")
    if index.num_withheld_blocks != sum(share.num_withheld_blocks for share in shares):
        raise IntegrityError(f"shares do not withhold {index.num_withheld_blocks} blocks together")


def _check_node(index: PrefixIndex, node: Node) -> None:
    """A span is a whole number of blocks, with an id for each, and is empty in roots alone."""
    if len(node.tokens) % index.block_bytes or node.num_blocks * index.block_bytes != len(node.tokens):
        raise IntegrityError(f"a node has {len(node.tokens)} bytes of tokens and {node.num_blocks} blocks")
    if bool(node.tokens) is isinstance(node, Root):
        raise IntegrityError("a span is empty exactly in a root")
    if isinstance(node, Root) and not node.children and not node.num_leases:
        raise IntegrityError(f"namespace {node.namespace} is kept with nothing in it")


def _check_links(index: PrefixIndex, node: Node, num_ends: int, num_locked: int) -> None:
    """Children are keyed by their first block, point back, begin where the node ends, and are no younger; the shortcut
    is one of them; locks are ends plus locked children, with ``num_locked`` that are detached.
    """
    children = node.children
    if children is not None and not children:
        raise IntegrityError("an empty dict of children is kept")
    recent = node.recent
    if recent is not None and (children is None or children.get(recent.tokens[: index.block_bytes]) is not recent):
        raise IntegrityError("a node's shortcut leads to what is not its child")
    for key, child in children.items() if children is not None else ():
        if child.root is not (node.root or node):
            raise IntegrityError("a node is not of its parent's namespace")
        if child.tokens[: index.block_bytes] != key or child.parent is not node:
            raise IntegrityError("a child is not where its first block or its parent says")
        if child.end - len(child.tokens) != node.end:
            raise IntegrityError(f"a child ends at byte {child.end}, not where its span does")
        if child.last_access > node.last_access or child.is_dead:
            raise IntegrityError("a child was touched after its parent, or is dead")
        num_locked += child.num_locks > 0
    if node.num_locks != num_ends + num_locked:
        raise IntegrityError(f"{node.num_locks} locks on a node with {num_ends} leases and {num_locked} locked below")


def _check_order(index: PrefixIndex, leaves: set[Node]) -> None:
    """The policy knows every unlocked leaf, once, and nothing but leaves."""
    known = list(index.policy.candidates())
    if len(set(known)) != len(known) or not leaves.issuperset(known):
        raise IntegrityError("the eviction order names a leaf twice, or what is no leaf")
    missing = [leaf for leaf in leaves.difference(known) if not leaf.num_locks]
    if missing:
        raise IntegrityError(f"{len(missing)} unlocked leaves are missing in the eviction order")
