"""How much memory a device has left."""

from __future__ import annotations

import os
from pathlib import Path

import torch

__all__ = ["free_bytes"]


def free_bytes(device: torch.device | str = "cpu") -> int:
    """Return the free memory of a device, for `radix_cache.kv_layout.size_pool`.

    CUDA: what the driver calls free, so take it after the weights are loaded and torch's own cache is emptied. CPU:
    what the kernel thinks can be had without swapping.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
