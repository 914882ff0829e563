"""Checks of policies' parameters that are no counts (those have `radix_cache.operations.check_count`)."""

from __future__ import annotations

from radix_cache.errors import InvalidArgument
from radix_cache.tokens import shown

__all__ = ["MAX_SECONDS", "check_number"]

MAX_SECONDS = 1e9


def check_number(value: float, what: str, least: float, most: float) -> float:
    """Return ``value`` as a float in [least, most], or raise `InvalidArgument` that names it and the limit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(f"{what} is a number, not {shown(value)}")
    if not least <= value <= most:
        raise InvalidArgument(f"{what} is at least {least:g} and at most {most:g}, not {shown(value)}")
    return float(value)
