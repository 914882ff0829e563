"""What each client has open, and how much it may: one that runs wild is stopped at its own limits.

A client is whoever a token names; without tokens, whom its certificate names, and else the host that it calls from (all
that come through unix sockets are one). Of what a state directory brought back, leases count as
`radix_cache_service.access.kept` says; namespaces in which no lease is open count from when they are used again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from radix_cache import Lease, PrefixCache
from radix_cache.errors import LimitExceeded
from radix_cache.operations import Namespace

__all__ = ["Client", "ClientLimits", "Clients", "client_of"]

_MANY = 4096


class ClientLimits(NamedTuple):
    """The most that one client may have open at once, by the names of the settings; None: no limit."""

    max_calls_per_client: int | None = None
    max_streams_per_client: int | None = None
    max_leases_per_client: int | None = None
    max_namespaces_per_client: int | None = None

    def check(self, name: str, num_open: int) -> None:
        """Raise `LimitExceeded` unless one more may be opened."""
        if self.is_reached(name, num_open):
            raise LimitExceeded(name, getattr(self, name))

    def is_reached(self, name: str, num_open: int) -> bool:
        """Tell whether one more would be too many."""
        most: int | None = getattr(self, name)
        return most is not None and num_open >= most


class Client:
    """One client. leases, namespaces: those that it opened and used; the ones that are gone are noticed late."""

    __slots__ = ("leases", "namespaces", "num_calls", "num_streams")

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_streams = 0
        self.leases: set[str] = set()
        self.namespaces: set[Namespace] = set()


class Clients:
    """All clients by name. What has no limit is not counted."""

    def __init__(self, limits: ClientLimits, cache: PrefixCache) -> None:
        self.limits = limits
        self._cache = cache
        self._by_name: dict[str, Client] = {}
        self._owners: dict[str, Client] = {}

    def get(self, name: str) -> Client:
        """Return the client of this name. Of very many, those that have nothing open are forgotten now and then."""
        client = self._by_name.get(name)
        if client is None:
            if len(self._by_name) >= _MANY:
                self._by_name = {each: known for each, known in self._by_name.items() if self._has_anything(known)}
            client = self._by_name[name] = Client()
        return client

    def _has_anything(self, client: Client) -> bool:
        self._prune(client)
        return bool(client.num_calls or client.num_streams or client.leases)

    def opened(self, client: Client, lease: Lease) -> None:
        """A client has this lease, perhaps again."""
        if self.limits.max_leases_per_client is not None:
            self.ended(lease.lease_id)  # an id that expired may be used again, by anybody
            self._owners[lease.lease_id] = client
            client.leases.add(lease.lease_id)
        if self.limits.max_namespaces_per_client is not None:
            client.namespaces.add(lease.namespace)

    def ended(self, lease_id: str) -> None:
        """A lease is gone. Those that expire may go unsaid."""
        owner = self._owners.pop(lease_id, None)
        if owner is not None:
            owner.leases.discard(lease_id)

    def check_leases(self, client: Client, num_more: int) -> None:
        """Raise `LimitExceeded` unless there is room for one lease besides ``num_more``. O(leases) near the limit."""
        if self.limits.is_reached("max_leases_per_client", len(client.leases) + num_more):
            self._prune(client)
            self.limits.check("max_leases_per_client", len(client.leases) + num_more)

    def _prune(self, client: Client) -> None:
        for lease_id in [each for each in client.leases if self._cache.lease_of(each) is None]:
            self.ended(lease_id)

    def check_namespaces(self, client: Client, namespace: Namespace, more: set[Namespace]) -> None:
        """Raise `LimitExceeded` if this were one namespace too many, besides ``more``."""
        if namespace in client.namespaces or namespace in more:
            return
        if self.limits.is_reached("max_namespaces_per_client", len(client.namespaces | more)):
            client.namespaces = set(filter(self._cache.has_namespace, client.namespaces))
            self.limits.check("max_namespaces_per_client", len(client.namespaces | more))


def client_of(context: Any) -> str:
    """Return the name of a client that has no token."""
    identities = context.peer_identities()
    if identities:
        name: str = next(iter(identities)).decode(errors="replace")
        return f"certificate {name}"
    peer: str = context.peer()
    kind, _, rest = peer.partition(":")
    return f"{kind} {rest.rpartition(':')[0]}" if kind in {"ipv4", "ipv6"} else kind
