"""What the KV of one block looks like, and how many blocks fit into a memory budget: arithmetic, and no memory.

Three layouts, named as attention kernels name them. A layer has a key and a value plane, or one latent plane:

    NHD  [num_blocks, block_size, num_kv_heads, head_dim]   key, value   (FlashAttention, FlashInfer)
    HND  [num_blocks, num_kv_heads, block_size, head_dim]   key, value   (FlashInfer, TensorRT-LLM)
    MLA  [num_blocks, block_size, head_dim]                 latent       (DeepSeek: kv_lora_rank + qk_rope_head_dim)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, SupportsIndex

from radix_cache.errors import InvalidArgument
from radix_cache.operations import MAX_BLOCKS, check_count
from radix_cache.tokens import shown

__all__ = ["DTYPE_BYTES", "ORDERS", "KVLayout", "PoolSize", "size_pool"]

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of one number, by torch's name of the type."""

ORDERS = ("NHD", "HND", "MLA")

_MOST = 2**20
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV of one block: all layers, ``block_size`` tokens. Raises `InvalidArgument` that names the field.

    order: "NHD", "HND" or "MLA". With MLA, ``head_dim`` is the length of the latent and ``num_kv_heads`` is 1. dtype:
    one of `DTYPE_BYTES`; what is stored, whatever the model computes in. num_kv_heads: of this tensor-parallel rank.

    >>> KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16).bytes_per_block
    2097152
    """

    num_layers: int
    head_dim: int
    num_kv_heads: int = 1
    block_size: int = 16
    dtype: str = "bfloat16"
    order: str = "NHD"

    def __post_init__(self) -> None:
        for name in ("num_layers", "head_dim", "num_kv_heads", "block_size"):
            check_count(getattr(self, name), name, 1, _MOST)
        for name, known in (("dtype", tuple(DTYPE_BYTES)), ("order", ORDERS)):
            if getattr(self, name) not in known:
                raise InvalidArgument(f"{name} is one of {', '.join(known)}, not {shown(getattr(self, name))}")
        if self.order == "MLA" and self.num_kv_heads != 1:
            raise InvalidArgument(f"num_kv_heads is 1 with MLA, whose heads share one latent, not {self.num_kv_heads}")

    @property
    def num_planes(self) -> int:
        """Tensors of a layer: key and value, or the latent alone."""
        return 1 if self.order == "MLA" else 2

    @property
    def bytes_per_token(self) -> int:
        """All layers."""
        numbers = self.num_planes * self.num_layers * self.num_kv_heads * self.head_dim
        return numbers * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        """All layers."""
        return self.bytes_per_token * self.block_size

    @property
    def fingerprint(self) -> str:
        """A short text that differs wherever two engines could not read each other's blocks."""
        return (
            f"kv1 {self.order} {self.dtype} layers={self.num_layers} heads={self.num_kv_heads} dim={self.head_dim} "
            f"block={self.block_size}"
        )

    def plane_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one plane of one layer."""
        if self.order == "MLA":
            return num_blocks, self.block_size, self.head_dim
        inner = (self.block_size, self.num_kv_heads)
        return num_blocks, *(inner if self.order == "NHD" else inner[::-1]), self.head_dim

    def __str__(self) -> str:
        planes = "1 (latent)" if self.order == "MLA" else "2 (key, value)"
        return (
            f"{planes} x {self.num_layers} layers x {self.num_kv_heads} heads x {self.head_dim} x "
            f"{DTYPE_BYTES[self.dtype]} bytes ({self.dtype}) = {self.bytes_per_token:,} bytes a token; "
            f"x {self.block_size} tokens = {self.bytes_per_block:,} bytes a block"
        )


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many blocks a budget holds, and as a text the arithmetic behind it."""

    layout: KVLayout
    budget_bytes: int
    num_blocks: int
    budget: str

    def __str__(self) -> str:
        tokens = self.num_blocks * self.layout.block_size
        found = f"{self.num_blocks:,} blocks ({tokens:,} tokens)"
        return f"{self.layout}; {self.budget} = {self.budget_bytes:,} bytes: {found}"


def size_pool(layout: KVLayout, budget: str | float, free_bytes: int | None = None) -> PoolSize:
    """Return how many blocks of ``layout`` fit into ``budget``.

    budget: ``"8 GiB"``, ``"500 MB"``, a number of bytes (an int), or a share of the free memory: ``"0.9"``, ``"90%"``,
    0.9 (a float). free_bytes: what is free, needed for a share. Raises `InvalidArgument` for anything else, and where
    less than one block fits.

    >>> print(size_pool(KVLayout(num_layers=30, num_kv_heads=3, head_dim=64), "1 GiB"))  # doctest: +ELLIPSIS
    2 (key, value) x 30 layers x 3 heads x 64 x 2 bytes (bfloat16) = 23,040 bytes a token; x 16 tokens = ...
    """
    num_bytes, said = _read_budget(budget, free_bytes)
    num_blocks = min(num_bytes // layout.bytes_per_block, MAX_BLOCKS)
    if not num_blocks:
        raise InvalidArgument(f"budget: {said} is {num_bytes:,} bytes, one block has {layout.bytes_per_block:,}")
    return PoolSize(layout, num_bytes, num_blocks, said)


def _read_budget(budget: Any, free_bytes: int | None) -> tuple[int, str]:
    """Return the bytes, and the budget in words."""
    if isinstance(budget, SupportsIndex) and not isinstance(budget, bool) and int(budget) > 0:
        return int(budget), "the budget"
    share = _as_share(budget)
    if share is None:
        return _as_bytes(budget), str(budget)
    if not 0 < share <= 1:
        raise InvalidArgument(f"budget: a share of the free memory is above 0 and at most 1, not {shown(budget)}")
    if free_bytes is None:
        raise InvalidArgument(f"budget: {budget!r} is a share of the free memory, and free_bytes is not said")
    check_count(free_bytes, "free_bytes", most=2**63)
    return int(free_bytes * share), f"{share:g} of {free_bytes:,} bytes free"


def _as_share(budget: Any) -> float | None:
    if isinstance(budget, float):
        return budget
    if not isinstance(budget, str) or not (found := re.fullmatch(r"\s*(\d+\.\d+|1|\d+(?:\.\d+)?\s*%)\s*", budget)):
        return None
    text = found[1]
    return float(text.rstrip("% ")) / 100 if text.endswith("%") else float(text)


def _as_bytes(budget: Any) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", budget) if isinstance(budget, str) else None
    if not found or found[2].lower() not in _UNITS:
        raise InvalidArgument(f"budget: {shown(budget)} is neither a size such as '8 GiB' nor a share such as '0.9'")
    num_bytes = float(found[1]) * _UNITS[found[2].lower()]
    if num_bytes >= 2**63:
        raise InvalidArgument(f"budget: {shown(budget)} is beyond 2**63 bytes")
    return int(num_bytes)
