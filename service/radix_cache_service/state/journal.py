"""The journal: what a server did, in the order in which it did it, in files that only grow.

A segment is one line of text that says which one it is, and then records: a head of fixed size and a payload, each with
a checksum. A record is one `write`, made before the answer that it is about leaves: the kernel has it then, and a
killed process loses nothing. Nothing is synced, so a machine that loses its power loses the end.

What a kill can leave behind is the beginning of a record at the end of the last segment. Its call was never answered:
it is cut off. Any other thing that does not fit is damage, and is refused.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple

from radix_cache.errors import RadixCacheError

__all__ = ["Kind", "Record", "Segment", "SegmentReader", "StateError"]

_FORMAT = 1
_HEAD = struct.Struct("<IIQdII")  # length and checksum of the payload, number, reading, kind, digest
_CHECKSUM = struct.Struct("<I")  # of the head
_HEAD_BYTES = _HEAD.size + _CHECKSUM.size
_LONGEST_LINE = 512


class StateError(RadixCacheError, OSError):
    """A state directory cannot be used: its files are damaged, belong to something else, or cannot be written."""


class Kind(IntEnum):
    """What a record is about. Below 32 it is one verb, by the number of its field in a batch's ``Operation``."""

    BATCH = 32
    BATCH_IN_PART = 33  # with what its other operations were refused for before
    HEARD = 34  # an engine, or nobody: time went on
    DETACH = 35  # the first piece of a reset
    SWEEP = 36  # a further one
    START = 37


class Record(NamedTuple):
    """One call. kind: see `Kind`. reading: the clock then. digest: a checksum of its answer. payload: its message."""

    number: int
    kind: int
    reading: float
    digest: int
    payload: bytes


class Segment:
    """A new segment, open for writing. first: the number that its first record gets. Raises `StateError`."""

    def __init__(self, path: Path, epoch: str, first: int) -> None:
        self._path = path
        self._next = first
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self.num_bytes = self._write([_line(epoch, first)])
        except OSError as error:
            raise StateError(f"{path} cannot be written: {error.strerror}") from error

    @property
    def next_number(self) -> int:
        """The number that the next record gets."""
        return self._next

    def append(self, kind: int, reading: float, digest: int, payload: bytes) -> None:
        """Write one record. After an error the segment has an end that is cut off when it is read."""
        head = _HEAD.pack(len(payload), zlib.crc32(payload), self._next, reading, kind, digest)
        try:
            self.num_bytes += self._write([head, _CHECKSUM.pack(zlib.crc32(head)), payload])
        except OSError as error:
            raise StateError(f"{self._path} cannot be written: {error.strerror}") from error
        self._next += 1

    def _write(self, parts: list[bytes]) -> int:
        wanted = sum(map(len, parts))
        written = os.writev(self._file, parts)
        if written != wanted:
            raise OSError(0, f"{written} of {wanted} bytes were taken")
        return written

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


class SegmentReader:
    """The records of a segment, to be iterated once.

    first: the number that its first record must have. is_last: it may end in the beginning of a record. After the
    last record, ``next_number`` is the number that would follow, ``end`` where that would begin, and ``num_torn_bytes``
    what lies behind. Raises `StateError` for what does not fit, naming the file and the place.
    """

    def __init__(self, path: Path, epoch: str, first: int, *, is_last: bool) -> None:
        self._path = path
        self._epoch = epoch
        self._is_last = is_last
        self.next_number = first
        self.end = 0
        self.num_torn_bytes = 0

    def __iter__(self) -> Iterator[Record]:
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._read_line(file)
                while (record := self._read(file, size)) is not None:
                    yield record
                    self.next_number += 1
                    self.end += _HEAD_BYTES + len(record.payload)
        except OSError as error:
            raise error if isinstance(error, StateError) else self._broken(str(error.strerror)) from error
        self.num_torn_bytes = size - self.end
        if self.num_torn_bytes and not self._is_last:
            raise self._broken(f"ends in the middle of record {self.next_number}")

    def _read_line(self, file: BinaryIO) -> None:
        line = file.readline(_LONGEST_LINE)
        wanted = _line(self._epoch, self.next_number)
        if line == wanted:
            self.end = len(line)
        elif not (self._is_last and wanted.startswith(line)):
            raise self._broken("does not begin as it should: it is of another journal or another version")

    def _read(self, file: BinaryIO, size: int) -> Record | None:
        """Return the next record, or None where there is none, or only the beginning of one."""
        left = size - self.end - _HEAD_BYTES
        if left < 0 or not self.end:
            return None
        head, checksum = file.read(_HEAD.size), file.read(_CHECKSUM.size)
        length, payload_checksum, number, reading, kind, digest = _HEAD.unpack(head)
        if _CHECKSUM.unpack(checksum)[0] != zlib.crc32(head) or number != self.next_number:
            raise self._broken(f"is damaged: record {self.next_number} does not begin there")
        if length > left:
            return None
        payload = file.read(length)
        if zlib.crc32(payload) != payload_checksum:
            raise self._broken(f"is damaged: record {number} is not what was written")
        return Record(number, kind, reading, digest, payload)

    def _broken(self, what: str) -> StateError:
        return StateError(f"{self._path} {what} (byte {self.end})")


def _line(epoch: str, first: int) -> bytes:
    return f"radix-cache journal {_FORMAT} {epoch} {first}\n".encode()
