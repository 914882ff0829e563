"""The acceptance scenarios, each over every route."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scenarios import SCENARIOS, OpenRoute


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario: Callable[[OpenRoute], None], open_route: OpenRoute) -> None:
    """What an engine sees is the same on every route."""
    scenario(open_route)
