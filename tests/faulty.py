"""A policy that fails when it meets certain tokens, to see what a server makes of a bug."""

from __future__ import annotations

import asyncio
from typing import Any

from radix_cache.node import Node
from radix_cache.policies import LRU
from radix_cache.tokens import unpack_tokens

RAISES = 666
CANCELS = 667


class Faulty(LRU):
    """``lru``, but not with everything."""

    name = "faulty"

    def visit(self, node: Node, num_tokens: int, is_insert: bool, counted: Node | None, hints: Any) -> None:
        """Fail where the span begins with one of the tokens above."""
        tokens = unpack_tokens(node.tokens)
        if tokens[0] == RAISES:
            raise ValueError(f"these are the tokens of somebody else: {tokens.tolist()}")
        if tokens[0] == CANCELS:
            raise asyncio.CancelledError
        super().visit(node, num_tokens, is_insert, counted, hints)
