"""Recency, and the computation that a leaf's memory saves: long prompts are dearer to compute again than short ones."""

from __future__ import annotations

from typing import Any

from radix_cache.hints import Hints
from radix_cache.node import Node
from radix_cache.operations import check_count
from radix_cache.policies.classed import ClassedPolicy
from radix_cache.policies.costs import MAX_POSITION, position_class, relative_cost
from radix_cache.policies.parameters import check_number
from radix_cache.policies.tuning import Tuner
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["FlopAware"]


class FlopAware(ClassedPolicy):
    """P = norm(1 / (now - last)) + alpha * norm(FLOPs saved / bytes), each scaled to [0, 1] over the unlocked leaves.

    The rule of Marconi (Pan et al., arXiv 2411.19379, MLSys 2025). Times are logical. FLOPs for each byte of KV are
    what the last token of a leaf costs, in classes of its position: see `radix_cache.policies.costs`.

    alpha: the weight of computation; None: it starts at 0, which is LRU, and is tuned by replaying each ``window``
    requests to a small model of the cache, see `radix_cache.policies.tuning`: for 1,024 requests of a few nodes, five
    inserts take 15 ms longer. attention_tokens: the position at which a token costs twice what it does at first.
    """

    name = "flop-aware"

    def __init__(self, alpha: float | None = None, window: int = 1024, attention_tokens: float = 32_768) -> None:
        super().__init__()
        self.alpha = alpha if alpha is None else check_number(alpha, "alpha", 0, 1e9)
        self.window = check_count(window, "window", 1, 65_536)
        self.attention_tokens = check_number(attention_tokens, "attention_tokens", 1, MAX_POSITION)
        self._now = 0
        self._tuner = Tuner(self.window, lambda weight: FlopAware(weight, attention_tokens=attention_tokens))
        self._scale = ((0.0, 1.0), (0.0, 1.0))  # offset and factor of recency and of cost

    def visit(self, node: Node, num_tokens: int, is_insert: bool, counted: Node | None, hints: Hints) -> None:
        """Note how deep each node of the path lies. O(depth + log leaves), and a replay now and then."""
        end, above = num_tokens, node
        while above.parent is not None:
            self.update(above, end)
            end -= len(above.tokens) // TOKEN_BYTES
            above = above.parent
        if node.children is None:
            self.touch(node)
        if self.alpha is None and is_insert:
            self._tuner.add(node, num_tokens, counted is not None)

    def update(self, node: Node, end: int) -> None:
        """``node``, which ends at position ``end``, was covered."""
        self._now = node.last_access
        node.data = position_class(end)

    def classify(self, leaf: Node) -> int:
        """Return the class of its position."""
        position: int = leaf.data
        return position

    def place(self, leaf: Node) -> int:
        """Return the last access: costs within a class are the same."""
        return leaf.last_access

    def urgency(self, leaf: Node) -> tuple[float, int]:
        """Return P, as scaled when the leaves were last weighed, and the last access."""
        (lowest, per_recency), (cheapest, per_cost) = self._scale
        alpha = self._tuner.weight if self.alpha is None else self.alpha
        score = (self._recency(leaf) - lowest) * per_recency + alpha * (self._cost(leaf) - cheapest) * per_cost
        return score, leaf.last_access

    def _recency(self, leaf: Node) -> float:
        return 1 / (self._now + 1 - leaf.last_access)

    def _cost(self, leaf: Node) -> float:
        return relative_cost(leaf.data, self.attention_tokens)

    def weigh(self) -> None:
        """Scale recency and cost over all unlocked leaves, whoever's limits they are under. O(classes * groups)."""
        ends = list(self.ends())
        self._scale = (
            _scale([self._recency(leaf) for oldest_and_newest in ends for leaf in oldest_and_newest]),
            _scale([self._cost(oldest) for oldest, _ in ends]),
        )

    def evicted(self, leaf: Node, num_blocks: int) -> None:
        """Let the tuner know."""
        self._tuner.evicted()
        leaf.prev = None  # the digest there was of the longer span

    def saved(self) -> list[Any]:
        """Return the logical time and what the tuner knows."""
        return [self._now, self._tuner.saved()]

    def restore(self, saved: list[Any]) -> None:
        """Take up what `saved` returned."""
        self._now, tuner = saved
        self._tuner.restore(tuner)


def _scale(values: list[float]) -> tuple[float, float]:
    """Return offset and factor that map ``values`` to [0, 1]; all of them to 0 where they are equal."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return low, 1 / (high - low) if high > low else 0.0
