"""Which request opened each live lease, so that a match whose answer was lost can be asked for again.

The client chooses the lease's id and repeats the same request; it gets the lease as it is now. Another request under an
id that is in use is refused, like in process. Only a digest of the request is kept, for as long as its lease lives.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakValueDictionary

from radix_cache import Lease
from radix_cache.operations import MatchPrefix

__all__ = ["Openings"]


class Openings:
    """Finds the lease that an equal request opened.

    O(tokens) for the digest, which is Python's own hash: seeded anew in each process, so that nobody can make two
    requests collide on purpose.
    """

    def __init__(self) -> None:
        self._leases: WeakValueDictionary[str, Lease] = WeakValueDictionary()
        self._digests: WeakKeyDictionary[Lease, int] = WeakKeyDictionary()

    def note(self, operation: MatchPrefix, engine_id: str, lease: Lease) -> None:
        """Remember what opened ``lease``."""
        self._leases[operation.lease_id] = lease
        self._digests[lease] = hash((operation, engine_id))

    def find(self, operation: MatchPrefix, engine_id: str) -> Lease | None:
        """Return the latest lease of that id if an equal request opened it. It may have been released since."""
        lease = self._leases.get(operation.lease_id)
        if lease is None or self._digests.get(lease) != hash((operation, engine_id)):
            return None
        return lease
