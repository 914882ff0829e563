"""Eviction policies: the built-in ones by name, a user's own by ``"module:Class"``, by entry point, or as an object."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points

from radix_cache.errors import InvalidArgument
from radix_cache.policies.base import EvictionPolicy
from radix_cache.policies.lru import LRU

__all__ = ["LRU", "EvictionPolicy", "make_policy"]

_BUILT_IN: dict[str, Callable[[], EvictionPolicy]] = {policy.name: policy for policy in (LRU,)}


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """Return the policy that ``policy`` names: built in, ``"module:Class"``, or an entry point in
    `radix_cache.policies`.

    An object is returned as it is; it must not serve two trees. Raises `InvalidArgument` for an unknown name.
    """
    if isinstance(policy, EvictionPolicy):
        return policy
    if not isinstance(policy, str):
        raise InvalidArgument(f"policy is a name or an EvictionPolicy, not {type(policy).__name__}")
    made = _find(policy)()
    if not isinstance(made, EvictionPolicy):
        raise InvalidArgument(f"policy {policy!r} makes a {type(made).__name__}, which is no EvictionPolicy")
    return made


def _find(name: str) -> Callable[[], EvictionPolicy]:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found: Callable[[], EvictionPolicy] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise InvalidArgument(f"policy {name!r} cannot be imported: {error}") from error
        return found
    for point in entry_points(group="radix_cache.policies", name=name):
        loaded: Callable[[], EvictionPolicy] = point.load()
        return loaded
    raise InvalidArgument(f"policy {name!r} is neither built in ({', '.join(_BUILT_IN)}) nor an entry point")
