"""Which request opened each live lease, so that a match whose answer was lost can be asked for again.

The client chooses the lease's id and repeats the same request; it gets the lease as it is now. Another request under an
id that is in use is refused, like in process. Only a digest of the request is kept, for as long as its lease lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

from radix_cache import Lease
from radix_cache.operations import MatchPrefix

__all__ = ["Openings"]

_Digest: TypeAlias = tuple[int, int] | bytes


class Openings:
    """Finds the lease that an equal request opened.

    O(tokens) for the digest: Python's own hashes of the tokens and of the rest as text, seeded anew in each process, so
    that nobody can make two requests collide on purpose. (Not of the rest as numbers: -1 has the hash of -2, 0 that of
    0.0.) What is to outlive the process needs a digest that does: ``lasting`` takes BLAKE2, at ten times the cost.
    """

    def __init__(self, *, lasting: bool = False) -> None:
        self._leases: WeakValueDictionary[str, Lease] = WeakValueDictionary()
        self._digests: WeakKeyDictionary[Lease, _Digest] = WeakKeyDictionary()
        self._digest = _lasting if lasting else _passing

    def note(self, operation: MatchPrefix, engine_id: str, lease: Lease) -> None:
        """Remember what opened ``lease``."""
        self._leases[operation.lease_id] = lease
        self._digests[lease] = self._digest(operation, engine_id)

    def find(self, operation: MatchPrefix, engine_id: str) -> Lease | None:
        """Return the latest lease of that id if an equal request opened it. It may have been released since."""
        lease = self._leases.get(operation.lease_id)
        known = None if lease is None else self._digests.get(lease)
        digest = _lasting if isinstance(known, bytes) else _passing
        return lease if known is not None and known == digest(operation, engine_id) else None

    def digests(self, leases: Mapping[str, Lease]) -> Iterator[tuple[str, _Digest]]:
        """Yield the ids of ``leases``, and the digests of what opened them."""
        for lease_id, lease in leases.items():
            if lease in self._digests:
                yield lease_id, self._digests[lease]

    def restore(self, leases: Mapping[str, Lease], digests: Iterable[Sequence[Any]]) -> None:
        """Remember what `digests` yielded, of lasting ones."""
        for lease_id, digest in digests:
            self._leases[lease_id] = leases[lease_id]
            self._digests[leases[lease_id]] = digest


def _passing(operation: MatchPrefix, engine_id: str) -> tuple[int, int]:
    return hash(operation.tokens), hash(_rest(operation, engine_id))


def _lasting(operation: MatchPrefix, engine_id: str) -> bytes:
    digest = blake2b(operation.tokens, digest_size=16)
    digest.update(_rest(operation, engine_id).encode())
    return digest.digest()


def _rest(operation: MatchPrefix, engine_id: str) -> str:
    return repr((operation[1:], engine_id))  # the tokens are first
