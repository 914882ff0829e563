"""Leases of before the start, which a state directory brought back: whose they are.

With tokens, an engine's leases are known under the name of its token, and so is the client that they count for. Without
tokens, whoever calls as their engine, or works on them, is taken for whom they were opened.

An engine whose token has got another name meanwhile, or that needs a token only now, can't keep its leases of before
alive, but would believe so: its calls are answered. So whoever calls under such an engine's id is refused until these
leases have run out, which no call of theirs prevents. It may hit another tenant's engine of the same id: for one ttl,
and after such a restart only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from radix_cache import LeaseInfo, PrefixCache
from radix_cache.errors import PermissionDenied

__all__ = ["KeptLeases"]


class KeptLeases:
    """What is open in ``cache`` now. token_names: None where no tokens are asked for."""

    def __init__(self, cache: PrefixCache, token_names: Collection[str] | None) -> None:
        self._cache = cache
        self._by_owner: defaultdict[str, list[LeaseInfo]] = defaultdict(list)
        self._alone: dict[str, LeaseInfo] = {}
        self._stranded: defaultdict[str, set[str]] = defaultdict(set)
        for info in cache.leases():
            if info.engine_id is None:
                self._alone[info.lease_id] = info
                continue
            party, _, engine_id = info.engine_id.partition("/")
            self._by_owner[info.engine_id if token_names is None else party].append(info)
            if token_names is not None and not (engine_id and party in token_names):
                self._stranded[engine_id or party].add(info.engine_id)

    def of_owner(self, name: str) -> list[LeaseInfo]:
        """Return those of a token's engines, or without tokens of an engine, that are still open; once."""
        return [info for info in self._by_owner.pop(name, ()) if self._cache.lease_of(info.lease_id) is not None]

    def of_nobody(self, lease_id: str | None) -> list[LeaseInfo]:
        """Return the one of this name if it has no engine; once."""
        info = self._alone.pop(lease_id, None) if lease_id and self._alone else None
        return [] if info is None else [info]

    def check_engine(self, engine_id: str, name: str) -> None:
        """Raise `PermissionDenied` while leases are open that were this engine's under another name than ``name``."""
        if engine_id not in self._stranded:
            return
        names = self._stranded[engine_id] - {name}
        if any(map(self._cache.leases, names)):
            raise PermissionDenied(
                f"an engine_id {engine_id!r} has leases of before the restart, under another token's name or none: "
                "it may call when they have run out"
            )
        del self._stranded[engine_id]
