"""Heartbeats, and threads and processes that come and go.

What must not run out lives by a clock that the test moves: a machine that stands still for a while lets nothing expire.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from client_help import Proxy, assert_all_returned, losing_answers, new_engine, wait_until
from helpers import Clock
from routes import FileClock
from service_process import ServerProcess

from radix_cache.errors import LeaseExpired, UnknownLease
from radix_cache_service import AsyncClient, Client

TTL_S = 0.8  # for leases that are to run out
KEPT_TTL_S = 9.0  # for those that are kept alive, by the clock of the test


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server whose leases run out soon."""
    with ServerProcess(num_blocks=64, block_size=2, lease_ttl_s=TTL_S) as process:
        yield process


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> FileClock:
    """The clock of the other server."""
    return FileClock(tmp_path_factory.mktemp("time") / "clock")


@pytest.fixture(scope="module")
def patient(clock: FileClock) -> Iterator[ServerProcess]:
    """A server whose leases run out when the test lets time pass."""
    with ServerProcess(num_blocks=64, block_size=2, lease_ttl_s=KEPT_TTL_S, test_clock=clock.path) as process:
        yield process


def hearts() -> set[threading.Thread]:
    """Of all clients that there are; a client of another file may have been left to the collector."""
    return {thread for thread in threading.enumerate() if thread.name == "radix-cache heartbeat"}


# Heartbeats.


def test_a_heartbeat_keeps_leases_alive_while_no_call_comes(patient: ServerProcess, clock: FileClock) -> None:
    with Client(patient.address, engine_id=new_engine()) as client, Client(patient.address) as silent:
        client._books.clock = silent._books.clock = clock
        others = hearts()
        kept = client.match_prefix([1], num_tokens=2)
        lost = silent.match_prefix([1], num_tokens=2)
        assert len(hearts() - others) == 1, "a client without an engine has none"
        while not is_over(silent):
            let_a_beat_come(client, clock)
            assert not is_over(client)
        client.allocate(kept, num_tokens=4)
        with pytest.raises(LeaseExpired):
            silent.release(lost)
    assert not hearts() - others
    assert_all_returned(patient.address)


def is_over(client: Client) -> bool:
    assert client.valid_until is not None
    return client.valid_until <= client._books.clock()


def let_a_beat_come(client: Client, clock: FileClock) -> None:
    """Let time pass until one is due, and wait until it is answered."""
    before = client._books.heard_at
    assert before is not None
    clock.advance(KEPT_TTL_S / 3)
    client._books.wake()
    wait_until(lambda: (client._books.heard_at or 0.0) > before)


def test_no_heartbeat_is_sent_while_calls_are(server: ServerProcess) -> None:
    with Client(server.address, engine_id=new_engine(), heartbeat_interval_s=0.5) as client:
        clock = client._books.clock = Clock(1000.0)
        client.probe([1])

        def num_beats() -> int:
            return client.stats().num_calls.get("Renew/OK", 0)

        before = num_beats()
        for _ in range(20):
            clock.advance(0.4)
            client._books.wake()
            client.probe([1])
        assert num_beats() == before
        clock.advance(0.6)
        client._books.wake()
        wait_until(lambda: num_beats() > before)


def test_heartbeats_come_by_themselves(patient: ServerProcess) -> None:
    with Client(patient.address, engine_id=new_engine(), heartbeat_interval_s=0.1) as client:
        client.probe([1])
        with Client(patient.address) as other:
            before = other.stats().num_calls.get("Renew/OK", 0)
            wait_until(lambda: other.stats().num_calls.get("Renew/OK", 0) >= before + 3)


def test_the_interval_can_be_chosen(server: ServerProcess) -> None:
    with Client(server.address, engine_id=new_engine(), heartbeat_interval_s=100) as client:
        lease = client.match_prefix([1], num_tokens=2)
        time.sleep(TTL_S + 0.2)
        with pytest.raises(LeaseExpired):
            client.allocate(lease, num_tokens=4)


def test_beats_that_fail_are_repeated(patient: ServerProcess, clock: FileClock) -> None:
    with Proxy(patient.address) as proxy, Client(proxy.address, engine_id=new_engine()) as client:
        client._books.clock = clock
        lease = client.match_prefix([1], num_tokens=2)
        for _ in range(4):
            proxy.cut()
            with losing_answers(client, is_served=False, times=3):
                let_a_beat_come(client, clock)
            assert not is_over(client)
        client.allocate(lease, num_tokens=4)
    assert_all_returned(patient.address)


def test_one_engine_can_beat_for_another(patient: ServerProcess, clock: FileClock) -> None:
    with (
        Client(patient.address) as client,
        Client(patient.address, engine_id="other", heartbeat_interval_s=99) as other,
    ):
        lease = other.match_prefix([1], num_tokens=2)
        for _ in range(4):
            clock.advance(KEPT_TTL_S / 3)
            client.heartbeat("other")
        other.allocate(lease, num_tokens=4)
        with pytest.raises(ValueError, match="engine_id"):
            client.heartbeat()


def test_a_client_that_is_forgotten_falls_silent(server: ServerProcess) -> None:
    others = hearts()
    client = Client(server.address, engine_id=new_engine())
    lease_id = client.match_prefix([1], num_tokens=2).lease_id
    assert len(hearts() - others) == 1
    del client
    gc.collect()
    wait_until(lambda: not hearts() - others)
    with Client(server.address) as other:
        wait_until(lambda: other.stats().num_leases == 0)
        with pytest.raises(LeaseExpired):
            other.release(lease_id)


def test_orphans_are_given_back_though_no_call_comes(patient: ServerProcess) -> None:
    beating = Client(patient.address, engine_id=new_engine(), heartbeat_interval_s=0.2)
    with Client(patient.address) as other, beating as client:
        client.probe([1])
        with Client(patient.address, engine_id=client.engine_id, heartbeat_interval_s=99) as lost:
            lease = lost.match_prefix([1], num_tokens=2)
            lost.renew(lease, ttl_s=500)
        assert other.stats().num_leases == 1
        now = time.monotonic()
        client._books._losses.abandon([lease.lease_id], now, now)
        wait_until(lambda: other.stats().num_leases == 0)


def test_the_heart_of_an_async_client(patient: ServerProcess, clock: FileClock) -> None:
    async def run() -> None:
        async with AsyncClient(patient.address, engine_id=new_engine()) as client:
            client._books.clock = clock
            lease = await client.match_prefix([1], num_tokens=2)
            for _ in range(4):
                before = client._books.heard_at
                clock.advance(KEPT_TTL_S / 3)
                client._books.wake()
                async with asyncio.timeout(60):
                    while client._books.heard_at == before:  # noqa: ASYNC110 - nothing else tells
                        await asyncio.sleep(0.01)
            await client.allocate(lease, num_tokens=4)

    asyncio.run(run())
    assert_all_returned(patient.address)


# Processes.


def in_a_fork(act: Callable[[], Any]) -> Any:
    """Return what ``act`` returns in a forked child, or fail with its error."""
    near, far = multiprocessing.Pipe()
    child = os.fork()
    if not child:
        try:
            far.send(act())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent must know
            far.send(repr(error))
        finally:
            os._exit(0)
    assert near.poll(100), "the child hangs"
    answer = near.recv()
    os.waitpid(child, 0)
    near.close()
    far.close()
    return answer


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_a_connection_and_leases_of_its_own(patient: ServerProcess) -> None:
    with Client(patient.address, engine_id=new_engine()) as client, client.session() as session:
        lease = client.match_prefix([1, 2, 3], num_tokens=4)
        client.insert(lease, [1, 2])
        session.probe([1])

        def work() -> Any:
            assert client.valid_until is None
            own = client.match_prefix([1, 2, 9], num_tokens=4)
            with client.batch() as batch:
                batch.allocate(own, num_blocks=1)
            found = len(own.block_table), session.probe([1, 2]), client.stats().num_leases, own.lease_id
            session.close()
            client.close()
            return found

        table, probed, num_leases, own = in_a_fork(work)
        assert (table, probed, num_leases) == (3, 2, 2)
        assert own != lease.lease_id
        assert client.stats().num_leases == 1, "the child gave back its own lease only"
        client.allocate(lease, num_tokens=6)
        assert session.probe([1, 2]) == 2
    assert_all_returned(patient.address)


def test_a_spawned_child_can_work_on_a_lease_by_its_name(patient: ServerProcess) -> None:
    with Client(patient.address, engine_id=new_engine()) as client:
        lease = client.match_prefix([1], num_tokens=2)
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=release, args=(patient.address, lease.lease_id))
        child.start()
        child.join(100)
        assert child.exitcode == 0
        with pytest.raises(UnknownLease):
            client.release(lease)


def release(address: str, lease_id: str) -> None:
    with Client(address) as client:
        client.release(lease_id)
