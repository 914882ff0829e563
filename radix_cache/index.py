"""The radix tree proper: walking, locking, grafting, evicting, forgetting. Everything that changes a node lives here.

It works on packed tokens and packed block ids, trusts its caller about whose they are, and knows neither leases nor a
pool: `radix_cache.tree` puts the caller's ids in front of it, `radix_cache.cache` a pool and leases.

Theory of operation. A prompt is walked from its namespace's root: the next block is looked up among the children, the
child's whole span is compared in one go, and so on. A walk changes nothing; it ends in a node, or part of the way into
a child. What follows is up to the caller, who may refuse it; only then is the child cut where the walk ended, the
path touched and locked. So every node boundary lies where some match or insert ended, and locks, touches and evictions
are as exact as if each block were a node of its own.

A reset takes whole subtrees out of sight at once and leaves the walk through them to `sweep`, piece by piece. Until it
gets there their leaves are evicted like any other. A node that is still locked then dies: no walk finds it, and
its blocks are free as soon as its last lock is. It keeps its parent, for its lock still holds the path above it.

Nothing here recurses, so a tree may be as deep as it likes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from radix_cache.errors import IntegrityError, InvalidTokens
from radix_cache.node import BLOCK_ID_BYTES, MAX_PLAIN_CHILDREN, Node, Root, WideChildren, common_prefix
from radix_cache.operations import Namespace
from radix_cache.policies import EvictionPolicy
from radix_cache.stats import TreeNode
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["PrefixIndex"]

FrozenNode: TypeAlias = tuple[int | Namespace, bytes, bytes, int]
"""Position of the parent, or a root's namespace; tokens; block ids; last access."""

_MAX_EXTENDED_BYTES = 64 * 1024  # a span is not extended beyond this: each extension copies it
_MAX_TRIMMED_BLOCKS = 256  # of a longer leaf this much is cut off first: each trim copies the rest


class PrefixIndex:
    """Nodes under their namespaces' roots, and the eviction order of the leaves.

    num_cached_blocks, num_protected_blocks, num_nodes: kept up to date; what a reset detached counts until it is freed.
    now: the logical time, one step for each touch of a path.
    """

    def __init__(self, block_size: int, policy: EvictionPolicy) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.policy = policy
        self._visit = policy.visit
        self.now = 0
        self.num_cached_blocks = 0
        self.num_protected_blocks = 0
        self.num_nodes = 0
        self.roots: dict[Namespace, Root] = {}
        self._doomed: list[Node] = []  # out of sight, still to be swept
        self._dead: set[Node] = set()  # swept while locked

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks with no lease on or below them. O(1)."""
        return self.num_cached_blocks - self.num_protected_blocks

    # Walking: changes nothing.

    def whole(self, num_bytes: int) -> int:
        """Round down to whole blocks."""
        return num_bytes - num_bytes % self.block_bytes

    def checked_whole(self, data: bytes) -> bytes:
        """Return packed tokens that are whole blocks, or raise `InvalidTokens`."""
        if len(data) % self.block_bytes:
            num_tokens = len(data) // TOKEN_BYTES
            raise InvalidTokens(f"{num_tokens} tokens are not whole blocks of {self.block_size}")
        return data

    def walk(
        self, node: Node, data: bytes, at: int, limit: int, block_ids: list[bytes]
    ) -> tuple[Node, int, Node | None, int]:
        """Follow ``data[at:limit]`` (whole blocks) down from ``node`` as far as the tree has it.

        Returns the last node that is covered whole, the position behind it, and the child that is covered in part, if
        any, with the bytes of it that are. The ids of all that is covered are appended to ``block_ids``, span by span.
        """
        block_bytes = self.block_bytes
        while at < limit and node.children is not None:
            child = node.children.get(data[at : at + block_bytes])
            if child is None:
                break
            span = child.tokens
            end = at + len(span)
            if end > limit or not data.startswith(span, at):
                covered = common_prefix(span, data, at, limit, block_bytes)
                block_ids.append(child.block_ids[: covered // block_bytes * BLOCK_ID_BYTES])
                return node, at, child, covered
            block_ids.append(child.block_ids)
            node = child
            at = end
        return node, at, None, 0

    def num_evictable_above(self, node: Node) -> int:
        """Evictable blocks on the path from the root through ``node``: what a lock on it would protect. O(depth)."""
        num_blocks = 0
        above: Node | None = node
        while above is not None and not above.num_locks:
            num_blocks += above.num_blocks
            above = above.parent
        return num_blocks

    def agrees(self, node: Node, depth: int, start: int, tokens: bytes, length: int) -> bool:
        """Tell whether the path has the first ``length`` bytes of ``tokens`` at byte ``start``; ``node`` ends at
        ``depth``.

        ``start`` is a whole block. A memcmp for each node that is read.
        """
        stop = start + length
        above: Node | None = node
        while above is not None and depth > start:
            span, begin = above.tokens, depth - len(above.tokens)
            if begin < stop:
                if begin < start or depth > stop:
                    span = span[max(start - begin, 0) : stop - begin]
                if not tokens.startswith(span, max(begin - start, 0)):
                    return False
            depth, above = begin, above.parent
        return True

    def path_slice(self, node: Node, depth: int, start: int, stop: int) -> tuple[bytes, bytes]:
        """Return tokens and block ids of bytes [start, stop) of the path whose end, ``node``, lies at byte ``depth``.

        ``start`` and ``stop`` are whole blocks. O(depth of the part that is read).
        """
        tokens: list[bytes] = []
        block_ids: list[bytes] = []
        per_block = self.block_bytes
        above: Node | None = node
        while above is not None and depth > start:
            begin = depth - len(above.tokens)
            low, high = max(start - begin, 0), min(stop - begin, len(above.tokens))
            if low < high:
                tokens.append(above.tokens[low:high])
                block_ids.append(
                    above.block_ids[low // per_block * BLOCK_ID_BYTES : high // per_block * BLOCK_ID_BYTES]
                )
            depth, above = begin, above.parent
        return b"".join(reversed(tokens)), b"".join(reversed(block_ids))

    # Changing.

    def cut(self, node: Node, num_bytes: int) -> Node:
        """Cut ``node`` after ``num_bytes`` of its span, unless that is all of it; return the node that ends there."""
        if num_bytes == len(node.tokens):
            return node
        self.num_nodes += 1
        upper = node.cut(num_bytes, self.block_bytes)
        siblings = None if upper.parent is None else upper.parent.children
        if siblings is None or siblings.get(upper.tokens[: self.block_bytes]) is not upper:
            self._doomed.append(
                upper
            )  # evicted by a piece after a reset and before the sweep: nothing else leads to it
        return upper

    def node_above(self, node: Node, depth: int, stop: int) -> Node:
        """Return the node of the path that ends at byte ``stop``, cutting one if need be; ``node`` ends at
        ``depth``.
        """
        while depth - len(node.tokens) >= stop and node.parent is not None:
            depth -= len(node.tokens)
            node = node.parent
        return self.cut(node, len(node.tokens) - (depth - stop))

    def touch(self, node: Node, is_insert: bool, counted: Node | None = None) -> None:
        """Note that the path through ``node`` was covered by a match or an insert. O(depth).

        ``counted``: where the last insert of the same request ended.
        """
        self.now = now = self.now + 1
        above: Node | None = node
        while above is not None:
            above.last_access = now
            above = above.parent
        self._visit(node, is_insert, counted)

    def hold(self, node: Node, is_insert: bool, counted: Node | None = None) -> None:
        """Touch the path through ``node`` and protect it, once more. O(depth)."""
        self.now = now = self.now + 1
        num_bytes = 0
        above: Node | None = node
        while above is not None:
            above.last_access = now
            above.num_locks = locks = above.num_locks + 1
            if locks > 1:  # what is above is locked already, through this node
                above = above.parent
                break
            num_bytes += len(above.block_ids)
            above = above.parent
        while above is not None:
            above.last_access = now
            above = above.parent
        self.num_protected_blocks += num_bytes // BLOCK_ID_BYTES
        self._visit(node, is_insert, counted)

    def unlock(self, node: Node) -> bytes:
        """Undo the lock of one `hold`; touches nothing. O(depth).

        Returns the ids of blocks that a reset had detached and that are free now; mostly none.
        """
        freed = b""
        num_bytes = 0
        above: Node | None = node
        while above is not None:
            above.num_locks = locks = above.num_locks - 1
            if locks:
                break
            num_bytes += len(above.block_ids)
            if above.children is None and above.parent is not None:
                if above.is_dead:
                    self._dead.discard(above)
                    freed += self._drop(above)
                else:
                    self.policy.add(above)
            above = above.parent
        self.num_protected_blocks -= num_bytes // BLOCK_ID_BYTES
        return freed

    def graft(self, node: Node, num_own_locks: int, tokens: bytes, block_ids: bytes) -> Node:
        """Add ``tokens`` (whole blocks that no child of ``node`` begins with) below ``node``; return where they end.

        A leaf in which nobody but the caller ends (``num_own_locks`` times) grows in place: it is then touched and
        locked as one with what is added, and a request that publishes block by block makes one node, not a chain.
        """
        children = node.children
        num_blocks = len(block_ids) // BLOCK_ID_BYTES
        self.num_cached_blocks += num_blocks
        if (
            children is None
            and node.num_locks == num_own_locks
            and 0 < len(node.tokens) < _MAX_EXTENDED_BYTES
            and self.policy.merges_touched
        ):
            node.tokens += tokens
            node.block_ids += block_ids
            if num_own_locks:
                self.num_protected_blocks += num_blocks
            return node
        child = Node(node, tokens, block_ids)
        self._adopt(node, child)
        return child

    def _adopt(self, node: Node, child: Node) -> None:
        """Hang ``child`` below ``node``."""
        children = node.children
        self.num_nodes += 1
        if children is None:
            node.children = children = {}
            self.policy.discard(node)
        elif type(children) is dict and len(children) >= MAX_PLAIN_CHILDREN:
            node.children = children = WideChildren(children)
        children[child.tokens[: self.block_bytes]] = child

    def open_root(self, namespace: Namespace) -> Root:
        """Return the namespace's root, a new one if there is none; something must be grafted to it at once."""
        root = self.roots.get(namespace)
        if root is None:
            self.roots[namespace] = root = Root(namespace)
        return root

    def evict(self, num_blocks: int) -> list[bytes]:
        """Remove exactly ``min(num_blocks, evictable)`` blocks, in the policy's order, tails of leaves first.

        Returns their ids: pieces in the order of eviction, each in the order of the table. O(what is evicted).
        """
        left = min(num_blocks, self.num_cached_blocks - self.num_protected_blocks)
        evicted: list[bytes] = []
        victim = self.policy.victim
        while left:
            leaf = victim()
            if leaf is None:
                raise IntegrityError(f"policy {self.policy.name!r} names no victim; {left} more blocks are evictable")
            num_spare = len(leaf.block_ids) // BLOCK_ID_BYTES - left
            if num_spare <= 0:
                left = -num_spare
                self._unlink(leaf)
                evicted.append(self._drop(leaf))
            elif num_spare > _MAX_TRIMMED_BLOCKS:
                self.cut(leaf, (num_spare + left - max(left, _MAX_TRIMMED_BLOCKS)) * self.block_bytes)
            else:
                evicted.append(leaf.block_ids[num_spare * BLOCK_ID_BYTES :])
                leaf.block_ids = leaf.block_ids[: num_spare * BLOCK_ID_BYTES]
                leaf.tokens = leaf.tokens[: num_spare * self.block_bytes]
                self.num_cached_blocks -= left
                left = 0
        return evicted

    def _unlink(self, leaf: Node) -> None:
        """Take an unlocked leaf out of its parent, which may become a leaf by that."""
        parent = leaf.parent
        assert parent is not None
        siblings = parent.children
        key = leaf.tokens[: self.block_bytes]
        if siblings is None or siblings.get(key) is not leaf:
            return  # detached by a reset that is still being swept
        del siblings[key]
        if not siblings:
            self._bare(parent)

    def _bare(self, node: Node) -> None:
        """``node`` has lost its last child."""
        node.children = None
        if isinstance(node, Root):
            if self.roots.get(node.namespace) is node:
                del self.roots[node.namespace]
        elif not node.num_locks:
            self.policy.add(node)

    def _drop(self, node: Node) -> bytes:
        """End an unlocked leaf; return the ids of its blocks."""
        self.policy.discard(node)
        node.is_dead = True
        self.num_nodes -= 1
        self.num_cached_blocks -= len(node.block_ids) // BLOCK_ID_BYTES
        return node.block_ids

    # Forgetting.

    def detach(self, namespace: Namespace, tokens: bytes) -> None:
        """Put all that extends ``tokens`` out of sight, in every namespace that begins with ``namespace``.

        O(namespaces + children of the prefix's end). `sweep` frees it.
        """
        length = len(namespace)
        for root in [root for name, root in self.roots.items() if name[:length] == namespace]:
            node, at, child, covered = self.walk(root, tokens, 0, len(tokens), [])
            if at + covered < len(tokens):
                continue
            if child is not None:
                node = self.cut(child, covered)
            if node.children is not None:
                self._doomed.extend(node.children.values())
                self._bare(node)

    def sweep(self, num_nodes: int) -> list[bytes] | None:
        """Free up to ``num_nodes`` nodes of what was detached; return the ids of their blocks, or None when all is
        done.

        A node under a lock only dies; `unlock` returns its blocks.
        """
        if not self._doomed:
            return None
        freed: list[bytes] = []
        while self._doomed and num_nodes:
            num_nodes -= 1
            node = self._doomed.pop()
            if node.is_dead:
                continue  # evicted since
            if node.children is not None:
                self._doomed.extend(node.children.values())
                node.children = None
            if node.num_locks:
                self.policy.discard(node)
                node.is_dead = True
                self._dead.add(node)
            else:
                freed.append(self._drop(node))
        return freed

    # Reading.

    def nodes(self, tops: Iterable[Node]) -> Iterator[Node]:
        """Yield ``tops`` and all below, parents first, children in the order in which they were added."""
        stack = list(tops)[::-1]
        while stack:
            node = stack.pop()
            yield node
            if node.children is not None:
                stack.extend(reversed(list(node.children.values())))

    def freeze(self) -> list[FrozenNode]:
        """Return every visible node as a flat row, parents first, without locks."""
        position: dict[Node, int] = {}
        frozen: list[FrozenNode] = []
        for node in self.nodes(self.roots.values()):
            position[node] = len(frozen)
            above = node.namespace if isinstance(node, Root) else position[node.parent]  # type: ignore[index]
            frozen.append((above, node.tokens, node.block_ids, node.last_access))
        return frozen

    def thaw(self, frozen: Iterable[FrozenNode]) -> None:
        """Fill this empty index with what `freeze` returned. O(nodes log leaves)."""
        nodes: list[Node] = []
        for above, tokens, block_ids, last_access in frozen:
            if isinstance(above, tuple):
                node: Node = self.open_root(above)
            else:
                node = Node(nodes[above], tokens, block_ids)
                self._adopt(nodes[above], node)
                self.num_cached_blocks += node.num_blocks
            node.last_access = last_access
            self.now = max(self.now, last_access)
            nodes.append(node)
        for node in nodes:
            if node.children is None:
                self.policy.add(node)

    def rows(self, tops: Iterable[Root], max_nodes: int, max_span_tokens: int) -> Iterator[TreeNode]:
        """Yield up to ``max_nodes`` rows of the trees under ``tops``, parents first."""
        for root in tops:
            stack: list[tuple[Node, int]] = [(root, 0)]
            while stack and max_nodes:
                max_nodes -= 1
                node, depth = stack.pop()
                yield self._row(node, root.namespace, depth, max_span_tokens)
                children = [] if node.children is None else list(node.children.values())
                stack.extend((child, depth + 1) for child in reversed(children[:max_nodes]))

    def _row(self, node: Node, namespace: Namespace, depth: int, max_span_tokens: int) -> TreeNode:
        shown = min(len(node.tokens), max_span_tokens * TOKEN_BYTES)
        num_shown_blocks = -(-shown // self.block_bytes)
        return TreeNode(
            namespace=namespace,
            depth=depth,
            num_tokens=len(node.tokens) // TOKEN_BYTES,
            num_blocks=node.num_blocks,
            num_locks=node.num_locks,
            num_children=0 if node.children is None else len(node.children),
            age=self.now - node.last_access,
            tokens=node.tokens[:shown],
            block_ids=node.block_ids[: num_shown_blocks * BLOCK_ID_BYTES],
        )

    def check_integrity(self, holders: Iterable[Node]) -> set[int]:
        """Walk everything; raise `IntegrityError` for the first broken invariant. ``holders``: where each lease ends.

        Returns the ids of all cached blocks. O(tree).
        """
        ends = Counter(holders)
        seen: set[int] = set()
        leaves: set[Node] = set()
        sums = Counter[str]()
        detached = [node for node in self._doomed if not node.is_dead]
        for node in self.nodes([*self.roots.values(), *detached, *self._dead]):
            self._check_node(node)
            self._check_links(node, ends[node])
            ids = memoryview(node.block_ids).cast("i").tolist()
            sums.update(nodes=node.parent is not None, cached=len(ids), locks=node.num_locks)
            sums["protected"] += len(ids) if node.num_locks else 0
            seen.update(ids)
            if node.parent is not None and node.children is None and not node.is_dead:
                leaves.add(node)
        if len(seen) != sums["cached"]:
            raise IntegrityError(f"{sums['cached'] - len(seen)} block ids are in the tree twice")
        for counted, kept in (
            (sums["nodes"], self.num_nodes),
            (sums["cached"], self.num_cached_blocks),
            (sums["protected"], self.num_protected_blocks),
        ):
            if counted != kept:
                raise IntegrityError(f"nodes, cached, protected are {dict(sums)}; the books say {kept} for {counted}")
        self._check_order(leaves)
        return seen

    def _check_node(self, node: Node) -> None:
        """A span is a whole number of blocks, with an id for each, and is empty in roots alone."""
        if len(node.tokens) % self.block_bytes or node.num_blocks * self.block_bytes != len(node.tokens):
            raise IntegrityError(f"a node has {len(node.tokens)} bytes of tokens and {node.num_blocks} blocks")
        if bool(node.tokens) is isinstance(node, Root):
            raise IntegrityError("a span is empty exactly in a root")
        if isinstance(node, Root) and not node.children:
            raise IntegrityError(f"namespace {node.namespace} is kept with nothing in it")

    def _check_links(self, node: Node, num_ends: int) -> None:
        """Children are keyed by their first block, point back, and are no younger; locks are ends plus locked
        children.
        """
        children = node.children
        if children is not None and not children:
            raise IntegrityError("an empty dict of children is kept")
        num_locked = 0
        for key, child in children.items() if children is not None else ():
            if child.tokens[: self.block_bytes] != key or child.parent is not node:
                raise IntegrityError("a child is not where its first block or its parent says")
            if child.last_access > node.last_access or child.is_dead:
                raise IntegrityError("a child was touched after its parent, or is dead")
            num_locked += child.num_locks > 0
        num_locked += sum(dead.parent is node for dead in self._dead)
        num_locked += sum(top.parent is node and top.num_locks > 0 for top in self._doomed if not top.is_dead)
        if node.num_locks != num_ends + num_locked:
            raise IntegrityError(
                f"{node.num_locks} locks on a node with {num_ends} leases and {num_locked} locked below"
            )

    def _check_order(self, leaves: set[Node]) -> None:
        """The policy knows every unlocked leaf, once, and nothing but leaves."""
        known = list(self.policy.candidates())
        if len(set(known)) != len(known) or not leaves.issuperset(known):
            raise IntegrityError("the eviction order names a leaf twice, or what is no leaf")
        missing = [leaf for leaf in leaves.difference(known) if not leaf.num_locks]
        if missing:
            raise IntegrityError(f"{len(missing)} unlocked leaves are missing in the eviction order")
