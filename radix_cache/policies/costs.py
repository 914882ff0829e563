"""What a token costs to compute, by where it stands: the layers' share is constant, attention's grows on the way.

Positions come in classes, one for each power of two, so that neighbours have equal costs (nodes with equal records can
merge) and a policy whose scores change with time has a bounded number of costs to compare.
"""

from __future__ import annotations

__all__ = ["MAX_POSITION", "position_class", "relative_cost"]

MAX_POSITION = 2.0**62


def position_class(position: int) -> int:
    """Return the class of a position: c holds [2 ** (c - 1), 2 ** c)."""
    return position.bit_length()


def relative_cost(position: int, attention_tokens: float) -> float:
    """Return the cost of a token in the middle of a class, where one at position 0 costs 1.

    attention_tokens: the position at which a token costs 2. For a model of n parameters and l layers of width d it is
    n / (2 * l * d), about 30,000 for 8 billion parameters.
    """
    return 1.0 + 0.75 * 2.0**position / attention_tokens
