"""A Hugging Face cache without any memory: what a model's attention writes and reads are the blocks of a request.

Attention hands its new keys and values to `update` and gets all of them back, old and new. Here the new ones go into
the slots of the request's block table, and all are gathered from it. Nothing is kept between two forward passes but the
pool itself, so a prefix that somebody else computed is restored by naming its blocks.

Layers with a sliding window keep their whole prefix, and the model's mask hides what is out of the window. Models with
state-space or linear-attention layers, or with further tensors in their cache, do not fit.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from radix_cache.errors import InvalidArgument
from radix_cache.kv_layout import KVLayout
from radix_cache.operations import check_count
from radix_cache.tokens import BlockIds, shown
from radix_cache.torch_pool import KVPool

__all__ = ["PagedCache", "forward_arguments", "layout_of", "longest_request"]


class PagedCache(Cache):  # type: ignore[misc] # transformers has no types
    """The KV of one request for one forward pass over its positions [start, end); the pass writes them.

    pool: where. block_table: of the request, covering ``end`` tokens, the first ``start`` of which are there.
    Raises `InvalidArgument`, `InvalidBlocks` as the pool does.
    """

    def __init__(self, pool: KVPool, block_table: BlockIds, start: int, end: int) -> None:
        slots = pool.slot_mapping(block_table, start, end)
        blocks = pool.block_ids(block_table)
        super().__init__(
            layers=[PagedLayer(pool, layer, blocks, slots, start, end) for layer in range(pool.layout.num_layers)]
        )


class PagedLayer(CacheLayerMixin):  # type: ignore[misc] # transformers has no types
    """One layer of a `PagedCache`."""

    is_sliding = False

    def __init__(
        self, pool: KVPool, layer: int, blocks: torch.Tensor, slots: torch.Tensor, start: int, end: int
    ) -> None:
        super().__init__()
        self._pool, self._layer, self._blocks, self._slots = pool, layer, blocks, slots
        self._num_tokens, self._end = start, end

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is made: the pool is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new states; return all, ``[1, num_heads, num_tokens, head_dim]``, in the type of the new ones."""
        key, value = key_states.squeeze(0), value_states.squeeze(0)
        if self._pool.layout.order == "MLA":
            latent = torch.cat((key[0], value[0]), dim=-1)
            self._pool.write(self._layer, self._slots, latent)
        else:
            self._pool.write(self._layer, self._slots, key.transpose(0, 1), value.transpose(0, 1))
        self._num_tokens = self._end
        found = self._pool.gather(self._layer, self._blocks, self._end, dtype=key.dtype)
        if self._pool.layout.order == "MLA":
            latent = found[0][None, None]
            return latent[..., : key.shape[-1]], latent[..., key.shape[-1] :]
        return found[0].transpose(0, 1)[None], found[1].transpose(0, 1)[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys, and the position of the first."""
        return self._end, 0

    def get_seq_length(self) -> int:
        """Return how many tokens are there."""
        return self._num_tokens

    def get_max_length(self) -> int:
        """Return how many there can be."""
        return self._end


def layout_of(model: Any, block_size: int, dtype: torch.dtype | None = None, order: str = "NHD") -> KVLayout:
    """Return what a block of this model's KV looks like; ``dtype`` is the model's unless given.

    Runs the model on one token and looks at what it caches: a key and a value of one shape, or a latent in two parts
    (MLA). Raises `InvalidArgument` for a model that caches something else.
    """
    if order not in ("NHD", "HND"):
        raise InvalidArgument(f"order is 'NHD' or 'HND', and MLA where the model has it, not {shown(order)}")
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            model(input_ids=token, **forward_arguments(cache))
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"{type(model).__name__} does not run on a standard cache: {error}") from error
    shapes = {_shapes(layer) for layer in cache.layers}
    if len(shapes) != 1:
        raise InvalidArgument(f"all layers must cache alike, and these cache {sorted(shapes)}")
    ((heads, key_dim), (value_heads, value_dim)) = shapes.pop()
    stored = str(dtype or cache.layers[0].keys.dtype).removeprefix("torch.")
    if heads == value_heads and key_dim == value_dim:
        return KVLayout(len(cache.layers), key_dim, heads, block_size, stored, order)
    if heads == value_heads == 1:
        return KVLayout(len(cache.layers), key_dim + value_dim, 1, block_size, stored, "MLA")
    raise InvalidArgument(
        f"keys of {heads} x {key_dim} and values of {value_heads} x {value_dim} do not fit one layout"
    )


def longest_request(config: Any, max_tokens: int | None = None) -> int | None:
    """Return how many tokens a request may have: ``max_tokens``, else what the model was made for; None: any number.

    Models that rotate keys otherwise in long requests than in short ones (dynamic NTK, LongRoPE) have prefixes that
    long and short ones can't share, so they are held to the short ones. Raises `InvalidArgument` for a ``max_tokens``
    beyond those.
    """
    most: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    varying = next((kind for kind in kinds if kind.get("rope_type") in ("dynamic", "longrope")), None)
    if varying is not None:
        most = varying.get("original_max_position_embeddings") or most
        if max_tokens is not None and most is not None and max_tokens > most:
            kind = varying["rope_type"]
            raise InvalidArgument(f"max_tokens is at most {most} with rope_type {kind}, not {max_tokens}")
    return most if max_tokens is None else check_count(max_tokens, "max_tokens", 1)


def _shapes(layer: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or layer.keys is None:
        raise InvalidArgument(f"a layer caches as {type(layer).__name__}, which is not keys and values for each token")
    return (layer.keys.shape[1], layer.keys.shape[3]), (layer.values.shape[1], layer.values.shape[3])


def forward_arguments(cache: Cache) -> dict[str, Any]:
    """Return the arguments of a forward pass that uses ``cache`` and computes the logits of the last token only."""
    return {"cache": cache, "use_cache": True, "logits_to_keep": 1}
