"""A pool's memory on a GPU, opened by other processes: CUDA IPC by way of torch's storages.

What torch's own multiprocessing pickles is kept as named fields of `radix_cache.pool_descriptor.CudaHandle` instead:
the IPC handle of the allocation, where in it the storage begins, and a counter and an event with which torch lets the
owner wait for its readers. A GPU is named by its UUID, since its index depends on each process's environment.

The owner must keep its pool for as long as anybody uses it: memory of a process that has ended is undefined, which is
why engines look at the owner's lock before they launch. Torch counts readers, but for one at a time: a pool that had
none, or whose reader was killed, is not given back before the owner's process ends, and one of two readers that ends
makes torch give the memory back when the owner drops the pool. So a process owns one pool, and ends with it.
"""

from __future__ import annotations

from typing import Any

import torch

from radix_cache.errors import InvalidArgument
from radix_cache.pool_descriptor import CudaHandle

__all__ = ["allocate", "open_handle"]


def allocate(num_bytes: int, device: torch.device) -> tuple[CudaHandle, torch.Tensor]:
    """Return zeros on a GPU as uint8, and the handle that another process opens them with.

    Raises `InvalidArgument` if they don't fit.
    """
    try:
        with torch.inference_mode(False):
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except torch.cuda.OutOfMemoryError as error:
        raise InvalidArgument(f"device: no room for {num_bytes:,} bytes on {device}") from error
    torch.cuda.synchronize(device)  # a reader's streams know nothing of ours
    storage: Any = memory.untyped_storage()
    index, handle, size, offset, counter, counter_offset, event, is_sync_required = storage._share_cuda_()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    shared = CudaHandle(uuid, handle.hex(), size, offset, counter.hex(), counter_offset, event.hex(), is_sync_required)
    return shared, memory


def open_handle(shared: CudaHandle) -> torch.Tensor:
    """Return the bytes that a handle stands for, as uint8. Raises `InvalidArgument` if this process has no such GPU."""
    index = _device_index(shared.device_uuid)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    storage: Any = torch.UntypedStorage
    opened = storage._new_shared_cuda(
        index,
        bytes.fromhex(shared.handle),
        shared.num_bytes,
        shared.offset_bytes,
        bytes.fromhex(shared.ref_counter),
        shared.ref_counter_offset,
        bytes.fromhex(shared.event),
        shared.is_event_sync_required,
    )
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(opened)


def _device_index(uuid: str) -> int:
    names = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uuid not in names:
        raise InvalidArgument(f"device_uuid: GPU {uuid} is not visible here; {', '.join(names) or 'none'} is")
    return names.index(uuid)
