"""The pool's memory, which every engine maps, and the fence around it.

A block is one record of 64 bytes: who wrote it (engine, its life, lease, position in the table, tokens in it, when),
then twice a digest of all tokens up to its end and of the namespace. A cached block is right if its digests are those
that the tokens demand; who wrote it does not matter, and is told where it is wrong. A private block is right if it
holds exactly what its owner wrote there last. Half of one record and half of another is never right.

Behind the blocks lies the ledger: for each block the digest and the epoch of the last insert that the server answered.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

RECORD_BYTES = 64
_DIGEST_BYTES = 16
_TAG = struct.Struct("<5I4xd")
_LEDGER_BYTES = 32
NOTHING = bytes(_DIGEST_BYTES)  # the digest of a block that is claimed, and not computed yet


class Tag(NamedTuple):
    """Who wrote a record, and when by the lease clock."""

    engine: int
    life: int
    lease: int
    position: int
    num_tokens: int
    written_at: float

    def __str__(self) -> str:
        return (
            f"engine {self.engine}.{self.life}, its lease no. {self.lease}, table[{self.position}], "
            f"{self.num_tokens} tokens, at {self.written_at:.3f}"
        )


def record(tag: Tag, digest: bytes) -> bytes:
    """Return the bytes of a block."""
    return _TAG.pack(*tag) + digest + digest


def tag_of(found: bytes) -> Tag:
    """Return who wrote a record."""
    return Tag(*_TAG.unpack_from(found))


def first_digest(namespace: Sequence[str]) -> bytes:
    """Return what stands before the first block of a namespace."""
    return blake2b(repr(tuple(namespace)).encode(), digest_size=_DIGEST_BYTES).digest()


def next_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the digest of a block from the one before it and its own tokens, be they fewer than a block has."""
    return blake2b(before + struct.pack(f"<{len(tokens)}I", *tokens), digest_size=_DIGEST_BYTES).digest()


class Memory:
    """Maps the file that `create` made."""

    def __init__(self, path: Path, num_blocks: int) -> None:
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 0)
        self.num_blocks = num_blocks
        self._ledger_at = num_blocks * RECORD_BYTES

    @staticmethod
    def create(path: Path, num_blocks: int) -> None:
        """Make a file of zeros."""
        with path.open("wb") as file:
            file.truncate(num_blocks * (RECORD_BYTES + _LEDGER_BYTES))

    def clear(self) -> None:
        """Make it zeros again."""
        self._bytes[:] = bytes(len(self._bytes))

    def read(self, block: int) -> bytes:
        """Return a block's record."""
        return self._bytes[block * RECORD_BYTES : (block + 1) * RECORD_BYTES]

    def write(self, block: int, content: bytes) -> None:
        """Replace a block's record."""
        self._bytes[block * RECORD_BYTES : (block + 1) * RECORD_BYTES] = content

    def has(self, block: int, digest: bytes) -> bool:
        """Tell whether the block holds just what these tokens demand."""
        at = (block + 1) * RECORD_BYTES
        return self._bytes[at - 2 * _DIGEST_BYTES : at] == digest + digest

    def acknowledge(self, block: int, digest: bytes, epoch: str) -> None:
        """Note in the ledger that an insert of this block was answered."""
        at = self._ledger_at + block * _LEDGER_BYTES
        self._bytes[at : at + _LEDGER_BYTES] = digest + epoch.encode()[:_DIGEST_BYTES].ljust(_DIGEST_BYTES)

    def strike_out(self, block: int) -> None:
        """Delete a line of the ledger."""
        at = self._ledger_at + block * _LEDGER_BYTES
        self._bytes[at : at + _LEDGER_BYTES] = bytes(_LEDGER_BYTES)

    def acknowledged(self, block: int, epoch: str) -> bytes | None:
        """Return the digest under which the block was last published in this epoch, or None."""
        at = self._ledger_at + block * _LEDGER_BYTES
        entry = self._bytes[at : at + _LEDGER_BYTES]
        is_of_epoch = entry[_DIGEST_BYTES:] == epoch.encode()[:_DIGEST_BYTES].ljust(_DIGEST_BYTES)
        return entry[:_DIGEST_BYTES] if is_of_epoch else None


class Fence:
    """Many may be at the memory at once; none while the clock moves. A lock on a file, which dies with its holder."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._door = os.open(path.with_suffix(".door"), os.O_RDWR | os.O_CREAT)  # or nobody would ever get in alone
        self._mine = threading.Lock()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Be at the memory."""
        fcntl.flock(self._door, fcntl.LOCK_SH)
        fcntl.flock(self._file, fcntl.LOCK_SH)
        fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep everybody away from the memory. For one process; its threads take turns."""
        with self._mine:
            fcntl.flock(self._door, fcntl.LOCK_EX)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:  # the door last: whoever is paused in front of it must hold nothing
                fcntl.flock(self._file, fcntl.LOCK_UN)
                fcntl.flock(self._door, fcntl.LOCK_UN)
