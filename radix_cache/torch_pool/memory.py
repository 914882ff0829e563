"""How much memory a device has left."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

__all__ = ["free_bytes"]


def free_bytes(device: torch.device | str = "cpu") -> int:
    """Return the free memory of a device, for `radix_cache.kv_layout.size_pool`.

    CUDA: what the driver calls free, so take it after the weights are loaded and torch's own cache is emptied. CPU:
    what the kernel thinks can be had without swapping, and a container's limit leaves.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available_bytes(), _bytes_left_to_container())


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _bytes_left_to_container(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Version 2 of control groups, as seen from inside of a container."""
    try:
        most, used = ((folder / f"memory.{name}").read_text(encoding="ascii").strip() for name in ("max", "current"))
    except OSError:  # no container, or no such limits here
        return sys.maxsize
    return sys.maxsize if most == "max" else max(int(most) - int(used), 0)
