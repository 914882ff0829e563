"""From block tables to flat slots: ``slot = block_id * block_size + offset``, for many positions at once."""

from __future__ import annotations

import torch

from radix_cache.errors import InvalidArgument, InvalidBlocks
from radix_cache.operations import MAX_BLOCKS, check_count
from radix_cache.tokens import BlockIds, as_block_ids

__all__ = ["device_ids", "slot_mapping", "to_device"]


def device_ids(block_ids: BlockIds | torch.Tensor, num_blocks: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return block ids as an int64 tensor on ``device``, checked on the host before they are sent there.

    A tensor that is on another device than the CPU is taken as it is: to look at it would wait for all kernels. Raises
    `InvalidBlocks` for an id outside of [0, num_blocks). O(ids), one copy.
    """
    if isinstance(block_ids, torch.Tensor) and block_ids.device.type != "cpu":
        return block_ids.to(device, torch.int64)
    ids = as_block_ids(block_ids)
    if not ids:
        return torch.empty(0, dtype=torch.int64, device=device)
    if max(ids) >= num_blocks:
        bad = next(block_id for block_id in ids if block_id >= num_blocks)
        raise InvalidBlocks(f"block {bad} is not of this pool, which has {num_blocks} blocks", bad)
    return to_device(torch.frombuffer(ids, dtype=torch.int32).to(torch.int64), device)


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor of the host's on ``device``, without waiting for what runs there: from pinned memory, which torch
    keeps until it is read.
    """
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def slot_mapping(
    block_table: BlockIds | torch.Tensor,
    start: int,
    end: int,
    block_size: int,
    pad_to: int | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return the flat slots of positions [start, end) of a request, int64, on ``device``.

    pad_to: the length of the answer; what is beyond ``end - start`` is slot 0, of the padding block. Raises
    `InvalidArgument` where the table does not reach ``end``. O(end - start) on the device, no loop.

    >>> slot_mapping([7, 3], 2, 6, block_size=4).tolist()
    [30, 31, 12, 13]
    """
    table = device_ids(block_table, MAX_BLOCKS, device)
    end = check_count(end, "end")
    start = check_count(start, "start", 0, end)
    if end > len(table) * block_size:
        covered = len(table) * block_size
        raise InvalidArgument(f"end is {end}, and a table of {len(table)} blocks of {block_size} covers {covered}")
    positions = torch.arange(start, end, device=device)
    slots = table[positions // block_size] * block_size + positions % block_size
    if pad_to is None:
        return slots
    check_count(pad_to, "pad_to", end - start)
    return torch.nn.functional.pad(slots, (0, pad_to - len(slots)))
