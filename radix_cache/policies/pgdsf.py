"""Frequency weighed by cost: what is expensive to compute again stays longer."""

from __future__ import annotations

from radix_cache.hints import Hints
from radix_cache.node import Node
from radix_cache.policies.costs import MAX_POSITION, position_class, relative_cost
from radix_cache.policies.frequency import LFUDA
from radix_cache.policies.parameters import MAX_SECONDS, check_number

__all__ = ["PGDSF"]


class PGDSF(LFUDA):
    """P = clock + frequency * cost / size, where clock is the highest P of a victim so far.

    The prefix-aware greedy dual-size frequency rule of RAGCache (Jin et al., arXiv 2404.12457, 2024). Cost over size is
    seconds for each token: the hint ``cost_s`` over the tokens of the last insert that gave one; without any it is
    ``token_s``, and as much more as attention costs at the position. P is taken when a node is touched.

    token_s: seconds to compute one token at the beginning of a prompt. attention_tokens: the position at which a token
    costs twice that.
    """

    name = "pgdsf"

    def __init__(self, token_s: float = 1e-4, attention_tokens: float = 32_768) -> None:
        super().__init__()
        self.token_s = check_number(token_s, "token_s", 1e-12, MAX_SECONDS)
        self.attention_tokens = check_number(attention_tokens, "attention_tokens", 1, MAX_POSITION)
        self._cost_s: float | None = None  # of a token of the request that is being looked at

    def visit(self, node: Node, num_tokens: int, is_insert: bool, counted: Node | None, hints: Hints) -> None:
        """Update the records on the path, with the request's own cost if it says one."""
        self._cost_s = hints.cost_s / num_tokens if is_insert and hints.cost_s is not None else None
        super().visit(node, num_tokens, is_insert, counted, hints)

    def update(self, node: Node, end: int, counts: bool, hints: Hints) -> None:
        """Count the request, and take P at the clock of now."""
        hits, _, cost_s = node.data or (0, 0.0, None)
        hits += counts
        cost_s = cost_s if self._cost_s is None else self._cost_s
        estimate = self._estimate(end) if cost_s is None else cost_s
        node.data = (hits, self._age + hits * estimate, cost_s)

    def _estimate(self, end: int) -> float:
        return self.token_s * relative_cost(position_class(end), self.attention_tokens)
