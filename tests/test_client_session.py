"""Sessions: order, batches on their way at once, and streams that break."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from client_help import Proxy, assert_all_returned, new_engine, wait_until
from helpers import Clock
from service_process import ServerProcess

from radix_cache.errors import (
    BatchNotRun,
    DeadlineExceeded,
    InvalidArgument,
    PoolExhausted,
    ServiceUnavailable,
    StaleLease,
    UnknownLease,
)
from radix_cache_service import Client
from radix_cache_service.client.session import Session


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One server for all tests here."""
    with ServerProcess(num_blocks=256, block_size=2, lease_ttl_s=600) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    """A client with an engine of its own; in the end nothing is left of it."""
    with Client(server.address, engine_id=new_engine()) as opened:
        yield opened
    assert_all_returned(server.address)


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    """A session of that client."""
    with client.session() as opened:
        yield opened


def test_the_next_may_be_sent_before_the_last_is_answered(session: Session) -> None:
    with session.submit() as first:
        opened = first.match_prefix([1, 2, 3], num_tokens=4)
    with session.submit() as second:
        grown = second.allocate(opened, num_tokens=8)
        inserted = second.insert(opened, [1, 2])
    with session.submit() as third:
        forked = third.match_prefix([], parent=opened, num_tokens=4)
        released = third.release(opened)
    fork = forked.result()
    lease = opened.result()
    assert (len(grown.result()), len(inserted.result().block_ids)) == (2, 1)
    assert (lease.num_published_tokens, len(lease.block_table)) == (2, 4)
    assert (fork.num_cached_tokens, released.result()) == (2, None)
    with pytest.raises(UnknownLease):
        session.release(lease)
    session.release(fork)


def test_many_on_their_way_keep_their_order(session: Session) -> None:
    lease = session.match_prefix([0], num_tokens=2)
    answers = []
    for _ in range(100):
        with session.submit() as step:
            answers.append(step.allocate(lease, num_blocks=1))
    assert len(lease.block_table) == 1, "nobody asked for an answer yet"
    answers[40].result()
    assert len(lease.block_table) == 42, "the books are as of the answers read"
    last = answers[-1].result()
    assert list(lease.block_table)[1:] == [block for answer in answers for block in answer.result()]
    assert lease.block_table[-1] == last[0]


def test_each_verb_has_its_own_error(session: Session) -> None:
    with session.submit() as step:
        too_much = step.match_prefix([1], num_blocks=999)
        unknown = step.release("nobody")
        wrong = step.probe(["x"])
        fine = step.probe([1])
    for answer, error in ((too_much, PoolExhausted), (unknown, UnknownLease), (wrong, InvalidArgument)):
        with pytest.raises(error):
            answer.result()
    assert fine.result() == 0
    with pytest.raises(PoolExhausted):
        session.match_prefix([1], num_blocks=999)
    with pytest.raises(InvalidArgument):
        session.match_prefix([1], num_blocks=999, wait_s=1)


def test_a_batch_that_is_refused_as_a_whole_does_not_end_the_stream(session: Session) -> None:
    with session.submit(seq=7) as step:
        step.probe([1])
    with session.submit(seq=3) as late:
        answers = [late.probe([1]), late.match_prefix([1], num_tokens=2)]
    for answer in answers:
        with pytest.raises(InvalidArgument, match="older"):
            answer.result()
    with pytest.raises(InvalidArgument), session.batch(seq=3) as late:
        late.probe([1])
    with pytest.raises(InvalidArgument), session.submit(seq=0) as late:
        late.probe([1])
    stream = session._stream
    assert session.probe([1]) == 0
    assert session._stream is stream


def test_a_batch_again_gets_the_same_answer(session: Session, client: Client) -> None:
    lease = session.match_prefix([1], num_tokens=2)
    added = []
    for send in (session.batch, session.submit, client.batch):
        with send(seq=1) as step:
            answer = step.allocate(lease, num_blocks=2)
        added.append(list(answer.result()))
    assert added[0] == added[1] == added[2]
    assert len(lease.block_table) == 3


def test_a_batch_that_is_left_by_an_exception_is_not_sent(session: Session, client: Client) -> None:
    with pytest.raises(KeyError), session.submit() as step:  # noqa: PT012 - the block is what is tested
        never = step.match_prefix([1], num_tokens=2)
        raise KeyError
    with pytest.raises(BatchNotRun):
        never.result()
    assert client.stats().num_leases == 0


def test_threads_can_share_it(session: Session) -> None:
    found: list[int] = []

    def work(number: int) -> None:
        lease = session.match_prefix([number], num_tokens=2)
        for _ in range(20):
            with session.submit() as step:
                added = step.allocate(lease, num_blocks=1)
            added.result()
        found.append(len(lease.block_table))
        session.release(lease)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [21] * 4


def test_the_end_waits_for_what_is_on_its_way(client: Client) -> None:
    with client.session() as session, session.submit() as step:
        opened = step.match_prefix([1], num_tokens=2)
    assert len(client._books._tables.leases) == 1
    assert len(opened.result().block_table) == 1
    session.close()
    with pytest.raises(ServiceUnavailable, match="closed"):
        session.probe([1])
    assert client.stats().num_leases == 1, "a lease outlives the session"


# Streams that break.


@pytest.fixture
def proxy(server: ServerProcess) -> Iterator[Proxy]:
    """A connection that can be cut."""
    with Proxy(server.address) as opened:
        yield opened


def stop_the_proxy(proxy: Proxy) -> None:
    proxy.is_stopped.set()


def test_a_broken_stream_fails_what_is_unanswered_and_moves_no_lease(server: ServerProcess, proxy: Proxy) -> None:
    other = Client(server.address)
    with other, Client(proxy.address, engine_id=new_engine()) as client, client.session() as session:
        lease = session.match_prefix([1], num_tokens=2)
        kept = session.match_prefix([2], num_tokens=2)
        stop_the_proxy(proxy)
        steps: list[Any] = []
        for _ in range(3):
            with session.submit() as step:
                steps += [step.allocate(lease, num_blocks=1), step.match_prefix([3], num_tokens=2)]
        proxy.cut()
        proxy.is_stopped.clear()
        for answer in steps:
            with pytest.raises(ServiceUnavailable):
                answer.result()
        assert other.stats().num_leases == 2
        with pytest.raises(StaleLease):
            session.allocate(lease, num_blocks=1)
        assert len(session.allocate(kept, num_blocks=1)) == 1, "the next message opens a new stream"
        session.release(lease)
        assert other.stats().num_leases == 1
    assert_all_returned(server.address)


def test_what_lost_answers_opened_is_given_back(server: ServerProcess, proxy: Proxy) -> None:
    other = Client(server.address)
    with other, Client(proxy.address, engine_id=new_engine()) as client, client.session() as session:
        session.probe([])
        proxy.is_deaf.set()
        with session.submit() as step:
            opened = step.match_prefix([3], num_tokens=2)
        wait_until(lambda: other.stats().num_leases == 1)
        proxy.cut()
        proxy.is_deaf.clear()
        with pytest.raises(ServiceUnavailable):
            opened.result()
        session.probe([])
        wait_until(lambda: other.stats().num_leases == 0)
    assert_all_returned(server.address)


def test_an_answer_that_does_not_come_in_time_ends_the_stream(server: ServerProcess, proxy: Proxy) -> None:
    with Client(proxy.address, engine_id=new_engine()) as client, client.session() as session:
        client.describe()
        client.timeout_s, clock = 0.5, Clock(1000.0)
        client._books.clock = clock
        session.probe([])
        stop_the_proxy(proxy)
        with session.submit() as step:
            late = step.probe([1])
        clock.advance(0.6)
        proxy.is_stopped.clear()
        assert late.result() == 0, "nobody was kept waiting"
        stop_the_proxy(proxy)
        with session.submit() as step:
            late = step.probe([1])
        with ThreadPoolExecutor() as threads:
            reading = threads.submit(late.result)
            wait_until(lambda: session._stream is not None and session._stream._waiting_since is not None)
            clock.advance(0.6)
            assert isinstance(reading.exception(), DeadlineExceeded)
        proxy.is_stopped.clear()
        assert session.probe([1]) == 0
    assert_all_returned(server.address)


def test_a_server_that_ends_is_noticed() -> None:
    server, others = ServerProcess(num_blocks=8, block_size=2), set(threading.enumerate())
    with Client(server.address, engine_id="E") as client, client.session() as session:
        session.match_prefix([1], num_tokens=2)
        assert server.stop()[0] == 0
        with pytest.raises(ServiceUnavailable):
            session.probe([1])
    wait_until(
        lambda: not [each for each in set(threading.enumerate()) - others if each.name.startswith("radix-cache")]
    )
