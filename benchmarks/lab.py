"""``python -m benchmarks.lab TRACE``: LRU's curve at every capacity, against kvcache-simulator's C++ core at 20.

Both start from the parsed trace and end with hit tokens; each round runs one after the other, and the ratio is taken in
the round. Needs kvcache-simulator and a C++ compiler; not one of ``python -m benchmarks``, whose peers are trees.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from kvcache_sim.cpp_backend import ensure_cpp_simulator, run_cpp_sweep
from kvcache_sim.trace import parse_trace_file

from radix_cache.lab import lru_curve, read_trace

T = TypeVar("T")

NUM_CAPACITIES = 20
NUM_ROUNDS = 5


def main(path: str) -> None:
    """Print a line for each round."""
    requests = [request for request in read_trace(path) if request.num_ids]  # theirs skips the others
    theirs = parse_trace_file(path, block_size=requests[0].tokens_per_id)
    num_blocks = lru_curve(requests).num_blocks
    capacities = [num_blocks * step // (2 * NUM_CAPACITIES) for step in range(1, NUM_CAPACITIES + 1)]
    ensure_cpp_simulator()
    for _ in range(NUM_ROUNDS):
        ours_s, curve = timed(lambda: lru_curve(requests))
        theirs_s, swept = timed(
            lambda: run_cpp_sweep(theirs, capacities=capacities, policies=["lru"], warmup_requests=len(requests) // 2)
        )
        num_equal = sum(swept.results["lru", c].hitTokens == curve.last_half.at(c).num_hit_tokens for c in capacities)
        print(
            f"{num_blocks:,} capacities in {ours_s:.3f} s, C++ {NUM_CAPACITIES} in {theirs_s:.3f} s: "
            f"ratio {theirs_s / ours_s:.2f}, equal at {num_equal} of {NUM_CAPACITIES}"
        )


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that ``work`` took, and what it returned."""
    start = time.perf_counter()
    answer = work()
    return time.perf_counter() - start, answer


if __name__ == "__main__":
    main(sys.argv[1])
