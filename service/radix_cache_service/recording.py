"""Recording what a server is asked, as a trace that can be shared: of prompts and namespaces it has numbers only.

How blocks become numbers is in `radix_cache.salted`. A request is a lease that is no pin, from its match to its end,
whatever ends it; then its line is written, so lines are in the order of the ends, and their times, which all differ,
are in the order of the matches. A match that is answered once more is no other request. A fork is a prompt that begins
with what its parent has published. Leases from before the recording are left out, and their forks as well.

No call fails for it: whatever goes wrong ends the recording and is logged once, and the file is whole lines still. All
of it happens on the event loop.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from radix_cache import Lease, PrefixCache
from radix_cache.errors import InvalidArgument, RadixCacheError
from radix_cache.operations import Insert, MatchPrefix, Operation, Release, check_count
from radix_cache.salted import BlockNumbers
from radix_cache.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from radix_cache_service.config import ServerConfig

__all__ = ["RecordError", "Recording", "RecordingFigures", "check_recording", "open_recording"]

_log = logging.getLogger(__name__)

_MOST_BUFFERED_BYTES = 2**20


class RecordError(RadixCacheError):
    """The file of a recording can't be made."""


class RecordingFigures(NamedTuple):
    """What is counted of a recording. num_requests: that are in the file."""

    is_recording: bool = False
    num_requests: int = 0


def check_recording(record_file: str | None, max_recorded_blocks: int) -> None:
    """Raise `InvalidArgument` for a setting of that name that is wrong."""
    check_count(max_recorded_blocks, "max_recorded_blocks", 1, 2**31)
    if record_file == "":
        raise InvalidArgument("record_file is a file, not an empty name")
    if record_file is not None and os.path.lexists(record_file) and not Path(record_file).is_file():
        raise InvalidArgument(f"record_file: {record_file} is there, and no regular file")


def open_recording(config: ServerConfig, cache: PrefixCache) -> Recording | None:
    """Return the recording that the settings ask for, if they do. Raises `RecordError`."""
    if config.record_file is None:
        return None
    try:
        return Recording(config.record_file, cache, config.max_recorded_blocks)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RecordError(f"cannot record to {config.record_file}: {why}") from error


class _File:
    """A new file of lines, at ``path`` or with a number behind it; ``name`` is its name. Raises `OSError`."""

    def __init__(self, path: str) -> None:
        self.name, self._fd = _created(path)
        self.num_lines = 0
        self._lines: list[bytes] = []
        self._num_buffered_bytes = 0

    def add(self, line: bytes) -> None:
        """Take up a line, and write when there is much."""
        self._lines.append(line)
        self._num_buffered_bytes += len(line)
        if self._num_buffered_bytes > _MOST_BUFFERED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write all that is there, or leave the file as it is."""
        lines, self._lines, self._num_buffered_bytes = self._lines, [], 0
        found = os.fstat(self._fd)
        if not found.st_nlink:
            raise FileNotFoundError(errno.ENOENT, "the file was removed")
        left = memoryview(b"".join(lines))
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, found.st_size)
            raise
        self.num_lines += len(lines)

    def close(self) -> None:
        """Let go of the file, and of what is not written."""
        os.close(self._fd)


def _created(path: str) -> tuple[str, int]:
    """Make a file that nobody else may read: ids begin anew with each start, so none goes on with another's."""
    for number in count():
        name = f"{path}.{number}" if number else path
        with suppress(FileExistsError):
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            return name, fd
    raise AssertionError


@dataclass(slots=True)
class _Request:
    """A request that is open.

    numbers: of its prompt's blocks, the ragged one included. published: of the blocks that are, which may be others
    than were asked for. num_known: tokens, its answer's included.
    """

    lease: Lease
    timestamp_ms: float
    num_prompt_tokens: int
    numbers: array[int]
    num_known: int
    published: array[int]

    def line(self) -> bytes:
        """Return it as a record of the Mooncake format."""
        record = {
            "timestamp": self.timestamp_ms,
            "input_length": self.num_prompt_tokens,
            "output_length": self.num_known - self.num_prompt_tokens,
            "block_size": self.lease.block_size,
            "hash_ids": self.numbers.tolist(),
        }
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"


class Recording:
    """Writes the requests to ``cache`` to a new file. Holds up to 8 bytes for each block of an open request, and 160
    for each different block.

    path: of the file, see `_File`. max_blocks: the recording ends when it has seen more different ones. clock: seconds.
    """

    def __init__(
        self, path: str, cache: PrefixCache, max_blocks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache = cache
        self._max_blocks = max_blocks
        self._clock = clock
        self._start_s = clock()
        self._last_ms = -1.0
        self._numbers = BlockNumbers(cache.block_size)
        self._open: dict[str, _Request] = {}
        self._from_before = WeakSet(map(cache.lease_of, [info.lease_id for info in cache.leases()]))
        self._file = _File(path)
        self._is_on = True
        _log.info("recording to %s", self._file.name)

    def figures(self) -> RecordingFigures:
        """Return the figures of now."""
        return RecordingFigures(self._is_on, self._file.num_lines)

    def done(self, operation: Operation, value: Any) -> None:
        """Note an operation that was done, and what came of it."""
        if not self._is_on:
            return
        try:
            if isinstance(operation, MatchPrefix):
                self._begin(operation, value)
            elif isinstance(operation, Insert):
                self._grow(operation)
            elif isinstance(operation, Release):
                self._end(operation.lease_id)
        except Exception as error:  # noqa: BLE001 - whatever it is, the call has done its work
            self._fail(error)

    def tick(self) -> None:
        """Write what has ended by now. O(open requests): leases run out in silence, or end with their engine."""
        if not self._is_on:
            return
        try:
            for lease_id, request in list(self._open.items()):
                if self._cache.lease_of(lease_id) is not request.lease:
                    self._end(lease_id)
            self._file.flush()
        except Exception as error:  # noqa: BLE001 - see `done`
            self._fail(error)

    def close(self) -> None:
        """Write what has ended, and what is open as if it ended now."""
        if not self._is_on:
            return
        try:
            for lease_id in list(self._open):
                self._end(lease_id)
            self._file.flush()
        except Exception as error:  # noqa: BLE001 - see `done`
            self._fail(error)
        else:
            self._let_go()

    def _begin(self, operation: MatchPrefix, lease: Lease) -> None:
        lease_id, known = operation.lease_id, self._open.get(operation.lease_id)
        if operation.pin_s is not None or (known is not None and known.lease is lease) or lease in self._from_before:
            return
        if known is not None:  # it ran out, and another has its name now
            self._end(lease_id)
        shared = array("I")
        if operation.parent_id is not None:
            parent = self._open.get(operation.parent_id)
            if parent is None:
                return
            shared = parent.published
        numbers = shared + self._numbered(operation.tokens, lease, shared)
        num_tokens = len(shared) * lease.block_size + len(operation.tokens) // TOKEN_BYTES
        published = numbers[: lease.num_published_tokens // lease.block_size]
        self._open[lease_id] = _Request(lease, self._now_ms(), num_tokens, numbers, num_tokens, published)
        if len(self._numbers) > self._max_blocks:
            _log.warning("recording to %s ended: it has seen max_recorded_blocks", self._file.name)
            self.close()

    def _grow(self, operation: Insert) -> None:
        request = self._open.get(operation.lease_id)
        if request is None:
            return
        end, block_size = operation.offset + len(operation.tokens) // TOKEN_BYTES, request.lease.block_size
        request.num_known = max(request.num_known, end)
        published = request.published
        if end // block_size > len(published):
            start = len(published) * block_size - operation.offset
            stop = end // block_size * block_size - operation.offset
            tokens = operation.tokens[start * TOKEN_BYTES : stop * TOKEN_BYTES]
            published.extend(self._numbered(tokens, request.lease, published))

    def _numbered(self, tokens: bytes, lease: Lease, before: array[int]) -> array[int]:
        return self._numbers.blocks(tokens, lease.namespace, before[-1] if before else None)

    def _end(self, lease_id: str) -> None:
        request = self._open.pop(lease_id, None)
        if request is not None:
            self._file.add(request.line())

    def _now_ms(self) -> float:
        """Return the time since the start, to the microsecond, and later than any before it."""
        now_ms = max((self._clock() - self._start_s) * 1000, self._last_ms + 0.001)
        self._last_ms = round(now_ms, 3)
        return self._last_ms

    def _fail(self, error: Exception) -> None:
        if isinstance(error, OSError):
            _log.error("recording to %s ended: %s", self._file.name, error.strerror)
        else:
            _log.error("recording to %s ended: a bug", self._file.name, exc_info=error)
        self._let_go()

    def _let_go(self) -> None:
        self._is_on = False
        self._file.close()
        self._open.clear()
        self._numbers = BlockNumbers(self._cache.block_size)
