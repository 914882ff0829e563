"""A route to a cache that is kept in a state directory: its server can be killed and started again, in process.

A kill is what the files say it is: the ledger is dropped, nothing is closed, and the next one is made of what was
written. The calls are the server's own, less the transport.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers import Clock
from routes import Caller, FileClock, Route, limit_text

from radix_cache import Lease, PrefixCache
from radix_cache.batch import Batch
from radix_cache.frozen import freeze
from radix_cache.operations import MatchPrefix, Operation, Outcome, Reset, check_count
from radix_cache_service.calls import batch_request, read_batch
from radix_cache_service.client.verbs import Verbs
from radix_cache_service.clock import CallClock
from radix_cache_service.config import ServerConfig
from radix_cache_service.convert import Limits
from radix_cache_service.convert import read_batch as read_requests
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.state.compact import compact
from radix_cache_service.state.directory import StateDir
from radix_cache_service.state.journal import Kind
from radix_cache_service.state.keeper import Keeper
from radix_cache_service.state.ledger import Ledger
from radix_cache_service.state.opening import open_ledger
from radix_cache_service.state.recovery import recover

ANY = 2**40


def state(cache: PrefixCache) -> Any:
    """Return all that a cache is, less the running numbers of rankings, which break ties that scores break before."""
    frozen = freeze(cache)
    nodes = [node._replace(ranking=node.ranking and list(node.ranking)[:-1]) for node in frozen.nodes]
    answers = [(engine_id, seq, list(map(str, results))) for engine_id, seq, results in frozen.answers]
    return frozen._replace(nodes=nodes, answers=answers, policy=json.dumps(frozen.policy))


class Kept:
    """A ledger in a state directory, and its restarts."""

    def __init__(self, folder: Path, *, aside: bool = True, **settings: Any) -> None:
        self.config = ServerConfig(
            state_dir=str(folder), **{"num_blocks": 8, "block_size": 2, "growth_share": 0, **settings}
        )
        self.folder = folder
        self.aside = folder.with_suffix(".aside")
        if aside:
            self.aside.mkdir()
        self.open()

    def open(self) -> None:
        """Start, on what is there."""
        self.ledger: Ledger
        self.keeper: Keeper
        self.ledger, self.keeper = open_ledger(self.config)  # type: ignore[assignment]

    def kill(self, num_torn: int = 0) -> None:
        """End as a killed process does: the kernel closes its files, and nothing else happens.

        num_torn: how many bytes it has written of its next record.
        """
        last = self.segments()[-1]
        size = last.stat().st_size
        if num_torn:
            self.keeper.append(Kind.HEARD, self.ledger.clock(), 0, b"somebody, a long name")
            os.truncate(last, size + num_torn)
        os.close(self.keeper._segment._file)
        self.keeper._state.close()

    def restart(self, num_torn: int = 0) -> None:
        """Kill and start."""
        self.kill(num_torn)
        self.open()

    def compact(self) -> None:
        """Have the journal made into a snapshot, and the files that go kept aside."""
        for path in self.segments():
            if not (self.aside / path.name).exists():
                os.link(path, self.aside / path.name)
        through = self.keeper.rotate()
        self.keeper.publish(through, compact(StateDir(self.folder, is_child=True), through))

    def replayed(self) -> Ledger:
        """Return the ledger that comes of all that ever happened, with no snapshot in between."""
        for path in self.segments():
            if not (self.aside / path.name).exists():
                os.link(path, self.aside / path.name)
        manifest = replace(self.keeper._manifest, segment=1, number=1, snapshot=None, sha256=None)
        return recover(StateDir(self.aside, is_child=True), manifest, CallClock()).ledger

    def segments(self) -> list[Path]:
        """Return the files of the journal."""
        return sorted(self.folder.glob("journal-*"))


class Engine(Verbs):
    """The verbs of one party, over whatever ledger ``kept`` has at the time."""

    def __init__(self, kept: Kept, engine_id: str | None) -> None:
        self.kept = kept
        self.engine_id = engine_id or ""

    @property
    def ledger(self) -> Ledger:
        """The one that serves."""
        return self.kept.ledger

    def _do(self, operation: Operation, lease: object = None, wait_s: float | None = None) -> Any:
        if isinstance(operation, Reset):
            for _ in self.ledger.reset(operation):
                pass
            return None
        if isinstance(operation, MatchPrefix) and operation.lease_id in self.ledger.cache._executor.leases.by_id:
            (outcome,) = self._run([operation], None, False)  # as clients do, who mean a new lease here
            if outcome.error is not None:
                raise outcome.error
            return outcome.value
        return self.ledger.one(operation, self.engine_id)

    def batch(self, seq: int | None = None, strict: bool = False) -> Batch:
        """Record a batch that goes to the ledger as the message that it would be."""
        if seq is not None:
            check_count(seq, "seq", 1, most=2**64 - 1)
        return Batch(lambda asked: self._run(asked, seq, strict))

    def _run(self, asked: list[Operation], seq: int | None, strict: bool) -> list[Outcome]:
        batch = batch_request(asked, self.engine_id, seq, strict)
        requests, read = read_requests(batch, Limits(ANY, ANY, ANY, self.kept.config.block_size, 1))
        ran: list[Outcome] = []
        self.ledger.watch = lambda _, outcome, __: ran.append(outcome)
        results = self.ledger.batch(batch, requests, read)
        outcomes = read_batch(asked, pb.BatchResponse(results=results))
        leases = [outcome.value if isinstance(outcome.value, Lease) else None for outcome in ran]
        return [
            Outcome(lease) if lease else outcome
            for lease, outcome in zip(leases or [None] * len(asked), outcomes, strict=True)
        ]

    def stats(self) -> Any:
        """Return the figures of now."""
        self.ledger.heard("")
        return self.ledger.cache.stats()

    def describe(self) -> Any:
        """Return what it was made with."""
        return self.ledger.cache.describe()

    def heartbeat(self) -> None:
        """Say that this engine lives."""
        self.ledger.heard(self.engine_id)


class KeptCaller(Caller):
    """Calls an `Engine`."""

    def heartbeat(self) -> None:
        """Say that this engine lives."""
        self.target.heartbeat()

    @contextmanager
    def batch(self, seq: int | None = None, strict: bool = False) -> Iterator[Any]:
        """Yield the recorder of one batch."""
        with self.target.batch(seq, strict) as recorder:
            yield recorder


class KeptRoute(Route):
    """A cache in a state directory, called directly."""

    name = "kept"
    shares_leases = True

    def __init__(self, lease_ttl_s: float | None = None, limits: Any = None, **config: Any) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="radix-cache-"))
        self.clock: Clock = FileClock(self.root / "clock")
        texts = tuple(limit_text(*each) for each in (limits or {}).items())
        ttl_s = 1e9 if lease_ttl_s is None else lease_ttl_s
        settings = {**config, "lease_ttl_s": ttl_s, "namespace_limits": texts, "test_clock": str(self.clock.path)}
        self.kept = Kept(self.root / "state", **settings)

    def caller(self, engine_id: str | None = None) -> KeptCaller:
        """Return a party."""
        return KeptCaller(Engine(self.kept, engine_id), engine_id)

    def advance(self, seconds: float) -> None:
        """Move the clock."""
        self.clock.advance(seconds)

    def cut(self, engine_id: str) -> None:
        """Do nothing: there is no connection."""

    def check(self) -> None:
        """Run the integrity check."""
        self.kept.ledger.cache.check_integrity()

    def close(self) -> None:
        """Start once more from the files alone, and look."""
        try:
            self.kept.restart()
            self.check()
            assert state(self.kept.ledger.cache) == state(self.kept.replayed().cache)
            self.kept.kill()
        finally:
            shutil.rmtree(self.root)
