"""Tail-optimised LRU: a conversation needs only so much of its history cached that the next answer begins in time."""

from __future__ import annotations

from radix_cache.hints import Hints
from radix_cache.node import Node
from radix_cache.operations import MAX_TOKENS, check_count
from radix_cache.policies.scored import ScoredPolicy
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["TLRU"]


class TLRU(ScoredPolicy):
    """P = (-1 if tail-safe else 0, last): what no slow answer would come of goes first, then the least recently used.

    Of a conversation of L tokens, max(0, L + next prompt - threshold) are kept, rounded up to whole blocks; the tokens
    past that are tail-safe, because a next turn that has to compute them again computes no more than ``threshold`` in
    all (Zhang et al., "Tail-Optimized Caching for LLM Inference", arXiv 2510.15152, NeurIPS 2025). What several
    conversations share is safe where it is for all. A match is a conversation as long as what it covers.

    threshold: tokens that can be computed in time. next_prompt_tokens: what a next turn adds, where no hint says it.
    """

    name = "tlru"

    def __init__(self, threshold: int = 2048, next_prompt_tokens: int = 256) -> None:
        super().__init__()
        self.threshold = check_count(threshold, "threshold", most=MAX_TOKENS)
        self.next_prompt_tokens = check_count(next_prompt_tokens, "next_prompt_tokens", most=MAX_TOKENS)
        self._num_kept = 0  # of the path that is being touched

    def boundary(self, node: Node, num_tokens: int, hints: Hints) -> int | None:
        """Return where what is kept ends."""
        said = hints.next_prompt_tokens
        num_kept = num_tokens + (self.next_prompt_tokens if said is None else said) - self.threshold
        block_size = len(node.tokens) // TOKEN_BYTES // node.num_blocks
        self._num_kept = -(-num_kept // block_size) * block_size
        return self._num_kept if 0 < self._num_kept < num_tokens else None

    def update(self, node: Node, end: int, counts: bool, hints: Hints) -> None:
        """Note whether the node is kept for any conversation."""
        node.data = bool(node.data) or end <= self._num_kept

    def score(self, leaf: Node) -> tuple[int, int]:
        """Return whether the leaf is safe, and its last access."""
        return -1 + leaf.data, leaf.last_access
