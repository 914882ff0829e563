"""What an engine knows of its leases, laid open while it waits at the gate, so that the server's books can be compared.

Only what its client vouches for: leases that surely live, on the server that is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .request import Request, Violation


class Entry(NamedTuple):
    """One lease, as its engine has it."""

    lease_id: str
    num_published_tokens: int
    num_private_blocks: int
    num_redundant_blocks: int


def entry_of(request: Request) -> Entry:
    """Return what the engine knows of a request's lease."""
    lease, table = request.lease, set(request.lease.block_table)
    num_private_blocks = lease.num_blocks - lease.num_published_tokens // request.block_size
    num_redundant_blocks = sum(block not in table for block in request.own)
    return Entry(lease.lease_id, lease.num_published_tokens, num_private_blocks, num_redundant_blocks)


def lay_open(path: Path, valid_until: float, epoch: str, requests: Iterable[Request]) -> None:
    """Write down what is known, and until when."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps((valid_until, epoch, [entry_of(request) for request in requests])))
    unfinished.replace(path)


def compare(paths: Iterable[Path], now: float, epoch: str, infos: Iterable[Any]) -> int:
    """Compare all that surely lives with the leases that the server lists; return how many. Raises `Violation`."""
    listed = {info.lease_id: info for info in infos}
    num_compared = 0
    for entry in _entries(paths, now, epoch):
        info = listed.get(entry.lease_id)
        if info is None or entry != tuple(getattr(info, name) for name in Entry._fields):
            raise Violation("a lease is not what its engine was told", engine_has=str(entry), server_has=str(info))
        num_compared += 1
    return num_compared


def _entries(paths: Iterable[Path], now: float, epoch: str) -> Iterator[Entry]:
    for path in paths:
        valid_until, known_epoch, entries = json.loads(path.read_text())
        if now < valid_until and known_epoch == epoch:
            yield from (Entry(*entry) for entry in entries)
