"""What a caller may know about a request that an eviction policy can use. Advice: nothing but the order of eviction
depends on it, and a policy that has no use for a hint ignores it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from radix_cache.errors import InvalidArgument
from radix_cache.tokens import shown

__all__ = ["NO_HINTS", "Hints", "check_hints"]

MAX_PRIORITY = 2**31 - 1
MAX_LABEL_LENGTH = 128
MAX_AMOUNT = 1e15


class Hints(NamedTuple):
    """Hints of one request. Whatever is left out, the policy has a default for.

    priority: the larger, the longer its blocks stay (policy ``priority``), from -MAX_PRIORITY to MAX_PRIORITY.
    priority_s: seconds that the priority holds, from the release on; None: for ever.
    conversation: which conversation it belongs to, up to 128 characters.
    request_type: what kind of request it is (``"chat"``, ``"agent"``, ...), up to 128 characters.
    next_prompt_tokens: how many tokens the conversation's next prompt is expected to add.
    cost_s: seconds that it takes to compute the KV of its whole prompt.
    next_use: how many steps from now whoever shares this prompt runs next.
    """

    priority: int | None = None
    priority_s: float | None = None
    conversation: str = ""
    request_type: str = ""
    next_prompt_tokens: int | None = None
    cost_s: float | None = None
    next_use: float | None = None


NO_HINTS = Hints()


def check_hints(hints: Hints | None) -> Hints:
    """Return ``hints``, or none for None. Raises `InvalidArgument` that names the hint, its value and the limit."""
    if hints is None or hints is NO_HINTS:
        return NO_HINTS
    if not isinstance(hints, Hints):
        raise InvalidArgument(f"hints is a Hints, not {type(hints).__name__}")
    if hints.priority is not None:
        _check_number(hints, "priority", -MAX_PRIORITY, MAX_PRIORITY, int)
    if hints.next_prompt_tokens is not None:
        _check_number(hints, "next_prompt_tokens", 0, 2**62, int)
    for name in ("priority_s", "cost_s", "next_use"):
        if getattr(hints, name) is not None:
            _check_number(hints, name, 0, MAX_AMOUNT, (int, float))
    for name in ("conversation", "request_type"):
        _check_label(name, getattr(hints, name))
    return hints


def _check_number(hints: Hints, name: str, least: float, most: float, kinds: Any) -> None:
    value: Any = getattr(hints, name)
    if isinstance(value, bool) or not isinstance(value, kinds):
        kind = "an integer" if kinds is int else "a number"
        raise InvalidArgument(f"hints.{name} is {kind}, not {shown(value)}")
    if not least <= value <= most:
        raise InvalidArgument(f"hints.{name} is at least {least:.10g} and at most {most:.10g}, not {shown(value)}")


def _check_label(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(f"hints.{name} is a string, not {type(value).__name__}")
    if len(value) > MAX_LABEL_LENGTH:
        raise InvalidArgument(f"hints.{name} has at most {MAX_LABEL_LENGTH} characters, not {len(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"hints.{name} is Unicode text, not {value!a:.60}") from None
