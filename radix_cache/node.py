"""A node of the tree: one span of tokens and the blocks that hold it.

The representation is what makes plain Python fast enough here:

- The span and its block ids are each one ``bytes``: a comparison is one memcmp, a cut one memcpy, a cached leaf of 64
  tokens two small objects, and no node ever points into a larger buffer.
- ``children`` is keyed by the whole first block of each child's span, so one dict look-up tells which child agrees with
  a prompt by at least a block. It is None on leaves.
- ``num_locks`` counts the leases that end in this node plus its locked children. So a lock climbs only to the first
  ancestor that is locked already, and a node is protected exactly if its count is not zero.
- A cut makes a new *upper* half; the lower half stays the same object. Whoever ends in the node keeps ending at the
  same token.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

__all__ = ["Node", "Root", "Share", "WideChildren", "common_prefix"]

BLOCK_ID_BYTES = 4
MAX_PLAIN_CHILDREN = 2048
_NUM_SHARDS = 256


class Node:
    """One span; see the module's text.

    parent: the node above, None in a root; kept when a reset takes this node out of its parent's children, so that
    locks still climb.
    tokens: the span, packed; a whole number of blocks.
    block_ids: one int32 for each block of the span.
    end: position of the span's end, in bytes of the prompt; 0 in a root.
    children: first block of the child's span -> child; None where there are none.
    recent: the child that the last walk through this node went on to, to be tried first; None where there are many, or
    none yet. A shortcut, on which no answer depends.
    num_locks: leases that end here + children with locks.
    last_access: logical time of the last match or insert that covered this node.
    created: logical time at which its first block came.
    root: the namespace's root; None in a root itself.
    is_dead: out of the tree, by eviction or reset; what is still locked then is freed when it is unlocked.
    prev, next, rank, data: for the eviction policy alone, whatever they hold there; both halves of a cut share
    ``data``, so it is immutable.
    """

    __slots__ = (
        "block_ids",
        "children",
        "created",
        "data",
        "end",
        "is_dead",
        "last_access",
        "next",
        "num_locks",
        "parent",
        "prev",
        "rank",
        "recent",
        "root",
        "tokens",
    )

    def __init__(self, parent: Node | None, tokens: bytes, block_ids: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block_ids = block_ids
        self.root: Root | None
        if parent is None:
            self.root = None
            self.end = len(tokens)
        else:
            self.root = parent.root or parent  # type: ignore[assignment]
            self.end = parent.end + len(tokens)
        self.children: dict[bytes, Node] | WideChildren | None = None
        self.recent: Node | None = None
        self.num_locks = 0
        self.last_access = 0
        self.created = 0
        self.is_dead = False
        self.prev: Any = None
        self.next: Any = None
        self.rank: Any = None
        self.data: Any = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the span."""
        return len(self.block_ids) // BLOCK_ID_BYTES

    def cut(self, num_bytes: int, block_bytes: int) -> Node:
        """Split off and return a new upper half that holds the first ``num_bytes`` of the span; this node is the lower.

        ``num_bytes`` is a multiple of ``block_bytes`` strictly inside the span. The upper half inherits the place in
        the parent, the last access, and a lock if this node has any. O(length of the span).
        """
        tokens, block_ids = self.tokens, self.block_ids
        num_id_bytes = num_bytes // block_bytes * BLOCK_ID_BYTES
        upper = Node(self.parent, tokens[:num_bytes], block_ids[:num_id_bytes])
        # Not from the parent, which may have grown or shrunk since a reset detached this.
        upper.end = self.end - len(tokens) + num_bytes
        upper.last_access = self.last_access
        upper.created = self.created
        upper.data = self.data
        upper.num_locks = 1 if self.num_locks else 0
        upper.children = {tokens[num_bytes : num_bytes + block_bytes]: self}
        self.give_place(upper, tokens[:block_bytes])
        self.parent = upper
        self.tokens = tokens[num_bytes:]
        self.block_ids = block_ids[num_id_bytes:]
        return upper

    def give_place(self, other: Node, key: bytes) -> bool:
        """Put ``other`` into this node's place among its parent's children, under ``key``; False where a reset has
        taken this node out of it.
        """
        parent = self.parent
        siblings = None if parent is None else parent.children
        if parent is None or siblings is None or siblings.get(key) is not self:
            return False
        siblings[key] = other
        if parent.recent is self:
            parent.recent = other
        return True


class Share:
    """The limits of one or several namespaces, and what they have of the pool together.

    max_blocks: the most that they may have, cached and leased; None: any number. min_blocks: so many of their cached
    blocks are not evicted for others.
    """

    __slots__ = ("max_blocks", "min_blocks", "num_cached_blocks", "num_leased_blocks", "num_protected_blocks")

    def __init__(self, max_blocks: int | None, min_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.min_blocks = min_blocks
        self.num_cached_blocks = self.num_protected_blocks = self.num_leased_blocks = 0

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks with no lease on or below them."""
        return self.num_cached_blocks - self.num_protected_blocks

    @property
    def num_spare_blocks(self) -> int:
        """Evictable blocks that others may have."""
        return max(min(self.num_evictable_blocks, self.num_cached_blocks - self.min_blocks), 0)

    @property
    def num_withheld_blocks(self) -> int:
        """Evictable blocks that others may not have."""
        return self.num_evictable_blocks - self.num_spare_blocks


class WideChildren:
    """The children of a node that has very many: the part of a dict's interface that the tree uses, over small dicts.

    One big dict that gains and loses keys all the time is rehashed now and then: 15 ms at 200,000 keys, in the middle
    of some call. Of 256 dicts each is rehashed 256 times as fast. A key's dict is found by a checksum, and not by
    Python's own hash, whose seed is another one in each process: the same calls must give the same order anywhere.
    """

    __slots__ = ("_num_children", "_shards")

    def __init__(self, children: dict[bytes, Node]) -> None:
        self._shards: list[dict[bytes, Node]] = [{} for _ in range(_NUM_SHARDS)]
        self._num_children = len(children)
        for key, child in children.items():
            self._shards[crc32(key) & 255][key] = child

    def __len__(self) -> int:
        return self._num_children

    def get(self, key: bytes) -> Node | None:
        """Return the child whose span begins with ``key``, or None."""
        return self._shards[crc32(key) & 255].get(key)

    def __setitem__(self, key: bytes, child: Node) -> None:
        shard = self._shards[crc32(key) & 255]
        self._num_children += key not in shard
        shard[key] = child

    def __delitem__(self, key: bytes) -> None:
        del self._shards[crc32(key) & 255][key]
        self._num_children -= 1

    def values(self) -> list[Node]:
        """Return the children, in no particular order."""
        return [child for shard in self._shards for child in shard.values()]

    def items(self) -> list[tuple[bytes, Node]]:
        """Return pairs of first block and child."""
        return [item for shard in self._shards for item in shard.items()]


class Root(Node):
    """Where a namespace begins, an empty span; and what the namespace has.

    It lives as long as anything is cached below it, or any lease is open in it.

    num_cached_blocks, num_protected_blocks, num_leased_blocks, num_leases: now.
    num_requests, num_queried_tokens, num_hit_tokens, num_near_miss_tokens, num_evicted_blocks, evicted_age,
    evicted_idle: since it began, see `radix_cache.stats.Counters`.
    share: the limits that it is under, with others of its kind; None: none.
    """

    __slots__ = (
        "evicted_age",
        "evicted_idle",
        "namespace",
        "num_cached_blocks",
        "num_evicted_blocks",
        "num_hit_tokens",
        "num_leased_blocks",
        "num_leases",
        "num_near_miss_tokens",
        "num_protected_blocks",
        "num_queried_tokens",
        "num_requests",
        "share",
    )

    def __init__(self, namespace: tuple[str, ...], share: Share | None = None) -> None:
        super().__init__(None, b"", b"")
        self.namespace = namespace
        self.share = share
        self.num_cached_blocks = self.num_protected_blocks = self.num_leased_blocks = self.num_leases = 0
        self.num_requests = self.num_queried_tokens = self.num_hit_tokens = self.num_near_miss_tokens = 0
        self.num_evicted_blocks = self.evicted_age = self.evicted_idle = 0


def common_prefix(span: bytes, data: bytes, start: int, limit: int, unit: int) -> int:
    """Return how many leading bytes of ``span`` equal ``data[start:limit]``, rounded down to a multiple of ``unit``.

    The first ``unit`` bytes are known to agree. A binary search over memcmp: O(length), with a small constant.
    """
    low, high = unit, min(len(span), limit - start)
    high -= high % unit
    if data.startswith(span[:high], start):
        return high
    while high - low > unit:
        middle = (low + high) // 2
        middle -= middle % unit
        if data.startswith(span[low:middle], start + low):
            low = middle
        else:
            high = middle
    return low
