"""radix-cache: a prefix cache for LLM inference engines.

`PrefixCache` is the whole of it in process: a radix tree, a block pool and leases. `RadixTree` is the tree alone, for
those who own the block ids. `radix_cache_service.Client` has the verbs of `PrefixCache` over gRPC.
"""

from radix_cache.batch import Batch, Pending
from radix_cache.cache import PrefixCache
from radix_cache.errors import (
    BatchNotRun,
    DeadlineExceeded,
    IntegrityError,
    InvalidArgument,
    InvalidBlocks,
    InvalidTokens,
    LeaseExpired,
    LimitExceeded,
    NotConnected,
    OldSeq,
    PermissionDenied,
    PoolExhausted,
    RadixCacheError,
    ServiceUnavailable,
    StaleLease,
    Unauthenticated,
    UnknownLease,
)
from radix_cache.gc import settle_gc
from radix_cache.hints import Hints
from radix_cache.leases import Lease
from radix_cache.operations import InsertResult
from radix_cache.policies import EvictionPolicy
from radix_cache.pool import BlockPool
from radix_cache.shares import NamespaceLimit
from radix_cache.stats import Description, LeaseInfo, NamespaceStats, Stats, TreeNode
from radix_cache.tokens import pack_tokens, unpack_tokens
from radix_cache.tree import Match, RadixTree

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "BatchNotRun",
    "BlockPool",
    "DeadlineExceeded",
    "Description",
    "EvictionPolicy",
    "Hints",
    "InsertResult",
    "IntegrityError",
    "InvalidArgument",
    "InvalidBlocks",
    "InvalidTokens",
    "Lease",
    "LeaseExpired",
    "LeaseInfo",
    "LimitExceeded",
    "Match",
    "NamespaceLimit",
    "NamespaceStats",
    "NotConnected",
    "OldSeq",
    "Pending",
    "PermissionDenied",
    "PoolExhausted",
    "PrefixCache",
    "RadixCacheError",
    "RadixTree",
    "ServiceUnavailable",
    "StaleLease",
    "Stats",
    "TreeNode",
    "Unauthenticated",
    "UnknownLease",
    "__version__",
    "pack_tokens",
    "settle_gc",
    "unpack_tokens",
]
