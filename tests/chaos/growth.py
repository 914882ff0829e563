"""Whether memory grows for ever.

Two measures. What the kernel says is resident is all that there is, but coarse: allocators keep what they once had.
The number of memory blocks that the server's Python has in use, counted at rest, is exact: a few objects left behind by
every hundredth call show. Only the second half of a process's life counts, after what has a bound has been filled.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_LEAST_S = 120.0  # a shorter life is all warm-up, so only the size is looked at


class Sample(NamedTuple):
    at: float
    value: float


@dataclass
class Growth:
    """One measure of one process. most: how large it may get; most_per_minute: and how fast."""

    most: float
    most_per_minute: float
    samples: list[Sample] = field(default_factory=list)

    def add(self, value: float) -> None:
        """Take a sample."""
        self.samples.append(Sample(time.monotonic(), value))

    @property
    def num_seconds(self) -> float:
        """Seconds between the first sample and the last."""
        return self.samples[-1].at - self.samples[0].at if self.samples else 0.0

    @property
    def last(self) -> float:
        """The last sample."""
        return self.samples[-1].value if self.samples else 0.0

    @property
    def per_minute(self) -> float:
        """The slope of a line through the second half."""
        late = self.samples[len(self.samples) // 2 :]
        if len(late) < 3:
            return 0.0
        mean_at = sum(sample.at for sample in late) / len(late)
        mean = sum(sample.value for sample in late) / len(late)
        spread = sum((sample.at - mean_at) ** 2 for sample in late)
        return 60 * sum((sample.at - mean_at) * (sample.value - mean) for sample in late) / spread

    @property
    def is_flat(self) -> bool:
        """Tell whether it keeps within its limits."""
        return self.last < self.most and (self.num_seconds < _LEAST_S or self.per_minute < self.most_per_minute)


class Growths:
    """All that is measured in a run. What a new process begins with says nothing of the one before it."""

    def __init__(self) -> None:
        self.by_name: dict[str, Growth] = {}
        self.server_began()
        self.engine_began()

    def server_began(self) -> None:
        """There is a new server."""
        self.by_name["server, KiB"] = Growth(256 * 1024, 1024)
        self.by_name["server, Python's blocks"] = Growth(2_000_000, 3_000)

    def engine_began(self) -> None:
        """There is a new engine 0."""
        self.by_name["engine 0, KiB"] = Growth(256 * 1024, 1024)

    def look(self, server: int, engine: int) -> None:
        """Take a sample of what is resident of these processes; nothing of one that is gone."""
        for name, pid in ("server, KiB", server), ("engine 0, KiB", engine):
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
            except (OSError, IndexError):
                continue
            self.by_name[name].add(pages * 4)

    def count(self, num_blocks: int) -> None:
        """The server's Python has so many memory blocks in use, at rest."""
        self.by_name["server, Python's blocks"].add(num_blocks)

    @property
    def are_flat(self) -> bool:
        """Tell whether nothing grows."""
        return all(growth.is_flat for growth in self.by_name.values())
