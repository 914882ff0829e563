"""`KVPool`: the bytes of all blocks, and the four things that engines do with them.

All KV is one allocation, ``[num_layers, planes, *plane]`` with the planes of `radix_cache.kv_layout`: each layer's key
and value are contiguous tensors that a kernel takes as they are, and the whole can be shared as one piece. Indexing
works on the numbers' bits, as integers of their size: types like fp8, for which torch has few operations, cost nothing
special, and a copy is exact whatever the bits mean.
"""

from __future__ import annotations

from typing import TypeGuard

import torch

from radix_cache.errors import InvalidArgument, InvalidBlocks
from radix_cache.kv_layout import DTYPE_BYTES, KVLayout
from radix_cache.operations import check_count
from radix_cache.tokens import BlockIds, as_block_ids
from radix_cache.torch_pool.slots import device_ids, slot_mapping

__all__ = ["KVPool"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class KVPool:
    """KV storage for ``num_blocks`` blocks, zeros at first.

    layout: what a block looks like. device: where it lies. num_reserved_blocks: as in the cache; with one, block 0 is
    for padding. memory: bytes of one's own in place of fresh ones, uint8, as many as the pool needs.
    Works in and out of `torch.inference_mode`, and never records a gradient. On a GPU every method only launches on the
    current stream; before blocks are published, the host must have seen that end.

    >>> pool = KVPool(KVLayout(num_layers=1, head_dim=4, num_kv_heads=2, block_size=2, dtype="float32"), num_blocks=8)
    >>> key = torch.arange(24.0).view(3, 2, 4)  # three tokens, two heads
    >>> pool.write(0, pool.slot_mapping([5, 2], 0, 3), key, -key)
    >>> found, _ = pool.gather(0, [5, 2], num_tokens=3)
    >>> torch.equal(found, key)
    True
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device | str = "cpu",
        num_reserved_blocks: int = 0,
        memory: torch.Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = check_count(num_blocks, "num_blocks", 1)
        self.num_reserved_blocks = check_count(num_reserved_blocks, "num_reserved_blocks", 0, num_blocks - 1)
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        with torch.inference_mode(False):  # else it could be written in inference mode only
            if memory is None:
                memory = torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)
                if memory.is_cuda:  # other streams know nothing of this one
                    torch.cuda.synchronize(memory.device)
            elif memory.dtype != torch.uint8 or memory.numel() != self.num_bytes:
                raise InvalidArgument(f"memory is {self.num_bytes} bytes of uint8, not {memory.numel()} {memory.dtype}")
            elif not memory.is_contiguous() or memory.storage_offset() % self.dtype.itemsize:
                raise InvalidArgument(f"memory is contiguous and begins at a multiple of {self.dtype.itemsize} bytes")
            shape = layout.num_layers, layout.num_planes, *layout.plane_shape(num_blocks)
            self.kv = memory.view(self.dtype).view(shape)
            self._bits = self.kv.view(_INTEGERS[DTYPE_BYTES[layout.dtype]])
        self.device = memory.device

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.layout.bytes_per_block * self.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.layout.block_size

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return the planes of a layer, (key, value) or (latent,), as kernels take them: views, not copies."""
        return self.kv[layer].unbind(0)

    def block_ids(self, block_ids: BlockIds | torch.Tensor) -> torch.Tensor:
        """Return block ids as an int64 tensor on the pool's device, checked: for `gather`, once for all layers."""
        return device_ids(block_ids, self.num_blocks, self.device)

    def slot_mapping(
        self, block_table: BlockIds | torch.Tensor, start: int, end: int, pad_to: int | None = None
    ) -> torch.Tensor:
        """Return the flat slots of positions [start, end) of a request, on the pool's device; see `slot_mapping`.

        pad_to: fill up to this length with slot 0, as CUDA graphs need it. Raises `InvalidArgument` without a reserved
        block for it.
        """
        if pad_to is not None and not self.num_reserved_blocks:
            raise InvalidArgument(
                "pad_to writes to block 0, which is a request's unless num_reserved_blocks is above 0"
            )
        return slot_mapping(self.block_ids(block_table), start, end, self.block_size, pad_to, self.device)

    def write(self, layer: int, slots: torch.Tensor, *states: torch.Tensor) -> None:
        """Store the states of some tokens: ``key, value`` of shape ``[len(slots), num_kv_heads, head_dim]`` each, or
        one latent ``[len(slots), head_dim]``.

        slots: from `slot_mapping`; on a CPU they are checked, on a GPU a look at them would wait for all kernels.
        Converts to the pool's type; what fp8 can't hold becomes its largest number. One kernel for each plane. Raises
        `InvalidArgument` for a wrong layer, number or shape of states, and for a slot that is none; nothing is written
        then.
        """
        check_count(layer, "layer", 0, self.layout.num_layers - 1)
        self._check_slots(slots)
        self._check_states(len(slots), states)
        with torch.no_grad():
            for plane, state in zip(self._bits[layer].unbind(0), states, strict=True):
                bits = self._as_stored(state).contiguous().view(plane.dtype)
                if self.layout.order == "HND":
                    plane[slots // self.block_size, :, slots % self.block_size] = bits
                else:
                    plane.flatten(0, 1).index_copy_(0, slots, bits)

    def _as_stored(self, state: torch.Tensor) -> torch.Tensor:
        if self.dtype.itemsize == 1:  # out of range fp8 is NaN
            largest = torch.finfo(self.dtype).max
            state = state.clamp(-largest, largest)
        return state.detach().to(self.device, self.dtype)

    def _check_slots(self, slots: torch.Tensor) -> None:
        if not isinstance(slots, torch.Tensor) or slots.dtype != torch.int64 or slots.dim() != 1:
            raise InvalidArgument(f"slots are a tensor of one dimension and type int64, not {_kind(slots)}")
        if slots.device.type == "cpu" and len(slots):
            least, most = (int(bound) for bound in slots.aminmax())
            if least < 0 or most >= self.num_blocks * self.block_size:
                bad, last = least if least < 0 else most, self.num_blocks * self.block_size - 1
                raise InvalidArgument(f"slots are 0 to {last} in this pool, not {bad}")

    def _check_states(self, num_tokens: int, states: tuple[torch.Tensor, ...]) -> None:
        inner = (self.layout.num_kv_heads, self.layout.head_dim)
        wanted = (num_tokens, *(inner[1:] if self.layout.order == "MLA" else inner))
        if len(states) != self.layout.num_planes or any(state.shape != wanted for state in states):
            found = ", ".join(str(tuple(state.shape)) for state in states)
            raise InvalidArgument(f"{self.layout.order} takes {self.layout.num_planes} of shape {wanted}, not {found}")

    def gather(
        self,
        layer: int,
        block_table: BlockIds | torch.Tensor,
        num_tokens: int,
        start: int = 0,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return copies of the states of positions [start, num_tokens): shapes as in `write`.

        block_table: of the request; what `block_ids` returned of it saves a look at it for each layer. dtype: to
        convert to; the pool's own unless given. Whole blocks are copied, then cut: O(tokens), one kernel for each
        plane. Raises `InvalidArgument` where the table does not reach so far.
        """
        check_count(layer, "layer", 0, self.layout.num_layers - 1)
        size = self.block_size
        end = check_count(num_tokens, "num_tokens", 0, len(block_table) * size)
        first = check_count(start, "start", 0, end) // size
        table = block_table if self._is_at_hand(block_table) else self.block_ids(block_table)
        table = table[first : -(-end // size)]
        with torch.no_grad():
            return tuple(
                self._tokens(plane.index_select(0, table))[start - first * size : end - first * size].to(
                    dtype or self.dtype
                )
                for plane in self._bits[layer].unbind(0)
            )

    def _is_at_hand(self, block_ids: BlockIds | torch.Tensor) -> TypeGuard[torch.Tensor]:
        return (
            isinstance(block_ids, torch.Tensor) and block_ids.device == self.device and block_ids.dtype == torch.int64
        )

    def _tokens(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the tokens of some blocks of a plane, one after the other, as numbers."""
        if self.layout.order == "HND":
            blocks = blocks.transpose(1, 2)
        return blocks.flatten(0, 1).view(self.dtype)

    def copy_blocks(self, src: BlockIds | torch.Tensor, dst: BlockIds | torch.Tensor) -> None:
        """Copy whole blocks, all layers: ``dst[i]`` becomes what ``src[i]`` was before the call.

        For copy-on-write: a fork's ragged block. Two kernels and room for a copy of the blocks. Raises `InvalidBlocks`
        for ids out of range, or one that is named twice in ``dst``; `InvalidArgument` for two lengths. Ids that are on
        a GPU are not looked at.
        """
        if len(src) != len(dst):
            raise InvalidArgument(f"src has {len(src)} blocks and dst {len(dst)}")
        sources, targets = self.block_ids(src), self.block_ids(dst)
        if not isinstance(dst, torch.Tensor) or dst.device.type == "cpu":
            _check_distinct(dst)
        with torch.no_grad():
            self._bits.index_copy_(2, targets, self._bits.index_select(2, sources))

    def poison(self, block_ids: BlockIds | torch.Tensor) -> None:
        """Make every number of some blocks NaN: a test that nobody reads what was not written. Whatever the type, all
        bits set is one.
        """
        with torch.no_grad():
            self._bits.index_fill_(2, self.block_ids(block_ids), -1)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.num_blocks} blocks on {self.device}: {self.layout}>"


def _check_distinct(block_ids: BlockIds | torch.Tensor) -> None:
    ids = as_block_ids(block_ids)
    if len(set(ids)) != len(ids):
        twice = next(block_id for block_id in ids if ids.count(block_id) > 1)
        raise InvalidBlocks(f"block {twice} is named twice in dst", twice)


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    return type(value).__name__
