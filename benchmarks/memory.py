"""Memory of a cached leaf of 64 one-token blocks, tokens and ids included, in a fresh process for each contestant.

What counts is what the system says the process holds (RSS), after less before, over the number of leaves.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

from benchmarks import caches, sglang
from benchmarks.options import Options
from benchmarks.prompts import Prompts
from benchmarks.report import Goal, Row
from benchmarks.timing import Spread

TITLE = "memory of a leaf"

_NUM_TOKENS = 64


def run(options: Options) -> list[Row]:
    """One row."""
    num_leaves = options.pick(200_000, 50_000, 2000)
    makes = (*caches.OURS, *options.peers)
    figures = {make.name: _in_a_fresh_process(make.name, num_leaves) for make in makes}
    ours = figures[caches.OurCache.name]
    return [
        Row(
            f"memory of a leaf of {_NUM_TOKENS} one-token blocks, {num_leaves:,} leaves",
            {name: Spread(size, size, size) for name, size in figures.items()},
            unit="bytes",
            ratios={peer.name: Spread(*[figures[peer.name] / ours] * 3) for peer in options.peers},
            goals=(Goal("PrefixCache, bytes", ours, 1024),),
        )
    ]


def _in_a_fresh_process(name: str, num_leaves: int) -> float:
    command = [sys.executable, "-m", "benchmarks.memory", name, str(num_leaves)]
    root = Path(__file__).parent.parent
    return float(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)


def _main(name: str, num_leaves: int) -> None:
    make = next(make for make in (*caches.OURS, *sglang.PEERS) if make.name == name)
    cache, prompts = make(num_leaves * _NUM_TOKENS), Prompts()
    cache.add(cache.key(prompts.one(_NUM_TOKENS)))
    before = _resident_bytes()
    for _ in range(num_leaves - 1):
        cache.add(cache.key(prompts.one(_NUM_TOKENS)))
    gc.collect()
    print((_resident_bytes() - before) / (num_leaves - 1))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
