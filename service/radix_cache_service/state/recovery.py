"""From the files of a state directory to the cache that they stand for: the snapshot, then every call since.

All of it or nothing: whatever does not fit is a `StateError`, and what was loaded so far is thrown away.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from radix_cache.errors import IntegrityError
from radix_cache_service.clock import CallClock
from radix_cache_service.config import ServerConfig
from radix_cache_service.state.directory import Manifest, StateDir
from radix_cache_service.state.journal import SegmentReader, StateError
from radix_cache_service.state.ledger import Ledger
from radix_cache_service.state.snapshot import Title, load

__all__ = ["Recovered", "new_ledger", "recover"]


@dataclass(frozen=True, slots=True)
class Recovered:
    """A ledger as it was. next_number: of the record that comes next. num_bytes: how long the journal is.

    num_torn_bytes: what was cut off its end.
    """

    ledger: Ledger
    next_number: int
    num_bytes: int = 0
    num_torn_bytes: int = 0


def recover(state: StateDir, manifest: Manifest, clock: CallClock, through: int | None = None) -> Recovered:
    """Return the ledger that ``state`` holds, as of the end of segment ``through``, such that it can be saved.

    None: as of the last call, to serve from. A record that its writer did not finish is then cut off, and its segment
    with it if there is nothing else in it. Raises `StateError`.
    """
    ledger = new_ledger(manifest, clock, lasting=through is not None)
    path = state.checked_snapshot(manifest)
    if path is not None:
        load(path, ledger, Title(manifest.epoch, manifest.number))
    found = Recovered(ledger, manifest.number)
    segments = _segments(state, manifest, through)
    for segment in segments:
        found = _replayed(found, state, manifest, segment, through is None and segment == segments[-1])
    try:
        ledger.cache.check_integrity()
    except IntegrityError as error:
        raise StateError(f"the state in {state.path} contradicts itself: {error}") from error
    return found


def new_ledger(manifest: Manifest, clock: CallClock, *, lasting: bool = False) -> Ledger:
    """Return an empty ledger with the settings of a manifest."""
    return Ledger(ServerConfig(**manifest.settings).make_cache(clock), clock, is_lasting=lasting)


def _replayed(found: Recovered, state: StateDir, manifest: Manifest, segment: int, is_last: bool) -> Recovered:
    path = state.segment(segment)
    reader = SegmentReader(path, manifest.epoch, found.next_number, is_last=is_last)
    for record in reader:
        found.ledger.replay(record)
    if segment == manifest.last and (not reader.end or reader.next_number < manifest.last_number):
        raise StateError(f"{path} is damaged: it was longer, and ends before record {reader.next_number}")
    if reader.num_torn_bytes or not reader.end:
        _cut(path, reader.end)
    return Recovered(found.ledger, reader.next_number, found.num_bytes + reader.end, reader.num_torn_bytes)


def _segments(state: StateDir, manifest: Manifest, through: int | None) -> list[int]:
    """Return the numbers of the segments to read; none is missing, up to the last that is there or is known of."""
    found = state.segments()
    last = max([manifest.last, *found]) if through is None else through
    wanted = list(range(manifest.segment, last + 1))
    missing = [number for number in wanted if number not in found]
    if missing:
        raise StateError(f"{state.segment(missing[0])} is missing")
    return wanted


def _cut(path: Path, end: int) -> None:
    try:
        if end:
            os.truncate(path, end)
        else:
            path.unlink()
    except OSError as error:
        raise StateError(f"{path} cannot be repaired: {error.strerror}") from error
