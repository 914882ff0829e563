"""Four servers, an engine on each, requests of many tenants: round robin, then the router, then with a node killed.

``make cluster``, or ``python examples/cluster.py --json``; it needs the extras service, events and router. Servers and
router are processes on the loopback interface (`cluster_nodes.py`). Each run begins with empty caches and plays the
same requests, as many at once as ``--in-flight`` says. A pool is far too small for what all tenants share, so it
matters who is asked. The exit status is 1 if the router did not do what it is there for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

from cluster_nodes import Node, Process, Request, Tenants, Work

from radix_cache.cli.show import count, make_console, make_table, percent
from radix_cache.errors import RadixCacheError, ServiceUnavailable
from radix_cache_service import Router

LEAST_GAIN = 1.8  # in hit rate, over round robin
MOST_SPREAD = 1.5
_LIMIT_S = 30.0


class Run(NamedTuple):
    """What came of one run. noticed_s: seconds until the router noticed that a node was gone, and that it was back."""

    name: str
    seconds: float
    nodes: dict[str, Work]
    noticed_s: tuple[float, ...] = ()
    num_repeated: int = 0

    @property
    def hit_rate(self) -> float:
        works = self.nodes.values()
        return sum(work.num_cached_tokens for work in works) / sum(work.num_prompt_tokens for work in works)

    @property
    def spread(self) -> float:
        """The most that one node had to compute, over the mean."""
        computed = [work.num_computed_tokens for work in self.nodes.values()]
        return max(computed) * len(computed) / sum(computed)

    def as_dict(self) -> dict[str, Any]:
        nodes = {name: work._asdict() for name, work in self.nodes.items()}
        return {**self._asdict(), "nodes": nodes, "hit_rate": self.hit_rate, "spread": self.spread}


class Cluster:
    """The nodes, the router, and how many requests are in flight at once."""

    def __init__(self, num_nodes: int, num_blocks: int, in_flight: int) -> None:
        self.nodes: dict[str, Node] = {}
        with ExitStack() as opened:
            for number in range(1, num_nodes + 1):
                node = self.nodes[f"node-{number}"] = Node(f"node-{number}", num_blocks)
                opened.callback(node.close)
            process = Process("route", *(f"--node={name}={node.address}" for name, node in self.nodes.items()))
            opened.callback(process.stop)
            self.router = opened.enter_context(Router(process.address))
            self._open = opened.pop_all()
        self._in_flight = in_flight

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def run(
        self,
        name: str,
        requests: Sequence[Request],
        serve: Callable[[Request], int],
        meanwhile: Callable[[Callable[[], int]], tuple[float, ...]] = lambda _: (),
    ) -> Run:
        """Play all requests from empty caches. serve: does one, returns how often it had to be tried again."""
        for node in self.nodes.values():
            node.client.reset()
            node.work = Work()
        served: list[int] = []
        began = time.monotonic()
        with ThreadPoolExecutor(self._in_flight) as engines:
            futures = [engines.submit(lambda each: served.append(serve(each)), request) for request in requests]
            noticed_s = meanwhile(lambda: len(served))
            for future in futures:
                future.result()
        seconds = time.monotonic() - began
        return Run(name, seconds, {name: node.work for name, node in self.nodes.items()}, noticed_s, sum(served))

    # Ways to choose a node.

    def round_robin(self) -> Callable[[Request], int]:
        turns, turn = itertools.cycle(self.nodes.values()), threading.Lock()

        def serve(request: Request) -> int:
            with turn:
                node = next(turns)
            node.serve(request.tokens, request.namespace)
            return 0

        return serve

    def routed(self, request: Request) -> int:
        """Ask the router, and ask it again if the node ends meanwhile."""
        for num_repeated in itertools.count():
            with self.router.route(request.tokens, request.namespace) as routed:
                try:
                    self.nodes[routed.node].serve(request.tokens, request.namespace)
                    return num_repeated
                except RadixCacheError:
                    if self.state(routed.node) == "serving" and num_repeated > 10:
                        raise
                    time.sleep(0.05)
        raise AssertionError

    def state(self, name: str) -> str:
        (info,) = (info for info in self.router.nodes() if info.node == name)
        return info.state

    def kill_and_bring_back(self, name: str, number: int) -> Callable[[Callable[[], int]], tuple[float, ...]]:
        """Kill a node after a third of the requests, bring it back after two; say how soon each was noticed."""

        def meanwhile(num_served: Callable[[], int]) -> tuple[float, ...]:
            wait_until(lambda: num_served() >= number / 3)
            self.nodes[name].kill()
            gone_s = wait_until(lambda: self.state(name) != "serving")
            wait_until(lambda: num_served() >= number * 2 / 3)
            self.nodes[name].start_again()
            return gone_s, wait_until(lambda: self.state(name) == "serving")

        return meanwhile


def wait_until(holds: Callable[[], bool]) -> float:
    """Return how long it took."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > _LIMIT_S:
            raise ServiceUnavailable(f"still not after {_LIMIT_S:g} s")
        time.sleep(0.002)
    return time.monotonic() - began


def play(settings: argparse.Namespace) -> list[Run]:
    requests = Tenants(settings.tenants, skew=settings.skew).requests(settings.requests, settings.seed)
    with Cluster(settings.nodes, settings.blocks, settings.in_flight) as cluster:
        disturbance = cluster.kill_and_bring_back("node-2", len(requests))
        return [
            cluster.run("round robin", requests, cluster.round_robin()),
            cluster.run("router", requests, cluster.routed),
            cluster.run("router, node-2 killed", requests, cluster.routed, disturbance),
        ]


def verdict(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what the router gained, and whether that is enough."""
    robin, router, disturbed = runs
    gain = router.hit_rate / robin.hit_rate
    is_good = gain >= LEAST_GAIN and router.spread <= MOST_SPREAD
    return {"gain": gain, "spread": router.spread, "noticed_s": disturbed.noticed_s, "is_good": is_good}


def show(runs: Sequence[Run], found: dict[str, Any]) -> None:
    console = make_console()
    for run in runs:
        console.print(f"{run.name}: {percent(run.hit_rate)} of the prompts were cached; {run.seconds:.1f} s")
        table = make_table("node", "requests", "prompt tokens", "cached", "hit rate", "computed")
        for name, work in run.nodes.items():
            numbers = map(count, (work.num_requests, work.num_prompt_tokens, work.num_cached_tokens))
            rate = percent(work.num_cached_tokens / max(work.num_prompt_tokens, 1))
            table.add_row(name, *numbers, rate, count(work.num_computed_tokens))
        console.print(table)
        console.print(f"the busiest node computed {run.spread:.2f} times the mean\n")
    gone_s, back_s = found["noticed_s"]
    console.print(f"hit rate: {found['gain']:.2f} times that of round robin (at least {LEAST_GAIN})")
    console.print(f"load: at most {found['spread']:.2f} times the mean, in tokens computed (at most {MOST_SPREAD})")
    console.print(f"the router noticed the kill after {gone_s * 1000:.0f} ms, the return after {back_s * 1000:.0f} ms")
    console.print(f"requests that were sent to another node after the kill: {runs[-1].num_repeated}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare a router with round robin over a few servers.")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=1200, help="of each node's pool")
    parser.add_argument("--tenants", type=int, default=48)
    parser.add_argument("--skew", type=float, default=0.6, help="of how often tenants ask, a power law; 0: all alike")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--in-flight", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print figures, not tables")
    settings = parser.parse_args(arguments)
    runs = play(settings)
    found = verdict(runs)
    if settings.json:
        print(json.dumps({"runs": [run.as_dict() for run in runs], **found}, indent=2))
    else:
        show(runs, found)
    return 0 if found["is_good"] else 1


if __name__ == "__main__":
    sys.exit(main())
