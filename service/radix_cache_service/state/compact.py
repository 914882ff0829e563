"""``python -m radix_cache_service.state.compact DIRECTORY SEGMENT``: a snapshot of all up to the end of a segment.

A server starts this beside itself (`radix_cache_service.state.compaction`): a copy of the cache is loaded and brought
up to date here, while the server goes on. Each answer of the journal is computed again on the way, and the snapshot
is read back and compared before anybody is told of it. Only the server changes what counts in the directory.

It ends at once when its standard input does: then the server is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from radix_cache.errors import RadixCacheError
from radix_cache.frozen import Frozen, freeze
from radix_cache_service.clock import CallClock
from radix_cache_service.state.compaction import Compacted
from radix_cache_service.state.directory import Manifest, StateDir, checksum
from radix_cache_service.state.journal import StateError
from radix_cache_service.state.ledger import Ledger
from radix_cache_service.state.recovery import new_ledger, recover
from radix_cache_service.state.snapshot import Title, load, save

__all__ = ["compact", "main"]


def compact(state: StateDir, through: int) -> Compacted:
    """Write the snapshot, and return what it is called and holds. Raises `StateError`."""
    manifest = state.read()
    if manifest is None:
        raise StateError(f"{state.path} holds no state")
    found = recover(state, manifest, CallClock(), through)
    path, title = state.snapshot(through + 1), Title(manifest.epoch, found.next_number)
    save(path, found.ledger, title)
    _check(path, title, manifest, found.ledger)
    return Compacted(path.name, checksum(path), found.next_number, path.stat().st_size)


def _check(path: Path, title: Title, manifest: Manifest, ledger: Ledger) -> None:
    """Raise `StateError` unless the file comes back as what it was made of."""
    again = new_ledger(manifest, CallClock())
    load(path, again, title)
    again.cache.check_integrity()
    if _state(again) != _state(ledger):
        raise StateError(f"{path} does not come back as it was written")


def _state(ledger: Ledger) -> Frozen:
    frozen = freeze(ledger.cache)
    return frozen._replace(policy=json.dumps(frozen.policy))  # a file has no tuples


def _end_with_the_server() -> None:
    os.read(sys.stdin.fileno(), 1)  # not through sys.stdin, whose lock would be in the way of an orderly exit
    os._exit(1)


def main() -> None:
    """Run the command; what went wrong is the last line on standard error."""
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    os.nice(10)
    os.umask(0o077)  # there are prompts in it
    try:
        made = compact(StateDir(sys.argv[1], is_child=True), int(sys.argv[2]))
    except RadixCacheError as error:
        sys.exit(str(error))
    print(json.dumps(made._asdict()))  # noqa: T201 - what the server waits for


if __name__ == "__main__":
    main()
