"""What SGLang evicts, and in which order: run by the Python that has it, with scripts as JSON on stdin.

A script is ``[policy, parameters, steps]``. A step is ``["insert", tokens, priority]``, ``["match", tokens]`` or
``["evict", number]``; it answers what each eviction freed, as the numbers that the blocks got when they came.
"""

from __future__ import annotations

import json
import sys
from array import array
from typing import Any

from benchmarks.sglang import SGLang


class Recording(SGLang):
    """The cache that SGLang runs by default, with an eviction policy, a log of what is freed, and numbered slots."""

    def __init__(self, policy: str, parameters: dict[str, Any]) -> None:
        self._policy, self._parameters = policy, parameters
        super().__init__(10_000)
        self.freed: list[int] = []
        free = self.allocator.free

        def noted(slots: Any) -> None:
            self.freed += [self._numbers[slot] for slot in slots.tolist()]
            free(slots)

        self.allocator.free = noted
        self._numbers: dict[int, int] = {}
        self._num_blocks = 0

    def _make(self, params: Any) -> Any:
        params.eviction_policy, params.eviction_policy_config = self._policy, self._parameters or None
        return super()._make(params)

    def insert(self, tokens: list[int], priority: int | None) -> None:
        """Match, lock, insert, unlock, as for a request."""
        key, slots, num_matched, lock = self.open(self._lib.RadixKey(array("q", tokens)))
        for slot in slots[num_matched:].tolist():
            self._num_blocks += 1
            self._numbers[slot] = self._num_blocks
        params = self._insert_params(key=key, value=slots, prev_prefix_len=num_matched, priority=priority or 0)
        self.cache.insert(params)
        self.cache.unlock(lock)

    def match(self, tokens: list[int]) -> None:
        """Match, lock, unlock."""
        self.use(self._lib.RadixKey(array("q", tokens)))

    def play(self, steps: list[list[Any]]) -> list[list[int]]:
        """Return what each eviction freed."""
        answers = []
        for verb, *arguments in steps:
            if verb == "evict":
                self.freed.clear()
                self.evict(*arguments)
                answers.append(list(self.freed))
            else:
                getattr(self, verb)(*arguments)
        return answers


if __name__ == "__main__":
    print(json.dumps([Recording(policy, parameters).play(steps) for policy, parameters, steps in json.load(sys.stdin)]))
