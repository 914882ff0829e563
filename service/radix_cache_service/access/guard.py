"""Who may do what. The gate asks at each call, before its message is read; the runner at each operation, alone or in a
batch, before any of it runs.

Nobody learns here whether something exists that is not theirs: a namespace that a token may not use is refused
whether anything is in it or not, and a lease in one is unknown. What an operation of a batch finds is foreseen from
what those before it open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from radix_cache import PrefixCache
from radix_cache.errors import InvalidArgument, PermissionDenied, RadixCacheError, Unauthenticated, UnknownLease
from radix_cache.operations import (
    MAX_NAME_LENGTH,
    Invalid,
    MatchPrefix,
    Namespace,
    Operation,
    Release,
    needed_by,
    opened_by,
)
from radix_cache.stats import TreeNode
from radix_cache_service.access.kept import KeptLeases
from radix_cache_service.access.limits import Client, ClientLimits, Clients, client_of
from radix_cache_service.access.rules import RULES, Rule, require
from radix_cache_service.access.tokens import EVERYTHING, Grant, TokenFile, digest_of
from radix_cache_service.config import ServerConfig

__all__ = ["Guard", "make_guard"]


@dataclass(slots=True)
class Caller:
    """Who makes the call under way. number: of the token file, when ``grant`` was looked up. client: set by `enter`."""

    grant: Grant = EVERYTHING
    digest: bytes = b""
    number: int = 0
    client: Client = field(default_factory=Client)


@dataclass(slots=True)
class _Ahead:
    """What the operations before one in its batch will have done. is_alone: there is no batch."""

    is_alone: bool = False
    opened: dict[str, Namespace] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    doomed: set[str] = field(default_factory=set)  # leases whose match fails, and with it all that names them
    num_leases: int = 0  # more, or fewer, of the caller's
    namespaces: set[Namespace] = field(default_factory=set)  # of what is opened


_caller: ContextVar[Caller] = ContextVar("caller")


class Guard:
    """Stands before one cache, on its event loop. tokens: None where everybody may do everything, within the limits.

    rules: what each method needs. had_tokens: whether there were any before, see `KeptLeases`.
    """

    def __init__(
        self,
        tokens: TokenFile | None,
        limits: ClientLimits,
        cache: PrefixCache,
        rules: Mapping[str, Rule] = RULES,
        had_tokens: bool | None = None,
    ) -> None:
        self.tokens = tokens
        self._rules = rules
        self._clients = Clients(limits, cache)
        self._cache = cache
        self._kept = KeptLeases(cache, None if tokens is None else tokens.names, had_tokens)

    @property
    def is_needed(self) -> bool:
        """Whether anybody may ever be refused."""
        return self.tokens is not None or self._clients.limits != ClientLimits() or self._kept.has_stranded

    def refresh(self) -> None:
        """Look whether the tokens were changed. To be called every now and then."""
        if self.tokens is not None:
            names = self.tokens.names
            self.tokens.refresh()
            if gone := names - self.tokens.names:
                self._kept.tokens_gone(gone)

    # At the gate.

    def identify(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
        """Return who calls, for this call's task. Raises `Unauthenticated`, `PermissionDenied`."""
        caller = Caller()
        if self.tokens is not None:
            caller.digest = digest_of(_bearer(metadata))
            self._look_up(caller, self.tokens)
        require(method, caller.grant, self._rules)
        _caller.set(caller)
        return caller

    def enter(self, caller: Caller, context: Any, is_stream: bool) -> None:
        """Count a call while it lasts, up to `leave`. Raises `LimitExceeded`."""
        client = caller.client = self._clients.get(caller.grant.name or client_of(context))
        for lease in self._kept.of_owner(caller.grant.name) if self.tokens is not None else ():
            self._clients.opened(client, lease)
        if is_stream:
            self._clients.limits.check("max_streams_per_client", client.num_streams)
            client.num_streams += 1
        else:
            self._clients.limits.check("max_calls_per_client", client.num_calls)
            client.num_calls += 1

    def leave(self, caller: Caller, is_stream: bool) -> None:
        """The call is over."""
        if is_stream:
            caller.client.num_streams -= 1
        else:
            caller.client.num_calls -= 1

    def _look_up(self, caller: Caller, tokens: TokenFile) -> None:
        grant = tokens.find(caller.digest)
        if grant is None:
            raise Unauthenticated("this token is not known here")
        caller.grant, caller.number = grant, tokens.number

    # In the runner.

    def _current(self) -> Caller:
        """Return who calls; in a stream, with what the token grants by now."""
        caller = _caller.get()
        if self.tokens is not None and caller.number != self.tokens.number:
            self._look_up(caller, self.tokens)
        return caller

    def check_stream(self, method: str) -> None:
        """Raise what ends a stream of the caller's that is under way: its token is gone, or grants less by now."""
        require(method, self._current().grant)

    def engine(self, engine_id: str) -> str:
        """Return the name under which the cache knows the caller's engine: nobody keeps another's leases alive, or
        asks for the answers to its batches.
        """
        if not engine_id:
            return engine_id
        if self.tokens is None:
            self._kept.check_engine(engine_id, engine_id)
            for lease in self._kept.of_owner(engine_id):
                self._clients.opened(_caller.get().client, lease)
            return engine_id
        name = f"{self._current().grant.name}/{engine_id}"
        if len(name) > MAX_NAME_LENGTH:
            most = MAX_NAME_LENGTH - len(name) + len(engine_id)
            raise InvalidArgument(f"engine_id has at most {most} characters with this token, not {len(engine_id)}")
        self._kept.check_engine(engine_id, name)
        return name

    def check(self, operation: Operation) -> None:
        """Raise what forbids an operation: `PermissionDenied`, `UnknownLease`, `LimitExceeded`."""
        self._check(operation, self._current(), _Ahead(is_alone=True))

    def check_all(self, operations: Iterable[Operation]) -> list[Operation]:
        """Return the operations of a batch with the forbidden ones made `Invalid`.

        Exact but for one thing: a match counts against the limits as if it will succeed.
        """
        caller, ahead = self._current(), _Ahead()
        return [self._checked(operation, caller, ahead) for operation in operations]

    def _checked(self, operation: Operation, caller: Caller, ahead: _Ahead) -> Operation:
        try:
            if not isinstance(operation, Invalid):
                self._check(operation, caller, ahead)
                return operation
        except RadixCacheError as error:
            operation = Invalid(error, opened_by(operation))
        if operation.opens is not None:
            ahead.doomed.add(operation.opens)
        return operation

    def _check(self, operation: Operation, caller: Caller, ahead: _Ahead) -> None:
        require(type(operation).__name__, caller.grant)
        namespace = self._where(operation, caller.grant, ahead)
        if isinstance(operation, MatchPrefix):
            if operation.pin_s is not None:
                require("Pin", caller.grant)
            if namespace is None:
                ahead.doomed.add(operation.lease_id)
            else:
                self._check_opening(operation.lease_id, namespace, caller, ahead)
        elif isinstance(operation, Release):
            self._foresee_release(operation.lease_id, caller.client, ahead)

    def _where(self, operation: Operation, grant: Grant, ahead: _Ahead) -> Namespace | None:
        """Return the namespace that an operation is about, if it may be; None: the cache won't find its lease."""
        needed = needed_by(operation)
        if needed is None:
            namespace: Namespace = getattr(operation, "namespace", ())
            if not grant.covers(namespace):
                raise PermissionDenied(f"token {grant.name!r} may not use this namespace")
            return namespace
        if needed in ahead.doomed:
            return None
        found = ahead.opened[needed] if needed in ahead.opened else self._cache.namespace_of(needed)
        if not grant.covers(()) and (found is None or not grant.covers(found)):
            raise UnknownLease(needed)
        return found

    def _check_opening(self, lease_id: str, namespace: Namespace, caller: Caller, ahead: _Ahead) -> None:
        client = caller.client
        is_new = lease_id not in ahead.opened
        if is_new:
            known = self._namespace_of(lease_id) if lease_id not in ahead.released else None
            if known is not None and not (ahead.is_alone and caller.grant.covers(known)):
                raise InvalidArgument(f"lease_id {lease_id!r} is in use")
            if known is not None and lease_id in client.leases:
                return  # it is asked for again
            self._clients.check_leases(client, ahead.num_leases)
        self._clients.check_namespaces(client, namespace, ahead.namespaces)
        ahead.namespaces.add(namespace)
        ahead.num_leases += is_new
        ahead.opened[lease_id] = namespace
        ahead.doomed.discard(lease_id)

    def _namespace_of(self, lease_id: str) -> Namespace | None:
        """Return where a live lease has its tokens."""
        lease = self._cache.lease_of(lease_id)
        return None if lease is None else lease.namespace

    def _foresee_release(self, lease_id: str, client: Client, ahead: _Ahead) -> None:
        if lease_id in ahead.doomed:
            return
        if lease_id in ahead.opened:
            del ahead.opened[lease_id]
            ahead.num_leases -= 1
        elif lease_id not in ahead.released:
            ahead.num_leases -= lease_id in client.leases and self._cache.lease_of(lease_id) is not None
        ahead.released.add(lease_id)

    def done(self, operation: Operation, value: Any) -> None:
        """Note what an operation of the caller's came to."""
        if isinstance(operation, MatchPrefix):
            self._clients.opened(_caller.get().client, value)
        elif isinstance(operation, Release):
            self._clients.ended(operation.lease_id)
        else:
            for lease in self._kept.of_nobody(needed_by(operation)):
                self._clients.opened(_caller.get().client, lease)

    def visible(self, namespace: Namespace) -> list[Namespace]:
        """Return prefixes, none within another, that hold all that the caller may see under ``namespace``.

        Raises `PermissionDenied` if that is nothing.
        """
        grant = self._current().grant
        if grant.covers(namespace):
            return [namespace]
        below = {prefix for prefix in grant.namespaces if prefix[: len(namespace)] == namespace}
        if not below:
            raise PermissionDenied(f"token {grant.name!r} may not use this namespace")
        return sorted(each for each in below if not any(each[: len(up)] == up for up in below - {each}))

    def veiled(self, rows: list[TreeNode]) -> list[TreeNode]:
        """Return rows of a dump as the caller may see them: an age counts what everybody does."""
        if self._current().grant.covers(()):
            return rows
        return [replace(row, age=0) for row in rows]


def make_guard(config: ServerConfig, cache: PrefixCache, had_tokens: bool | None) -> Guard | None:
    """Return what guards ``cache``; None where neither the settings nor the leases of before ask for it."""
    guard = Guard(config.make_tokens(), config.client_limits, cache, had_tokens=had_tokens)
    return guard if guard.is_needed else None


def _bearer(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    said = [value for key, value in metadata or () if key == "authorization"]
    scheme, _, token = str(said[0]).partition(" ") if len(said) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("a token is needed here, as in authorization: Bearer TOKEN")
    return token
