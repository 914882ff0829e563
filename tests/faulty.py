"""A policy that fails when it meets certain tokens, to see what a server makes of a bug that leaves its cache whole."""

from __future__ import annotations

import asyncio
from typing import Any

from service_process import pack

from radix_cache.node import Node
from radix_cache.policies import LRU
from radix_cache.tokens import unpack_tokens
from radix_cache_service.pb import prefix_cache_pb2 as pb

RAISES = 666
CANCELS = 667


class Faulty(LRU):
    """``lru``, but not with everything."""

    name = "faulty"

    def victim(self) -> Node | None:
        """Fail where the span of a leaf begins with one of the tokens above."""
        for leaf in self.candidates():
            tokens = unpack_tokens(leaf.tokens)
            if tokens[0] == RAISES:
                raise ValueError(f"these are the tokens of somebody else: {tokens.tolist()}")
            if tokens[0] == CANCELS:
                raise asyncio.CancelledError
        return super().victim()


def provoke(stub: Any, token: int, *others: int, timeout: float) -> Any:
    """Cache such tokens, and have something evicted, which fails."""
    tokens = pack(token, *others)
    stub.MatchPrefix(pb.MatchPrefixRequest(lease_id="f", num_tokens=len(tokens) // 4), timeout=timeout)
    stub.Insert(pb.InsertRequest(lease_id="f", tokens=tokens), timeout=timeout)
    stub.Release(pb.ReleaseRequest(lease_id="f"), timeout=timeout)
    return stub.Evict(pb.EvictRequest(num_blocks=1), timeout=timeout)
