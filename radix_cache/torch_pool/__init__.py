"""KV storage for a block pool, in torch tensors: one allocation that is written, read and copied by block ids.

A `KVPool` knows which bytes a block has and nothing of who owns it: that is the cache's business. `share_pool` makes
one that other processes map too, `attach_pool` is what they do, with a descriptor that is plain data. Nothing here
loops over tokens. This package is the only part of the core that imports torch.
"""

from radix_cache.kv_layout import KVLayout, PoolSize, size_pool
from radix_cache.pool_descriptor import PoolDescriptor, PoolGone
from radix_cache.torch_pool.memory import free_bytes
from radix_cache.torch_pool.shared import SharedKVPool, attach_pool, share_pool
from radix_cache.torch_pool.slots import slot_mapping
from radix_cache.torch_pool.storage import KVPool

__all__ = [
    "KVLayout",
    "KVPool",
    "PoolDescriptor",
    "PoolGone",
    "PoolSize",
    "SharedKVPool",
    "attach_pool",
    "free_bytes",
    "share_pool",
    "size_pool",
    "slot_mapping",
]
