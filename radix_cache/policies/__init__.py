"""Eviction policies: built in by name, a user's own by ``"module:Class"``, by entry point, or as an object.

A name may carry parameters: ``"slru:protected_hits=3"``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points

from radix_cache.errors import InvalidArgument
from radix_cache.policies.base import EvictionPolicy
from radix_cache.policies.classed import ClassedPolicy
from radix_cache.policies.flops import FlopAware
from radix_cache.policies.frequency import LFU, LFUDA, SLRU
from radix_cache.policies.lru import LRU
from radix_cache.policies.pgdsf import PGDSF
from radix_cache.policies.priority import Priority
from radix_cache.policies.recency import FIFO, FILO, MRU
from radix_cache.policies.scored import ScoredPolicy
from radix_cache.policies.steps import StepsToExecution
from radix_cache.policies.tlru import TLRU
from radix_cache.policies.two_hit import TwoHit
from radix_cache.policies.workload import WorkloadAware

__all__ = [
    "BUILT_IN",
    "FIFO",
    "FILO",
    "LFU",
    "LFUDA",
    "LRU",
    "MRU",
    "PGDSF",
    "SLRU",
    "TLRU",
    "ClassedPolicy",
    "EvictionPolicy",
    "FlopAware",
    "Priority",
    "ScoredPolicy",
    "StepsToExecution",
    "TwoHit",
    "WorkloadAware",
    "make_policy",
]

BUILT_IN: dict[str, type[EvictionPolicy]] = {
    policy.name: policy
    for policy in (
        LRU,
        LFU,
        FIFO,
        FILO,
        MRU,
        SLRU,
        Priority,
        LFUDA,
        TwoHit,
        TLRU,
        PGDSF,
        WorkloadAware,
        FlopAware,
        StepsToExecution,
    )
}


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """Return the policy that ``policy`` names: built in, ``"module:Class"``, or an entry point in
    `radix_cache.policies`.

    A name may be followed by parameters, as in ``"slru:protected_hits=3"``. An object is returned as it is; it must not
    serve two trees. Raises `InvalidArgument` for an unknown name or parameter.
    """
    if isinstance(policy, EvictionPolicy):
        return policy
    if not isinstance(policy, str):
        raise InvalidArgument(f"policy is a name or an EvictionPolicy, not {type(policy).__name__}")
    make, parameters = _find(policy)
    try:
        made = make(**parameters)
    except (TypeError, InvalidArgument) as error:
        raise InvalidArgument(f"policy {policy!r}: {error}") from error
    if not isinstance(made, EvictionPolicy):
        raise InvalidArgument(f"policy {policy!r} makes a {type(made).__name__}, which is no EvictionPolicy")
    return made


def _find(policy: str) -> tuple[Callable[..., EvictionPolicy], dict[str, int | float | str]]:
    name, colon, rest = policy.partition(":")
    if name in BUILT_IN:
        return BUILT_IN[name], _parameters(policy, rest)
    for point in entry_points(group="radix_cache.policies", name=name):
        return point.load(), _parameters(policy, rest)
    if colon:
        attribute, _, parameters = rest.partition(":")
        return _import(policy, name, attribute), _parameters(policy, parameters)
    raise InvalidArgument(f"policy {policy!r} is neither built in ({', '.join(BUILT_IN)}) nor an entry point")


def _import(policy: str, module: str, attribute: str) -> Callable[..., EvictionPolicy]:
    try:
        found: Callable[..., EvictionPolicy] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise InvalidArgument(f"policy {policy!r} cannot be imported: {error}") from error
    return found


def _parameters(policy: str, text: str) -> dict[str, int | float | str]:
    """Read ``"a=1,b=0.5"``."""
    parameters: dict[str, int | float | str] = {}
    for pair in filter(None, text.split(",")):
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidArgument(f"policy {policy!r}: {pair!r} is not of the form name=value")
        name = name.strip()
        if name in parameters:
            raise InvalidArgument(f"policy {policy!r}: {name} is given twice")
        parameters[name] = _number(value.strip())
    return parameters


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
