"""What libCacheSim hits: run by the Python that has it, with ``[policies, capacity, uses]`` as JSON on stdin.

Objects are of size one. It answers, for each policy, which uses were hits, as a string of 0 and 1.
"""

from __future__ import annotations

import json
import sys

import libcachesim


def hits(policy: str, capacity: int, uses: list[int]) -> str:
    """Return a digit for each use."""
    cache = getattr(libcachesim, policy)(cache_size=capacity)
    found = []
    for use in uses:
        request = libcachesim.Request()
        request.obj_id, request.obj_size = use, 1
        found.append("01"[cache.get(request)])
    return "".join(found)


if __name__ == "__main__":
    policies, capacity, uses = json.load(sys.stdin)
    print(json.dumps([hits(policy, capacity, uses) for policy in policies]))
