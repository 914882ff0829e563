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

from collections.abc import Iterator
from itertools import starmap

from radix_cache.errors import IntegrityError, InvalidArgument, InvalidTokens
from radix_cache.events import Change, Cleared, Dropped, Grafted
from radix_cache.hints import NO_HINTS, Hints
from radix_cache.nearest import NearestKeys
from radix_cache.node import BLOCK_ID_BYTES, MAX_PLAIN_CHILDREN, Node, Root, Share, WideChildren, common_prefix
from radix_cache.operations import Namespace
from radix_cache.policies import EvictionPolicy
from radix_cache.reading import last_id, nodes_below
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["PrefixIndex"]

_MAX_EXTENDED_BYTES = 64 * 1024  # a span is not extended beyond this: each extension copies it
_MAX_GUESSED_CHILDREN = 8  # of more, the one that was taken last is too seldom the next
_MAX_TRIMMED_BLOCKS = 256  # of a longer leaf this much is cut off first: each trim copies the rest


class PrefixIndex:
    """Nodes under their namespaces' roots, and the eviction order of the leaves.

    num_cached_blocks, num_protected_blocks, num_nodes: kept up to date; what a reset detached counts until it is freed.
    num_withheld_blocks: evictable ones that minimums of shares keep from others.
    num_evicted_blocks, evicted_age, evicted_idle: totals; the last two summed over the blocks, in logical time.
    now: the logical time, one step for each touch of a path. nearest: finds blocks that agree in part.
    changes: where blocks that come and go are noted, for whoever takes them from there; None: nowhere.
    """

    def __init__(self, block_size: int, policy: EvictionPolicy, shares: dict[Namespace, Share] | None = None) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.policy = policy
        if policy.is_taken:
            raise InvalidArgument(
                f"this policy object ({policy.name!r}) serves another tree already; give each its own"
            )
        policy.is_taken = True
        kind = type(policy)
        self._touch_leaf = policy.touch  # all there is to a visit, where the policy has none of its own
        self._visit = None if kind.visit is EvictionPolicy.visit else policy.visit
        self._boundary = None if kind.boundary is EvictionPolicy.boundary else policy.boundary
        self._evicted = None if kind.evicted is EvictionPolicy.evicted else policy.evicted
        self._unlocked = None if kind.unlocked is EvictionPolicy.unlocked else policy.unlocked
        self.now = 0
        self.num_evicted_blocks = self.evicted_age = self.evicted_idle = 0
        self.num_cached_blocks = 0
        self.num_protected_blocks = 0
        self.num_withheld_blocks = 0
        self.num_nodes = 0
        self.nearest = NearestKeys()
        self.roots: dict[Namespace, Root] = {}
        self.shares: dict[Namespace, Share] = {} if shares is None else shares
        self.changes: list[Change] | None = None
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
        start = node.end - at  # where ``data`` begins
        while at < limit:
            child = node.recent  # on a busy path it is the one, and need not be looked up
            if child is None or not data.startswith(child.tokens, at, limit):
                children = node.children
                if children is None or (child := children.get(data[at : at + block_bytes])) is None:
                    break
                if not data.startswith(child.tokens, at, limit):
                    covered = common_prefix(child.tokens, data, at, limit, block_bytes)
                    block_ids.append(child.block_ids[: covered // block_bytes * BLOCK_ID_BYTES])
                    return node, at, child, covered
                few = type(children) is dict and len(children) <= _MAX_GUESSED_CHILDREN
                node.recent = child if few else None
            block_ids.append(child.block_ids)
            node = child
            at = child.end - start
        return node, at, None, 0

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

    def node_above(self, node: Node, stop: int) -> Node:
        """Return the node of the path through ``node`` that ends at byte ``stop``, cutting one if need be."""
        while (parent := node.parent) is not None and parent.end >= stop:
            node = parent
        return self.cut(node, len(node.tokens) - (node.end - stop))

    def touch(self, node: Node, is_insert: bool = False, counted: Node | None = None, hints: Hints = NO_HINTS) -> None:
        """Note that the path through ``node`` was covered by a match or an insert. O(depth).

        ``counted``: where the last insert of the same request ended.
        """
        self.now = now = self.now + 1
        above: Node | None = node
        while above is not None:
            above.last_access = now
            above = above.parent
        if self._visit is not None:
            self._tell(node, is_insert, counted, hints)
        elif node.children is None:
            self._touch_leaf(node)

    def _tell(self, node: Node, is_insert: bool, counted: Node | None, hints: Hints) -> None:
        """Let a policy that looks at paths see this one, with the boundary that it wants."""
        num_tokens = node.end // TOKEN_BYTES
        if self._boundary is not None:
            position = self._boundary(node, num_tokens, hints)
            if position is not None and (stop := self.whole(position * TOKEN_BYTES)) > 0:
                self.node_above(node, stop)
        assert self._visit is not None
        self._visit(node, num_tokens, is_insert, counted, hints)

    def hold(
        self,
        node: Node,
        is_insert: bool = False,
        counted: Node | None = None,
        hints: Hints = NO_HINTS,
        held: Node | None = None,
    ) -> None:
        """`touch` the path through ``node`` and `lock` it, in one climb. O(depth).

        ``held``: the node above at which the lock ended so far, from where it moves on.
        """
        self.now = now = self.now + 1
        above = node
        while not above.num_locks and (parent := above.parent) is not None:
            above.num_locks = 1
            above.last_access = now
            above = parent
        above.num_locks += 1  # the root, or the first that is locked already
        if held is not None:
            held.num_locks -= 1  # it has a locked child now
        if above is not node:
            self._protect(node, (node.end - above.end) // self.block_bytes)
        above.last_access = now
        while (parent := above.parent) is not None:
            parent.last_access = now
            above = parent
        if self._visit is not None:
            self._tell(node, is_insert, counted, hints)
        elif node.children is None:
            self._touch_leaf(node)

    def _protect(self, node: Node, num_blocks: int) -> None:
        """Count blocks of ``node``'s namespace as protected; a negative number for those that no longer are."""
        self.num_protected_blocks += num_blocks
        root = node.root
        root.num_protected_blocks += num_blocks  # type: ignore[union-attr]
        if root.share is not None:  # type: ignore[union-attr]
            self._count(root.share, 0, num_blocks)  # type: ignore[union-attr]

    def _cache(self, root: Root, num_blocks: int) -> None:
        """Count blocks of a namespace as cached; a negative number for those that no longer are."""
        self.num_cached_blocks += num_blocks
        root.num_cached_blocks += num_blocks
        if root.share is not None:
            self._count(root.share, num_blocks, 0)

    def _count(self, share: Share, num_cached: int, num_protected: int) -> None:
        """Count blocks of a share, and what it withholds from others."""
        before = share.num_withheld_blocks
        share.num_cached_blocks += num_cached
        share.num_protected_blocks += num_protected
        self.num_withheld_blocks += share.num_withheld_blocks - before

    def lock(self, node: Node) -> None:
        """Protect the path through ``node``, once more, without touching it. O(depth), up to what is locked already."""
        above = node
        while not above.num_locks and (parent := above.parent) is not None:
            above.num_locks = 1
            above = parent
        above.num_locks += 1
        if above is not node:
            self._protect(node, (node.end - above.end) // self.block_bytes)

    def unlock(self, node: Node) -> bytes:
        """Undo the lock of one `hold`; touches nothing. O(depth).

        Returns the ids of blocks that a reset had detached and that are free now; mostly none.
        """
        if node.num_locks > 1:
            node.num_locks -= 1
            return b""
        freed = b""
        unlocked = self._unlocked
        above = node
        while above.num_locks == 1 and (parent := above.parent) is not None:
            above.num_locks = 0
            children = above.children
            if children is None:
                if above.is_dead:
                    self._dead.discard(above)
                    freed += self._drop(above)
                else:
                    self.policy.add(above)
            else:
                if unlocked is not None:
                    unlocked(above)
                if len(children) == 1:
                    self._merge(above)
            above = parent
        above.num_locks -= 1
        self._protect(node, (above.end - node.end) // self.block_bytes)
        return freed

    def _merge(self, upper: Node) -> None:
        """Join ``upper`` with its only child where nothing needs them apart: no lease ends between them, and policy and
        time make no difference. The child stays the object that it is; ``upper`` is gone.
        """
        children, parent = upper.children, upper.parent
        if parent is None or type(children) is not dict:
            return
        (lower,) = children.values()
        if (
            upper.last_access != lower.last_access
            or upper.num_locks != (lower.num_locks > 0)
            or len(upper.tokens) + len(lower.tokens) > _MAX_EXTENDED_BYTES
            or not (self.policy.merges_touched or (upper.data == lower.data and upper.created == lower.created))
        ):
            return
        if not upper.give_place(lower, upper.tokens[: self.block_bytes]):
            return  # detached by a reset, and in the list of what is to be swept
        lower.parent = parent
        lower.created = upper.created
        lower.tokens = upper.tokens + lower.tokens
        lower.block_ids = upper.block_ids + lower.block_ids
        upper.is_dead = True
        if self.nearest.orders:
            self.nearest.forget(upper)
        self.num_nodes -= 1

    def graft(self, node: Node, held: Node | None, tokens: bytes, block_ids: bytes) -> Node:
        """Add ``tokens`` (whole blocks that no child of ``node`` begins with) below ``node``; return where they end.

        A leaf in which nobody but the caller ends (``held``: where it does) grows in place: it is then touched and
        locked as one with what is added, and a request that publishes block by block makes one node, not a chain.
        """
        children = node.children
        num_blocks = len(block_ids) // BLOCK_ID_BYTES
        root: Root = node.root or node  # type: ignore[assignment]
        if self.changes is not None:
            self.changes.append(Grafted(root.namespace, last_id(node), tokens, block_ids))
        self._cache(root, num_blocks)
        if (
            children is None
            and node.num_locks == (node is held)
            and 0 < len(node.tokens) < _MAX_EXTENDED_BYTES
            and self.policy.merges_touched
        ):
            node.tokens += tokens
            node.block_ids += block_ids
            node.end += len(tokens)
            if node is held:
                self._protect(node, num_blocks)
            return node
        child = Node(node, tokens, block_ids)
        child.created = self.now + 1
        self._adopt(node, child)
        return child

    def _adopt(self, node: Node, child: Node) -> None:
        """Hang ``child`` below ``node``."""
        children = node.children
        self.num_nodes += 1
        if children is None:
            node.children = children = {}
            if node.parent is not None:
                self.policy.discard(node)
        elif type(children) is dict and len(children) >= MAX_PLAIN_CHILDREN:
            node.children = children = WideChildren(children)
        key = child.tokens[: self.block_bytes]
        children[key] = child
        if self.nearest.orders:
            self.nearest.added(node, key)

    def take_up(self, node: Node, *, is_dead: bool) -> None:
        """Count ``node``, which another tree had, and hang it below its parent; a dead one waits for its last lock."""
        assert node.parent is not None
        if is_dead:
            node.is_dead = True
            self._dead.add(node)
            self.num_nodes += 1
        else:
            self._adopt(node.parent, node)
        self._cache(node.root, node.num_blocks)  # type: ignore[arg-type]

    def open_root(self, namespace: Namespace) -> Root:
        """Return the namespace's root, a new one if there is none; it must be put to use at once."""
        root = self.roots.get(namespace)
        if root is None:
            self.roots[namespace] = root = Root(namespace, self.share_of(namespace))
        return root

    def close_root(self, root: Root) -> None:
        """Forget a root that has neither children nor leases."""
        if root.children is None and not root.num_leases and self.roots.get(root.namespace) is root:
            del self.roots[root.namespace]

    def share_of(self, namespace: Namespace) -> Share | None:
        """Return the limits that the longest limited prefix of ``namespace`` is under."""
        for length in range(len(namespace), -1, -1) if self.shares else ():
            share = self.shares.get(namespace[:length])
            if share is not None:
                return share
        return None

    def evict(self, num_blocks: int) -> list[bytes]:
        """Remove exactly ``min(num_blocks, evictable)`` blocks, in the policy's order, tails of leaves first.

        Returns their ids: pieces in the order of eviction, each in the order of the table. O(what is evicted).
        """
        left = self.num_cached_blocks - self.num_protected_blocks
        left = min(left, num_blocks)
        evicted: list[bytes] = []
        victim = self.policy.victim
        while left:
            leaf = victim()
            if leaf is None:
                raise IntegrityError(f"policy {self.policy.name!r} names no victim; {left} more blocks are evictable")
            piece = self.evict_from(leaf, left)
            left -= len(piece) // BLOCK_ID_BYTES
            evicted.append(piece)
        return evicted

    def evict_from(self, leaf: Node, num_blocks: int) -> bytes:
        """Remove up to ``num_blocks`` blocks from the tail of an unlocked leaf; return their ids, in table order."""
        num_had = len(leaf.block_ids) // BLOCK_ID_BYTES
        num_evicted = min(num_blocks, num_had)
        now, root = self.now, leaf.root
        assert root is not None
        self.num_evicted_blocks += num_evicted
        age, idle = (now - leaf.created) * num_evicted, (now - leaf.last_access) * num_evicted
        self.evicted_age += age
        self.evicted_idle += idle
        root.num_evicted_blocks += num_evicted
        root.evicted_age += age
        root.evicted_idle += idle
        if self._evicted is not None:
            self._evicted(leaf, num_evicted)
        if self.changes is not None:
            self.changes.append(Dropped(leaf.block_ids[(num_had - num_evicted) * BLOCK_ID_BYTES :]))
        num_left = num_had - num_evicted
        if not num_left:
            self._unlink(leaf)
            return self._drop(leaf)
        if num_left > _MAX_TRIMMED_BLOCKS:  # of a long leaf a part is cut off first, so that trims copy little
            num_cut = num_had - max(num_evicted, _MAX_TRIMMED_BLOCKS)
            self.cut(leaf, num_cut * self.block_bytes)
            num_left -= num_cut
        evicted = leaf.block_ids[num_left * BLOCK_ID_BYTES :]
        if not num_left:
            self._unlink(leaf)
            return self._drop(leaf)
        leaf.block_ids = leaf.block_ids[: num_left * BLOCK_ID_BYTES]
        leaf.tokens = leaf.tokens[: num_left * self.block_bytes]
        leaf.end -= num_evicted * self.block_bytes
        self._cache(root, -num_evicted)
        return evicted

    def _unlink(self, leaf: Node) -> None:
        """Take an unlocked leaf out of its parent, which may become a leaf by that."""
        parent = leaf.parent
        assert parent is not None
        siblings = parent.children
        key = leaf.tokens[: self.block_bytes]
        if siblings is None or (self._doomed and siblings.get(key) is not leaf):
            return  # detached by a reset that is still being swept
        del siblings[key]
        if parent.recent is leaf:
            parent.recent = None
        if self.nearest.orders:
            self.nearest.removed(parent, key)
        num_left = len(siblings)
        if num_left == 0:
            self._bare(parent)
        elif num_left == 1:
            self._merge(parent)

    def _bare(self, node: Node) -> None:
        """``node`` has lost its last child."""
        node.children = node.recent = None
        self.nearest.forget(node)
        if isinstance(node, Root):
            self.close_root(node)
        elif not node.num_locks:
            self.policy.add(node)

    def _drop(self, node: Node) -> bytes:
        """End an unlocked leaf; return the ids of its blocks."""
        self.policy.discard(node)
        node.is_dead = True
        self.num_nodes -= 1
        self._cache(node.root, -(len(node.block_ids) // BLOCK_ID_BYTES))  # type: ignore[arg-type]
        return node.block_ids

    # Forgetting.

    def detach(self, namespace: Namespace, tokens: bytes) -> None:
        """Put all that extends ``tokens`` out of sight, in every namespace that begins with ``namespace``.

        O(namespaces + children of the prefix's end), and where changes are noted + nodes, unless it is of everything.
        `sweep` frees it.
        """
        length = len(namespace)
        is_all = not namespace and not tokens
        if self.changes is not None and is_all:
            self.changes.append(Cleared())
        for root in [root for name, root in self.roots.items() if name[:length] == namespace]:
            node, at, child, covered = self.walk(root, tokens, 0, len(tokens), [])
            if at + covered < len(tokens):
                continue
            if child is not None:
                node = self.cut(child, covered)
            if node.children is not None:
                if self.changes is not None and not is_all:
                    below = list(nodes_below(node.children.values()))
                    self.changes.extend(Dropped(each.block_ids) for each in reversed(below))
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
                node.children = node.recent = None
                self.nearest.forget(node)
            if node.num_locks:
                self.policy.discard(node)
                node.is_dead = True
                self._dead.add(node)
            else:
                freed.append(self._drop(node))
        return freed

    # Reading.

    def grafts(self) -> Iterator[Change]:
        """Return the changes that would make the visible tree of this moment out of an empty one. O(nodes).

        They are made as they are read, without the tree: only the walk is done by then.
        """
        spans: list[tuple[Root, bytes, bytes, bytes]] = []
        for root in self.roots.values():
            above: list[Node] = [root]
            while above:  # `nodes_below`, written out: everybody waits for it
                node = above.pop()
                ids = node.block_ids
                for child in node.children.values() if node.children is not None else ():
                    spans.append((root, ids, child.tokens, child.block_ids))
                    if child.children is not None:
                        above.append(child)
        return starmap(_graft, spans)


def _graft(root: Root, above: bytes, tokens: bytes, block_ids: bytes) -> Grafted:
    """Return the change that brought a span below what ends with the blocks ``above``."""
    return Grafted(root.namespace, memoryview(above).cast("i")[-1] if above else None, tokens, block_ids)
