"""A sweep on a Ray cluster of two nodes on this machine. Ray is heavy: not part of the development set-up."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_traces import chats

from radix_cache.errors import InvalidArgument
from radix_cache.lab import Job, TraceSource, plan_sweep, run_in_processes, sweep
from radix_cache.lab.writing import as_line

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of two nodes with a core each."""
    from ray.cluster_utils import Cluster

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


def test_two_nodes_find_the_same(address: str, tmp_path: Path) -> None:
    from radix_cache.lab.cluster import run_on_ray

    trace = tmp_path / "chats.jsonl"
    trace.write_text("".join(map(as_line, chats(1, 150))))
    jobs = plan_sweep([TraceSource(str(trace))], ["lru", "lfu", "optimal"], [20, 40, 60])
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    sweep(jobs, here, lambda missing: run_in_processes(missing, 1))
    sweep(jobs, there, lambda missing: run_on_ray(missing, address))
    assert here.read_bytes() == there.read_bytes()
    assert not ray.is_initialized(), "it left the cluster"
    with pytest.raises(InvalidArgument, match="num_blocks"):
        list(run_on_ray([Job(TraceSource(str(trace)), "lru", 0)], address))
    ray.init(address=address, log_to_driver=False)
    try:
        assert len([node for node in ray.nodes() if node["Alive"]]) == 2
    finally:
        ray.shutdown()
