"""The lease table: who lives until when. Time is a number that the test passes in."""

from __future__ import annotations

import re

import pytest
from helpers import Clock

from radix_cache import PrefixCache
from radix_cache.errors import InvalidArgument, LeaseExpired, RadixCacheError, UnknownLease
from radix_cache.leases import Lease, LeaseTable
from radix_cache.operations import check_name, new_lease_id

TTL_S = 10.0


class Table:
    """A lease table with the verbs of these tests, by lease id."""

    def __init__(self, ttl_s: float | None = TTL_S) -> None:
        self.books = LeaseTable(ttl_s)

    def open(self, lease_id: str, now: float, engine_id: str | None = None) -> Lease:
        """Add a lease."""
        lease = Lease(lease_id, (), block_size=1, num_cached_tokens=0, cached=[], engine_id=engine_id)
        self.books.add(lease, now)
        return lease

    def gone(self, now: float) -> list[str]:
        """Return the ids of what ran out by ``now``, sorted, with the books checked."""
        gone = sorted(lease.lease_id for lease in self.books.expired(now))
        assert self.books.check() == []
        return gone


def test_a_lease_without_an_engine_lives_a_ttl() -> None:
    """To the moment, and not an instant longer."""
    table = Table()
    table.open("a", 5.0)
    assert table.gone(14.999) == []
    assert table.gone(15.0) == ["a"]
    assert len(table.books) == 0


def test_an_expired_lease_is_told_from_an_unknown_one() -> None:
    """An engine must learn that its blocks may be overwritten by now."""
    table = Table()
    released = table.open("released", 0.0)
    table.open("late", 0.0)
    table.books.remove(released)
    assert table.gone(10.0) == ["late"]
    with pytest.raises(LeaseExpired, match="'late' expired") as caught:
        table.books.get("late")
    assert caught.value.lease_id == "late"
    assert isinstance(caught.value, UnknownLease | TimeoutError)
    for name in ("released", "never"):
        with pytest.raises(UnknownLease, match=f"no lease '{name}'") as unknown:
            table.books.get(name)
        assert not isinstance(unknown.value, LeaseExpired)
        assert isinstance(unknown.value, KeyError)
        assert isinstance(unknown.value, RadixCacheError)


def test_an_engine_keeps_all_its_leases_alive() -> None:
    """One heartbeat is enough, and only for its own."""
    table = Table()
    for lease_id, engine_id in [("a", "E"), ("b", "E"), ("c", "F")]:
        table.open(lease_id, 0.0, engine_id)
    table.books.heartbeat("E", 6.0)
    assert table.gone(10.0) == ["c"]
    assert sorted(lease.lease_id for lease in table.books.of_engine("E")) == ["a", "b"]
    assert table.gone(15.9) == []
    assert table.gone(16.0) == ["a", "b"]
    assert table.books.of_engine("E") == []


def test_a_new_lease_is_a_sign_of_life() -> None:
    """It was opened by a call of its engine."""
    table = Table()
    table.open("a", 0.0, "E")
    table.open("b", 8.0, "E")
    assert table.gone(17.9) == []
    assert table.gone(18.0) == ["a", "b"]


def test_a_heartbeat_of_nobody_is_nothing() -> None:
    """An engine without a lease has nothing to renew."""
    table = Table()
    table.books.heartbeat("E", 0.0)
    table.open("a", 5.0, "E")
    assert table.gone(15.0) == ["a"]


def test_many_heartbeats_move_one_deadline() -> None:
    """Renewing costs no memory: an idle engine's heartbeats don't pile up."""
    table = Table()
    table.open("a", 0.0, "E")
    for second in range(1_000):
        table.books.heartbeat("E", float(second))
        assert table.gone(float(second)) == []
    assert len(table.books._deadlines) < 10
    assert table.gone(1_008.9) == []
    assert table.gone(1_009.0) == ["a"]


def test_a_promise_outlives_the_engine() -> None:
    """Hand-over from prefill to decode: the router renews what the prefill engine leaves behind."""
    table = Table()
    kept = table.open("kept", 0.0, "E")
    table.open("lost", 0.0, "E")
    table.books.promise(kept, 1.0, 100.0)
    assert table.gone(10.0) == ["lost"]
    assert table.gone(100.9) == []
    assert table.gone(101.0) == ["kept"]


def test_an_engine_outlives_a_promise() -> None:
    """The later of the two counts."""
    table = Table()
    lease = table.open("a", 0.0, "E")
    table.books.promise(lease, 0.0, 2.0)
    table.books.heartbeat("E", 5.0)
    assert table.gone(14.9) == []
    assert table.gone(15.0) == ["a"]


def test_naming_a_lease_renews_it() -> None:
    """A call without an engine id speaks for the lease that it names, and never shortens a promise."""
    table = Table()
    lease, owned = table.open("a", 0.0), table.open("b", 0.0, "E")
    table.books.renew(lease, 7.0)
    table.books.renew(owned, 7.0)
    table.books.promise(lease, 7.0, 50.0)
    table.books.renew(lease, 8.0)
    assert table.gone(16.9) == []
    assert table.gone(17.0) == ["b"]
    assert table.gone(57.0) == ["a"]


def test_without_a_ttl_nothing_runs_out() -> None:
    """The library's default."""
    table = Table(None)
    table.open("a", 0.0)
    table.open("b", 0.0, "E")
    table.books.heartbeat("E", 1.0)
    assert table.gone(1e12) == []
    assert sorted(lease.lease_id for lease in table.books) == ["a", "b"]


def test_a_released_lease_does_not_expire() -> None:
    """Its deadline comes up and finds nobody, also when the id is in use again."""
    table = Table()
    first = table.open("a", 0.0)
    table.books.remove(first)
    assert table.gone(5.0) == []
    table.open("a", 6.0)
    assert table.gone(10.0) == []
    assert "a" in table.books
    assert table.gone(16.0) == ["a"]


def test_an_engine_can_come_back() -> None:
    """New leases of an engine that lost all of them start afresh."""
    table = Table()
    table.open("a", 0.0, "E")
    assert table.gone(10.0) == ["a"]
    table.open("b", 20.0, "E")
    assert table.gone(29.9) == []
    assert table.gone(30.0) == ["b"]


def test_an_id_that_expired_can_be_used_again() -> None:
    """What is said of it then is about the new lease: when that is released, nothing has expired."""
    table = Table()
    table.open("a", 0.0)
    assert table.gone(10.0) == ["a"]
    table.books.remove(table.open("a", 11.0))
    with pytest.raises(UnknownLease) as caught:
        table.books.get("a")
    assert not isinstance(caught.value, LeaseExpired)


def test_lease_ids_cannot_be_guessed() -> None:
    """128 random bits; small integers would be taken for a neighbour's."""
    made = {new_lease_id() for _ in range(1_000)}
    assert len(made) == 1_000
    assert all(re.fullmatch("[0-9a-f]{32}", lease_id) for lease_id in made)


@pytest.mark.parametrize("name", ["", "x" * 257, None, 5, b"a", True], ids=str)
def test_names_have_a_length(name: object) -> None:
    """The error says what it is about."""
    with pytest.raises(InvalidArgument, match="lease_id is a string of 1 to 256 characters"):
        check_name(name, "lease_id")  # type: ignore[arg-type]
    assert check_name("x" * 256, "lease_id") == "x" * 256


@pytest.mark.parametrize("harm", ["engine only", "wrong engine", "empty engine"])
def test_the_check_finds_broken_books(harm: str) -> None:
    """A check that cannot fail guards nothing."""
    table = Table()
    lease = table.open("a", 0.0, "E")
    assert table.books.check() == []
    match harm:
        case "engine only":
            del table.books.by_id["a"]
        case "wrong engine":
            lease._engine = None
        case "empty engine":
            table.books._engines["E"].leases.clear()
    assert table.books.check()


def test_a_promise_renewed_again_and_again_is_one_deadline() -> None:
    """The heap has each lease once, however often it was renewed; else every renewal would make the next one dearer."""
    clock = Clock()
    cache = PrefixCache(8, lease_ttl_s=1.0, clock=clock)
    cache.match_prefix([], lease_id="alone")
    cache.match_prefix([], lease_id="of an engine", engine_id="E")
    pin = cache.pin([], 1.0)
    for _ in range(1000):
        clock.advance(0.5)
        for lease_id in ("alone", "of an engine", pin.lease_id):
            cache.renew(lease_id, 1.0)
    assert len(cache._executor.leases._deadlines) <= 4
    clock.advance(0.9)
    assert cache.stats().num_leases == 3
    clock.advance(0.2)
    assert cache.stats().num_leases == 0
