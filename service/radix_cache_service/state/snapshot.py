"""A ledger as one SQLite file: a table for each kind of row, plain values, and JSON for what is a list.

A file is written once, under another name until it is whole, and never changed. Nothing in it is code: loading it runs
nothing but constructors. Answers that may be asked for again are kept as the messages that they were.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from radix_cache.frozen import Frozen, FrozenLease, FrozenNode, freeze
from radix_cache.thawing import thaw
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.state.journal import StateError
from radix_cache_service.state.ledger import Ledger

__all__ = ["Title", "load", "save"]

_FORMAT = 1
_JSON = frozenset({"namespace", "counts", "data", "ranking", "hints", "seq"})  # seq may be beyond SQLite's integers
_TABLES: dict[str, tuple[str, ...]] = {
    "title": ("name", "value"),
    "nodes": FrozenNode._fields,
    "leases": FrozenLease._fields,
    "free": ("block_ids",),
    "engines": ("engine_id", "deadline", "is_scheduled"),
    "deadlines": ("time", "number", "is_engine", "name"),
    "gone": ("lease_id", "namespace"),
    "answers": ("engine_id", "seq", "place", "result"),
    "openings": ("lease_id", "digest"),
}


class Title(NamedTuple):
    """Whose snapshot it is, and of when: all before record ``next_number``."""

    epoch: str
    next_number: int


def save(path: Path, ledger: Ledger, title: Title) -> None:
    """Write ``ledger`` to a new file at ``path``, and have it on the disk. O(everything)."""
    frozen = freeze(ledger.cache)
    draft = path.with_suffix(".tmp")
    draft.unlink(missing_ok=True)
    with closing(sqlite3.connect(draft, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("PRAGMA synchronous = OFF")
        database.execute("BEGIN")
        for name, columns in _TABLES.items():
            database.execute(f"CREATE TABLE {name} ({', '.join(columns)})")
            _insert(database, name, _rows(name, ledger, frozen, title))
        database.execute("COMMIT")
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.rename(path)


def _insert(database: sqlite3.Connection, name: str, rows: Iterable[Sequence[Any]]) -> None:
    columns = _TABLES[name]
    lists = [place for place, column in enumerate(columns) if column in _JSON]
    marks = ", ".join("?" * len(columns))
    packed = (_with_json(row, lists) for row in rows)
    database.executemany(f"INSERT INTO {name} VALUES ({marks})", packed)  # noqa: S608 - the names are ours


def _with_json(row: Sequence[Any], lists: Iterable[int]) -> list[Any]:
    values = list(row)
    for place in lists:
        if values[place] is not None:
            values[place] = json.dumps(values[place], allow_nan=False)
    return values


def _rows(name: str, ledger: Ledger, frozen: Frozen, title: Title) -> Iterable[Sequence[Any]]:
    if name == "title":
        said = {
            "format": _FORMAT,
            **title._asdict(),
            "reading": ledger.clock(),
            "closed": ledger.closed,
            "totals": frozen.totals,
            "policy": frozen.policy,
        }
        return [(key, json.dumps(value, allow_nan=False)) for key, value in said.items()]
    if name == "free":
        return [(frozen.free,)]
    if name == "answers":
        return _answers(frozen)
    if name == "openings":
        return ledger.openings.digests(lease.lease_id for lease in frozen.leases)
    rows: Iterable[Sequence[Any]] = getattr(frozen, name)
    return rows


def _answers(frozen: Frozen) -> Iterator[tuple[str, int, int, bytes]]:
    for engine_id, seq, results in frozen.answers:
        yield engine_id, seq, -1, b""  # also for a batch of nothing
        for place, result in enumerate(results):
            yield engine_id, seq, place, result.SerializeToString()


# Back.


def load(path: Path, ledger: Ledger, title: Title) -> None:
    """Make ``ledger``, whose cache is new and has the settings of before, into the one that was saved.

    The file's checksum has been compared. Raises `StateError` where it is not what ``title`` says.
    """
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            tables = {name: list(_select(database, name)) for name in _TABLES}
        said = {key: json.loads(value) for key, value in tables["title"]}
        if said["format"] != _FORMAT:
            raise StateError(f"{path} has format {said['format']}, this version of radix-cache reads {_FORMAT}")
        if Title(said["epoch"], said["next_number"]) != title:
            raise StateError(f"{path} is of another epoch or another moment than state.json says")
        thaw(ledger.cache, _frozen(said, tables))
        ledger.clock.resume(said["reading"])
        ledger.closed = said["closed"] and tuple(said["closed"])
        ledger.openings.restore(tables["openings"])
    except (sqlite3.Error, ValueError, TypeError, LookupError, AttributeError) as error:
        raise StateError(f"{path} does not hold a state: {error!r:.200}") from error


def _select(database: sqlite3.Connection, name: str) -> Iterator[Sequence[Any]]:
    columns = _TABLES[name]
    lists = [place for place, column in enumerate(columns) if column in _JSON]
    for row in database.execute(f"SELECT {', '.join(columns)} FROM {name} ORDER BY rowid"):  # noqa: S608 - ours
        values = list(row)
        for place in lists:
            if values[place] is not None:
                values[place] = json.loads(values[place])
        yield values


def _frozen(said: dict[str, Any], tables: dict[str, list[Sequence[Any]]]) -> Frozen:
    answers: dict[str, tuple[str, int, list[Any]]] = {}
    for engine_id, seq, place, result in tables["answers"]:
        answers.setdefault(engine_id, (engine_id, seq, []))
        if place >= 0:
            answers[engine_id][2].append(pb.OperationResult.FromString(result))
    return Frozen(
        totals=said["totals"],
        policy=said["policy"],
        nodes=[FrozenNode(*row) for row in tables["nodes"]],
        leases=[FrozenLease(*row) for row in tables["leases"]],
        free=tables["free"][0][0],
        engines=[tuple(row) for row in tables["engines"]],
        deadlines=[tuple(row) for row in tables["deadlines"]],
        gone=[tuple(row) for row in tables["gone"]],
        answers=list(answers.values()),
    )
