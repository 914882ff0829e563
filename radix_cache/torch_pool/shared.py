"""One pool, many processes: its owner makes it, engines map it, and nobody but the owner ever removes it.

On a CPU the KV lies in a file, by default in /dev/shm, where a file is memory. It is mapped with `mmap` and not with
`multiprocessing.shared_memory`: before Python 3.13 a process that attaches to that registers the segment as its own
and removes it from under everybody when it ends. On a GPU the file has its first page only, and the KV is found by a
CUDA IPC handle (`radix_cache.torch_pool.cuda_ipc`).

The owner's lock on the file says that it lives (`radix_cache.pool_descriptor`). A file whose owner was killed stays
until another owner comes; then it is removed. An engine that dies leaves nothing behind: its mapping ends with it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch

from radix_cache.errors import InvalidArgument
from radix_cache.kv_layout import KVLayout
from radix_cache.operations import check_count
from radix_cache.pool_descriptor import (
    HEADER_BYTES,
    PoolDescriptor,
    header_of,
    is_owned,
    lock_owned,
    lock_removal,
)
from radix_cache.torch_pool import cuda_ipc
from radix_cache.torch_pool.storage import KVPool

__all__ = ["SharedKVPool", "attach_pool", "share_pool"]

_PREFIX = "radix-cache-kv-"
_MAKING_S = 60  # so old an unowned file without its name yet was left by somebody who was killed
_owned: set[int] = set()  # open files with a lock
_on_gpu: weakref.WeakValueDictionary[str, SharedKVPool] = weakref.WeakValueDictionary()  # own ones, by pool_id


class SharedKVPool(KVPool):
    """A `KVPool` that several processes map. From `share_pool` or `attach_pool`; a context manager, like a file.

    descriptor: how others find it. is_owner: whether this process made it.
    """

    descriptor: PoolDescriptor

    def __init__(self, descriptor: PoolDescriptor, memory: torch.Tensor, lock: int | None) -> None:
        super().__init__(
            descriptor.layout, descriptor.num_blocks, num_reserved_blocks=descriptor.num_reserved_blocks, memory=memory
        )
        self.descriptor, self.memory = descriptor, memory
        self.is_owner = lock is not None
        self._remove = None if lock is None else weakref.finalize(self, _remove, descriptor.path, lock, os.getpid())

    def is_owner_alive(self) -> bool:
        """Tell whether the process that made the pool still has it. Once False, always False. A few microseconds."""
        return self.descriptor.is_owner_alive()

    def check_owner(self) -> None:
        """Raise `PoolGone` unless the owner lives: to be called before kernels are launched."""
        self.descriptor.check_owner()

    def close(self) -> None:
        """Owner: remove the pool's file and give up the lock, which others notice. Else nothing. What is mapped stays
        mapped as long as a tensor of it is in use. An owner that ends without it does it at its exit.
        """
        if self._remove is not None:
            self._remove()

    def __enter__(self) -> SharedKVPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled."""
        raise TypeError(
            "a shared pool travels as its descriptor, which is data: attach_pool(pool.descriptor.to_json())"
        )


def share_pool(
    layout: KVLayout,
    num_blocks: int,
    device: torch.device | str = "cpu",
    num_reserved_blocks: int = 0,
    path: str | Path | None = None,
    mode: int = 0o600,
) -> SharedKVPool:
    """Make a pool that other processes can map, and own it.

    path: of its file; by default a new name in /dev/shm, and pools there whose owner was killed are removed first.
    mode: who may open it. Raises `InvalidArgument` if a live owner has ``path``, or the memory is not there.
    """
    pool_id = os.urandom(16).hex()
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())  # noqa: S108 - random names
    target = folder / f"{_PREFIX}{pool_id}" if path is None else Path(path).absolute()
    if path is None:
        _remove_dead_pools(folder)
    check_count(num_blocks, "num_blocks", 1)
    is_cuda = _is_cuda(torch.device(device))
    num_bytes = 0 if is_cuda else layout.bytes_per_block * num_blocks
    lock = _create(target, pool_id, HEADER_BYTES + num_bytes, mode)
    try:
        descriptor = PoolDescriptor(pool_id, str(target), layout, num_blocks, num_reserved_blocks)
        if is_cuda:
            handle, memory = cuda_ipc.allocate(layout.bytes_per_block * num_blocks, torch.device(device))
            descriptor = replace(descriptor, cuda=handle)
        else:
            memory = _map(descriptor)
        pool = SharedKVPool(descriptor, memory, lock)
        if is_cuda:
            _on_gpu[pool_id] = pool
        return pool
    except BaseException:
        _remove(str(target), lock, os.getpid())
        raise


def attach_pool(descriptor: PoolDescriptor | str) -> SharedKVPool:
    """Map a pool of another process. descriptor: also as JSON, as the server's `describe().pool_descriptor` has it.

    Raises `PoolGone` if its owner has ended, `InvalidArgument` if it may not be opened or the GPU is not here.
    """
    if not isinstance(descriptor, PoolDescriptor):
        descriptor = PoolDescriptor.from_json(descriptor)
    descriptor.check_owner()  # or its handle may stand for anything by now
    if descriptor.cuda is None:
        memory = _map(descriptor)
    elif descriptor.pool_id in _on_gpu:  # CUDA opens no handles of its own process
        memory = _on_gpu[descriptor.pool_id].memory
    else:
        memory = cuda_ipc.open_handle(descriptor.cuda)
    pool = SharedKVPool(descriptor, memory, None)
    pool.check_owner()
    return pool


def _map(descriptor: PoolDescriptor) -> torch.Tensor:
    """Map the KV, through an open file of its own: `mmap` keeps one, and so would a forked child keep the lock's."""
    num_bytes = HEADER_BYTES + descriptor.layout.bytes_per_block * descriptor.num_blocks
    file = descriptor.open_file()
    try:
        if os.fstat(file).st_size != num_bytes:
            raise InvalidArgument(f"the pool's file has {os.fstat(file).st_size} bytes, not {num_bytes}")
        return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8, offset=HEADER_BYTES)
    finally:
        os.close(file)


def _create(target: Path, pool_id: str, num_bytes: int, mode: int) -> int:
    """Make the file, locked from its first moment under its name; return it open."""
    fresh = target.with_name(f".{target.name}.{pool_id}.new")
    try:
        lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except OSError as error:
        raise InvalidArgument(f"path: {target}: {error.strerror}") from error
    try:
        os.fchmod(lock, mode)  # whatever the umask
        lock_owned(lock)
        os.posix_fallocate(lock, 0, num_bytes)  # now, or a write would end the process when memory runs out
        os.pwrite(lock, header_of(pool_id), 0)
        _give_name(fresh, target)
    except OSError as error:
        os.close(lock)
        raise InvalidArgument(f"path: no room for {num_bytes:,} bytes at {target}: {error.strerror}") from error
    except BaseException:
        os.close(lock)
        raise
    finally:
        fresh.unlink()
    _owned.add(lock)
    return lock


def _give_name(fresh: Path, target: Path) -> None:
    for _ in range(100):
        try:
            os.link(fresh, target)
        except FileExistsError:
            if not _remove_if_dead(target):
                raise InvalidArgument(f"path: {target} is in use by another pool, or is something else") from None
        else:
            return
    raise InvalidArgument(f"path: {target} is being made by others again and again")


def _remove_if_dead(path: Path) -> bool:
    """Remove the file of a pool whose owner has ended; False: it lives, or the file is no pool's."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        magic = header_of("").rstrip(b"\n")
        if os.pread(file, len(magic), 0) != magic:
            return False
        lock_removal(file)
        if is_owned(file):
            return False
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file).st_ino:  # else another owner was faster
                path.unlink()
    except OSError:  # nothing that could be a pool's file
        return False
    finally:
        os.close(file)
    return True


def _remove_dead_pools(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if path.stat().st_uid == os.getuid():
                _remove_if_dead(path)
    for path in folder.glob(f".{_PREFIX}*.new"):
        with suppress(OSError):
            _remove_if_given_up(path)


def _remove_if_given_up(path: Path) -> None:
    """Remove a file that its maker was killed over before it got its name."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        state = os.fstat(file)
        if state.st_uid == os.getuid() and time.time() - state.st_mtime > _MAKING_S and not is_owned(file):
            path.unlink()
    finally:
        os.close(file)


def _is_cuda(device: torch.device) -> bool:
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device is a CPU or a CUDA device, not {device}")
    return device.type == "cuda"


def _remove(path: str, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child runs its parent's finalizers too
        with suppress(OSError):
            if Path(path).stat().st_ino == os.fstat(lock).st_ino:
                Path(path).unlink()
        _owned.discard(lock)
        os.close(lock)


def _after_fork() -> None:
    """A child does not own what its parent does, or the parent would seem to live on in it."""
    for lock in _owned:
        os.close(lock)
    _owned.clear()


os.register_at_fork(after_in_child=_after_fork)
