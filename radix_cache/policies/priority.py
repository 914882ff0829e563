"""What the caller says is worth keeping: priorities, for ever or for a while (SGLang's priority, TensorRT-LLM's
retention).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sortedcontainers import SortedList

from radix_cache.hints import MAX_PRIORITY, Hints
from radix_cache.node import Node
from radix_cache.operations import check_count
from radix_cache.policies.scored import ScoredPolicy

__all__ = ["Priority"]

_NEW = (None, None, None, 0.0, 0)


class Priority(ScoredPolicy):
    """P = (priority, last): the lowest priority goes first, among equals the least recently touched.

    A node's priority is the highest that any of its requests gave (SGLang, 2025); one that inserts and gives none gives
    ``default``, one that only matches and gives none changes nothing. One with ``priority_s`` holds for so long after
    its request is released; then the node has the priority that others gave it, or ``default``, as if it had been
    touched when that was noticed: at the back (``KvCacheRetentionConfig`` of TensorRT-LLM, 2024). Of several with an
    end, the highest counts.
    """

    name = "priority"
    # A node's record: the priority without end; the one with an end; its seconds, if its clock stands still; when it
    # ends, or ended; and the logical time at which that was noticed.

    def __init__(self, default: int = 0) -> None:
        super().__init__()
        self.default = check_count(default, "default", -MAX_PRIORITY, MAX_PRIORITY)
        self._now = 0
        self._ends: SortedList[Any] = SortedList()  # when a ranked leaf's priority ends, whatever order it is in

    def update(self, node: Node, end: int, counts: bool, hints: Hints) -> None:
        """Take the request's priority into account."""
        self._now = node.last_access
        lasting, passing, wait_s, until, since = node.data or _NEW
        if passing is not None and wait_s is None and until <= self.clock():
            lasting, passing = self._lasting(lasting), None
        given = self.default if hints.priority is None else hints.priority
        if hints.priority_s is not None:
            if passing is None or given > passing:
                passing, wait_s, until = given, hints.priority_s, 0.0
            elif given == passing:
                wait_s = max(wait_s or 0.0, hints.priority_s)
        elif counts or hints.priority is not None:
            lasting = given if lasting is None else max(lasting, given)
        if passing is not None and lasting is not None and passing <= lasting:
            passing = wait_s = None
        node.data = (lasting, passing, wait_s, until, since)
        if not node.num_locks:
            self.unlocked(node)

    def score(self, leaf: Node) -> tuple[int, int, float, int, bool]:
        """Return priority and place among equals; the rest orders what ended together, and tells what will end."""
        lasting, passing, wait_s, until, since = leaf.data
        priority = max((given for given in (lasting, passing) if given is not None), default=self.default)
        return (
            priority,
            max(leaf.last_access, since),
            until,
            leaf.last_access,
            passing is not None and wait_s is None,
        )

    def unlocked(self, node: Node) -> None:
        """Start the clock of the node's priority."""
        lasting, passing, wait_s, until, since = node.data
        if wait_s is not None:
            node.data = (lasting, passing, None, max(until, self.clock() + wait_s), since)

    def add(self, leaf: Node) -> None:
        """Rank ``leaf``; it may have been unlocked, which starts its clock."""
        before = leaf.data
        if not leaf.num_locks:
            self.unlocked(leaf)
        if leaf.rank is not None and leaf.data is not before:
            self.discard(leaf)
        if leaf.rank is None:
            super().add(leaf)
            self._note_end(leaf, self._ends.add)

    def discard(self, leaf: Node) -> None:
        """Forget ``leaf`` if it is ranked."""
        if leaf.rank is not None:
            self._note_end(leaf, self._ends.remove)
        super().discard(leaf)

    def _note_end(self, leaf: Node, note: Callable[[Any], None]) -> None:
        """Call ``note`` with the leaf's entry in the order of ends, if it has one."""
        (_, _, until, _, ends), number, _ = leaf.rank
        if ends:
            note((until, number, leaf))

    def rank_again(self, leaf: Node, ranking: Any) -> None:
        """Rank ``leaf`` as it was, and note when its priority ends."""
        super().rank_again(leaf, ranking)
        if ranking[0][-1]:
            self._ends.add((ranking[0][2], *leaf.rank[1:]))

    def overdue(self) -> Iterator[Node]:
        """Yield the leaves whose priority has ended, as leaves with another one. O(log leaves) for each."""
        now = self.clock() if self._ends else 0.0
        while self._ends and self._ends[0][0] <= now:
            leaf = self._ends[0][2]
            lasting, _, _, until, _ = leaf.data
            leaf.data = (self._lasting(lasting), None, None, until, self._now)
            yield leaf

    def _lasting(self, lasting: int | None) -> int:
        return self.default if lasting is None else lasting

    def saved(self) -> int:
        """Return the logical time."""
        return self._now

    def restore(self, saved: int) -> None:
        """Take up the logical time."""
        self._now = saved
