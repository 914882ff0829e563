"""The last answer to each engine's batches, kept in case it was lost on its way.

What is kept is bounded in number and in bytes. Where it gets too much, the oldest goes of those who have the most:
engines are of one party if their names agree up to the first ``/``, which is where a server puts the name of whoever
calls. So nobody can make another's answers be forgotten.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from radix_cache.operations import InsertResult, Outcome

__all__ = ["Answers"]

MAX_ENGINES = 4096
MAX_BYTES = 64 * 1024 * 1024
_LEAST_BYTES = 64  # of one answer


class _Kept(NamedTuple):
    seq: int
    answers: list[Any]
    num_bytes: int


class _Party:
    """Engines that are bounded together, the one that was answered last at the end."""

    def __init__(self) -> None:
        self.engines: OrderedDict[str, _Kept] = OrderedDict()
        self.num_bytes = 0


class Answers:
    """Answers by engine; see the module's text. Each method is O(answers), `put` O(parties) where something must go."""

    def __init__(self, max_engines: int = MAX_ENGINES, max_bytes: int = MAX_BYTES) -> None:
        self._max_engines = max_engines
        self._max_bytes = max_bytes
        self._parties: dict[str, _Party] = {}
        self._num_engines = self._num_bytes = 0

    def get(self, engine_id: str) -> tuple[int, list[Any]]:
        """Return the number of an engine's last batch and the answers, -1 and none where nothing is known of it."""
        party = self._parties.get(_party_of(engine_id))
        kept = None if party is None else party.engines.get(engine_id)
        return (-1, []) if kept is None else (kept.seq, kept.answers)

    def put(self, engine_id: str, seq: int, answers: list[Any]) -> None:
        """Keep these in place of the engine's last ones."""
        name = _party_of(engine_id)
        party = self._parties.setdefault(name, _Party())
        self._forget(name, engine_id)
        kept = _Kept(seq, answers, sum(map(_num_bytes, answers)))
        self._parties[name] = party
        party.engines[engine_id] = kept
        party.num_bytes += kept.num_bytes
        self._num_bytes += kept.num_bytes
        self._num_engines += 1
        while self._num_engines > self._max_engines:
            self._shorten(max(self._parties, key=lambda each: len(self._parties[each].engines)))
        while self._num_bytes > self._max_bytes and self._num_engines > 1:
            self._shorten(max(self._parties, key=lambda each: self._parties[each].num_bytes))

    def _shorten(self, name: str) -> None:
        self._forget(name, next(iter(self._parties[name].engines)))

    def _forget(self, name: str, engine_id: str) -> None:
        party = self._parties[name]
        kept = party.engines.pop(engine_id, None)
        if kept is not None:
            party.num_bytes -= kept.num_bytes
            self._num_bytes -= kept.num_bytes
            self._num_engines -= 1
        if not party.engines:
            del self._parties[name]

    def items(self) -> Iterator[tuple[str, int, list[Any]]]:
        """Yield engine, number and answers, such that `put` in this order makes the same again."""
        for party in self._parties.values():
            for engine_id, kept in party.engines.items():
                yield engine_id, kept.seq, kept.answers


def _party_of(engine_id: str) -> str:
    return engine_id.partition("/")[0]


def _num_bytes(answer: Any) -> int:
    """Return about how much an answer holds: a message says it, of anything else the ids count."""
    if hasattr(answer, "ByteSize"):
        return _LEAST_BYTES + int(answer.ByteSize())
    if isinstance(answer, array):
        return len(answer) * answer.itemsize
    if isinstance(answer, InsertResult | Outcome):
        return _LEAST_BYTES + sum(map(_num_bytes, answer))
    return _LEAST_BYTES
