"""Which request opened each live lease, so that a match whose answer was lost can be asked for again.

The client chooses the lease's id and repeats the same request; it gets the lease as it is now. Another request under an
id that is in use is refused, like in process. What is kept of a request, with its lease, is enough to know it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from radix_cache import Lease, PrefixCache
from radix_cache.operations import MatchPrefix
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["Openings"]


class _Passing(NamedTuple):
    """A request, less its tokens: of those, the first ``num_held`` bytes are in the lease's path, and the others have
    the hash ``tail``, which Python seeds anew in each process, so that nobody can make two collide on purpose.
    """

    num_held: int
    tail: int
    rest: tuple[Any, ...]
    engine_id: str


class Openings:
    """Finds the lease of ``cache`` that an equal request opened.

    O(tokens), a memcmp for those that were cached when it was opened, a hash for the others. What is to outlive the
    process can't rely on either: ``lasting`` takes BLAKE2 of all, at many times the cost.
    """

    def __init__(self, cache: PrefixCache, *, lasting: bool = False) -> None:
        self._cache = cache
        self._is_lasting = lasting

    def note(self, operation: MatchPrefix, engine_id: str, lease: Lease) -> None:
        """Remember what opened ``lease``."""
        if self._is_lasting:
            lease._opening = _lasting(operation, engine_id)
        else:
            num_held = lease.num_cached_tokens * TOKEN_BYTES if operation.parent_id is None else 0
            lease._opening = _Passing(num_held, hash(operation.tokens[num_held:]), operation[1:], engine_id)

    def find(self, operation: MatchPrefix, engine_id: str) -> Lease | None:
        """Return the lease of that id if an equal request opened it."""
        lease = self._cache.lease_of(operation.lease_id)
        if lease is None or lease._opening is None:
            return None
        if isinstance(lease._opening, _Passing):
            return lease if self._is_equal(lease._opening, operation, engine_id, lease) else None
        return lease if lease._opening == _lasting(operation, engine_id) else None

    def _is_equal(self, known: _Passing, operation: MatchPrefix, engine_id: str, lease: Lease) -> bool:
        num_held, tail, *rest = known
        tokens = operation.tokens
        return (
            rest == [operation[1:], engine_id]
            and len(tokens) >= num_held
            and hash(tokens[num_held:]) == tail
            and self._cache.is_opened_with(lease, tokens[:num_held])
        )

    def digests(self, lease_ids: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield the open ones of ``lease_ids``, and what is kept of the requests that opened them."""
        for lease_id in lease_ids:
            lease = self._cache.lease_of(lease_id)
            if lease is not None and lease._opening is not None:
                yield lease_id, lease._opening

    def restore(self, digests: Iterable[Sequence[Any]]) -> None:
        """Remember what `digests` yielded, of lasting ones; the leases are open."""
        for lease_id, digest in digests:
            lease = self._cache.lease_of(lease_id)
            if lease is None:
                raise LookupError(f"no lease {lease_id!r}")
            lease._opening = digest


def _lasting(operation: MatchPrefix, engine_id: str) -> bytes:
    """As text: -1 has the hash of -2, and 0 is equal to 0.0."""
    digest = blake2b(operation.tokens, digest_size=16)
    digest.update(repr((operation[1:], engine_id)).encode())  # the tokens are first
    return digest.digest()
