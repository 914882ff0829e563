"""What keeps a server's calls: it writes each down, and lets the journal be compacted when it has grown.

A write that fails ends the process: its memory is ahead of the journal then, and nothing that it went on to say could
be made good after a restart. Its clients come back to a server that knows what it has told them.

Compaction is another process's work (`radix_cache_service.state.compact`). The server closes a segment, names the
next one in the manifest, has the closed one read, and names the new snapshot; it never waits for any of that. If it
fails, the journal is longer, and the next attempt comes when it has grown by as much again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from radix_cache_service.fatal import end_at_once
from radix_cache_service.state.compaction import Compacted, CompactionFailed, compact
from radix_cache_service.state.directory import Manifest, StateDir
from radix_cache_service.state.journal import Segment, StateError

__all__ = ["Keeper", "KeeperFigures"]

_log = logging.getLogger(__name__)

_MAX_RECORDS = 250_000  # a start replays 30,000 to 100,000 a second


@dataclass(frozen=True, slots=True)
class KeeperFigures:
    """How long the journal is, how long it gets before it is compacted, and how that went since the start.

    compacted_at_s: when it last went well, in seconds since 1970; 0: never.
    """

    num_bytes: int = 0
    limit_bytes: int = 0
    num_compactions: int = 0
    num_failed_compactions: int = 0
    compacted_at_s: float = 0.0


class Keeper:
    """Keeps the calls to one ledger in a locked state directory.

    next_number: of the first record to come. num_bytes: how long the journal is already. max_bytes: how long it may
    get before it is compacted, or as long as the last snapshot if that is more.
    has_tokens: goes into the manifest; what was there is ``had_tokens``.
    """

    def __init__(
        self,
        state: StateDir,
        manifest: Manifest,
        next_number: int,
        num_bytes: int,
        max_bytes: int,
        has_tokens: bool | None,
    ) -> None:
        self.had_tokens = manifest.has_tokens
        self._state = state
        self._manifest = replace(manifest, has_tokens=has_tokens)
        self._max_bytes = max_bytes
        self._num_closed_bytes = num_bytes
        self._compacted_at = max_bytes
        self._compacted_at_number = _MAX_RECORDS
        self._is_closed = False
        self._compaction: asyncio.Task[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._limit_bytes = max_bytes
        self._num_compactions = self._num_failed_compactions = 0
        self._compacted_at_s = 0.0
        self._number = max(state.segments(), default=manifest.segment - 1) + 1
        self._segment = self._opened(next_number)

    @property
    def epoch(self) -> str:
        """Whose state it is."""
        return self._manifest.epoch

    @property
    def num_journal_bytes(self) -> int:
        """How long the journal is."""
        return self._num_closed_bytes + self._segment.num_bytes

    def figures(self) -> KeeperFigures:
        """Return how the journal is."""
        return KeeperFigures(
            num_bytes=self.num_journal_bytes,
            limit_bytes=self._limit_bytes,
            num_compactions=self._num_compactions,
            num_failed_compactions=self._num_failed_compactions,
            compacted_at_s=self._compacted_at_s,
        )

    def _opened(self, next_number: int) -> Segment:
        return Segment(self._state.segment(self._number), self.epoch, next_number)

    def append(self, kind: int, reading: float, digest: int, payload: bytes) -> None:
        """Write down one call; it is safe from the end of this process when this returns. One system call."""
        if self._is_closed:
            raise StateError("the server has ended")
        try:
            self._segment.append(kind, reading, digest, payload)
        except StateError as error:
            self._end(error)

    def _end(self, error: StateError) -> NoReturn:
        end_at_once(_log, os.EX_IOERR, f"calls cannot be written down any more ({error})", error)

    # Compaction.

    def tend(self) -> None:
        """Have the journal compacted if it is too long; to be called between calls, when no reset is under way."""
        num_records = self._segment.next_number - self._manifest.number
        is_long = self.num_journal_bytes >= self._compacted_at or num_records >= self._compacted_at_number
        if is_long and self._compaction is None:
            # Should it fail, whatever the reason, the next attempt is as far away.
            self._compacted_at = self.num_journal_bytes + self._max_bytes
            self._compacted_at_number = num_records + _MAX_RECORDS
            self._compaction = asyncio.create_task(self._compact(self.rotate()))

    def rotate(self) -> int:
        """Begin a new segment; return the number of the one before, which is complete."""
        self._segment.close()
        self._num_closed_bytes += self._segment.num_bytes
        self._number += 1
        try:
            self._segment = self._opened(self._segment.next_number)
        except StateError as error:
            self._end(error)
        return self._number - 1

    async def _compact(self, through: int) -> None:
        try:
            await self._written(self.name_segment)
            made = await compact(self._state, through)
            await self._written(self.publish, through, made)
            self._num_compactions += 1
        except (CompactionFailed, OSError) as error:
            self._num_failed_compactions += 1
            _log.error("the journal in %s was not compacted, and grows: %s", self._state.path, error)
        finally:
            self._compaction = None

    async def _written(self, write: Callable[..., None], *args: Any) -> None:
        """Write the manifest in a thread; to the end, also if the compaction is cancelled."""
        self._writing = asyncio.ensure_future(asyncio.to_thread(write, *args))
        await asyncio.shield(self._writing)

    def name_segment(self) -> None:
        """Note in the manifest that the segment is there, and how far it has come. Raises `StateError`."""
        last_number = self._segment.next_number
        manifest = replace(self._manifest, last=self._number, last_number=last_number, is_closed=False)
        self._state.write(manifest)
        self._manifest = manifest

    def publish(self, through: int, made: Compacted) -> None:
        """Let a snapshot stand for all segments up to ``through``. Raises `StateError`, `OSError`."""
        manifest = replace(
            self._manifest,
            segment=through + 1,
            number=made.next_number,
            snapshot=made.snapshot,
            sha256=made.sha256,
            last=self._number,
            last_number=self._segment.next_number,
        )
        num_bytes = sum(
            self._state.segment(number).stat().st_size for number in range(self._manifest.segment, through + 1)
        )
        self._state.write(manifest)
        self._manifest = manifest
        self._num_closed_bytes -= num_bytes
        self._limit_bytes = max(self._max_bytes, made.num_bytes)  # or a big tree would be written again and again
        self._compacted_at = self._limit_bytes
        self._compacted_at_s = time.time()
        self._compacted_at_number = _MAX_RECORDS

    async def close(self) -> None:
        """End a compaction under way, and let go of the directory; what is called after that is not written down."""
        self._is_closed = True
        if self._compaction is not None:
            self._compaction.cancel()
            await asyncio.wait([self._compaction])
        if self._writing is not None:
            await asyncio.wait([self._writing])  # no other server may come in between
        self._segment.close()
        self._state.close()
