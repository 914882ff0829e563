"""Where a shared KV pool lies, as plain data: made by its owner, handed out by the server, read by engines.

It is JSON and nothing but JSON: a pickle would run whatever its sender likes. Every pool has a file, whose first page
names the pool; the KV follows in it (CPU), or lies on a GPU and is found by the handle. The owner keeps the file
locked for as long as it lives, and the kernel drops the lock when it dies, however it dies. So whoever can open the
file can tell a live owner from a dead one, and neither process ids nor time are needed. They ask without locking
anything themselves, or they would seem to be owners to each other. Needs no torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from radix_cache.errors import InvalidArgument, RadixCacheError
from radix_cache.kv_layout import KVLayout
from radix_cache.operations import check_count, check_name
from radix_cache.tokens import shown

__all__ = [
    "HEADER_BYTES",
    "CudaHandle",
    "PoolDescriptor",
    "PoolGone",
    "header_of",
    "is_owned",
    "lock_owned",
    "lock_removal",
]

HEADER_BYTES = 4096
_MAGIC = b"radix-cache KV pool 2\n"
_MAX_JSON = 64 * 1024
# Bytes of the file that stand for more than they hold. Locks go with the open file, as of Linux 3.15, not the process.
_OWNED, _REMOVED = 0, 1
_LOCK = "hhqqi"  # struct flock


class PoolGone(RadixCacheError, ConnectionError):
    """The process that owns a shared KV pool has ended: nothing in it may be relied on, nothing may be launched."""


@dataclass(frozen=True, slots=True)
class CudaHandle:
    """Memory on a GPU, as another process opens it: what torch's storages share, bytes as hexadecimal text.

    device_uuid: which GPU, whatever its index is in each process. handle: of the allocation; offset_bytes: where in
    it the pool begins; num_bytes: how long it is. The rest is torch's own: its reference counter and its event.
    """

    device_uuid: str
    handle: str
    num_bytes: int
    offset_bytes: int
    ref_counter: str
    ref_counter_offset: int
    event: str
    is_event_sync_required: bool

    def __post_init__(self) -> None:
        check_name(self.device_uuid, "device_uuid")
        for name in ("handle", "ref_counter", "event"):
            _check_hex(getattr(self, name), name)
        for name in ("num_bytes", "offset_bytes", "ref_counter_offset"):
            check_count(getattr(self, name), name, 0, 2**63)
        if not isinstance(self.is_event_sync_required, bool):
            raise InvalidArgument(f"is_event_sync_required is true or false, not {shown(self.is_event_sync_required)}")


@dataclass(frozen=True, slots=True)
class PoolDescriptor:
    """One shared pool. Raises `InvalidArgument` that names the field, whatever is wrong with it.

    pool_id: of this pool and no other, so also a `pool_epoch`. path: its file. cuda: None where the KV lies in the
    file.
    """

    pool_id: str
    path: str
    layout: KVLayout
    num_blocks: int
    num_reserved_blocks: int = 0
    cuda: CudaHandle | None = None

    def __post_init__(self) -> None:
        check_name(self.pool_id, "pool_id")
        if not _is_absolute(self.path):
            raise InvalidArgument(f"path is an absolute path, not {shown(self.path)}")
        check_count(self.num_blocks, "num_blocks", 1)
        check_count(self.num_reserved_blocks, "num_reserved_blocks", 0, self.num_blocks - 1)

    def to_json(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    def write(self, path: str | Path, mode: int = 0o600) -> None:
        """Write it to a file, which is never seen half written. mode: who may read it, and so map a pool on a GPU."""
        target = Path(path)
        fresh = target.with_name(f"{target.name}.{os.getpid()}.new")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(self.to_json() + "\n")
        fresh.replace(target)

    @classmethod
    def from_json(cls, text: str) -> PoolDescriptor:
        """Read what `to_json` wrote. Raises `InvalidArgument`: also for a field that is missing or unknown."""
        if not isinstance(text, str) or len(text) > _MAX_JSON:
            raise InvalidArgument(f"a pool descriptor is a JSON text of at most {_MAX_JSON} characters")
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            raise InvalidArgument("a pool descriptor is a JSON object, and this is no JSON") from None
        values = _checked(cls, said, "pool descriptor")
        values["layout"] = KVLayout(**_checked(KVLayout, values["layout"], "layout"))
        if values.get("cuda") is not None:
            values["cuda"] = CudaHandle(**_checked(CudaHandle, values["cuda"], "cuda"))
        return cls(**values)

    @classmethod
    def read(cls, source: str) -> PoolDescriptor:
        """Read a descriptor that is given as JSON, or as the name of a file with it. Raises `InvalidArgument`."""
        if source.lstrip().startswith("{"):
            return cls.from_json(source)
        try:
            return cls.from_json(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not the name of a file with text"
            raise InvalidArgument(f"pool descriptor {shown(source)}: {reason}") from error

    def open_file(self, flags: int = os.O_RDWR) -> int:
        """Open the pool's file, for reading and writing unless told otherwise; to close it is the caller's business.

        Raises `PoolGone` if the file is gone or is another pool's by now, `InvalidArgument` if it may not be opened.
        """
        try:
            file = os.open(self.path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise PoolGone(f"the pool's file {self.path} is gone: its owner has ended") from None
        except OSError as error:
            raise InvalidArgument(f"the pool's file {self.path}: {error.strerror}") from error
        if not self._is_named(file):
            os.close(file)
            raise PoolGone(f"the pool's file {self.path} is another pool's: the owner of this one has ended")
        return file

    def _is_named(self, file: int) -> bool:
        header = header_of(self.pool_id)
        try:
            return os.pread(file, len(header), 0) == header
        except OSError:  # a pipe, say
            return False

    def check_owner(self) -> None:
        """Raise `PoolGone` unless the owner lives, `InvalidArgument` if that can't be told."""
        if not self.is_owner_alive():
            raise PoolGone(
                f"the owner of pool {self.pool_id} has ended: its pool_descriptor is an old one, take the next"
            )

    def is_owner_alive(self) -> bool:
        """Tell whether the owner still runs. Four system calls, nothing is changed or locked."""
        try:
            file = self.open_file(os.O_RDONLY)
        except PoolGone:
            return False
        try:
            return is_owned(file)
        finally:
            os.close(file)


def header_of(pool_id: str) -> bytes:
    """Return what the file of a pool begins with."""
    return _MAGIC + pool_id.encode() + b"\n"


def lock_owned(file: int) -> None:
    """Own a pool's file until it is closed. Raises `BlockingIOError` if somebody does."""
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock_of(_OWNED))


def is_owned(file: int) -> bool:
    """Tell whether somebody with another open file owns it."""
    answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _lock_of(_OWNED))
    return bool(struct.unpack(_LOCK, answer)[0] != fcntl.F_UNLCK)


def lock_removal(file: int) -> None:
    """Wait to be the only one that thinks about removing this file, until it is closed."""
    fcntl.fcntl(file, fcntl.F_OFD_SETLKW, _lock_of(_REMOVED))


def _lock_of(byte: int) -> bytes:
    return struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)


def _is_absolute(path: object) -> bool:
    try:
        return isinstance(path, str) and Path(path).is_absolute() and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _checked(kind: type[Any], said: object, what: str) -> dict[str, Any]:
    """Return the fields of an object, or raise `InvalidArgument` if it has others, or lacks one that has no default."""
    if not isinstance(said, dict):
        raise InvalidArgument(f"a {what} is a JSON object, not {type(said).__name__}")
    known = {item.name for item in fields(kind)}
    if unknown := set(said) - known:
        raise InvalidArgument(f"a {what} has no field {shown(min(unknown))}")
    written = {item.name for item in fields(kind) if item.name not in {"cuda", "num_reserved_blocks"}}
    if missing := written - set(said):
        raise InvalidArgument(f"a {what} needs the field {min(missing)!r}")
    return dict(said)


def _check_hex(text: Any, what: str) -> None:
    try:
        bytes.fromhex(text)
    except (ValueError, TypeError):
        raise InvalidArgument(f"{what} is hexadecimal text, not {shown(text)}") from None
