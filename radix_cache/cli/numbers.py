"""A number on the command line that is one: neither NaN nor infinite, which click's ranges let through."""

from __future__ import annotations

import math
from typing import Any

import click

__all__ = ["Number"]


class Number(click.FloatRange):
    """A finite number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or fail with a usage error."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number
