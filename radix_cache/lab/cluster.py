"""Sweeps on a Ray cluster. Each node needs radix-cache, and the traces and policy files at the same paths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from radix_cache.lab.sweep import Job, play
from radix_cache.lab.tables import Row

__all__ = ["run_on_ray"]

_NUM_AHEAD = 4  # jobs for each core that are handed over at a time


def run_on_ray(jobs: Sequence[Job], address: str) -> Iterator[tuple[Job, Row]]:
    """Play ``jobs`` on the cluster at ``address`` (``auto``: the one of this machine); yield each row when it is there.

    Joins the cluster, and leaves it at the end, unless this process is in it already. Raises `ModuleNotFoundError`
    without ray, `ConnectionError` where no cluster is, and what playing raises.
    """
    import ray  # noqa: PLC0415 - only who has a cluster needs it

    if not jobs:
        return
    joins = not ray.is_initialized()
    if joins:
        ray.init(address=address, log_to_driver=False)
    try:
        remote = ray.remote(max_retries=3)(play)
        num_ahead = max(int(ray.cluster_resources().get("CPU", 1)) * _NUM_AHEAD, 1)
        waiting = list(reversed(jobs))
        running: dict[Any, Job] = {}
        while waiting or running:
            while waiting and len(running) < num_ahead:
                job = waiting.pop()
                running[remote.remote(job)] = job
            (done,), _ = ray.wait(list(running))
            job = running.pop(done)
            try:
                yield job, ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None  # what playing raised, without the worker's wrapping
    finally:
        if joins:
            ray.shutdown()
