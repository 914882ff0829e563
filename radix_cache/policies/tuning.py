"""A weight that is found by trying: the last requests are replayed with each, and the best one is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radix_cache.node import Node
from radix_cache.policies.replaying import Replayed, Window

__all__ = ["Tuner"]

_WEIGHTS = (0.0, 0.001, 0.01, 0.1, 1.0)
_MARGIN = 1.05


class Tuner:
    """Notes requests, and after each ``num_requests`` of them tries one weight for each request that follows.

    Then the weight that would have found the most is in force, or 0 unless that is 5 % more than 0 would have found. So
    a call is held up by one replay, and five in all come to each window. make_policy: makes one with that weight.
    """

    def __init__(self, num_requests: int, make_policy: Callable[[float], Replayed]) -> None:
        self.weight = _WEIGHTS[0]
        self._make_policy = make_policy
        self._window = Window(num_requests)
        self._is_evicting = False
        self._found: list[int] = []  # hit tokens by weight, of a window that is full

    def add(self, node: Node, num_tokens: int, continues: bool) -> None:
        """Note a request, see `Window.add`, or try a weight."""
        if not self._window.is_full:
            self._window.add(node, num_tokens, continues)
            return
        policy = self._make_policy(_WEIGHTS[len(self._found)])
        self._found.append(self._window.hit_tokens(policy) if self._is_evicting else 0)
        if len(self._found) == len(_WEIGHTS):
            self._choose()

    def _choose(self) -> None:
        best = max(self._found)
        self.weight = _WEIGHTS[self._found.index(best) if best > _MARGIN * self._found[0] else 0]
        self._found.clear()
        self._window.clear()
        self._is_evicting = False

    def evicted(self) -> None:
        """Note that the cache is full: before that, no weight finds more than another."""
        self._is_evicting = True

    def saved(self) -> list[Any]:
        """Return all that is known."""
        return [self.weight, self._is_evicting, self._found[:], self._window.saved()]

    def restore(self, saved: list[Any]) -> None:
        """Take up what `saved` returned."""
        self.weight, self._is_evicting, found, window = saved
        self._found = list(found)
        self._window.restore(window)
