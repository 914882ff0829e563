"""What all processes can see: the totals of each engine, and whether to go on. It outlives whoever is killed.

A row of 64-bit numbers for each engine, written by that engine alone, and a last row, written by the conductor.
"""

from __future__ import annotations

import mmap
import zlib
from pathlib import Path

TOTALS = (
    "num_steps",
    "num_messages",
    "num_operations",
    "num_finished",
    "num_aborted",
    "num_preempted",
    "num_forks",
    "num_handed_over",
    "num_taken_over",
    "num_released_after_death",  # leases of an engine's life before, by its next
    "num_refused",  # for lack of blocks
    "num_lost_leases",
    "num_stale_leases",
    "num_cut_off",  # times that an engine kept away from the memory
    "num_reused_tokens",
    "num_computed_tokens",
    "num_checked_blocks",
    "num_acknowledged_blocks",  # published by inserts that were answered
    "num_probed",
    # Faults that an engine does to its own calls.
    "call_deadline",
    "call_cancelled",
    "reply_lost",
    "reply_lost_then_repeated",
    "batch_sent_again",
    "stream_dropped",
)
_CONTROLS = ("is_parked", "is_gate_closed", "epoch_mark", "num_acknowledged_in_epoch")
_NAMES = {name: at for at, name in enumerate((*TOTALS, *_CONTROLS))}


class Board:
    """Maps the file that `create` made."""

    def __init__(self, path: Path, num_engines: int) -> None:
        with path.open("r+b") as file:
            self._cells = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        self.num_engines = num_engines

    @staticmethod
    def create(path: Path, num_engines: int) -> None:
        """Make a file of zeros."""
        with path.open("wb") as file:
            file.truncate(8 * len(_NAMES) * (num_engines + 1))

    def get(self, engine: int, name: str) -> int:
        """Return a number of an engine's."""
        return self._cells[engine * len(_NAMES) + _NAMES[name]]

    def set(self, engine: int, name: str, value: int) -> None:
        """Replace a number of an engine's."""
        self._cells[engine * len(_NAMES) + _NAMES[name]] = value

    def add(self, engine: int, name: str, amount: int = 1) -> None:
        """Add to a number of an engine's; for that engine only."""
        self._cells[engine * len(_NAMES) + _NAMES[name]] += amount

    def total(self, name: str) -> int:
        """Return the sum over all engines."""
        return sum(self.get(engine, name) for engine in range(self.num_engines))

    def acknowledge(self, engine: int, epoch: str, num_blocks: int) -> None:
        """Count blocks published by an insert that was answered, in all and in this epoch."""
        self.add(engine, "num_acknowledged_blocks", num_blocks)
        if self.get(engine, "epoch_mark") != _mark(epoch):
            self.set(engine, "epoch_mark", _mark(epoch))
            self.set(engine, "num_acknowledged_in_epoch", 0)
        self.add(engine, "num_acknowledged_in_epoch", num_blocks)

    def num_acknowledged_in(self, epoch: str) -> int:
        """Return how many blocks answered inserts have published in this epoch."""
        engines = [engine for engine in range(self.num_engines) if self.get(engine, "epoch_mark") == _mark(epoch)]
        return sum(self.get(engine, "num_acknowledged_in_epoch") for engine in engines)

    @property
    def is_gate_closed(self) -> bool:
        """Tell whether engines are to wait between two steps."""
        return bool(self.get(self.num_engines, "is_gate_closed"))

    def close_gate(self, is_closed: bool) -> None:
        """Let engines wait between two steps, or go on."""
        self.set(self.num_engines, "is_gate_closed", is_closed)


def _mark(epoch: str) -> int:
    return zlib.crc32(epoch.encode())
