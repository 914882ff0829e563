"""What each method needs of a token, besides that its namespaces are the token's.

Whatever opens a lease or acts on one is ``write``: it takes blocks, or gives back those that a kernel may be using.
What only asks is ``read``. ``admin`` is for what takes from others, or from other engines of the same tenant, what they
count on: evicting, resetting, pinning (all pins share one part of the pool); and for reading out the tokens of a whole
namespace, which nobody needs who knows the prompt. Methods that cannot be told to keep to a namespace are for tokens
that are good for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from radix_cache.errors import PermissionDenied
from radix_cache_service.access.tokens import Grant, Right

__all__ = ["RULES", "Rule", "require"]


class Rule(NamedTuple):
    """right: None for any token. everywhere: the token must be good for all namespaces."""

    right: Right | None = None
    everywhere: bool = False


RULES: Final[Mapping[str, Rule]] = {
    "MatchPrefix": Rule("write"),
    "Allocate": Rule("write"),
    "Insert": Rule("write"),
    "Free": Rule("write"),
    "Release": Rule("write"),
    "Renew": Rule("write"),
    "Pin": Rule("admin"),  # a match that pins; it needs what any match needs as well
    "Probe": Rule("read"),
    "Evict": Rule("admin", everywhere=True),
    "Reset": Rule("admin"),
    "Batch": Rule(),  # each operation is looked at by itself
    "Session": Rule(),
    "GetStats": Rule("read", everywhere=True),
    "Describe": Rule(),
    "DumpTree": Rule("admin"),
    "WatchEvents": Rule("admin", everywhere=True),
    "ListLeases": Rule("admin"),
    "ReleaseEngine": Rule("admin"),
    "ServerReflectionInfo": Rule(),
}
"""By method, and by the operation of the same name. What is not here, nobody with a token may call."""


def require(method: str, grant: Grant, rules: Mapping[str, Rule] = RULES) -> None:
    """Raise `PermissionDenied` unless the grant is good for the method, somewhere."""
    rule = rules.get(method)
    if rule is None:
        raise PermissionDenied(f"no token is good for {method}")
    if rule.right is not None and rule.right not in grant.rights:
        raise PermissionDenied(f"{method} needs the right {rule.right!r}, which token {grant.name!r} has not")
    if rule.everywhere and not grant.covers(()):
        raise PermissionDenied(f"{method} concerns all namespaces, and token {grant.name!r} may not use all")
