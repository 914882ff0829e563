"""The lease clock: a file, which the server and every engine read, and which moves only while nobody is at the memory.

That makes the rule "past ``valid_until`` an engine touches nothing" checkable without a margin: an engine that has
looked at the clock inside the fence knows that no lease runs out before it leaves.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from .memory import Fence

_TICK_S = 0.02


class FileClock:
    """Reads the time at each call."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __call__(self) -> float:
        file = os.open(self._path, os.O_RDONLY)
        try:
            return float(os.read(file, 64))
        finally:
            os.close(file)


class LeaseClock(threading.Thread):
    """Moves the clock: at the pace of time, and by jumps. num_ticks, slowest_tick_s: how well that went."""

    def __init__(self, path: Path, fence: Fence) -> None:
        super().__init__(name="lease clock", daemon=True)
        self.num_ticks = 0
        self.slowest_tick_s = 0.0
        self._path = path
        self._fence = fence
        self._ahead_s = 0.0
        self._ended = threading.Event()
        self._write()

    def run(self) -> None:
        """Tick until stopped."""
        while not self._ended.wait(_TICK_S):
            started = time.monotonic()
            self.jump(0.0)
            self.num_ticks += 1
            self.slowest_tick_s = max(self.slowest_tick_s, time.monotonic() - started)

    def jump(self, seconds: float) -> None:
        """Let so much more time have passed, at once, for everybody."""
        with self._fence.exclusive():
            self._ahead_s += seconds
            self._write()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        if self.is_alive():
            self.join()

    def _write(self) -> None:
        """A reader sees the time of before or of after, never an empty file."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(repr(time.monotonic() + self._ahead_s), encoding="ascii")
        fresh.replace(self._path)
