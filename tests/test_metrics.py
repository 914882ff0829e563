"""What the server counts, and how Prometheus gets to see it."""

from __future__ import annotations

import copy
import itertools
import math
import random
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import grpc
import pytest
from client_help import wait_until
from scraping import read_metrics, read_text, samples
from security_help import ENTRIES, ROOT, Tenant, write_tokens
from service_process import ServerProcess, stub_to

from radix_cache.stats import Counters
from radix_cache_service import Client
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.telemetry.metrics import BUCKETS_S, Latencies

METRICS = "127.0.0.1:0"
DEADLINE_S = 60


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server that is scraped."""
    with ServerProcess(num_blocks=64, num_reserved_blocks=4, block_size=2, metrics_listen=METRICS) as process:
        yield process


# The histogram.


def test_quantiles_are_at_most_13_percent_too_high() -> None:
    times = [10 ** random.Random(seed).uniform(-5.5, 1.5) for seed in range(1000)]
    latencies = Latencies()
    for seconds in times:
        latencies.add(seconds)
    times.sort()
    for share in (0.01, 0.5, 0.99):
        exact = times[int(share * 1000) - 1]
        assert exact <= latencies.quantile(share) <= 1.13 * exact
    assert latencies.quantile(1) == latencies.max_s == times[-1]
    assert latencies.sum_s == pytest.approx(sum(times))


def test_what_is_beyond_the_bounds_is_counted() -> None:
    latencies = Latencies()
    for seconds in (0.0, 1e-9, 1e6):
        latencies.add(seconds)
    assert (latencies.num_samples, latencies.quantile(0.99)) == (3, 1e6)
    assert latencies.buckets() == [2] * len(BUCKETS_S)


def test_buckets_count_what_is_at_or_below_their_bound() -> None:
    latencies = Latencies()
    times = [*BUCKETS_S, *(bound * 1.01 for bound in BUCKETS_S)]
    for seconds in times:
        latencies.add(seconds)
    assert latencies.buckets() == [sum(seconds <= bound for seconds in times) for bound in BUCKETS_S]


def test_a_copy_stands_still() -> None:
    latencies = Latencies()
    latencies.add(0.1)
    before = copy.copy(latencies)
    latencies.add(0.2)
    assert (before.num_samples, before.buckets()[-1], before.max_s) == (1, 1, 0.1)


# A scrape.


def test_a_scrape_says_what_get_stats_says(server: ServerProcess) -> None:
    with Client(server.address, engine_id="E") as client:
        lease = client.match_prefix([1, 2, 3, 4, 5], num_tokens=8)
        client.insert(lease, [1, 2, 3, 4, 5])
        client.release(client.match_prefix([1, 2, 3, 4, 9], num_tokens=5))
        stats = client.stats()
        seen = samples(server.metrics_address)
        for state in ("free", "leased", "evictable", "protected"):
            assert seen["radix_cache_blocks", state] == getattr(stats, f"num_{state}_blocks")
        assert seen["radix_cache_blocks", "leased"] == 2
        blocks = [value for name, value in seen.items() if name[0] == "radix_cache_blocks"]
        assert sum(blocks) == seen["radix_cache_pool_blocks",] == 60
        assert seen["radix_cache_leases",] == stats.num_leases == 1
        assert seen["radix_cache_prefix_cache_queries_tokens_total",] == stats.counters["num_queried_tokens"] == 5
        assert seen["radix_cache_lookup_hit_tokens_total",] == stats.counters["num_lookup_hit_tokens"] == 4
        assert seen["radix_cache_nodes",] == stats.num_nodes
        assert seen["radix_cache_block_size_tokens",] == 2
        assert seen["radix_cache_serving",] == 1
        client.release(lease)
        client.reset()


def test_every_counter_of_the_cache_is_there_and_described(server: ServerProcess) -> None:
    seen = read_metrics(server.metrics_address)
    renamed = {"num_queried_tokens": "prefix_cache_queries_tokens", "num_hit_tokens": "prefix_cache_hits_tokens"}
    for item in fields(Counters):
        metric = seen["radix_cache_" + renamed.get(item.name, item.name.removeprefix("num_"))]
        assert metric.type == "counter"
        assert metric.documentation != "A counter of the cache.", item.name


def test_calls_and_operations_by_status(server: ServerProcess) -> None:
    before = samples(server.metrics_address)

    def gained(*name: str) -> float:
        return after[name] - before.get(name, 0)

    with Client(server.address) as client, client.session() as session:
        client.probe([1])
        with client.batch() as batch:
            batch.probe([1])
            batch.match_prefix([1], num_blocks=99)
        with session.submit() as step:
            last = step.release("nobody")
        with pytest.raises(KeyError):
            last.result()
        after = samples(server.metrics_address)
        assert after["radix_cache_streams",] == 1
    assert gained("radix_cache_calls_total", "OK", "Probe") == 1
    assert gained("radix_cache_calls_total", "OK", "Batch") == 1
    assert gained("radix_cache_calls_total", "OK", "Session") == 1
    assert gained("radix_cache_operations_total", "OK", "Probe") == 2
    assert gained("radix_cache_operations_total", "RESOURCE_EXHAUSTED", "MatchPrefix") == 1
    assert gained("radix_cache_operations_total", "NOT_FOUND", "Release") == 1
    assert gained("radix_cache_call_seconds_count", "Session") == 1
    assert (
        after["radix_cache_call_seconds_bucket", "+Inf", "Session"]
        == after["radix_cache_call_seconds_count", "Session"]
    )


def test_a_call_that_is_refused_before_its_handler_has_no_time(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    with ServerProcess(metrics_listen=METRICS, tokens_file=tokens) as server, stub_to(server.address) as stub:
        root = Tenant(stub, ROOT)
        for _ in range(3):
            with pytest.raises(grpc.RpcError):
                Tenant(stub, None).Probe(pb.ProbeRequest())
        with grpc.insecure_channel(server.address) as channel:
            probe = channel.unary_unary(f"/{pb.DESCRIPTOR.package}.PrefixCacheService/Probe")
            with pytest.raises(grpc.RpcError):
                probe(b"\xff", timeout=DEADLINE_S, metadata=root.metadata)
        root.Probe(pb.ProbeRequest())
        stats = root.GetStats(pb.GetStatsRequest())
        seen = samples(server.metrics_address)
    assert dict(stats.num_calls) == {"Probe/UNAUTHENTICATED": 3, "Probe/INVALID_ARGUMENT": 1, "Probe/OK": 1}
    assert stats.latencies["Probe"].num_samples == 1
    assert seen["radix_cache_call_seconds_count", "Probe"] == 1
    assert seen["radix_cache_calls_total", "UNAUTHENTICATED", "Probe"] == 3


def test_get_stats_counts_the_operations_of_batches(server: ServerProcess) -> None:
    with Client(server.address) as client:
        before = client.stats().num_operations
        with client.batch() as batch:
            batch.free("nobody", [1])
        with pytest.raises(KeyError):
            client.free("nobody", [1])
        after = client.stats().num_operations
    assert after["Free/NOT_FOUND"] == before.get("Free/NOT_FOUND", 0) + 1, "the one of the batch"


def test_the_process_and_its_build(server: ServerProcess) -> None:
    seen = read_metrics(server.metrics_address)
    (build,) = seen["radix_cache_build_info"].samples
    with Client(server.address) as client:
        assert build.labels["version"] == client.describe().version
    assert seen["process_resident_memory_bytes"].samples[0].value > 10e6
    assert seen["process_cpu_seconds"].samples[0].value > 0


def test_the_age_of_the_oldest_lease_that_is_no_pin(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("100")
    with ServerProcess(metrics_listen=METRICS, lease_ttl_s=600, test_clock=clock) as server:
        with Client(server.address) as client:
            assert samples(server.metrics_address)["radix_cache_oldest_lease_age_seconds",] == 0
            assert client.stats().oldest_lease_age_s is None
            lease = client.match_prefix([1, 2, 3], num_tokens=4)
            client.insert(lease, [1, 2])
            clock.write_text("130")
            other = client.match_prefix([5])
            client.pin([1, 2], ttl_s=600)
            clock.write_text("160")
            for opened, age in ((lease, 60), (other, 30)):
                assert client.stats().oldest_lease_age_s == age
                assert samples(server.metrics_address)["radix_cache_oldest_lease_age_seconds",] == age
                client.release(opened)
        seen = samples(server.metrics_address)
        assert seen["radix_cache_oldest_lease_age_seconds",] == 0
        assert (seen["radix_cache_pins",], seen["radix_cache_pinned_blocks",]) == (1, 1)


def test_nothing_of_a_request_is_in_it(server: ServerProcess) -> None:
    token = 3_735_928_559
    with Client(server.address, engine_id="engine-of-mallory") as client:
        lease = client.match_prefix([token, token], ("tenant-of-mallory",), num_tokens=3, lease_id="lease-of-mallory")
        client.insert(lease, [token, token])
        with pytest.raises(ValueError, match="contradict"):
            client.insert(lease, [token - 1, token])
        text = read_text(server.metrics_address)
        client.release(lease)
    assert "radix_cache_namespaces 1" in text
    assert "mallory" not in text
    assert str(token) not in text


def test_kv35_scraped() -> None:
    """Lookups repeated by scheduling retries inflate the hit rate (vllm-project/vllm#45202)."""
    with ServerProcess(num_blocks=4, block_size=1, metrics_listen=METRICS) as server:
        with Client(server.address) as client:
            first = client.match_prefix([1, 2], num_tokens=2)
            client.insert(first, [1, 2])
            client.release(first)
            before = samples(server.metrics_address)
            for _ in range(3):
                client.release(client.match_prefix([1, 2, 3]))
                with pytest.raises(MemoryError):
                    client.match_prefix([1, 2, 3], num_tokens=9)
            lease = client.match_prefix([1, 2, 3], num_tokens=3)
            client.insert(lease, [1, 2, 3])
        after = samples(server.metrics_address)
    gained = {name: after[name] - value for name, value in before.items() if name[0].startswith("radix_cache")}
    assert gained["radix_cache_lookups_total",] == 4
    assert gained["radix_cache_requests_total",] == 1
    assert gained["radix_cache_prefix_cache_queries_tokens_total",] == 3
    assert gained["radix_cache_prefix_cache_hits_tokens_total",] == 2


def test_kv37_scraped() -> None:
    """Inconsistent token counts make a Prometheus counter raise and kill the output loop (vllm-project/vllm#36812)."""
    with ServerProcess(num_blocks=4, block_size=2, metrics_listen=METRICS) as server:
        scrapes = [samples(server.metrics_address)]
        with Client(server.address) as client:
            client.match_prefix([])
            client.match_prefix([1])
            scrapes.append(samples(server.metrics_address))
            lease = client.match_prefix([1, 2, 3, 4], max_tokens=2, num_tokens=4)
            client.evict(4)
            client.insert(lease, [1, 2, 3, 4])
            scrapes.append(samples(server.metrics_address))
    for before, after in itertools.pairwise(scrapes):
        counters = [name for name in before if name[0].endswith(("_total", "_count", "_bucket", "_sum"))]
        assert len(counters) > 20
        assert all(after[name] >= before[name] for name in counters)
    for seen in scrapes:
        assert not any(math.isnan(value) for value in seen.values())
        queried = seen["radix_cache_prefix_cache_queries_tokens_total",]
        assert 0 <= seen["radix_cache_prefix_cache_hits_tokens_total",] <= queried


# Waiting.


def test_waiting_for_blocks_is_no_latency() -> None:
    with ServerProcess(metrics_listen=METRICS) as server, stub_to(server.address) as stub:
        stub.MatchPrefix(pb.MatchPrefixRequest(lease_id="all", num_blocks=8), timeout=DEADLINE_S)
        waiting = stub.MatchPrefix.future(pb.MatchPrefixRequest(num_blocks=1, wait=True), timeout=DEADLINE_S)
        wait_until(lambda: samples(server.metrics_address)["radix_cache_waiting_calls",] == 1)
        assert stub.GetStats(pb.GetStatsRequest(), timeout=DEADLINE_S).num_waiting_calls == 1
        time.sleep(3)
        stub.Release(pb.ReleaseRequest(lease_id="all"), timeout=DEADLINE_S)
        waiting.result()
        gone = stub.MatchPrefix.future(pb.MatchPrefixRequest(num_blocks=8, wait=True), timeout=DEADLINE_S)
        wait_until(lambda: samples(server.metrics_address)["radix_cache_waiting_calls",] == 1)
        gone.cancel()
        wait_until(lambda: samples(server.metrics_address)["radix_cache_wait_seconds_count",] == 2)
        seen = samples(server.metrics_address)
        spent = stub.GetStats(pb.GetStatsRequest(), timeout=DEADLINE_S).latencies["MatchPrefix"]
    assert (spent.num_samples, spent.max_s < 2) == (3, True)
    assert seen["radix_cache_call_seconds_sum", "MatchPrefix"] < 2, "less than the wait, on a busy machine too"
    assert seen["radix_cache_wait_seconds_count",] == 2
    assert seen["radix_cache_wait_seconds_sum",] > 3
    assert seen["radix_cache_waiting_calls",] == 0
