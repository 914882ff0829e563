"""A real server on a state directory: killed under load, out of disk, started twice, compacting all the while."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from client_help import wait_until
from routes import FileClock
from service_process import ServerProcess, StartFailed, pack, reason_of, stub_to, unpack

from radix_cache.errors import PoolExhausted
from radix_cache_service import Client, LayoutMismatch
from radix_cache_service.pb import prefix_cache_pb2 as pb

BLOCK_SIZE = 4
NUM_ENGINES = 3


class Engine(threading.Thread):
    """Sends numbered batches until the server is gone, and keeps what it was told.

    tables: of each live lease. asked: the request that opened it. inserted: prefixes that were published. last: the
    last batch that was answered, and its answer; pending: the one that was not.
    """

    def __init__(self, address: str, name: str, seed: int) -> None:
        super().__init__(name=name)
        self.address = address
        self.random = random.Random(seed)
        self.seq = 0
        self.tables: dict[str, list[int]] = {}
        self.asked: dict[str, pb.MatchPrefixRequest] = {}
        self.inserted: list[bytes] = []
        self.last: tuple[pb.BatchRequest, pb.BatchResponse] | None = None
        self.pending: pb.BatchRequest | None = None
        self.epochs: set[str] = set()
        self.code: grpc.StatusCode | None = None

    def run(self) -> None:
        """Go on until a call fails."""
        with stub_to(self.address) as stub:
            while self.code is None:
                self.pending = self.pending or self.step()
                try:
                    self.take(self.pending, stub.Batch(self.pending, timeout=100))
                except grpc.RpcError as error:
                    self.code = error.code()

    def step(self) -> pb.BatchRequest:
        """Return a batch: a new request, a published one, one that grows, one that ends."""
        self.seq += 1
        batch = pb.BatchRequest(engine_id=self.name, seq=self.seq)
        prompt = pack(*([7] * 8 + [self.random.randrange(4) for _ in range(40)]))
        lease_id = f"{self.name}-{self.seq}"
        batch.operations.add().match_prefix.MergeFrom(
            pb.MatchPrefixRequest(tokens=prompt, lease_id=lease_id, num_tokens=50)
        )
        batch.operations.add().insert.MergeFrom(pb.InsertRequest(lease_id=lease_id, tokens=prompt))
        live = list(self.tables)
        if live:
            batch.operations.add().allocate.MergeFrom(
                pb.AllocateRequest(lease_id=self.random.choice(live), num_blocks=1)
            )
        if len(live) > 6:
            batch.operations.add().release.MergeFrom(pb.ReleaseRequest(lease_id=live[0]))
        return batch

    def take(self, batch: pb.BatchRequest, answer: pb.BatchResponse) -> None:
        """Book an answer."""
        self.epochs.add(answer.state.epoch)
        for operation, result in zip(batch.operations, answer.results, strict=True):
            verb = operation.WhichOneof("verb")
            assert result.WhichOneof("result") == verb, result
            request = getattr(operation, verb)
            if verb == "match_prefix":
                self.tables[request.lease_id] = unpack(result.match_prefix.block_table)
                self.asked[request.lease_id] = request
            elif verb == "insert":
                ids = unpack(result.insert.blocks)
                self.tables[request.lease_id][: len(ids)] = ids
                self.inserted.append(request.tokens)
            elif verb == "allocate":
                self.tables[request.lease_id] += unpack(result.allocate.added_blocks)
            else:
                del self.tables[request.lease_id]
        self.last, self.pending = (batch, answer), None

    def check(self, stub: Any) -> None:
        """What was acknowledged is so: the last batch again gets the same answer, and each lease has its table."""
        if self.last is not None and self.pending is None:
            batch, answer = self.last
            again = stub.Batch(batch)
            assert [result.SerializeToString() for result in again.results] == [
                result.SerializeToString() for result in answer.results
            ]
        if self.pending is not None:  # it ran or it did not: this is the answer either way
            self.take(self.pending, stub.Batch(self.pending))
        for lease_id, table in self.tables.items():
            request = pb.MatchPrefixRequest()
            request.CopyFrom(self.asked[lease_id])
            request.engine_id = self.name
            with pytest.raises(grpc.RpcError) as caught:  # another request
                stub.MatchPrefix(pb.MatchPrefixRequest(tokens=b"", lease_id=lease_id, engine_id=self.name))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert unpack(stub.MatchPrefix(request).block_table) == table
        for tokens in self.inserted:
            assert stub.Probe(pb.ProbeRequest(tokens=tokens)).num_cached_tokens == len(tokens) // 4


def test_nothing_is_lost_by_kills_under_load(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    settings = {
        "num_blocks": 60_000,
        "block_size": BLOCK_SIZE,
        "state_dir": tmp_path / "state",
        "max_journal_bytes": 60_000,  # so that it is compacted all the time
    }
    engines = [Engine(address, f"engine-{number}", number) for number in range(NUM_ENGINES)]
    epochs: set[str] = set()
    for round_ in range(3):
        with ServerProcess(address, **settings) as server:
            with stub_to(address) as stub:
                for engine in engines:
                    engine.check(stub)
                check_sums(stub, engines)
            for engine in engines:
                engine.start()
            wait_until(partial(have_sent, engines, 10 * (round_ + 1)))
            wait_until(lambda: is_compacted(tmp_path / "state"))
            time.sleep(0.13 * round_)
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            for engine in engines:
                engine.join()
        epochs.update(*(engine.epochs for engine in engines))
        engines = [successor(engine) for engine in engines]
    with ServerProcess(address, **settings) as server, stub_to(address) as stub:
        for engine in engines:
            engine.check(stub)
        check_sums(stub, engines)
    assert len(epochs) == 1
    assert min(engine.seq for engine in engines) > 20
    assert is_compacted(tmp_path / "state")


def is_compacted(state: Path) -> bool:
    """Whether a snapshot counts: one that the manifest does not name yet is removed by the next start."""
    return json.loads((state / "state.json").read_text())["snapshot"] is not None


def have_sent(engines: list[Engine], num_batches: int) -> bool:
    return all(engine.seq > num_batches for engine in engines)


def successor(engine: Engine) -> Engine:
    """Return an engine that knows all that this one did, and which the server left: a thread runs once."""
    assert engine.code is grpc.StatusCode.UNAVAILABLE
    new = Engine(engine.address, engine.name, engine.seq)
    for name in ("seq", "tables", "asked", "inserted", "last", "pending", "epochs"):
        setattr(new, name, getattr(engine, name))
    return new


def check_sums(stub: Any, engines: list[Engine]) -> None:
    """The server has the leases that the engines know of, with the blocks that they know of, and nothing else."""
    stats = stub.GetStats(pb.GetStatsRequest())
    assert stats.num_leases == sum(len(engine.tables) for engine in engines)
    private = [ids for engine in engines for lease_id, table in engine.tables.items() for ids in table[12:]]
    assert len(private) == len(set(private))
    assert stats.counters["num_evicted_blocks"] == 0
    assert stats.counters["num_inserted_blocks"] == stats.num_cached_blocks


def test_a_client_goes_on_with_its_leases(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    settings = {"num_blocks": 16, "state_dir": tmp_path / "state"}
    with Client(address, engine_id="engine") as client:
        with ServerProcess(address, **settings) as server:
            lease = client.match_prefix([1, 2, 3], num_tokens=4)
            client.insert(lease, [1, 2, 3])
            epoch, table = client.epoch, list(lease.block_table)
            server.process.send_signal(signal.SIGKILL)
        with ServerProcess(address, **settings):
            client.renew(lease)
            assert client.epoch == epoch
            with client.batch() as batch:
                batch.allocate(lease, num_tokens=6)
                other = batch.match_prefix([1, 2, 4], num_tokens=4)
            assert list(lease.block_table)[:2] == table
            assert other.result().num_cached_tokens == 2
            assert not set(lease.block_table) & set(other.result().block_table) - set(table[:1])


def test_a_full_disk_ends_the_server_and_no_answer_was_a_lie(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    settings = {"num_blocks": 1000, "block_size": BLOCK_SIZE, "state_dir": tmp_path / "state", "log_level": "error"}
    engine = Engine(address, "engine", 1)
    server = ServerProcess(address, **settings)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    engine.start()
    engine.join()
    status, errors = server.finish()
    assert status == os.EX_IOERR
    assert "cannot be written" in errors
    engine = successor(engine)
    with ServerProcess(address, **settings), stub_to(address) as stub:
        engine.check(stub)
        check_sums(stub, [engine])
    assert engine.seq > 20


POLICY = """
from radix_cache.policies import ScoredPolicy

class P(ScoredPolicy):
    name = "p"
    def update(self, node, end, counts, hints):
        node.data = end
    def score(self, leaf):
        return 1 / (5 - leaf.data), leaf.last_access
"""


@pytest.mark.parametrize("in_a_batch", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_a_call_that_leaves_the_cache_half_changed_ends_the_server(
    tmp_path: Path, in_a_batch: bool, has_state: bool
) -> None:
    (tmp_path / "mine.py").write_text(POLICY)
    settings: dict[str, Any] = {
        "num_blocks": 16,
        "block_size": 1,
        "policy": "mine:P",
        "environ": {"PYTHONPATH": str(tmp_path)},
        **({"state_dir": tmp_path / "state"} if has_state else {}),
    }
    address = f"unix:{tmp_path}/s.sock"
    server = ServerProcess(address, **settings)
    with stub_to(address) as stub:
        for tokens in ((1, 2, 3), (9,)):
            lease_id = f"L{len(tokens)}"
            stub.MatchPrefix(pb.MatchPrefixRequest(tokens=pack(*tokens), num_tokens=5, lease_id=lease_id))
            stub.Insert(pb.InsertRequest(lease_id=lease_id, tokens=pack(*tokens)))
        stub.Release(pb.ReleaseRequest(lease_id="L1"))
        fatal = pb.InsertRequest(lease_id="L3", tokens=pack(1, 2, 3, 4, 5))  # no score where a leaf ends at 5
        batch = pb.BatchRequest(operations=[pb.Operation(insert=fatal)])
        with pytest.raises(grpc.RpcError) as caught:
            stub.Batch(batch) if in_a_batch else stub.Insert(fatal)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    status, errors = server.finish()
    assert status == os.EX_SOFTWARE, errors
    assert "left the cache half changed, so this server ends" in errors
    assert "ZeroDivisionError" in errors
    with ServerProcess(address, **settings), stub_to(address) as stub:
        stats = stub.GetStats(pb.GetStatsRequest())
        assert stats.num_leases == has_state
        assert stub.Probe(pb.ProbeRequest(tokens=pack(1, 2, 3, 4, 5))).num_cached_tokens == 3 * has_state


def test_a_second_server_on_one_directory_is_refused(tmp_path: Path) -> None:
    with ServerProcess(state_dir=tmp_path), pytest.raises(StartFailed, match="in use by another server") as caught:
        ServerProcess(state_dir=tmp_path)
    assert caught.value.status == 1
    with ServerProcess(state_dir=tmp_path):
        pass  # the lock went with its holder


def test_an_engine_of_another_life_of_the_memory_is_refused() -> None:
    with ServerProcess(pool_epoch="boot 2") as server:
        with Client(server.address, pool_epoch="boot 2") as client:
            assert client.describe().pool_epoch == "boot 2"
        with Client(server.address, pool_epoch="boot 1") as client, pytest.raises(LayoutMismatch, match="pool_epoch"):
            client.match_prefix([1])


def test_a_start_in_use_hands_out_nothing_and_says_for_how_long(tmp_path: Path) -> None:
    clock, in_use = FileClock(tmp_path / "clock"), {"RADIX_CACHE_POOL_IN_USE": "true"}
    with (
        ServerProcess(environ=in_use, lease_ttl_s=30, test_clock=clock.path) as server,
        stub_to(server.address) as stub,
    ):
        clock.advance(10)
        with pytest.raises(grpc.RpcError) as caught:
            stub.MatchPrefix(pb.MatchPrefixRequest(num_blocks=1))
        code, reason, details = reason_of(caught.value)
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "POOL_EXHAUSTED")
        assert details == {"needed": "1", "available": "0", "retry_after_s": "20.0"}
        with Client(server.address) as client:
            with pytest.raises(PoolExhausted, match=r"for another 20\.0 s"):
                client.match_prefix([1], num_tokens=2)
            assert client.match_prefix([1]).num_cached_tokens == 0  # what needs no block is served
            clock.advance(20.5)
            assert len(client.match_prefix([1], num_tokens=2, wait_s=60).block_table) == 1
