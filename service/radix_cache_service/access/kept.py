"""Leases of before the start, which a state directory brought back, or of before a token went: whose they are.

With tokens, an engine's leases are known under the name of its token and the engine's id, with a slash between, and the
client that they count for is the token's. Without tokens, whoever calls as their engine, or works on them, is taken for
whom they were opened.

An engine that goes by another name than its leases can't keep them alive, but would believe so: its calls are answered.
Its token may have got another name, or it needs one only now, or none any more. So whoever calls under such an engine's
id is refused until these leases have run out, which no call of theirs prevents. It may hit another tenant's engine of
the same id, unless that has leases of its own by then: for one ttl, and after such a change only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection

from radix_cache import Lease, PrefixCache
from radix_cache.errors import PermissionDenied

__all__ = ["KeptLeases"]


class KeptLeases:
    """What is open in ``cache`` now. token_names: None where no tokens are asked for. had_tokens: whether any were when
    these leases were opened; None: for some of them perhaps.
    """

    def __init__(self, cache: PrefixCache, token_names: Collection[str] | None, had_tokens: bool | None = None) -> None:
        self._cache = cache
        self._by_owner: defaultdict[str, list[Lease]] = defaultdict(list)
        self._alone: dict[str, Lease] = {}
        self._stranded: defaultdict[str, dict[str, Lease]] = defaultdict(dict)  # by the engine's id
        leases = self._open()
        is_same = had_tokens is True and token_names is not None
        self._names = {lease.engine_id for lease in leases} if is_same else set()  # they are who they were
        for lease in leases:
            if lease.engine_id is None:
                self._alone[lease.lease_id] = lease
            elif token_names is None:
                self._by_owner[lease.engine_id].append(lease)
            else:
                self._take(lease, lease.engine_id, had_tokens)
        if had_tokens is not False:
            self._strand(leases, lambda party: party not in (token_names or ()))

    def _open(self) -> list[Lease]:
        found = (self._cache.lease_of(info.lease_id) for info in self._cache.leases())
        return [lease for lease in found if lease is not None]

    def _take(self, lease: Lease, name: str, had_tokens: bool | None) -> None:
        party, slash, _ = name.partition("/")
        if slash and had_tokens is not False:
            self._by_owner[party].append(lease)
        if had_tokens is not True:
            self._stranded[name][lease.lease_id] = lease

    def _strand(self, leases: list[Lease], is_gone: Callable[[str], bool]) -> None:
        for lease in leases:
            party, _, engine_id = (lease.engine_id or "").partition("/")
            if engine_id and is_gone(party):
                self._stranded[engine_id][lease.lease_id] = lease

    def tokens_gone(self, token_names: Collection[str]) -> None:
        """Note that no token has these names any more. O(leases)."""
        leases = self._open()
        self._names.update(lease.engine_id for lease in leases)
        self._strand(leases, lambda party: party in token_names)

    @property
    def has_stranded(self) -> bool:
        """Whether `check_engine` may refuse anybody."""
        return bool(self._stranded)

    def of_owner(self, name: str) -> list[Lease]:
        """Return those of a token's engines, or without tokens of an engine, that are still open; once."""
        return list(filter(self._is_open, self._by_owner.pop(name, ())))

    def of_nobody(self, lease_id: str | None) -> list[Lease]:
        """Return the one of this name if it has no engine and is still open; once."""
        lease = self._alone.pop(lease_id, None) if lease_id and self._alone else None
        return [] if lease is None or not self._is_open(lease) else [lease]

    def _is_open(self, lease: Lease) -> bool:
        return self._cache.lease_of(lease.lease_id) is lease  # its name may be another's by now

    def check_engine(self, engine_id: str, name: str) -> None:
        """Raise `PermissionDenied` while leases are open that were this engine's under another name than ``name``."""
        stranded = self._stranded.get(engine_id)
        if stranded is None or name in self._names:
            return
        for lease_id, lease in list(stranded.items()):
            if not self._is_open(lease):
                del stranded[lease_id]
            elif lease.engine_id != name:
                raise PermissionDenied(
                    f"an engine_id {engine_id!r} has leases under another token's name or none, of before the tokens "
                    "changed: it may call when they have run out"
                )
        if not stranded:
            del self._stranded[engine_id]
