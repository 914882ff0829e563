"""Who runs next keeps its prompt: eviction by the schedule of a workflow's agents."""

from __future__ import annotations

from radix_cache.hints import Hints
from radix_cache.node import Node
from radix_cache.policies.parameters import MAX_SECONDS, check_number
from radix_cache.policies.scored import ScoredPolicy

__all__ = ["StepsToExecution"]


class StepsToExecution(ScoredPolicy):
    """P = (known, -due, last): first what nobody is known to need, least recently used; then what is needed last.

    The workflow-aware rule of KVFlow (Pan et al., arXiv 2507.07400, NeurIPS 2025). The hint ``next_use`` says in how
    many steps whoever shares the prompt runs again; where the prompt ends is then due after so many times ``step_s``
    seconds. A parent takes over from an evicted child what is due sooner, so a shared prefix is kept for the first of
    the agents that share it. What has been due for ``grace_steps`` and was not asked for is no longer known to be
    needed.
    """

    name = "steps-to-execution"
    has_lasting_urgency = False  # it may end with time alone, which `first` finds out

    def __init__(self, step_s: float = 1.0, grace_steps: float = 10.0) -> None:
        super().__init__()
        self.step_s = check_number(step_s, "step_s", 0, MAX_SECONDS)
        self.grace_steps = check_number(grace_steps, "grace_steps", 0, MAX_SECONDS)

    def visit(self, node: Node, num_tokens: int, is_insert: bool, counted: Node | None, hints: Hints) -> None:
        """Set when the end of the path is due; what was due on the way has now been used. O(depth + log leaves)."""
        if hints.next_use is not None:
            now = self.clock()
            above = node
            while above.parent is not None:
                if above.data is not None and above.data <= now:
                    above.data = None
                above = above.parent
            node.data = _sooner(node.data, now + hints.next_use * self.step_s)
        if node.children is None:
            self.touch(node)

    def score(self, leaf: Node) -> tuple[bool, float, int]:
        """Return whether it is due, how soon, and its last access."""
        return leaf.data is not None, -(leaf.data or 0.0), leaf.last_access

    def add(self, leaf: Node) -> None:
        """Rank ``leaf``, as due unless that is past."""
        if leaf.rank is None and leaf.data is not None and self._is_past(leaf.data):
            leaf.data = None
        super().add(leaf)

    def evicted(self, leaf: Node, num_blocks: int) -> None:
        """Let the parent take over what is due."""
        parent = leaf.parent
        if num_blocks == leaf.num_blocks and leaf.data is not None and parent is not None and parent.parent is not None:
            current = parent.data is not None and parent.data > self.clock()
            parent.data = _sooner(parent.data if current else None, leaf.data)

    def first(self) -> Node | None:
        """Return the leaf of the smallest P now. O(log leaves), amortised over what is past."""
        while self._order and (due := self._order[-1][2].data) is not None and self._is_past(due):
            self.touch(self._order[-1][2])
        return super().first()

    def _is_past(self, due: float) -> bool:
        return due + self.grace_steps * self.step_s < self.clock()


def _sooner(due: float | None, other: float) -> float:
    return other if due is None else min(due, other)
